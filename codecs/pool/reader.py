"""The consumer's side: proxies in, bytes out, exactly one acknowledgement per lease.

One Reader per process. However many proxies name a lease and however often each is opened, the reader counts
the releases and acknowledges once: when the count its producer declared is reached and no block has it open
any more. Thread-safe, so that a copy thread can open and release.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from tensorferry.codecs.errors import AttachRefused, BadTensor, LeaseNotReady, PeerGone, StaleLease
from tensorferry.codecs.frames import Buffer, open_inline
from tensorferry.codecs.memory.memory import Order
from tensorferry.codecs.messages import LAST_NONCE, Chunks, Confirmed, Inline, Payload, Proxy, Retired
from tensorferry.codecs.pool.attached_pool import Held, Imported
from tensorferry.codecs.pool.consumer import check_taken
from tensorferry.codecs.pool.elastic.chunk_imports import ChunksHere
from tensorferry.codecs.pool.elastic.mail import Letter, ReleaseMail
from tensorferry.codecs.pool.export import Attachment, Export
from tensorferry.codecs.pool.pool import MOST_DEVICES, new_nonce
from tensorferry.codecs.system.arguments import whole
from tensorferry.codecs.system.descriptors import close_all
from tensorferry.codecs.system.interruptible_lock import Lock
from tensorferry.codecs.system.pidfd import is_dead
from tensorferry.codecs.tensors import View, dtype_of


class Reader:
    """See the module."""

    def __init__(self, consumer: int | None = None, *, device: int | None = None, cache_handles: bool = True) -> None:
        """consumer: the epoch of this process, random by default.

        device: the GPU to have views on, as torch counts. None: in host memory for a pool of host memory; for one of
        GPU memory where that is, if this process sees that GPU, else on the device that is current at `attach`. Where
        the pool lies elsewhere a view is a local copy. cache_handles: keep pools of CUDA IPC mapped; False maps them
        for each open and then waits for its stream.
        """
        self.consumer = whole("consumer", consumer or new_nonce(), 1, LAST_NONCE)
        self.stale = 0  #: proxies refused because their lease was over, or acknowledged here already
        self._device = None if device is None else whole("device", device, 0, MOST_DEVICES)
        self._cache_handles = cache_handles
        self._pools: dict[int, Imported] = {}
        self._mail: dict[
            int, ReleaseMail
        ] = {}  #: by pool, also of detached pools: their producers must still be notified
        self._left: dict[int, int] = {}  #: of those, the pidfd of the producer, where there is one
        self._idle: deque[Imported] = deque()  #: detached, and open no more: to be closed
        self._lock = Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- pools

    @property
    def pools(self) -> frozenset[int]:
        return frozenset(self._pools)

    def orphans(self) -> frozenset[int]:
        """The pools whose producer has ended. What was ready in them can still be read; `detach` them when no more
        proxies of theirs can come."""
        with self._lock():
            orphans = frozenset(pool for pool, imported in self._pools.items() if imported.is_orphan)
            self._forget_dead()
        self._close_idle()
        return orphans

    def producer_died(self, producer: int) -> None:
        """The producer of this epoch is proven dead: by the word of its node's supervisor, where there is no pidfd."""
        with self._lock():
            for imported in self._pools.values():
                if imported.producer_epoch == producer:
                    imported.bereaved = True
            for pool in [pool for pool, mail in self._mail.items() if mail.producer == producer]:
                if pool not in self._pools:
                    self._forget(pool)

    def chunks(self, pool: int) -> ChunksHere:
        """Which chunks of a pool this process has now; none of one that is not elastic, or not attached."""
        with self._lock():
            imported = self._pools.get(pool)
            mapping = None if imported is None else imported.mapping
        return ChunksHere({}, {}) if mapping is None else mapping.here()

    def upkeep(self) -> None:
        """Map what peers' elastic pools have grown, ahead of need, and drop what they retired; once a second will do.

        Until that is dropped it takes GPU memory and counts in its pool's budget. A millisecond a chunk, so do it off
        an event loop; no other thread waits for more than one chunk meanwhile. Raises CudaError.
        """
        with self._lock():
            mappings = [imported.mapping for imported in self._pools.values() if imported.mapping is not None]
        with ExitStack() as all_of_them:
            for mapping in mappings:
                all_of_them.callback(mapping.upkeep)

    def knows(self, message: Chunks | Retired | Confirmed) -> bool:
        """Whether a message is about a pool that this process acknowledges by message, and is for its present epoch."""
        return message.pool in self._mail and message.to == self.consumer

    def hear(self, message: Chunks | Retired | Confirmed) -> None:
        """Book a message from the producer of a pool. It may be repeated or late."""
        mail = self._mail.get(message.pool)
        if mail is not None:
            mail.hear(message)

    def letters(self) -> list[Letter]:
        """The messages to producers that are due now, for the caller to send: acknowledgements whose reads are done,
        repeated until they are confirmed, and what became of chunks.

        Also of pools that were detached, as long as their producer lives: a pidfd proves its death, and where there is
        none, or after `close`, `producer_died` says so.
        """
        if self._left:
            with self._lock():
                self._forget_dead()
        now = time.monotonic()
        letters = [mail.due(now) for mail in list(self._mail.values())]
        return [letter for letter in letters if letter is not None]

    def attach(self, export: Export, fds: Sequence[int]) -> tuple[Attachment, list[int]]:
        """Map a peer's pool; takes over the descriptors that came with the export.

        Returns what `Pool.admit` needs, with descriptors (ack page, this process, for an elastic pool the line) that
        the caller closes once they are sent. Raises AttachRefused, TypeError, where a GPU is used NoDriver or
        CudaError, NoFabric, having closed everything.
        """
        check_taken(export, Export, fds)
        attach = Imported.local if export.mail is None else Imported.by_mail
        imported, sent = attach(export, fds, self.consumer, self._device, self._cache_handles)
        with ExitStack() as undo:
            undo.callback(close_all, sent)
            undo.callback(imported.close)
            with self._lock():
                if export.description.pool in self._pools:
                    raise AttachRefused(f"pool {export.description.pool} is attached already")
                self._pools[export.description.pool] = imported
                if imported.mail is not None:
                    self._forget(export.description.pool)
                    self._mail[export.description.pool] = imported.mail
            undo.pop_all()
        return Attachment(export.description.pool, self.consumer), sent

    def detach(self, pool: int) -> None:
        """Forget a pool; its memory is unmapped here once no block has it open. No-op for one that is not attached.

        GPU memory: waits until the acknowledgements that are queued have landed, so call it in a thread of its own; a
        block that ends later does the same at its end. No other thread waits meanwhile.
        """
        with self._lock():
            imported = self._pools.pop(pool, None)
            if imported is None:
                return
            imported.detached = True
            if imported.is_orphan:
                self._forget(pool)
            elif imported.mail is not None and imported.producer is not None:
                self._left[pool], imported.producer = imported.producer, None
            if not imported.open:
                self._idle.append(imported)
        self._close_idle()

    def close(self) -> None:
        """Detach every pool. Messages that producers have yet to confirm stay in `letters`."""
        for pool in list(self._pools):
            self.detach(pool)
        with self._lock():
            while self._left:
                os.close(self._left.popitem()[1])

    # --- payloads

    def is_ready(self, proxy: Proxy) -> bool:
        """Whether `open` would give the bytes now; False only while the producer is still writing.

        Raises as `open` does when it never will.
        """
        if not isinstance(proxy, Proxy):
            raise _no_payload(proxy)
        with self._lock():
            imported = self._living(proxy)
            imported.check(proxy)
            return imported.is_ready(proxy)

    @contextmanager
    def open(self, payload: Payload, frames: Sequence[Buffer] = ()) -> Iterator[View]:
        """Borrow a payload's bytes for the length of the block; the block's end counts as one release.

        frames: the inline frames of the message the payload came in. Nothing may read the view after the
        block: the bytes of a proxy are then lent again. However often a lease is open here at once, its
        bytes stay until the last block ends. Raises StaleLease (over, or acknowledged already), LeasePoisoned,
        LeaseNotReady (see `is_ready`), PeerGone, BadTensor, UnsupportedDtype; for Inline also BadMessage. A
        failed open of a living lease counts as its release too, so that one bad reader blocks no other.

        A view on a GPU: queue the reads on the stream that is current here, or `View.join` them; the acknowledgement
        goes into that stream behind them. Of a pool elsewhere the view is a local copy, and the release follows the
        copy at once. Raises StreamCapturing, also at the block's end: the release is then still owed.
        """
        if isinstance(payload, Inline):
            yield open_inline(payload, frames)
            return
        use = self._hold(payload)
        try:
            view = self._look(use)
            if not use.imported.memory.borrowed:
                self._release(use)
            yield view
        finally:
            self._release(use)

    def copy(self, payload: Payload, into: View, frames: Sequence[Buffer] = ()) -> None:
        """Copy a payload into memory of the caller's own, such as rows of a batch, and release it; raises as `open`.

        From a pool elsewhere this is one copy, where `open` and then copying from the view is two.
        """
        if isinstance(payload, Inline):
            into.copy_from(open_inline(payload, frames))
            return
        use = self._hold(payload)
        try:
            self._copy(use, into)
        finally:
            self._release(use)

    def acknowledge(self, payload: Payload) -> None:
        """Release a payload without reading it: an embedding-cache hit, or a request that was given up.

        Safe at any time, also before the bytes are ready. Raises StaleLease when nothing is owed, PeerGone.
        """
        if not isinstance(payload, Inline):
            self._release(self._hold(payload))

    def withdraw(self, pool: int, leases: Sequence[tuple[int, int]]) -> None:
        """The producer does not know which of these leases (slot, generation) we were sent: acknowledge them, those
        that are open here once no block reads them any more. No-op for those that are over, and where the pool is not
        attached."""
        with self._lock():
            imported = self._pools.get(pool)
            if imported is not None:
                for slot, generation in leases:
                    imported.withdraw(slot, generation)

    def refuse(self, payloads: Sequence[Payload]) -> None:
        """Acknowledge the leases of these without reading them, however many releases they declare: those that are open
        here once no block reads them any more. No-op for those that are over."""
        for payload in payloads:
            if isinstance(payload, Proxy):
                self.withdraw(payload.pool, [(payload.slot, payload.generation)])

    def _forget(self, pool: int) -> None:
        """The producer of a pool needs no more messages."""
        self._mail.pop(pool, None)
        if (pidfd := self._left.pop(pool, None)) is not None:
            os.close(pidfd)

    def _forget_dead(self) -> None:
        for pool in [pool for pool, pidfd in self._left.items() if is_dead(pidfd)]:
            self._forget(pool)

    def _hold(self, proxy: Proxy) -> _Use:
        """Count one user of a living lease in; each must be counted out by `_release`."""
        if not isinstance(proxy, Proxy):
            raise _no_payload(proxy)
        with self._lock():
            try:
                imported = self._living(proxy)
            except StaleLease:
                self.stale += 1
                raise
            imported.held.setdefault((proxy.slot, proxy.generation), Held(proxy.uses)).users += 1
            imported.open += 1
            return _Use(imported, proxy)

    def _release(self, use: _Use) -> None:
        """Count one user out, once; the last of the last declared use acknowledges, after all that the others read."""
        if use.ended:
            return
        use.ended = True
        self._lock.run(partial(self._count_out, use))
        if use.order is not None:
            use.imported.memory.returned(use.order)
        self._close_idle()

    def _count_out(self, use: _Use) -> None:
        imported, proxy, order = use.imported, use.proxy, use.order
        held = imported.held[proxy.slot, proxy.generation]
        held.users -= 1
        imported.open -= 1
        if held.users == 0 and held.due <= 1:
            imported.acknowledge(proxy.slot, proxy.generation, held, order)
            del imported.held[proxy.slot, proxy.generation]
        elif order is not None:
            held.ended(order)
        held.due -= 1
        if imported.detached and not imported.open:
            self._idle.append(imported)

    def _close_idle(self) -> None:
        """Unmap what was detached and is open no more."""
        while self._idle:
            with suppress(IndexError):  # another thread was faster
                self._idle.popleft().close()

    def _look(self, use: _Use) -> View:
        proxy = use.proxy
        with self._lock():
            order, nbytes = self._readable(use)
            data = use.imported.memory.lend(proxy.offset, nbytes, order)
            use.order = order
            return View(data, dtype_of(proxy.dtype), proxy.shape, order, read_only=use.imported.memory.on_host)

    def _copy(self, use: _Use, into: View) -> None:
        proxy = use.proxy
        dtype = dtype_of(proxy.dtype)
        if (into.dtype, into.shape) != (dtype, proxy.shape):
            raise BadTensor(f"cannot copy {dtype} of shape {proxy.shape} into {into!r}")
        if use.imported.memory.on_host is not into.on_host:
            into.copy_from(self._look(use))
            return
        with self._lock():
            order, _ = self._readable(use)
            use.imported.memory.copy_out(proxy.offset, into.data, order)
            use.order = order
        into.join()

    def _readable(self, use: _Use) -> tuple[Order, int]:
        """The order to read a lease in, once the host has seen `ready`, and its bytes. Raises as `open` does.

        No stream waits for the word as well: it was stored behind a fence for the whole system, the host has seen it,
        and what the host queues after that comes after it. (Measured: such a wait costs 2 us a copy and orders nothing
        more; see docs/gpu-facts.md.)
        """
        imported, proxy = use.imported, use.proxy
        if self._pools.get(proxy.pool) is not imported:
            raise PeerGone(f"pool {proxy.pool}", "was detached")
        nbytes = imported.check(proxy)
        if not imported.is_ready(proxy):
            raise LeaseNotReady(proxy.slot, proxy.generation, "is not written yet")
        order = imported.memory.order()
        if imported.mapping is not None:
            imported.mapping.use(proxy, nbytes)
        return order, nbytes

    def _living(self, proxy: Proxy) -> Imported:
        """The pool of a lease that this process has not acknowledged. Raises PeerGone, BadTensor, StaleLease."""
        imported = self._pools.get(proxy.pool)
        if imported is None:
            raise PeerGone(f"pool {proxy.pool}", "is not attached here")
        imported.check_living(proxy.slot, proxy.generation)
        return imported


def _no_payload(given: object) -> TypeError:
    return TypeError(f"{given!r} is no payload; give one that `dispatch` returned")


@dataclass(slots=True)
class _Use:
    """One user of a lease, from `_hold` to `_release`."""

    imported: Imported
    proxy: Proxy
    order: Order | None = None  #: of its reads; None: it has read nothing
    ended: bool = False
