"""What a processor is: encoded media in, pixel tensor out, in two steps so that the tensor's home comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

        Returns the 16-byte content hash: over the pixels the tensor is made of, their size and every setting
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
    """`Processor.plan`, or of a video `plan_video`. Raises BadMedia."""
    return _of_videos(processor).plan_video(media) if isinstance(media, Video) else processor.plan(media)


def write(processor: Processor, media: Media, plan: Plan, out: View) -> bytes:
    """`Processor.write`, or of a video `write_video`, wherever `out` lies."""
    if out.on_host or getattr(processor, "writes_on_gpu", False):
        return _write(processor, media, plan, out)
    here = View.empty(plan.dtype, plan.shape)
    content_hash = _write(processor, media, plan, here)
    out.copy_from(here)
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
