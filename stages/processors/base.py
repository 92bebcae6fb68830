"""What a processor is: encoded media in, pixel tensor out, in two steps so that the tensor's home comes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tensorferry.codecs.tensors import View, nbytes_of


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
    """Turns encoded images into pixel tensors. Thread-safe; called off the event loop."""

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
        """No tensor of this processor is larger: what a limit or a pool must hold. A bound, at most a few
        percent above the largest there is."""

    def rows_for(self, width: int, height: int) -> int:
        """Placeholder tokens of an upright image of this size. Raises BadMedia where it would be refused."""

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        """A (width, height), near the aspect ratio (width / height), whose `rows_for` is `rows` or as near as
        the processor can get: what a replay uses where a trace gives tokens per image."""


def write(processor: Processor, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
    """`Processor.write`, wherever `out` lies."""
    if out.on_host or getattr(processor, "writes_on_gpu", False):
        return processor.write(data, plan, out)
    here = View.empty(plan.dtype, plan.shape)
    content_hash = processor.write(data, plan, here)
    out.copy_from(here)
    return content_hash


class BadMedia(Exception):
    """This image cannot be used, and why; the caller knows which item it was."""
