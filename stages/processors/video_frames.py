"""Where the frames of a video come from: a list of encoded pictures, or one animated file with its own timing."""

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
#: The pixels of all pictures of a video that are decoded, over those that one image may have.
MOST_PICTURES = 32


class Footage(Protocol):
    """A video's frames, by number from 0 on, as if they came at an even rate."""

    @property
    def frames(self) -> int:
        """How many there are, one at least."""

    @property
    def fps(self) -> float | None:
        """How many are a second; None: not known."""

    def size(self, numbers: Sequence[int]) -> Size:
        """The upright (width, height) of these frames, from headers alone. Raises BadMedia, which names the frame: not
        acceptable, not all of one size, or more pixels in all than may be decoded."""

    def pictures(self, numbers: Sequence[int]) -> Generator[Image.Image]:
        """These frames, in ascending order, upright and RGB, each decoded when it is asked for, and once where it comes
        again at once. Raises BadMedia."""


def footage_of(video: Video, limits: LimitsSpec) -> Footage:
    """The frames of a video. Raises BadMedia where there are none, or the file is none that is accepted."""
    if isinstance(video, Clip):
        if not video.frames:
            raise BadMedia("a video of no frames")
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
            raise BadMedia("frame {} is {}x{}, frame {} {}x{}".format(first[1], *first[0], other[1], *other[0]))
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
    """Of n pictures that take T seconds it has n frames, T / n apart: frame k is the picture on screen at k * T / n.
    Where all are shown equally long, that is picture k."""

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
        """The pictures on screen at these frames' moments."""
        shown_ms = self.animation.shown_ms
        total, starts = sum(shown_ms), [self.frames * start for start in accumulate(shown_ms, initial=0)]
        return [bisect_right(starts, number * total) - 1 for number in numbers]


def _check_pixels(what: str, pictures: int, size: Size, limits: LimitsSpec) -> None:
    """Raise BadMedia where more is to be decoded than one item may cost."""
    most = limits.item_pixels * MOST_PICTURES
    if pictures * size[0] * size[1] > most:
        limit = f"the limit is {most} pixels in all, {MOST_PICTURES} times limits.item_pixels"
        raise BadMedia(f"{what} of {size[0]}x{size[1]}; {limit}")


@contextmanager
def _of_frame(number: int) -> Iterator[None]:
    """BadMedia that is raised inside is about a frame of a video."""
    try:
        yield
    except BadMedia as problem:
        raise BadMedia(f"frame {number}: {problem}") from problem
