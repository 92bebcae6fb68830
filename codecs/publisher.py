"""The producer's side: where a tensor is written, and how it leaves: by lease where possible, inline where not.

A *draft* is a place to write one item's tensors in place. It lies in the pool when the pool has room, and in
private memory when it has not, is absent, or the tensor is small; whoever writes into it need not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.codecs.errors import PoolFull
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.messages import Inline, Payload, Proxy
from tensorferry.codecs.pool.pool import Lease, Pool
from tensorferry.codecs.tensors import View, nbytes_of, view_of

#: Where tensors of a packed draft start: enough for any dtype, a cache line, and the widest vector store.
ALIGNMENT = 64

Layout = Sequence[tuple[str, tuple[int, ...]]]  #: (dtype, shape) of each tensor


class Publisher:
    """Makes drafts, and counts how they travel. Thread-safe as far as the pool is."""

    def __init__(
        self,
        pool: Pool | None,
        *,
        inline_below_nbytes: int = 32 << 10,
        on_fallback: Callable[[PoolFull, Pool], None] = lambda full, pool: None,
    ) -> None:
        """pool: None sends everything inline. on_fallback: called at each draft the full pool had no room for."""
        self.pool = pool
        self._inline_below_nbytes = inline_below_nbytes
        self._on_fallback = on_fallback
        #: Drafts by how they travelled: `pool`, or inline as `small`, `no_pool`, `pool_full`.
        self.drafts: Counter[str] = Counter()

    @contextmanager
    def draft(self, layout: Layout) -> Iterator[Draft]:
        """Memory for the tensors of one item, packed, to be written, dispatched and sent within the block.

        Raises UnsupportedDtype or BadTensor. Never waits and never fails for lack of room.
        """
        offsets, nbytes = _pack(layout)
        with ExitStack() as block:
            lease = self._lease(block, nbytes)
            data = np.empty(nbytes, np.uint8) if lease is None else lease.data
            yield Draft(layout, offsets, data, lease, self.pool)

    @contextmanager
    def publish(self, *tensors: Any) -> Iterator[Draft]:
        """A draft filled with copies of these tensors (torch, numpy or View): they may change at once."""
        views = [view_of(tensor) for tensor in tensors]
        with self.draft([(view.dtype, view.shape) for view in views]) as draft:
            for place, view in zip(draft.views, views, strict=True):
                place.copy_from(view)
            yield draft

    def _lease(self, block: ExitStack, nbytes: int) -> Lease | None:
        """Room in the pool for the length of the block; None: go inline, counted with the reason."""
        if self.pool is None:
            self.drafts["no_pool"] += 1
            return None
        if nbytes < self._inline_below_nbytes:
            self.drafts["small"] += 1
            return None
        try:
            lease = block.enter_context(self.pool.lease(nbytes))
        except PoolFull as full:
            self.drafts["pool_full"] += 1
            self._on_fallback(full, self.pool)
            return None
        self.drafts["pool"] += 1
        return lease


class Draft:
    """The tensors of one item, being made. `views` are writable until the first dispatch."""

    def __init__(
        self,
        layout: Layout,
        offsets: Sequence[int],
        data: npt.NDArray[np.uint8],
        lease: Lease | None,
        pool: Pool | None,
    ) -> None:
        self.views = [
            View(data[offset : offset + nbytes_of(dtype, shape)], dtype, shape)
            for offset, (dtype, shape) in zip(offsets, layout, strict=True)
        ]
        self._offsets, self._lease = offsets, lease
        self._pool = 0 if pool is None else pool.description.pool

    @property
    def transport(self) -> str:
        """`shm`, or `inline`."""
        return "inline" if self._lease is None else "shm"

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.views)

    def dispatch(self, column: int | None, frames: list[Buffer], *, consumers: int = 1, uses: int = 1) -> list[Payload]:
        """The payloads of one message to one consumer, which must now be sent; one per tensor.

        column: the consumer's, or None for one that cannot read the pool (it gets the bytes inline). frames: the
        message's inline frames; what travels inline is appended. consumers: how many processes this draft goes
        to; uses: how often this consumer releases each tensor. Raises LeaseError.
        """
        if self._lease is None or column is None:
            payloads: list[Payload] = []
            for view in self.views:
                payloads.append(Inline(len(frames), view.dtype, view.shape))
                frames.append(view.data if self._lease is None else view.data.copy())
            return payloads
        self._lease.dispatch((column,))
        slot, generation, start, _ = self._lease.grant
        return [
            Proxy(
                self._pool,
                slot,
                generation,
                start + offset,
                view.dtype,
                view.shape,
                consumers,
                uses * len(self.views),
            )
            for offset, view in zip(self._offsets, self.views, strict=True)
        ]

    def retract(self, column: int | None) -> None:
        """The message of the last dispatch to this consumer was certainly not sent."""
        if self._lease is not None and column is not None:
            self._lease.retract(column)


def _pack(layout: Layout) -> tuple[list[int], int]:
    offsets, end = [], 0
    for dtype, shape in layout:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(offset)
        end = offset + nbytes_of(dtype, shape)
    return offsets, end
