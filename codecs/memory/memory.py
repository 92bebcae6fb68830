"""What a pool asks of the memory it lies in: its bytes, and the order in which what is done to them takes effect.

`host.py`, `registered.py` (the same pages, with a GPU at work on them), `cuda_ipc.py` and `cuda_vmm.py` are those there
are, each for the producer that made the memory and for a consumer that has it mapped. Everything else of a pool
(ledger, control words, publisher, reader) is the same code for all.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from tensorferry.codecs.messages import Wire

#: uint8 of one dimension: a numpy array in host memory, a torch tensor in GPU memory.
Bytes = Any

#: What a chunk can be mapped from in another process: a descriptor, or the 64 bytes of a FABRIC handle.
Handle = int | bytes


class GpuHandle(Wire, frozen=True):
    """Where a pool in GPU memory lies, and what opens it in another process."""

    device: Annotated[bytes, Meta(min_length=16, max_length=16)]  #: UUID of the GPU or of the MIG instance
    #: cuIpcMemHandle_t; empty for an elastic pool, whose chunks are handed over one by one.
    handle: Annotated[bytes, Meta(max_length=64)]


def let_go(handle: Handle | None) -> None:
    """Close a descriptor. A FABRIC handle is a name, and holds nothing."""
    if isinstance(handle, int):
        os.close(handle)


class WordPage(Protocol):
    """A page of generation words of this process, as memories and orders use it; see `pool/control.py`."""

    device_address: int  #: of the page, where a GPU reaches it; 0: none does. Set by `Memory.adopt`

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def device_word(self, column: int, slot: int) -> int:
        """Where a GPU reaches a word."""

    def store(self, column: int, slot: int, generation: int) -> None:
        """Store a word after everything that this thread has written before."""


class Arrival(Protocol):
    """Bytes on their way to host memory."""

    data: npt.NDArray[np.uint8]  #: valid once `done`; the memory is used again when the last view of it is gone

    @property
    def done(self) -> bool: ...


class Order(Protocol):
    """The place of one user's work: at once for host memory, in one stream for GPU memory.

    Taken when a user is handed the bytes, a reader only after the host has seen `ready`. Nothing here waits, neither
    the host nor a stream for a word. What is given to an order comes after everything that was given to it before.
    """

    def check(self) -> None:
        """Raises StreamCapturing while the stream records a CUDA graph: a generation must not be baked in."""

    def store(self, page: WordPage, column: int, slot: int, generation: int) -> None:
        """Store a word once everything before is done and visible. Raises StreamCapturing."""

    def join(self) -> None:
        """What follows comes also after all that this thread's current stream was given so far."""

    def mark(self) -> int:
        """A point in this order; `after` is to be called with it once."""

    def after(self, mark: int) -> None:
        """What follows comes also after a mark of any order."""

    def to_host(self, data: Bytes) -> Arrival:
        """Start copying to host memory, in this order."""


class Memory(Protocol):
    """A pool's bytes as one process has them."""

    nbytes: int
    on_host: bool
    borrowed: bool  #: whether `lend` gives the bytes themselves; else a local copy, made in the given order

    def order(self) -> Order:
        """The order of a user that is about to be handed bytes. Raises StreamCapturing."""

    def lend(self, offset: int, nbytes: int, order: Order) -> Bytes: ...

    def copy_out(self, offset: int, into: Bytes, order: Order) -> None:
        """Copy from `offset` on into memory of the same kind, in this order."""

    def returned(self, order: Order) -> None:
        """What was lent in this order is needed no more; all work on it is queued."""

    def private(self, nbytes: int) -> Bytes | None:
        """Other memory of the same kind, its bytes not set; None where any memory will do."""

    def adopt(self, page: WordPage) -> None:
        """Let this memory's orders reach the words of a page; `disown` it before it is closed."""

    def disown(self, page: WordPage) -> None:
        """Undo `adopt`. May wait for work that is queued on the page."""

    def descriptors(self) -> list[int]:
        """New ones, the caller's to close, that a consumer needs to map this memory; perhaps none."""

    def handle(self) -> GpuHandle | None: ...

    def close(self) -> None:
        """Give it up here. May wait for work that is queued on it."""


class Growing(Memory, Protocol):
    """The memory of an elastic pool as its producer has it: address space, and chunks at some of its positions."""

    chunk_nbytes: int

    def grow(self, position: int) -> Handle:
        """Map a new chunk; its handle, which stays the memory's. Raises FerryError, having left nothing."""

    def shrink(self, position: int) -> None:
        """Unmap a chunk and give it up. Nothing may be queued on it: this never waits.

        Raises FerryError, and is then to be called again: what could be given up is, and the rest is still there."""


class Arriving(Memory, Protocol):
    """The same as a consumer has it."""

    def map(self, position: int, handle: Handle) -> None:
        """Map the chunk of a handle, which stays the caller's. Raises FerryError, having left nothing."""

    def unmap(self, position: int) -> None:
        """Nothing may be queued on it: this never waits."""

    def settle(self) -> None:
        """Wait for all that this process has queued on the device."""
