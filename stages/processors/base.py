"""The processor interface: encoded media in, pixel tensor out. Two steps let the caller choose the tensor's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from tensorferry.codecs.tensors import View, nbytes_of


@dataclass(frozen=True, slots=True)
class Clip:
    """A video as a list of encoded pictures of one size, in order."""

    frames: Sequence[bytes | memoryview]
    fps: float | None  #: frames a second; None: not known


@dataclass(frozen=True, slots=True)
class AnimatedFile:
    """A video as one file of several pictures, with its own timing."""

    data: bytes | memoryview


Video = Clip | AnimatedFile
Media = bytes | memoryview | Video


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensor and the placeholders of an item, known from its header alone."""

    modality: str
    grid: tuple[int, int, int]  #: patches along time, height, width
    shape: tuple[int, ...]  #: (patches, channels * temporal * patch * patch)
    dtype: str
    rows: int  #: placeholder tokens of the item, so rows of its embeddings
    #: Upright (width, height) of the image, for the traffic recorder; None: not known.
    size: tuple[int, int] | None = field(default=None, compare=False)

    def check(self) -> None:
        """Raise TypeError for a field that cannot travel: whole numbers must be Python's own ints."""
        if not (isinstance(self.modality, str) and self.modality.isprintable() and 1 <= len(self.modality) <= 64):
            raise TypeError(f"the plan's modality is {self.modality!r:.200}; it must be a string of 1 to 64 characters")
        for name, numbers, bits in (("grid", self.grid, 31), ("shape", self.shape, 40), ("rows", (self.rows,), 40)):
            if not (isinstance(numbers, tuple) and all(type(n) is int and 0 <= n < 1 << bits for n in numbers)):
                raise TypeError(f"the plan's {name} is {getattr(self, name)!r:.200}; give ints from 0 to 2**{bits} - 1")
        if self.size is not None and not (
            isinstance(self.size, tuple) and len(self.size) == 2 and all(type(n) is int and n > 0 for n in self.size)
        ):
            raise TypeError(f"the plan's size is {self.size!r:.200}; give (width, height) as ints above 0, or None")
        if len(self.grid) != 3:
            raise TypeError(f"the plan's grid is {self.grid!r:.200}; it must be (time, height, width)")

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


class Processor(Protocol):
    """Turns encoded images into pixel tensors. Thread-safe; called off the event loop.

    A processor that takes videos is a `VideoProcessor` too.
    """

    #: Whether `write` takes a tensor in GPU memory, which it writes on the current stream. If it is False or absent,
    #: the tensor is made on the host and copied.
    writes_on_gpu: bool

    def plan(self, data: bytes | memoryview) -> Plan:
        """Read the header only. Raises BadMedia if the image is not acceptable."""

    def write(self, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
        """Decode and write the tensor of `plan` into `out` (every byte of it).

        Returns the 32-byte content hash. It covers the pixels of the tensor, their size and every setting that changes
        the tensor, so equal hashes mean equal tensors, also from different files. Raises BadMedia.
        """

    def largest_item_nbytes(self) -> int:
        """A bound for the tensors of images (a video's may be larger), for limits and pools. It is at most a few
        percent above the largest tensor."""

    def rows_for(self, width: int, height: int) -> int:
        """Placeholder tokens of an upright image of this size. Raises BadMedia if `plan` would refuse it."""

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        """A (width, height) near the aspect ratio (width / height), whose `rows_for` is `rows`, or as near to it as the
        processor can get. A replay uses it if a trace gives tokens per image."""


class VideoProcessor(Processor, Protocol):
    """A processor that takes videos too. The contracts are those of `plan` and `write`."""

    def plan_video(self, video: Video) -> Plan: ...

    def write_video(self, video: Video, plan: Plan, out: View) -> bytes: ...


def plan(processor: Processor, media: Media) -> Plan:
    """Call `Processor.plan`, or `plan_video` for a video. Raises BadMedia, and TypeError for an invalid plan."""
    planned: object = _of_videos(processor).plan_video(media) if isinstance(media, Video) else processor.plan(media)
    if not isinstance(planned, Plan):
        raise TypeError(f"{type(processor).__name__} returned {planned!r:.200} in place of a Plan")
    planned.check()
    return planned


def write(processor: Processor, media: Media, plan: Plan, out: View) -> bytes:
    """Call `Processor.write`, or `write_video` for a video; `out` may lie in any memory. Raises BadMedia, and TypeError
    for an invalid content hash."""
    if out.on_host or getattr(processor, "writes_on_gpu", False):
        content_hash: object = _write(processor, media, plan, out)
    else:
        here = View.empty(plan.dtype, plan.shape)
        content_hash = _write(processor, media, plan, here)
        out.copy_from(here)
    if not isinstance(content_hash, bytes) or len(content_hash) != 32:
        given = f"{content_hash!r:.200}"
        raise TypeError(f"{type(processor).__name__} returned the content hash {given}; it must be 32 bytes")
    return content_hash


def _write(processor: Processor, media: Media, plan: Plan, out: View) -> bytes:
    if isinstance(media, Video):
        return _of_videos(processor).write_video(media, plan, out)
    return processor.write(media, plan, out)


def _of_videos(processor: Processor) -> VideoProcessor:
    if not callable(getattr(processor, "plan_video", None)):
        raise BadMedia("this deployment's processor takes no videos")
    return cast(VideoProcessor, processor)


class BadMedia(Exception):
    """An image or video cannot be used, for this reason. The caller knows the item."""
