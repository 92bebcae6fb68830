"""A bounded pool in shared memory, of the host or of a GPU: ranges are lent, one lease a feature, and come back by
acknowledgement.

The pool joins the ledger (who has what), the control words (what everybody else can see) and the memory, which together
are its `Lending`. It is thread-safe. It proves deaths itself, by the descriptors consumers sent of themselves, so a
consumer that is killed gives everything back without anybody's help.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Literal, get_args

import numpy as np

from tensorferry.codecs.errors import AttachRefused, StaleLease
from tensorferry.codecs.memory.cuda_driver import HandleKind
from tensorferry.codecs.memory.cuda_ipc import CudaSegment
from tensorferry.codecs.memory.cuda_vmm import CHUNK_NBYTES, VmmSegment
from tensorferry.codecs.memory.host import HostSegment
from tensorferry.codecs.memory.memory import Bytes, Growing, Memory, Order
from tensorferry.codecs.memory.registered import RegisteredSegment
from tensorferry.codecs.messages import LAST_NONCE, MOST_SLOTS, Confirmed, PoolDescription, Released
from tensorferry.codecs.pool.consumer import Consumer, check_taken
from tensorferry.codecs.pool.control import ControlPage, await_stores
from tensorferry.codecs.pool.elastic.growth import Growth
from tensorferry.codecs.pool.elastic.growth_state import GrowthState
from tensorferry.codecs.pool.elastic.mail import ChunkMail, Letter
from tensorferry.codecs.pool.export import Attachment, Export, positions_of
from tensorferry.codecs.pool.lease import Lease
from tensorferry.codecs.pool.lending import Lending
from tensorferry.codecs.pool.statistics import PoolStatistics
from tensorferry.codecs.system.arguments import seconds, whole
from tensorferry.codecs.system.descriptors import close_all
from tensorferry.codecs.tensors import MAX_NBYTES

MOST_DEVICES = 1023
NAME = "tensorferry-pool"  #: of host memory, in /proc/PID/maps
PoolMemory = Literal["host", "cuda_ipc", "cuda_vmm"]
IDLE_S, GROW_WAIT_S = 3.0, 0.005  #: of elastic pools, by default


class Pool:
    """See the module. Made by `create`, lends through `lease`, and must be closed."""

    def __init__(
        self,
        segment: Memory,
        control: ControlPage,
        description: PoolDescription,
        producer: int,
        *,
        growing: Growing | None = None,
        mail: HandleKind | None = None,
        idle_s: float = IDLE_S,
        grow_wait_s: float = GROW_WAIT_S,
    ) -> None:
        """growing: the segment, if its memory comes in chunks; then the pool is empty until it grows, see `create`.
        mail: see `Export`."""
        self.description = description
        self.producer, self.mail = producer, mail
        lending = Lending(
            segment, control, description, growing=growing, mail=mail, idle_s=idle_s, grow_wait_s=grow_wait_s
        )
        self._lending, self._lock, self._ledger = lending, lending.lock, lending.ledger
        self._segment, self._control = segment, control
        self._consumers = lending.consumers
        self.growth: Growth | None = lending.growth  #: of an elastic pool: how soon it shrinks, and its thread
        self._distrusted: list[int] = []  # quarantined for what they wrote, and not reported by `check_words` yet
        self._acks_invalid = 0

    @classmethod
    def create(
        cls,
        nbytes: int,
        slots: int = 4096,
        *,
        memory: PoolMemory = "host",
        device: int | None = None,
        producer: int | None = None,
        go_on: Callable[[], None] = lambda: None,
        chunk_nbytes: int = CHUNK_NBYTES,
        idle_s: float = IDLE_S,
        grow_wait_s: float = GROW_WAIT_S,
        mail: HandleKind | None = None,
    ) -> Pool:
        """A pool of host memory, populated: nothing faults afterwards. Or of GPU memory, allocated. Or *elastic*
        (cuda_vmm): of so much GPU memory at most, in chunks that come with demand and go when they are idle.

        device: the GPU that GPU memory lies on, as torch counts, the first by default; for host memory the GPU that
        writes it, if one does: views are then CUDA tensors over its pages. producer: the epoch of this process, random
        by default; go_on: called again and again while host memory is made, which can take seconds, and may raise to
        give it up. Of elastic pools: chunk_nbytes: at most, see `cuda_vmm.divided`; idle_s: after so long without a
        lease a chunk is given back, unless it is the spare; grow_wait_s: how long a lease that finds no room waits for
        a chunk at most; mail: share no pages with consumers, who then acknowledge by message (see `hear` and
        `letters`), and hand chunks over by POSIX file descriptor or, across nodes, FABRIC handle. Raises TypeError or
        ValueError before anything is taken; NoMemory; where a GPU is used NoDriver or CudaError; BudgetTooSmall,
        NoFabric.
        """
        if memory not in get_args(PoolMemory):
            raise ValueError(f"memory={memory!r}: a pool lies in one of {', '.join(get_args(PoolMemory))}")
        if mail is not None and mail not in get_args(HandleKind):
            raise ValueError(f"mail={mail!r}: chunks are handed over by one of {', '.join(get_args(HandleKind))}")
        if mail is not None and memory != "cuda_vmm":
            raise ValueError(f"mail={mail!r} with memory={memory!r}: only cuda_vmm is acknowledged by message")
        nbytes = whole("nbytes", nbytes, -MAX_NBYTES, MAX_NBYTES)  # of none or less, the memory says what it needs
        slots = whole("slots", slots, 1, MOST_SLOTS)
        chunk_nbytes = whole("chunk_nbytes", chunk_nbytes, 1, MAX_NBYTES)
        idle_s, grow_wait_s = seconds("idle_s", idle_s), seconds("grow_wait_s", grow_wait_s)
        if device is not None:
            device = whole("device", device, 0, MOST_DEVICES)
        producer, name = whole("producer", producer or new_nonce(), 1, LAST_NONCE), new_nonce()
        with ExitStack() as undo:
            segment: Memory
            growing: VmmSegment | None = None
            if memory == "cuda_vmm":
                segment = growing = VmmSegment.create(nbytes, device or 0, chunk_nbytes, mail or "posix_fd")
            elif memory == "cuda_ipc":
                segment = CudaSegment.create(nbytes, device or 0)
            elif device is not None:
                segment = RegisteredSegment.create(nbytes, NAME, device, go_on)
            else:
                segment = HostSegment.create(nbytes, NAME, go_on)
            undo.callback(segment.close)
            description = PoolDescription(name, memory, segment.nbytes, slots, growing.chunk_nbytes if growing else 0)
            control = ControlPage.create(slots, name, producer, positions_of(description))
            undo.callback(control.close)
            segment.adopt(control)
            undo.callback(segment.disown, control)
            times = {"idle_s": idle_s, "grow_wait_s": grow_wait_s}
            pool = cls(segment, control, description, producer, growing=growing, mail=mail, **times)
            if pool.growth is not None:
                undo.callback(pool.growth.end)
                pool.growth.start()
            undo.pop_all()
        return pool

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- consumers

    def export(self) -> tuple[Export, list[int]]:
        """What `Reader.attach` needs: a description, and descriptors to send with SCM_RIGHTS.

        The caller owns the descriptors (memory if it is the host's, control page, this process) and closes them once
        they are sent. With `mail` there is no control page, and across nodes nothing is to be sent. Raises PoolClosed.
        """
        with self._lock(), ExitStack() as undo:
            self._lending.check_open()
            fds = self._segment.descriptors()
            undo.callback(close_all, fds)  # the list as it is then
            if self.mail is None:
                fds.append(os.dup(self._control.segment.fd))
            fds.append(os.pidfd_open(os.getpid()))
            undo.pop_all()
        return Export(self.description, self.producer, self._segment.handle(), self.mail), fds

    def admit(self, attachment: Attachment, fds: Sequence[int]) -> int:
        """Take a consumer's ack page and process descriptors, which are this pool's from now on.

        Of an elastic pool, its end of the line too; the chunks that there are, are in it when this returns. With `mail`
        there is no ack page, and a line only for descriptors. From another node nothing comes, and the caller must
        `strike` the consumer once its death is known. Returns the consumer's column. Raises AttachRefused, TypeError.
        """
        check_taken(attachment, Attachment, fds)
        if self.mail is None:
            consumer = Consumer.local(self.description, attachment, fds)
        else:
            consumer = Consumer.by_mail(self.description, self.mail, attachment, fds)
        with ExitStack() as undo:
            undo.callback(consumer.close)
            with self._lock():
                self._lending.check_open()
                if self.mail and any(other.epoch == consumer.epoch for other in self._consumers.values()):
                    raise AttachRefused(f"consumer {consumer.epoch} has a column already; detach it first")
                column = self._ledger.admit()
                self._consumers[column] = consumer
                if self.growth is not None:
                    self.growth.deliveries.admitted(column)
            undo.pop_all()
        return column

    def strike(self, column: int) -> None:
        """Write off a consumer that is proven dead: no lease waits for it any more. For a consumer on another node the
        proof is the word of that node's supervisor, which has seen the process end.

        No-op for one that the pool has found dead by itself, as it does when it is short of space. Raises ValueError
        for a column that `admit` never gave.
        """
        with self._lock():
            column = whole("column", column, 0, self._ledger.admitted - 1)
            if column in self._consumers:
                self._lending.strike(column)
                self._lending.written_off += 1

    def outstanding(self, column: int) -> list[tuple[int, int]]:
        """Slot and generation of every lease that was dispatched to this consumer and is not acknowledged yet."""
        with self._lock():
            self._lending.reclaim()
            return [grant[:2] for grant in self._ledger.outstanding(column)]

    def strike_dead(self) -> list[int]:
        """Write off every consumer whose process is gone. Returns their columns."""
        with self._lock():
            return self._lending.strike_dead()

    def check_words(self) -> list[int]:
        """Quarantine the consumers that have acknowledged a lease that there never was. Returns their columns.

        Such an acknowledgement, of a generation that its slot has not had yet, shows a writer that stores where or what
        it should not. So none of that consumer's words is believed any more: what it was lent stays out until its
        process is proven dead. It cannot be dispatched to. This costs one comparison for each consumer, and is for the
        periodic recycler.
        """
        with self._lock():
            if self._lending.closed:
                return []
            lent = self._control.lease_words()
            for column in sorted(self._consumers.keys() - self._ledger.quarantined):
                page = self._consumers[column].page
                invalid = 0 if page is None else int(np.count_nonzero(page.words() > lent))
                if self.growth is not None:
                    invalid += self.growth.deliveries.invalid_words(column)
                self._distrust(column, invalid)
            found, self._distrusted = self._distrusted, []
            return [column for column in found if column in self._consumers]

    def check_growth(self) -> Exception | None:
        """What went wrong in an elastic pool's thread, which goes on. The periodic recycler logs it.

        The problem that cost this process its GPU is returned at every call, and every new lease raises it too. Of
        other problems the first is returned, once; the rest are only counted, as `growth_failed`.
        """
        with self._lock():
            return None if self.growth is None else self.growth.problem()

    # --- by message

    def letters(self) -> list[Letter]:
        """The messages about chunks that are due now, for the caller to send; repeated until they are answered."""
        now = time.monotonic()
        with self._lock():
            mails = [consumer.line for consumer in self._consumers.values() if isinstance(consumer.line, ChunkMail)]
            return [letter for mail in mails for letter in mail.due(now)]

    def knows(self, message: Released) -> bool:
        """Whether a message comes from a consumer of this pool that acknowledges by message."""
        with self._lock():
            return self._corresponding(message) is not None

    def hear(self, message: Released) -> Letter | None:
        """Book a consumer's message. Returns the answer, for the caller to send.

        A message may be repeated or late: an entry that is booked already changes nothing. Returns None for a consumer
        without a column (it is dead, or of a previous epoch) and for a quarantined one. A message that acknowledges a
        lease that there never was quarantines its consumer, as `check_words` does.
        """
        with self._lock():
            column = self._corresponding(message)
            if self._lending.closed or column is None or column in self._ledger.quarantined:
                return None
            mail, growth, lent = self._consumers[column].line, self.growth, self._control.lease_words()
            assert isinstance(mail, ChunkMail)
            assert growth is not None
            invalid = sum(slot >= len(lent) or generation > lent[slot] for slot, generation in message.leases)
            invalid = invalid or growth.deliveries.answered(column, mail, message.taken, message.dropped)
            if self._distrust(column, invalid):
                return None
            for slot, generation in message.leases:
                with suppress(StaleLease):  # it was booked before
                    self._ledger.acknowledge(slot, generation, column)
            epoch = message.consumer
            return Letter(epoch, Confirmed(message.pool, epoch, message.leases)) if message.leases else None

    # --- leases

    def lease(self, nbytes: int, *, patient: bool = True) -> Lease:
        """A range of the pool to write into, for the length of a `with` block. Raises ValueError below 0 bytes.

        Entering raises PoolClosed, and PoolFull when nothing can be had now; in an elastic pool below its budget, when
        no chunk came within `grow_wait_s`, or at once with patient=False. Once an elastic pool has found that this
        process has lost its GPU, entering raises the CudaError, or error of torch's, that said so, also where there is
        room. The block's end settles the lease: dispatched, and it is the consumers' until they acknowledge or die; not
        dispatched, and it comes back. Nothing may write to the range after the block. In GPU memory: write on the
        stream that is current when the block begins, or `View.join`; entering raises StreamCapturing too.
        """
        if type(nbytes) is not int or nbytes < 0:
            nbytes = whole("nbytes", nbytes, 0, MAX_NBYTES)
        return Lease(self._lending, nbytes, patient)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether leases of these sizes could all be had now, after a pass to reclaim what they need.

        If not, an elastic pool starts to grow for them: see `growing`."""
        with self._lock():
            return self._lending.fits(sizes)

    @property
    def on_host(self) -> bool:
        """Whether what it lends is written by the host; otherwise views are tensors of a GPU."""
        return self._segment.on_host

    def growing(self, sizes: Sequence[int]) -> bool:
        """Whether an elastic pool is about to make room for leases of these sizes, which do not fit now."""
        with self._lock():
            return not self._lending.closed and self._lending.ask_for(sizes) is not None

    def private(self, nbytes: int) -> Bytes | None:
        """Memory of the same kind outside the pool; None for a host pool, where any memory will do."""
        return self._segment.private(nbytes)

    def order(self) -> Order:
        """The order of work on `private` memory that this thread is about to do. Raises StreamCapturing."""
        return self._segment.order()

    def reclaim(self) -> int:
        """End what has come back, at most RECLAIM_AT_ONCE leases; returns how many."""
        with self._lock():
            return self._lending.reclaim()

    def statistics(self) -> PoolStatistics:
        with self._lock():
            lending, ledger, growth = self._lending, self._ledger, self.growth
            nbytes, done = self.description.nbytes, GrowthState() if growth is None else growth.state
            mapped_nbytes, retiring_nbytes = (nbytes, 0) if growth is None else growth.sizes()
            return PoolStatistics(
                capacity_nbytes=ledger.capacity_nbytes if growth is None else nbytes,
                lent_nbytes=ledger.lent_nbytes,
                free_nbytes=ledger.free_nbytes,
                peak_lent_nbytes=ledger.peak_lent_nbytes,
                longest_free_nbytes=ledger.longest_free_nbytes,
                free_ranges=ledger.free_ranges,
                lent_slots=ledger.lent_slots,
                peak_lent_slots=ledger.peak_lent_slots,
                slots=self.description.slots,
                consumers=len(self._consumers),
                leases=lending.leases,
                refused=lending.refused,
                struck_consumers=lending.written_off,
                quarantined_consumers=len(self._ledger.quarantined),
                acks_invalid=self._acks_invalid,
                ended=lending.ended,
                lent_ms=lending.lent_ns / max(1, lending.ended) / 1e6,
                longest_lent_ms=lending.longest_lent_ns / 1e6,
                reserved_nbytes=nbytes,
                mapped_nbytes=mapped_nbytes,
                retiring_nbytes=retiring_nbytes,
                grown=done.grown,
                retired=done.retired,
                growth_waits=lending.growth_waits,
                growth_refused=done.refused,
                growth_failed=done.failed,
            )

    def close(self) -> None:
        """Give the memory up here; consumers that have it mapped keep it until they detach.

        GPU memory: waits for what is queued on it, so call it off an event loop.
        """
        with self._lock():
            if self._lending.closed:
                return
            self._lending.closed = True
            for column in list(self._consumers):
                self._lending.strike(column)
        if self.growth is not None:
            self.growth.end()
        with self._lock():
            control = self._control
            await_stores(lambda: control.column(control.READY) == self._lending.published)
            with ExitStack() as undo:  # all of it, also where one of them fails
                undo.callback(self._segment.close)
                undo.callback(control.close)
                self._segment.disown(control)

    # --- under the lock

    def _corresponding(self, message: Released) -> int | None:
        """The column of a consumer that acknowledges by message."""
        for column, consumer in self._consumers.items():
            if consumer.epoch == message.consumer and message.pool == self.description.pool and consumer.page is None:
                return column
        return None

    def _distrust(self, column: int, invalid: int) -> bool:
        """Quarantine a consumer for so many invalid acknowledgements; False: there are none."""
        if invalid:
            self._acks_invalid += invalid
            self._ledger.quarantine(column)
            self._distrusted.append(column)
        return bool(invalid)


def new_nonce() -> int:
    """A random name that is never reused: a pool's, or one life of a process (1 .. 2^63-1)."""
    return secrets.randbits(62) + 1
