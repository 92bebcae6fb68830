"""What a processor is: encoded media in, pixel tensor out, in two steps so that the tensor's home comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from tensorferry.codecs.tensors import View, nbytes_of


@dataclass(frozen=True, slots=True)
class Clip:
    """A video as it comes: encoded pictures of one size, in order."""

    frames: Sequence[bytes | memoryview]
    fps: float | None  #: how many of them are a second; None: not known


@dataclass(frozen=True, slots=True)
class AnimatedFile:
    """A video as one file of several pictures, with its own timing."""

    data: bytes | memoryview


Video = Clip | AnimatedFile
Media = bytes | memoryview | Video


@dataclass(frozen=True, slots=True)
class Plan:
    """What an item will become, known from its header alone."""

    modality: str
    grid: tuple[int, int, int]  #: patches along time, height, width
    shape: tuple[int, ...]  #: (patches, channels * temporal * patch * patch)
    dtype: str
    rows: int  #: placeholder tokens the model sees for it, so rows of its embeddings
    #: Upright (width, height) of the image that was read, for whoever records traffic; None: nobody knows it yet.
    size: tuple[int, int] | None = field(default=None, compare=False)

    def check(self) -> None:
        """Raises TypeError for a field that cannot travel: whole numbers are Python's own ints."""
        if not (isinstance(self.modality, str) and self.modality.isprintable() and 1 <= len(self.modality) <= 64):
            raise TypeError(f"a plan of modality {self.modality!r:.200}; it is a string of 1 to 64 characters")
        for name, numbers, bits in (("grid", self.grid, 31), ("shape", self.shape, 40), ("rows", (self.rows,), 40)):
            if not (isinstance(numbers, tuple) and all(type(n) is int and 0 <= n < 1 << bits for n in numbers)):
                raise TypeError(f"a plan with {name} {getattr(self, name)!r:.200}; give ints from 0 to 2**{bits} - 1")
        if self.size is not None and not (
            isinstance(self.size, tuple) and len(self.size) == 2 and all(type(n) is int and n > 0 for n in self.size)
        ):
            raise TypeError(f"a plan with size {self.size!r:.200}; give (width, height) as ints above 0, or None")
        if len(self.grid) != 3:
            raise TypeError(f"a plan with grid {self.grid!r:.200}; it is (time, height, width)")

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


class Processor(Protocol):
    """Turns encoded images into pixel tensors. Thread-safe; called off the event loop.

    One that takes videos is a `VideoProcessor` too.
    """

    #: Whether `write` can be given a tensor in GPU memory, which it then writes on the current stream. May be absent,
    #: which says no: the tensor is then made on the host and copied.
    writes_on_gpu: bool

    def plan(self, data: bytes | memoryview) -> Plan:
        """Read the header only. Raises BadMedia for what is not an acceptable image."""

    def write(self, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
        """Decode and write the tensor of `plan` into `out` (every byte of it).

        Returns the 32-byte content hash: over the pixels the tensor is made of, their size and every setting
        that changes it, so equal hashes mean equal tensors whatever file they came from. Raises BadMedia.
        """

    def largest_item_nbytes(self) -> int:
        """No image's tensor is larger (a video's may be): what a limit or a pool must hold. A bound, at most a few
        percent above the largest there is."""

    def rows_for(self, width: int, height: int) -> int:
        """Placeholder tokens of an upright image of this size. Raises BadMedia where it would be refused."""

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        """A (width, height), near the aspect ratio (width / height), whose `rows_for` is `rows` or as near as
        the processor can get: what a replay uses where a trace gives tokens per image."""


class VideoProcessor(Processor, Protocol):
    """A processor that takes videos too. The contracts are those of `plan` and `write`."""

    def plan_video(self, video: Video) -> Plan: ...

    def write_video(self, video: Video, plan: Plan, out: View) -> bytes: ...


def plan(processor: Processor, media: Media) -> Plan:
    """`Processor.plan`, or of a video `plan_video`. Raises BadMedia, and TypeError for a plan that is none."""
    planned: object = _of_videos(processor).plan_video(media) if isinstance(media, Video) else processor.plan(media)
    if not isinstance(planned, Plan):
        raise TypeError(f"{type(processor).__name__} planned {planned!r:.200}, which is no Plan")
    planned.check()
    return planned


def write(processor: Processor, media: Media, plan: Plan, out: View) -> bytes:
    """`Processor.write`, or of a video `write_video`, wherever `out` lies. Raises BadMedia, and TypeError for a content
    hash that is none."""
    if out.on_host or getattr(processor, "writes_on_gpu", False):
        content_hash: object = _write(processor, media, plan, out)
    else:
        here = View.empty(plan.dtype, plan.shape)
        content_hash = _write(processor, media, plan, here)
        out.copy_from(here)
    if not isinstance(content_hash, bytes) or len(content_hash) != 32:
        given = f"{content_hash!r:.200}"
        raise TypeError(f"{type(processor).__name__} gave the content hash {given}; 32 bytes are needed")
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
    """This image cannot be used, and why; the caller knows which item it was."""
