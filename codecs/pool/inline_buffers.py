"""Private memory for tensors that travel inside a message, used again once they are sent.

A page costs a microsecond or two when it is touched for the first time, several times what it costs to fill, and an
allocator gives large blocks back to the kernel as soon as they are freed. Here a block waits for its next use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

BLOCKS = 4  #: that wait at most; as many as a busy publisher has on their way to the kernel at once
SMALLEST_NBYTES = 256 << 10  #: below, the allocator keeps memory itself
LARGEST_NBYTES = 64 << 20  #: above, a waiting block would cost more than it saves


class Scratch:
    """Blocks come back by themselves, when the last view of them is gone. Thread-safe, and takes no lock: a view
    may go in any thread, wherever garbage happens to be collected."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self._idle: deque[Bytes] = deque(maxlen=blocks)  # a full one drops its oldest

    @property
    def idle_nbytes(self) -> int:
        return sum(block.nbytes for block in list(self._idle))

    def take(self, nbytes: int) -> Bytes:
        """uint8 of shape (nbytes,), its bytes not set."""
        if not SMALLEST_NBYTES <= nbytes <= LARGEST_NBYTES:
            return np.empty(nbytes, np.uint8)
        block = self._found(nbytes)
        return np.asarray(_Lent(np.empty(nbytes, np.uint8) if block is None else block, nbytes, self._idle.append))

    def _found(self, nbytes: int) -> Bytes | None:
        """The block returned last that is large enough, but not more than twice that: caches may still have it."""
        for _ in range(BLOCKS):
            try:
                block = self._idle.pop()
            except IndexError:
                return None
            if nbytes <= block.nbytes <= 2 * nbytes:
                return block
            self._idle.appendleft(block)
        return None


class _Lent:
    """A block as numpy sees it: the base of all views of it, so that it is freed after the last of them."""

    def __init__(self, block: Bytes, nbytes: int, give_back: Callable[[Bytes], None]) -> None:
        self._block, self._give_back = block, give_back
        self.__array_interface__ = {**block.__array_interface__, "shape": (nbytes,)}

    def __del__(self) -> None:
        self._give_back(self._block)
