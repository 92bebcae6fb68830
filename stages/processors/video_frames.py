"""The frames of a video: a list of encoded pictures, or one animated file with its own timing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from PIL import Image

from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors.base import AnimatedFile, BadMedia, Clip, Video
from tensorferry.stages.processors.image import contained, decoded, explained, header, opened, upright
from tensorferry.stages.processors.image_headers import png
from tensorferry.stages.processors.image_headers.animations import Animation, read_animation

Size = tuple[int, int]  #: width, height
#: All decoded pictures of a video may have this many times the pixels of one image.
MOST_PICTURES = 32


class Footage(Protocol):
    """A video's frames, numbered from 0 and at an even rate."""

    @property
    def frames(self) -> int:
        """The number of frames, at least one."""

    @property
    def fps(self) -> float | None:
        """Frames a second; None: not known."""

    def size(self, numbers: Sequence[int]) -> Size:
        """The upright (width, height) of these frames, from headers alone. Raises BadMedia, which names the frame: it
        is not acceptable, the sizes differ, or there are more pixels in all than may be decoded."""

    def pictures(self, numbers: Sequence[int]) -> Generator[Image.Image]:
        """These frames, in ascending order, upright and RGB. Each is decoded when it is needed; a frame that repeats
        the one before is not decoded again. Raises BadMedia."""


def footage_of(video: Video, limits: LimitsSpec) -> Footage:
    """Read the frames of a video. Raises BadMedia if there are none, or if the file is not accepted."""
    if isinstance(video, Clip):
        if not video.frames:
            raise BadMedia("the video has no frames")
        return _Listed(video, limits)
    return _Animated(video, read_animation(video.data, contained(video.data, limits)), limits)


@dataclass(frozen=True, slots=True)
class _Listed:
    clip: Clip
    limits: LimitsSpec

    @property
    def frames(self) -> int:
        return len(self.clip.frames)

    @property
    def fps(self) -> float | None:
        return self.clip.fps

    def size(self, numbers: Sequence[int]) -> Size:
        sizes: dict[Size, int] = {}
        for number in numbers:
            with _of_frame(number):
                found = header(self.clip.frames[number], self.limits)
            size = (found.width, found.height)
            sizes[size] = number
            _check_pixels(f"{len(numbers)} frames", len(numbers), size, self.limits)
        if len(sizes) > 1:
            (first, other) = list(sizes.items())[:2]
            raise BadMedia("frame {} is {}x{}, frame {} is {}x{}".format(first[1], *first[0], other[1], *other[0]))
        return next(iter(sizes))

    def pictures(self, numbers: Sequence[int]) -> Generator[Image.Image]:
        at = -1
        for number in numbers:
            if number != at:
                with _of_frame(number):
                    picture = upright(self.clip.frames[number], self.limits)
                at = number
            yield picture


@dataclass(frozen=True, slots=True)
class _Animated:
    """A file of n pictures that take T seconds has n frames, T / n apart: frame k is the picture on screen at
    k * T / n. If all pictures have one duration, that is picture k."""

    file: AnimatedFile
    animation: Animation
    limits: LimitsSpec

    @property
    def frames(self) -> int:
        return len(self.animation.shown_ms)

    @property
    def fps(self) -> float | None:
        return 1000 * self.frames / sum(self.animation.shown_ms)

    def size(self, numbers: Sequence[int]) -> Size:
        found = header(self.file.data, self.limits)
        # A picture changes the one before it, so all of them up to the last are decoded.
        last = self._shown(numbers)[-1]
        _check_pixels(f"frames 0 to {last}", last + 1, (found.width, found.height), self.limits)
        return found.width, found.height

    def pictures(self, numbers: Sequence[int]) -> Generator[Image.Image]:
        container, at, skipped = self.animation.container, -1, self.animation.skipped
        shown = self._shown(numbers)
        with opened(container, self.limits) as (image, orientation):
            if container.several and shown:  # once, as a look at each picture would walk over all before it again
                png.check_whole(container.data, skipped, skipped + shown[-1])
            for number in shown:
                if number != at:
                    with _of_frame(number), explained(container.format):
                        image.seek(number + skipped)
                        picture = decoded(container, image, orientation)
                    at = number
                yield picture

    def _shown(self, numbers: Sequence[int]) -> list[int]:
        """The pictures that are on screen at the times of these frames."""
        shown_ms = self.animation.shown_ms
        total, starts = sum(shown_ms), [self.frames * start for start in accumulate(shown_ms, initial=0)]
        return [bisect_right(starts, number * total) - 1 for number in numbers]


def _check_pixels(what: str, pictures: int, size: Size, limits: LimitsSpec) -> None:
    """Raise BadMedia if the pictures have more pixels than one item may decode."""
    most = limits.item_pixels * MOST_PICTURES
    if pictures * size[0] * size[1] > most:
        limit = f"the limit is {most} pixels in all, {MOST_PICTURES} times limits.item_pixels"
        raise BadMedia(f"{what} of {size[0]}x{size[1]}; {limit}")


@contextmanager
def _of_frame(number: int) -> Iterator[None]:
    """Name a frame of the video in every BadMedia that is raised inside."""
    try:
        yield
    except BadMedia as problem:
        raise BadMedia(f"frame {number}: {problem}") from problem
