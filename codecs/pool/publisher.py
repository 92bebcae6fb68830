"""The producer's side: memory to write tensors into, which are then sent by lease where possible, inline where not.

A *draft* is a place to write one item's tensors in place. It lies in the pool when the pool has room, and in
private memory when it has not, is absent, or the tensor is small; its writer need not know which. Both are of
the pool's kind: where that is a GPU's, what has to travel inline is *staged* to the host first, without waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import Any, Self

import numpy as np

from tensorferry.codecs.errors import BadTensor, LeaseError, NotStaged, PoolFull
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.memory.host import HOST_ORDER
from tensorferry.codecs.memory.memory import Arrival, Bytes, Order
from tensorferry.codecs.messages import MOST_CONSUMERS, MOST_USES, Inline, Payload, Proxy
from tensorferry.codecs.pool.inline_buffers import Scratch
from tensorferry.codecs.pool.lease import Lease
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.tensors import ALIGNMENT, CODES, View, nbytes_of, view_of

Layout = Sequence[tuple[str, tuple[int, ...]]]  #: (dtype, shape) of each tensor


class Publisher:
    """Makes drafts, and counts how they travel. Thread-safe as far as the pool is."""

    def __init__(
        self,
        pool: Pool | None,
        *,
        inline_below_nbytes: int | None = None,
        on_fallback: Callable[[PoolFull, Pool], None] = lambda full, pool: None,
    ) -> None:
        """pool: None sends everything inline. on_fallback: called at each draft the full pool had no room for.

        inline_below_nbytes: 32 KiB by default; 0 for a pool that a GPU writes, from where inline is the longer way.
        """
        if not isinstance(pool, Pool | None):
            raise TypeError(f"pool={pool!r}: give a Pool, or None to send everything inline")
        self.pool = pool
        if inline_below_nbytes is None:
            inline_below_nbytes = 32 << 10 if pool is None or pool.on_host else 0
        self._inline_below_nbytes = inline_below_nbytes
        self._on_fallback = on_fallback
        self._scratch = Scratch()
        #: Drafts by how they travelled: `pool`, or inline as `small`, `no_pool`, `pool_full`.
        self.drafts: Counter[str] = Counter()

    def draft(self, layout: Layout, *, patient: bool = True) -> Draft:
        """Memory for the tensors of one item, packed, to be written, dispatched and sent within a `with` block.

        Raises UnsupportedDtype or BadTensor. A lack of room is no failure. The block may wait at its start for an
        elastic pool that grows; with patient=False, as on an event loop, it never waits: see `growing`.
        """
        return Draft(self, layout, patient=patient)

    def fits(self, layouts: Sequence[Layout]) -> bool:
        """Whether there is room now for drafts of all these layouts, so that none goes inline.

        A caller that would rather wait asks *before* it holds any of them. So no two callers can each hold the room
        that the other waits for.
        """
        return self.pool is None or self.pool.fits(self._sizes(layouts))

    def growing(self, layouts: Sequence[Layout]) -> bool:
        """Whether an elastic pool is about to make room for drafts of these layouts, which do not fit now."""
        return self.pool is not None and self.pool.growing(self._sizes(layouts))

    def _sizes(self, layouts: Sequence[Layout]) -> list[int]:
        """The sizes of the leases that these would take."""
        return [nbytes for _, nbytes in map(_pack, layouts) if nbytes >= self._inline_below_nbytes]

    def publish(self, *tensors: Any) -> Draft:
        """A draft filled with copies of these tensors (torch, numpy or View). They are copied when its block begins,
        and may change from then on; those in GPU memory, by work on the stream that is current then.

        Raises UnsupportedDtype or BadTensor.
        """
        sources = [view_of(tensor) for tensor in tensors]
        return Draft(self, [(source.dtype, source.shape) for source in sources], sources)

    def _lease(self, nbytes: int, patient: bool) -> Lease | None:
        """Room in the pool, its block entered; None: go inline, counted with the reason."""
        if self.pool is None:
            self.drafts["no_pool"] += 1
            return None
        if nbytes < self._inline_below_nbytes:
            self.drafts["small"] += 1
            return None
        lease = self.pool.lease(nbytes, patient=patient)
        try:
            lease.__enter__()
        except PoolFull as full:
            self.drafts["pool_full"] += 1
            self._on_fallback(full, self.pool)
            return None
        self.drafts["pool"] += 1
        return lease


class Draft:
    """Memory for one item's tensors, for the length of its block. `views` are writable until the first dispatch."""

    views: list[View]

    def __init__(
        self, publisher: Publisher, layout: Layout, sources: Sequence[View] = (), *, patient: bool = True
    ) -> None:
        """sources: tensors to copy from; without them the bytes are not set."""
        self._publisher, self._layout, self._sources, self._patient = publisher, layout, sources, patient
        self._places, self._nbytes = _pack(layout)
        self._lease: Lease | None = None
        self._used = self._open = False
        self._pool = 0 if publisher.pool is None else publisher.pool.description.pool

    def __enter__(self) -> Self:
        if self._used:
            slot, generation = (0, 0) if self._lease is None else self._lease.grant[:2]
            raise LeaseError(slot, generation, "of a draft is for one block; make another draft")
        self._used = self._open = True
        lease = self._lease = self._publisher._lease(self._nbytes, self._patient)
        try:
            self._make(lease)
        except BaseException:  # interrupted: the lease was dispatched to no consumer, so it comes back
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        if self._lease is not None:
            self._lease.__exit__()

    def _make(self, lease: Lease | None) -> None:
        """The views, with the sources copied into them."""
        self._order: Order = HOST_ORDER
        self._arrival: Arrival | None = None
        if lease is None:
            data = self._private()
        else:
            data, self._order = lease.data, lease.order
        self._data, self._on_host = data, isinstance(data, np.ndarray)
        self.views = [
            View(data if end == self._nbytes and not start else data[start:end], dtype, shape, self._order)
            for (start, end), (dtype, shape) in zip(self._places, self._layout, strict=True)
        ]
        for view, source in zip(self.views, self._sources, strict=bool(self._sources)):
            view.copy_from(source)

    def _private(self) -> Bytes:
        """Memory of this draft alone, of the kind that the pool's views have."""
        pool = self._publisher.pool
        if pool is not None and (data := pool.private(self._nbytes)) is not None:
            self._order = pool.order()
            return data
        return self._publisher._scratch.take(self._nbytes)

    @property
    def transport(self) -> str:
        """`shm`, `cuda_ipc`, `cuda_vmm`, or `inline`."""
        pool = self._publisher.pool
        if self._lease is None or pool is None:
            return "inline"
        return "shm" if pool.description.memory == "host" else pool.description.memory

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.views)

    def complete(self) -> None:
        """All bytes are written, or will be by work that is queued now. Consumers find them ready once that is done,
        also if later work is queued behind it. Implied by the first dispatch. Raises PoolClosed; StreamCapturing."""
        if self._lease is not None:
            self._lease.publish()

    def stage(self) -> None:
        """Start copying the bytes to the host if they are not there, since one consumer at least gets them inline. This
        never waits: look at `staged` until it is True, then dispatch. The bytes are those that were written until now,
        in the order of the views. Raises StreamCapturing, LeaseError."""
        if not self._open:
            raise self._outside()
        if self._arrival is None:
            self._order.check()
            self._arrival = self._order.to_host(self._data)

    @property
    def staged(self) -> bool:
        """Whether `dispatch` could give inline payloads now."""
        return self._on_host or (self._arrival is not None and self._arrival.done)

    def must_stage(self, column: int | None) -> bool:
        """Whether `dispatch` to this consumer would raise NotStaged now."""
        return bool(self.views) and (self._lease is None or column is None) and not self.staged

    def prepared(self, column: int | None) -> bool:
        """Whether `dispatch` to this consumer would succeed now. If not, this starts what is missing and returns at
        once: ask again. Inline bytes must be in host memory (see `stage`). For a consumer that acknowledges by message
        the bytes must be complete.

        Raises StreamCapturing, PoolClosed."""
        if self.must_stage(column):
            self.stage()
            return False
        return self._lease is None or column is None or not self.views or self._lease.prepared(column)

    def dispatch(self, column: int | None, frames: list[Buffer], *, consumers: int = 1, uses: int = 1) -> list[Payload]:
        """The payloads of one message to one consumer, one per tensor. The caller must now send it.

        column: the consumer's, or None for one that cannot read the pool (it gets the bytes inline). frames: the
        message's inline frames; what travels inline is appended. consumers: how many processes this draft goes
        to; uses: how often this consumer releases each tensor. Raises LeaseError, also for a consumer that has
        the lease already and outside the draft's block; PoolClosed. For GPU memory raises NotStaged, StreamCapturing,
        LeaseNotReady: see `prepared`.
        """
        if not self._open:
            raise self._outside()
        if self._lease is None or column is None or not self.views:  # no tensor: there is nothing to acknowledge
            payloads: list[Payload] = []
            for view, data in zip(self.views, self._inline(), strict=True):
                payloads.append(Inline(len(frames), CODES[view.dtype], view.shape))
                frames.append(data)
            return payloads
        slot, generation, offset, _ = self._lease.grant
        releases = uses * len(self.views)
        if not (isinstance(uses, int) and 1 <= uses and releases <= MOST_USES and 1 <= consumers <= MOST_CONSUMERS):
            said = f"{releases} uses and {consumers} consumers: at most {MOST_USES} and {MOST_CONSUMERS}, at least 1"
            raise LeaseError(slot, generation, f"cannot be said to have {said}")
        self._lease.dispatch((column,))
        return [
            Proxy(
                self._pool,
                slot,
                generation,
                offset + start,
                CODES[view.dtype],
                view.shape,
                consumers,
                releases,
            )
            for (start, _), view in zip(self._places, self.views, strict=True)
        ]

    def _outside(self) -> LeaseError:
        """Its bytes may have been lent again."""
        slot, generation = self._lease.grant[:2] if self._lease is not None else (0, 0)
        return LeaseError(slot, generation, "of a draft cannot be sent outside its block")

    def _inline(self) -> Iterator[Buffer]:
        """The bytes of each tensor, in memory that is not written again before they are sent."""
        if self._on_host:
            yield from (view.data if self._lease is None else view.data.copy() for view in self.views)
            return
        if self._arrival is None or not self._arrival.done:
            raise NotStaged(self._nbytes)
        yield from (self._arrival.data[start:end] for start, end in self._places)

    def retract(self, column: int | None) -> None:
        """The message of the last dispatch to this consumer was certainly not sent."""
        if self._lease is not None and column is not None:
            self._lease.retract(column)

    @staticmethod
    def send_all(drafts: Iterable[Draft], column: int | None, send: Callable[[], None]) -> None:
        """Send the message for which these drafts were last dispatched to one consumer.

        send: sends all of the message or nothing. If it raises, the drafts are retracted.
        """
        try:
            send()
        except Exception:  # a KeyboardInterrupt may come after the message has left
            for draft in drafts:
                draft.retract(column)
            raise


def _pack(layout: Layout) -> tuple[list[tuple[int, int]], int]:
    """The first byte of each tensor and the one behind it, and the size of all together."""
    places, end = [], 0
    try:
        for dtype, shape in layout:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + nbytes_of(dtype, shape)
            places.append((start, end))
        return places, index(end)
    except (TypeError, ValueError):  # of Python's, about a part of the layout that is of another type
        raise BadTensor(f"{layout!r:.200} is no layout; give the dtype and shape of each tensor") from None
