"""A bounded pool in shared memory, of the host or of a GPU: ranges are lent, one lease a feature, and come back by
acknowledgement.

The pool joins the ledger (who has what), the control words (what everybody else can see) and the memory. It is
thread-safe. It proves deaths itself, by the descriptors consumers sent of themselves, so a consumer that is
killed gives everything back without anybody's help.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple, Self

import numpy as np

from tensorferry.codecs.errors import AttachRefused, LeaseError, PoolClosed, PoolFull
from tensorferry.codecs.locking import Lock
from tensorferry.codecs.memory.cuda_ipc import CudaSegment
from tensorferry.codecs.memory.host import HostSegment
from tensorferry.codecs.memory.memory import Bytes, GpuHandle, Memory, Order
from tensorferry.codecs.memory.registered import RegisteredSegment
from tensorferry.codecs.messages import Nonce, PoolDescription, Wire
from tensorferry.codecs.pidfd import check_pidfd, is_dead
from tensorferry.codecs.pool.control import AckPage, ControlPage, await_stores
from tensorferry.codecs.pool.ledger import Grant, Ledger
from tensorferry.codecs.pool.statistics import PoolStatistics

NAME = "tensorferry-pool"  #: of host memory, in /proc/PID/maps
RECLAIM_AT_ONCE = 64  #: leases that one pass ends at most, so that nobody waits long for the lock
WARM_FROM_NBYTES = 4 << 20  #: a lease this large is worth a pass first: memory that was just used is half as dear


class Export(Wire, frozen=True):
    """What a consumer is given of a pool, beside the descriptors of its memory, control page and process."""

    description: PoolDescription
    producer: Nonce
    gpu: GpuHandle | None = None  #: instead of a descriptor of the memory


class Attachment(Wire, frozen=True):
    """What a consumer gives back, beside the descriptors of its ack page and process."""

    pool: Nonce
    consumer: Nonce


class Pool:
    """See the module. Made by `create`, lends through `lease`, and must be closed."""

    def __init__(self, segment: Memory, control: ControlPage, description: PoolDescription, producer: int) -> None:
        self.description = description
        self.producer = producer
        self._segment, self._control = segment, control
        self._ledger = Ledger(description.nbytes, description.slots)
        self._consumers: dict[int, _Consumer] = {}
        self._lock = Lock()
        self._closed = False
        self._leases = self._refused = self._struck = self._ended = self._foreign_words = 0
        self._published = [0] * description.slots  # last generation of each; the word may still be on its way
        self._lent_at_ns = [0] * description.slots
        self._lent_ns = self._longest_lent_ns = 0

    @classmethod
    def create(
        cls,
        nbytes: int,
        slots: int = 4096,
        *,
        memory: Literal["host", "cuda_ipc"] = "host",
        device: int | None = None,
        producer: int | None = None,
        go_on: Callable[[], None] = lambda: None,
    ) -> Pool:
        """A pool of host memory, populated: nothing faults afterwards. Or of GPU memory, allocated.

        device: the GPU that GPU memory lies on, as torch counts, the first by default; for host memory the GPU that
        writes it, if one does: views are then CUDA tensors over its pages. producer: the epoch of this process, random
        by default; go_on: called again and again while host memory is made, which can take seconds, and may raise to
        give it up. Raises NoMemory; where a GPU is used NoDriver or CudaError.
        """
        producer = producer or new_nonce()
        description = PoolDescription(new_nonce(), memory, nbytes, slots)
        with ExitStack() as undo:
            segment: Memory
            if memory == "cuda_ipc":
                segment = CudaSegment.create(nbytes, device or 0)
            elif device is not None:
                segment = RegisteredSegment.create(nbytes, NAME, device, go_on)
            else:
                segment = HostSegment.create(nbytes, NAME, go_on)
            undo.callback(segment.close)
            control = ControlPage.create(slots, description.pool, producer)
            undo.callback(control.close)
            segment.adopt(control)
            undo.pop_all()
        return cls(segment, control, description, producer)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- consumers

    def export(self) -> tuple[Export, list[int]]:
        """What `Reader.attach` needs: a description, and descriptors to send with SCM_RIGHTS.

        The caller owns the descriptors (memory if it is the host's, control page, this process) and closes them once
        they are sent. Raises PoolClosed.
        """
        with self._lock(), ExitStack() as undo:
            self._check_open()
            fds = self._segment.descriptors()
            undo.callback(_close_all, fds)  # the list as it is then
            fds.append(os.dup(self._control.segment.fd))
            fds.append(os.pidfd_open(os.getpid()))
            undo.pop_all()
        return Export(self.description, self.producer, self._segment.handle()), fds

    def admit(self, attachment: Attachment, fds: Sequence[int]) -> int:
        """Take a consumer's ack page and process descriptors, which are this pool's from now on.

        Returns the consumer's column. Raises AttachRefused.
        """
        with ExitStack() as undo:
            undo.callback(_close_all, fds)
            if len(fds) != 2 or attachment.pool != self.description.pool:
                raise AttachRefused(
                    f"{len(fds)} descriptors for pool {attachment.pool}; 2 for pool {self.description.pool} are needed"
                )
            check_pidfd(fds[1])
            page = AckPage.attach(fds[0], self.description.slots, attachment.pool, attachment.consumer)
            undo.callback(page.close)
            with self._lock():
                self._check_open()
                column = self._ledger.admit()
                self._consumers[column] = _Consumer(attachment.consumer, page, fds[1])
            undo.pop_all()
        os.close(fds[0])
        return column

    def strike(self, column: int) -> None:
        """Write off a consumer that is proven dead; its leases need it no more.

        No-op for one that the pool has found dead by itself, as it does when it is short of space.
        """
        with self._lock():
            if column in self._consumers:
                self._strike(column)
                self._struck += 1

    def strike_dead(self) -> list[int]:
        """Strike every consumer whose process is gone; returns their columns."""
        with self._lock():
            return self._strike_dead()

    def check_words(self) -> list[int]:
        """Quarantine the consumers that have acknowledged what nobody was ever lent; returns their columns.

        Such a *foreign* word, of a generation that its slot has not had yet, shows a writer that stores where or what
        it should not. So none of its words is believed any more: what it was lent stays out until its process is
        proven dead. It cannot be dispatched to. One comparison for each consumer; for the periodic recycler.
        """
        with self._lock():
            if self._closed:
                return []
            lent = self._control.lease_words()
            found = []
            for column in sorted(self._consumers.keys() - self._ledger.quarantined):
                foreign = int(np.count_nonzero(self._consumers[column].page.words() > lent))
                if foreign:
                    self._foreign_words += foreign
                    self._ledger.quarantine(column)
                    found.append(column)
            return found

    # --- leases

    def lease(self, nbytes: int) -> Lease:
        """A range of the pool to write into, for the length of a `with` block.

        Entering raises PoolFull when nothing can be had now. The block's end settles the lease: dispatched, and it
        is the consumers' until they acknowledge or die; not dispatched, and it comes back. Nothing may write to
        the range after the block. In GPU memory: write on the stream that is current when the block begins, or
        `View.join`; entering raises StreamCapturing too.
        """
        return Lease(self, nbytes)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether leases of these sizes could all be had now, after a pass to reclaim what they need."""
        with self._lock():
            while not self._closed:
                if self._ledger.fits(sizes):
                    return True
                if not self._reclaim() and not (self._strike_dead() and self._reclaim()):
                    break
            return False

    @property
    def on_host(self) -> bool:
        """Whether what it lends is written by the host; otherwise views are tensors of a GPU."""
        return self._segment.on_host

    def private(self, nbytes: int) -> Bytes | None:
        """Memory like the pool's that is not of the pool; None for a host pool: any will do."""
        return self._segment.private(nbytes)

    def order(self) -> Order:
        """The order of work on `private` memory that this thread is about to do. Raises StreamCapturing."""
        return self._segment.order()

    def reclaim(self) -> int:
        """End what has come back, at most RECLAIM_AT_ONCE leases; returns how many."""
        with self._lock():
            return self._reclaim()

    def statistics(self) -> PoolStatistics:
        with self._lock():
            ledger = self._ledger
            return PoolStatistics(
                capacity_nbytes=ledger.capacity_nbytes,
                lent_nbytes=ledger.lent_nbytes,
                peak_lent_nbytes=ledger.peak_lent_nbytes,
                longest_free_nbytes=ledger.longest_free_nbytes,
                free_ranges=ledger.free_ranges,
                lent_slots=ledger.lent_slots,
                peak_lent_slots=ledger.peak_lent_slots,
                slots=self.description.slots,
                consumers=len(self._consumers),
                leases=self._leases,
                refused=self._refused,
                struck_consumers=self._struck,
                quarantined_consumers=len(self._ledger.quarantined),
                foreign_words=self._foreign_words,
                ended=self._ended,
                lent_ms=self._lent_ns / max(1, self._ended) / 1e6,
                longest_lent_ms=self._longest_lent_ns / 1e6,
            )

    def close(self) -> None:
        """Give the memory up here; consumers that have it mapped keep it until they detach.

        GPU memory: waits for what is queued on it, so call it off an event loop.
        """
        with self._lock():
            if self._closed:
                return
            self._closed = True
            for column in list(self._consumers):
                self._strike(column)
            control = self._control
            await_stores(lambda: control.column(control.READY) == self._published)
            self._segment.disown(control)
            control.close()
            self._segment.close()

    # --- under the lock

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed

    def _lend(self, nbytes: int) -> Grant:
        with self._lock():
            self._check_open()
            if nbytes >= WARM_FROM_NBYTES and self.description.memory == "host":
                self._reclaim()
            while True:
                try:
                    grant = self._ledger.lend(nbytes)
                    break
                except PoolFull:
                    if not self._reclaim() and not (self._strike_dead() and self._reclaim()):
                        self._refused += 1
                        raise
            self._leases += 1
            self._lent_at_ns[grant.slot] = time.monotonic_ns()
            self._control.lend(grant.slot, grant.generation)
            return grant

    def _reclaim(self) -> int:
        if self._closed:
            return 0
        acks = {column: consumer.page.words() for column, consumer in self._consumers.items()}
        ended = self._ledger.reclaim(self._control.ready_words(), acks, RECLAIM_AT_ONCE)
        if ended:
            now_ns = time.monotonic_ns()
            lent_ns = [now_ns - self._lent_at_ns[grant.slot] for grant in ended]
            self._ended += len(ended)
            self._lent_ns += sum(lent_ns)
            self._longest_lent_ns = max(self._longest_lent_ns, *lent_ns)
        return len(ended)

    def _strike(self, column: int) -> None:
        consumer = self._consumers.pop(column)
        self._ledger.strike(column)
        consumer.page.close()
        os.close(consumer.pidfd)

    def _strike_dead(self) -> list[int]:
        dead = [column for column, consumer in self._consumers.items() if is_dead(consumer.pidfd)]
        for column in dead:
            self._strike(column)
        self._struck += len(dead)
        return dead


class Lease:
    """An open lease, for the length of its block, where it has `grant` and `data`: uint8 of the size asked for.

    A class and not a generator: entering and leaving one is a third of what a small tensor costs here.
    """

    grant: Grant
    data: Bytes
    order: Order  #: of the writes; ready comes after them in it

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pool = pool
        self._published = self._used = False
        self._told: set[int] = set()

    def __enter__(self) -> Self:
        if self._used:
            raise LeaseError(self.grant.slot, self.grant.generation, "is for one block; take another lease")
        self.order = self._pool._segment.order()
        grant = self.grant = self._pool._lend(self.nbytes)
        self._used = True
        self.data = self._pool._segment.lend(grant.offset, self.nbytes, self.order)
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()

    def publish(self) -> None:
        """The bytes are complete, in GPU memory as soon as what was queued is done. Implied by the first dispatch.

        Raises PoolClosed; StreamCapturing.
        """
        with self._pool._lock():
            self._pool._check_open()
            self._publish()

    def poison(self) -> None:
        """The bytes will never be valid; consumers that were told get an error instead of a value.

        Raises LeaseError when the lease has ended, PoolClosed.
        """
        with self._pool._lock():
            self._pool._check_open()
            self._pool._ledger.check_lent(self.grant)
            self._pool._control.set_poison(self.grant.slot, self.grant.generation)

    def dispatch(self, columns: Iterable[int]) -> None:
        """These consumers are about to be sent a proxy; call it before the send.

        Raises LeaseError, also for a consumer that was written off or quarantined, or told already: if a second send to
        it failed, `retract` would take back the first. PoolClosed.
        """
        columns = tuple(columns)
        with self._pool._lock():
            self._pool._check_open()
            for column in columns:
                if column in self._told:
                    raise LeaseError(
                        self.grant.slot, self.grant.generation, f"column {column}: was dispatched to it already"
                    )
            self._publish()
            self._pool._ledger.dispatch(self.grant, columns)
            self._told.update(columns)

    def retract(self, column: int) -> None:
        """The send to this consumer certainly did not happen. Raises LeaseError when it owes nothing."""
        with self._pool._lock():
            self._pool._ledger.retract(self.grant, column)
            self._told.discard(column)

    def _publish(self) -> None:
        if not self._published:
            control = self._pool._control
            self.order.store(control, control.READY, self.grant.slot, self.grant.generation)
            self._pool._published[self.grant.slot] = self.grant.generation
            self._published = True

    def _settle(self) -> None:
        self.data = None
        self._pool._lock.run(self._end)

    def _end(self) -> None:
        if self._pool._closed:
            return
        self._publish()  # also when cancelled: the range may be lent again when the writer is done
        self._pool._ledger.settle(self.grant)


class _Consumer(NamedTuple):
    epoch: int
    page: AckPage
    pidfd: int


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def new_nonce() -> int:
    """A random name that is never reused: a pool's, or one life of a process (1 .. 2^63-1)."""
    return secrets.randbits(62) + 1
