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
from dataclasses import dataclass, field
from functools import partial

from tensorferry.codecs.errors import (
    AttachRefused,
    BadTensor,
    LeaseNotReady,
    LeasePoisoned,
    PeerGone,
    StaleLease,
)
from tensorferry.codecs.frames import Buffer, open_inline
from tensorferry.codecs.locking import Lock
from tensorferry.codecs.memory.cuda_ipc import CudaImport
from tensorferry.codecs.memory.cuda_vmm import VmmImport
from tensorferry.codecs.memory.host import HOST_ORDER, HostSegment
from tensorferry.codecs.memory.memory import Memory, Order
from tensorferry.codecs.memory.registered import RegisteredSegment
from tensorferry.codecs.messages import Chunks, Confirmed, Inline, Payload, Proxy, Retired
from tensorferry.codecs.pidfd import check_pidfd, is_dead
from tensorferry.codecs.pool.control import AckPage, ControlPage, await_stores
from tensorferry.codecs.pool.export import Attachment, Export, positions_of
from tensorferry.codecs.pool.line import Receiver
from tensorferry.codecs.pool.mail import Letter, ReleaseMail
from tensorferry.codecs.pool.mapping import Mapping
from tensorferry.codecs.pool.pool import new_nonce
from tensorferry.codecs.tensors import ALIGNMENT, View, dtype_of, nbytes_of


