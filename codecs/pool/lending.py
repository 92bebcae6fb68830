"""What a pool lends, under one lock: the ledger, the control words, the memory, and the growth of an elastic pool.

`Pool` makes it and admits consumers. A `Lease` is one block of a writer, and uses it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tensorferry.codecs.errors import LeaseError, LeaseNotReady, PoolClosed, PoolFull
from tensorferry.codecs.memory.cuda_driver import HandleKind
from tensorferry.codecs.memory.memory import Growing, Memory, Order
from tensorferry.codecs.messages import PoolDescription
from tensorferry.codecs.pool.consumer import Consumer
from tensorferry.codecs.pool.control import ControlPage
from tensorferry.codecs.pool.elastic.growth import Growth
from tensorferry.codecs.pool.ledger import Grant, Ledger
from tensorferry.codecs.system.deadline import Deadline
from tensorferry.codecs.system.interruptible_lock import Lock

RECLAIM_AT_ONCE = 64  #: leases that one pass ends at most, so that the lock is soon free again
WARM_FROM_NBYTES = (
    4 << 20
)  #: from here on a pass to reclaim comes first: writing memory that was just used takes half the time


class Lending:
    """See the module. Methods are called under `lock`, save `lend`."""

    def __init__(
        self,
        segment: Memory,
        control: ControlPage,
        description: PoolDescription,
        *,
        growing: Growing | None,
        mail: HandleKind | None,
        idle_s: float,
        grow_wait_s: float,
    ) -> None:
        """As `Pool`."""
        slots = description.slots
        self.segment, self.control = segment, control
        self.ledger = Ledger(0 if growing else description.nbytes, slots)
        self.consumers: dict[int, Consumer] = {}  #: by column
        self.lock = Lock()
        self.closed = False
        self.published = [0] * slots  #: last generation of each; the word may still be on its way
        self.leases = self.refused = self.growth_waits = self.written_off = 0
        self.ended = self.lent_ns = self.longest_lent_ns = 0  #: leases that are over, and for how long they were out
        self._lent_at_ns = [0] * slots
        self._by_mail = mail is not None  # whether consumers acknowledge by message
        self._warms = description.memory == "host"
        self._grow_wait_s = grow_wait_s
        self.growth: Growth | None = None  #: of an elastic pool
        if growing is not None:
            self.growth = Growth(growing, self.ledger, control, self.consumers, self.lock, self.reclaim, idle_s)

    def check_open(self) -> None:
        if self.closed:
            raise PoolClosed

    # --- one lease

    def lend(self, nbytes: int, patient: bool) -> Grant:
        """Lend what is free; where nothing is, ask an elastic pool to grow; wait for that outside the lock, if patient.

        Raises PoolFull. It waits for this process's own thread alone, so a caller may hold other leases meanwhile.
        """
        with self.lock():
            try:
                return self._lend_now(nbytes)
            except PoolFull:
                asked = self._ask_and_wait(nbytes, patient)
                if asked is None:
                    raise
                self.growth_waits += 1
        return self._lend_once_grown(nbytes, asked, Deadline(self._grow_wait_s))

    def _lend_once_grown(self, nbytes: int, asked: int, deadline: Deadline) -> Grant:
        """Wait without the lock, try again under it, and so on until the deadline. Raises PoolFull."""
        assert self.growth is not None
        while True:
            self.growth.wait(asked, deadline)
            with self.lock():
                try:
                    grant = self._lend_now(nbytes)
                except PoolFull:
                    again = self._ask_and_wait(nbytes, not deadline.has_passed)
                    if again is None:
                        raise
                    asked = again
                else:
                    self.growth.found(self._rounded([nbytes]))
                    return grant

    def _ask_and_wait(self, nbytes: int, patient: bool) -> int | None:
        """Ask an elastic pool to grow. Returns what to wait with; None: the lease is refused. An impatient caller asks
        too, for those after it."""
        asked = self.ask_for([nbytes])
        if asked is None or not patient:
            self.refused += 1
            return None
        return asked

    def publish(self, grant: Grant, order: Order) -> None:
        """Say that the bytes are complete, once what was queued in this order is done. Raises StreamCapturing."""
        order.store(self.control, self.control.READY, grant.slot, grant.generation)
        self.published[grant.slot] = grant.generation

    def is_complete(self, grant: Grant) -> bool:
        """Whether the host has seen that the bytes are in memory."""
        return self.control.look(grant.slot)[self.control.READY] == grant.generation

    def poison(self, grant: Grant) -> None:
        """Say that the bytes will never be valid. Raises LeaseError when the lease has ended."""
        self.ledger.check_lent(grant)
        self.control.set_poison(grant.slot, grant.generation)

    def check_sent(self, column: int, grant: Grant) -> None:
        """Raises LeaseError where a consumer has not been sent the chunks that a lease lies in."""
        if self.growth is not None and column in self.consumers:
            self.growth.deliveries.check_sent(column, grant)

    def dispatch(self, grant: Grant, columns: tuple[int, ...]) -> None:
        """Book a dispatch to these consumers. Raises LeaseError, LeaseNotReady; see `Lease.dispatch`."""
        if self._by_mail and any(map(self.needs_complete, columns)):
            self._check_complete(grant)
        self.ledger.dispatch(grant, columns)

    def needs_complete(self, column: int) -> bool:
        """Whether a consumer may be sent complete bytes alone, as it cannot see `ready`."""
        consumer = self.consumers.get(column)
        return consumer is not None and consumer.page is None

    def _check_complete(self, grant: Grant) -> None:
        slot, generation = grant[:2]
        if self.control.look(slot)[self.control.POISON] == generation:
            raise LeaseError(
                slot, generation, "is poisoned, so it cannot be dispatched to a consumer that acknowledges by message"
            )
        if not self.is_complete(grant):
            raise LeaseNotReady(slot, generation, "is not complete yet: dispatch it to this consumer once `prepared`")

    def _lend_now(self, nbytes: int) -> Grant:
        self.check_open()
        if self.growth is not None:
            self.growth.check_context()
        if nbytes >= WARM_FROM_NBYTES and self._warms:
            self.reclaim()
        while True:
            try:
                grant = self.ledger.lend(nbytes)
                break
            except PoolFull:
                if not self._reclaim_also_of_dead():
                    raise
        self.leases += 1
        now_ns = self._lent_at_ns[grant.slot] = time.monotonic_ns()
        self.control.lend(grant.slot, grant.generation)
        if self.growth is not None:
            self.growth.lent(now_ns)
        return grant

    # --- room

    def fits(self, sizes: Sequence[int]) -> bool:
        """See `Pool.fits`."""
        if self.growth is not None and not self.closed:
            self.growth.check_context()
        while not self.closed:
            if self.ledger.fits(sizes):
                if self.growth is not None and self.growth.wanted:
                    self.growth.found(self._rounded(sizes))
                return True
            if not self._reclaim_also_of_dead():
                self.ask_for(sizes)
                break
        return False

    def ask_for(self, sizes: Sequence[int]) -> int | None:
        """What to wait with until an elastic pool has grown for these sizes; None: it will not."""
        if self.growth is None or self.ledger.free_slots < len(sizes):
            return None
        return self.growth.ask(self._rounded(sizes))

    def reclaim(self) -> int:
        """End the leases that have come back, at most RECLAIM_AT_ONCE. Returns how many."""
        if self.closed:
            return 0
        consumers = self.consumers.items()
        acks = {column: consumer.page.words() for column, consumer in consumers if consumer.page is not None}
        ended = self.ledger.reclaim(self.control.ready_words(), acks, RECLAIM_AT_ONCE)
        if ended:
            now_ns = time.monotonic_ns()
            if self.growth is not None:
                self.growth.ended(ended, now_ns)
            lent_ns = [now_ns - self._lent_at_ns[grant.slot] for grant in ended]
            self.ended += len(ended)
            self.lent_ns += sum(lent_ns)
            self.longest_lent_ns = max(self.longest_lent_ns, *lent_ns)
        return len(ended)

    def _reclaim_also_of_dead(self) -> int:
        """End the leases that have come back; if there are none, those of dead consumers. Returns how many."""
        return self.reclaim() or (self.reclaim() if self.strike_dead() else 0)

    def _rounded(self, sizes: Sequence[int]) -> list[int]:
        return [self.ledger.rounded(size) for size in sizes]

    # --- consumers that are gone

    def strike(self, column: int) -> None:
        """Write off a consumer: no lease waits for it any more."""
        consumer = self.consumers.pop(column)
        self.ledger.strike(column)
        if self.growth is not None:
            self.growth.chunks.strike(column)
        consumer.close()

    def strike_dead(self) -> list[int]:
        """Write off every consumer whose process is gone. Returns their columns."""
        dead = [column for column, consumer in self.consumers.items() if consumer.is_dead]
        for column in dead:
            self.strike(column)
        self.written_off += len(dead)
        return dead