class Reader:
    """See the module."""

    def __init__(self, consumer: int | None = None, *, device: int | None = None, cache_handles: bool = True) -> None:
        """consumer: the epoch of this process, random by default.

        device: the GPU to have views on, as torch counts. None: in host memory for a pool of host memory; for one of
        GPU memory where that is, if this process sees that GPU, else on the device that is current at `attach`. Where
        the pool lies elsewhere a view is a local copy. cache_handles: keep pools of CUDA IPC mapped; False maps them
        for each open and then waits for its stream.
        """
        self.consumer = consumer or new_nonce()
        self.stale = 0  #: proxies refused because their lease was over, or acknowledged here already
        self._device, self._cache_handles = device, cache_handles
        self._pools: dict[int, _Import] = {}
        self._mail: dict[int, ReleaseMail] = {}  #: by pool, also of those that were detached: they must be told
        self._idle: deque[_Import] = deque()  #: detached, and open no more: to be closed
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
        self._close_idle()
        return orphans

    def producer_died(self, producer: int) -> None:
        """The producer of this epoch is proven dead: by the word of its node's supervisor, where there is no pidfd."""
        with self._lock():
            for imported in self._pools.values():
                if imported.producer_epoch == producer:
                    imported.bereaved = True

    def upkeep(self) -> None:
        """Map what peers' elastic pools have grown, ahead of need, and drop what they retired; once a second will do.

        Until that is dropped it takes GPU memory and counts in its pool's budget. A millisecond a chunk, so do it off
        an event loop; nobody waits for more than one chunk meanwhile. Raises CudaError.
        """
        with self._lock():
            mappings = [imported.mapping for imported in self._pools.values() if imported.mapping is not None]
        with ExitStack() as all_of_them:
            for mapping in mappings:
                all_of_them.callback(mapping.upkeep)

    def hear(self, message: Chunks | Retired | Confirmed) -> None:
        """What the producer of a pool says by message, however often and in whatever order."""
        mail = self._mail.get(message.pool)
        if mail is not None:
            mail.hear(message)

    def letters(self) -> list[Letter]:
        """What producers are to be told by message now, for the caller to send: acknowledgements whose reads are done,
        again until they are confirmed, and what became of chunks."""
        now = time.monotonic()
        letters = [mail.due(now) for mail in list(self._mail.values())]
        return [letter for letter in letters if letter is not None]

    def attach(self, export: Export, fds: Sequence[int]) -> tuple[Attachment, list[int]]:
        """Map a peer's pool; takes over the descriptors that came with the export.

        Returns what `Pool.admit` needs, with descriptors (ack page, this process, for an elastic pool the line) that
        the caller closes once they are sent. Raises AttachRefused, where a GPU is used NoDriver or CudaError, NoFabric,
        having closed everything.
        """
        if export.mail is not None:
            return self._attach_by_mail(export, fds)
        description = export.description
        with ExitStack() as undo, ExitStack() as received:
            for fd in fds:
                received.callback(os.close, fd)
            gpu = export.gpu
            kinds = [("host", 3)] if gpu is None else [("cuda_ipc", 2), ("cuda_vmm", 2)]
            if (description.memory, len(fds)) not in kinds:
                raise AttachRefused(
                    f"cannot map pool {description.pool} of {description.memory} memory from {len(fds)} descriptors"
                )
            check_pidfd(fds[-1])
            memory: Memory
            arriving: VmmImport | None = None
            if gpu is None:
                memory = self._host(fds[0], description.nbytes)
            elif description.memory == "cuda_vmm":
                chunk_nbytes = description.chunk_nbytes
                memory = arriving = VmmImport.attach(gpu, description.nbytes, chunk_nbytes, ordinal=self._device)
            else:
                memory = CudaImport.attach(gpu, description.nbytes, ordinal=self._device, cached=self._cache_handles)
            undo.callback(memory.close)
            positions = positions_of(description)
            control = ControlPage.attach(fds[-2], description.slots, description.pool, export.producer, positions)
            undo.callback(control.close)
            acks = AckPage.create(description.slots, description.pool, self.consumer, positions)
            undo.callback(acks.close)
            memory.adopt(acks)
            undo.callback(memory.disown, acks)
            sent = [os.dup(acks.segment.fd)]
            undo.callback(os.close, sent[0])
            sent.append(os.pidfd_open(os.getpid()))
            undo.callback(os.close, sent[1])
            producer = os.dup(fds[-1])
            undo.callback(os.close, producer)
            imported = _Import(memory, control, acks, description.slots, producer, export.producer)
            if arriving is not None:
                line = Receiver()
                sent.append(line.descriptor)
                undo.callback(os.close, line.descriptor)
                known = imported.acknowledged
                imported.mapping = Mapping(arriving, control, acks, line, description.chunk_nbytes, known)
                undo.callback(imported.mapping.close)
            self._add(description.pool, imported)
            undo.pop_all()
        return Attachment(description.pool, self.consumer), sent

    def _attach_by_mail(self, export: Export, fds: Sequence[int]) -> tuple[Attachment, list[int]]:
        """The same of a pool that shares no pages. From another node no descriptors come, and none are returned."""
        description, gpu, pool = export.description, export.gpu, export.description.pool
        by_line = export.mail == "posix_fd"
        with ExitStack() as undo, ExitStack() as received:
            for fd in fds:
                received.callback(os.close, fd)
            if gpu is None or export.mail is None or description.memory != "cuda_vmm" or len(fds) not in (by_line, 1):
                said = f"{description.memory} memory from {len(fds)} descriptors"
                raise AttachRefused(f"cannot map pool {pool} of {said}, to acknowledge it by message")
            sent: list[int] = []
            producer: int | None = None
            if fds:
                check_pidfd(fds[0])
                producer = os.dup(fds[0])
                undo.callback(os.close, producer)
                sent.append(os.pidfd_open(os.getpid()))
                undo.callback(os.close, sent[0])
            nbytes, chunk_nbytes = description.nbytes, description.chunk_nbytes
            memory = VmmImport.attach(gpu, nbytes, chunk_nbytes, ordinal=self._device, kind=export.mail)
            undo.callback(memory.close)
            positions = positions_of(description)
            acks = AckPage.create(description.slots, pool, self.consumer, positions)
            undo.callback(acks.close)
            memory.adopt(acks)
            undo.callback(memory.disown, acks)
            mail = ReleaseMail(pool, export.producer, self.consumer, acks, description.slots, positions)
            line: Receiver | ReleaseMail = mail
            if by_line:
                line = Receiver()
                sent.append(line.descriptor)
                undo.callback(os.close, line.descriptor)
            imported = _Import(memory, None, acks, description.slots, producer, export.producer)
            imported.mail = mail
            imported.mapping = Mapping(memory, mail, acks, line, chunk_nbytes, imported.acknowledged)
            undo.callback(imported.mapping.close)
            self._add(pool, imported)
            undo.pop_all()
        return Attachment(pool, self.consumer), sent

    def _add(self, pool: int, imported: _Import) -> None:
        with self._lock():
            if pool in self._pools:
                raise AttachRefused(f"pool {pool} is attached already")
            self._pools[pool] = imported
            if imported.mail is not None:
                self._mail[pool] = imported.mail

    def _host(self, fd: int, nbytes: int) -> Memory:
        if self._device is None:
            return HostSegment.attach(fd, nbytes)
        return RegisteredSegment.attach(fd, nbytes, self._device)

    def detach(self, pool: int) -> None:
        """Forget a pool; its memory is unmapped here once no block has it open. No-op for one that is not attached.

        GPU memory: waits until the acknowledgements that are queued have landed, so call it in a thread of its own; a
        block that outlives it does the same at its end. Nobody else waits meanwhile.
        """
        with self._lock():
            imported = self._pools.pop(pool, None)
            if imported is None:
                return
            imported.detached = True
            if imported.is_orphan:
                self._mail.pop(pool, None)
            if not imported.open:
                self._idle.append(imported)
        self._close_idle()

    def close(self) -> None:
        for pool in list(self._pools):
            self.detach(pool)

    # --- payloads

    def is_ready(self, proxy: Proxy) -> bool:
        """Whether `open` would give the bytes now; False only while the producer is still writing.

        Raises as `open` does when it never will.
        """
        with self._lock():
            imported = self._living(proxy)
            imported.check(proxy)
            return imported.is_ready(proxy)

    @contextmanager
    def open(self, payload: Payload, frames: Sequence[Buffer] = ()) -> Iterator[View]:
        """Borrow a payload's bytes for the length of the block; the block's end counts as one release.

        frames: the inline frames of the message the payload came in. Nothing may read the view after the
        block: for a proxy the bytes are then somebody else's. However often a lease is open here at once, its
        bytes stay until the last block ends. Raises StaleLease (over, or acknowledged already), LeasePoisoned,
        LeaseNotReady (see `is_ready`), PeerGone, BadTensor, UnsupportedDtype; for Inline also BadMessage. A
        failed open of a living lease counts as its release too, so that one bad reader wedges nobody.

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
        if isinstance(payload, Proxy):
            self._release(self._hold(payload))

    def _hold(self, proxy: Proxy) -> _Use:
        """Count one user of a living lease in; each must be counted out by `_release`."""
        with self._lock():
            try:
                imported = self._living(proxy)
            except StaleLease:
                self.stale += 1
                raise
            imported.held.setdefault((proxy.slot, proxy.generation), _Held(proxy.uses)).users += 1
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
            imported.acknowledge(proxy, held, order)
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
            return View(data, dtype_of(proxy.dtype), proxy.shape, order)

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

    def _living(self, proxy: Proxy) -> _Import:
        """The pool of a lease that this process has not acknowledged. Raises PeerGone, BadTensor, StaleLease."""
        imported = self._pools.get(proxy.pool)
        if imported is None:
            raise PeerGone(f"pool {proxy.pool}", "is not attached here")
        if proxy.slot >= imported.slots:
            raise BadTensor(f"slot {proxy.slot} of a pool with {imported.slots}")
        imported.check_living(proxy)
        return imported


@dataclass(slots=True)
class _Use:
    """One user of a lease, from `_hold` to `_release`."""

    imported: _Import
    proxy: Proxy
    order: Order | None = None  #: of its reads; None: it has read nothing
    ended: bool = False


@dataclass(slots=True)
class _Held:
    """What this process still has to do with a lease."""

    due: int  #: releases to come, by its producer's word
    users: int = 0  #: who has it open now, or is about to
    last: Order | None = None  #: of the reader that ended last
    marks: list[int] = field(default_factory=list)  #: where the readers that have ended were then

    def ended(self, order: Order) -> None:
        self.last = order
        self.marks.append(order.mark())


class _Import:
    """A peer's pool as it is mapped here."""

    def __init__(
        self,
        memory: Memory,
        control: ControlPage | None,
        acks: AckPage,
        slots: int,
        producer: int | None,
        producer_epoch: int,
    ) -> None:
        """control: None of a pool that is acknowledged by message. producer: its pidfd; None: it is on another node."""
        self.memory, self.control, self.acks = memory, control, acks
        self.slots, self.producer, self.producer_epoch = slots, producer, producer_epoch
        self.held: dict[tuple[int, int], _Held] = {}  #: by (slot, generation)
        self.open = 0  #: uses that have not ended
        self.detached = False
        self.bereaved = False  #: somebody has said that the producer is dead
        self.mapping: Mapping | None = None  #: of an elastic pool
        self.mail: ReleaseMail | None = None  #: instead of a control page
        self.acknowledged = [0] * slots  #: last generation given back of each; the word may still be on its way

    @property
    def is_orphan(self) -> bool:
        return self.bereaved or (self.producer is not None and is_dead(self.producer))

    def check_living(self, proxy: Proxy) -> None:
        """Raises StaleLease for a lease that is over, or was given back here.

        Without a control page it is the proxy that says that the lease lives: we owe an acknowledgement for whatever we
        were sent, and the slot cannot go on without it.
        """
        given_back = self.acknowledged[proxy.slot]
        if self.control is not None:
            lease = self.control.look(proxy.slot)[0]
            if lease != proxy.generation:
                raise StaleLease(proxy.slot, proxy.generation, f"is over: the slot is at generation {lease}")
        elif proxy.generation < given_back:
            raise StaleLease(proxy.slot, proxy.generation, f"is over: generation {given_back} was acknowledged here")
        if given_back == proxy.generation:
            raise StaleLease(proxy.slot, proxy.generation, "was acknowledged here already")

    def check(self, proxy: Proxy) -> int:
        """The bytes of a proxy. Raises UnsupportedDtype or BadTensor for one that lies; allocates nothing."""
        nbytes = nbytes_of(dtype_of(proxy.dtype), proxy.shape)
        end = proxy.offset + nbytes
        if end > self.memory.nbytes or proxy.offset % ALIGNMENT:
            raise BadTensor(f"bytes {proxy.offset} to {end} of a pool of {self.memory.nbytes}")
        return nbytes

    def acknowledge(self, proxy: Proxy, held: _Held, order: Order | None) -> None:
        """Give a lease back, in the order of its last reader and after all others; at once if nobody has read it."""
        order = order or held.last or HOST_ORDER
        while held.marks:
            order.after(held.marks.pop())
        order.store(self.acks, self.acks.ACK, proxy.slot, proxy.generation)
        self.acknowledged[proxy.slot] = proxy.generation

    def is_ready(self, proxy: Proxy) -> bool:
        if self._looks_ready(proxy):
            return True
        if not self.is_orphan:
            return False
        if self._looks_ready(proxy):  # ready may have come after the look; now that it is dead its words are final
            return True
        raise PeerGone(f"pool {proxy.pool}", f"its producer died before slot {proxy.slot} was written")

    def _looks_ready(self, proxy: Proxy) -> bool:
        if self.control is None:  # it was told of when it was complete, but its chunks may come later
            assert self.mapping is not None
            return self.mapping.has_come(proxy, nbytes_of(dtype_of(proxy.dtype), proxy.shape))
        _, ready, poison = self.control.look(proxy.slot)
        if poison == proxy.generation:
            raise LeasePoisoned(proxy.slot, proxy.generation, "will never be valid: its producer said so")
        return ready == proxy.generation

    def close(self) -> None:
        await_stores(lambda: self.acks.column(self.acks.ACK) == self.acknowledged)
        with ExitStack() as undo:  # all of it, also where one of them fails
            if self.producer is not None:
                undo.callback(os.close, self.producer)
            undo.callback(self.memory.close)
            if self.control is not None:
                undo.callback(self.control.close)
            undo.callback(self.acks.close)
            undo.callback(self.memory.disown, self.acks)
            if self.mail is not None:
                undo.callback(self.mail.end)
            if self.mapping is not None:
                undo.callback(self.mapping.close)
