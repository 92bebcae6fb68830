"""One lease of a pool, while somebody writes into it and tells consumers of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

from tensorferry.codecs.errors import LeaseError, LeaseNotReady
from tensorferry.codecs.memory.memory import Bytes, Order
from tensorferry.codecs.pool.ledger import Grant

if TYPE_CHECKING:
    from tensorferry.codecs.pool.pool import Pool


class Lease:
    """An open lease, for the length of its block, where it has `grant` and `data`: uint8 of the size asked for.

    A class and not a generator: entering and leaving one is a third of what a small tensor costs here.
    """

    grant: Grant
    data: Bytes
    order: Order  #: of the writes; ready comes after them in it

    def __init__(self, pool: Pool, nbytes: int, patient: bool = True) -> None:
        self.nbytes, self._patient = nbytes, patient
        self._pool = pool
        self._published = self._used = False
        self._told: set[int] = set()

    def __enter__(self) -> Self:
        if self._used:
            raise LeaseError(self.grant.slot, self.grant.generation, "is for one block; take another lease")
        self.order = self._pool._segment.order()
        grant = self.grant = self._pool._lend(self.nbytes, self._patient)
        self._used = True
        try:
            self.data = self._pool._segment.lend(grant.offset, self.nbytes, self.order)
        except BaseException:  # nobody was told of it, so it comes back
            self._settle()
            raise
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
        """The bytes will never be valid; consumers that were told get an error instead of a value, and those that are
        told by message are not told any more.

        Raises LeaseError when the lease has ended, PoolClosed.
        """
        with self._pool._lock():
            self._pool._check_open()
            self._pool._ledger.check_lent(self.grant)
            self._pool._control.set_poison(self.grant.slot, self.grant.generation)

    def prepared(self, column: int) -> bool:
        """Whether `dispatch` to this consumer would go now. Of one that is told by message the bytes must be in memory
        first: then this publishes them, and is True once the host has seen that they are. Nobody waits: look again.

        Raises PoolClosed; StreamCapturing.
        """
        with self._pool._lock():
            self._pool._check_open()
            if not self._pool._needs_complete(column):
                return True
            self._publish()
            return self._is_complete()

    def dispatch(self, columns: Iterable[int]) -> None:
        """These consumers are about to be sent a proxy; call it before the send.

        Raises LeaseError, also for a consumer that was written off or quarantined, or told already: if a second send to
        it failed, `retract` would take back the first. LeaseNotReady for a consumer that is told by message, while the
        bytes are not in memory: see `prepared`. PoolClosed.
        """
        columns = tuple(columns)
        with self._pool._lock():
            self._pool._check_open()
            for column in columns:
                if column in self._told:
                    raise LeaseError(
                        self.grant.slot, self.grant.generation, f"column {column}: was dispatched to it already"
                    )
                if self._pool._growth is not None and column in self._pool._consumers:
                    self._pool._growth.check_sent(column, self.grant)
            self._publish()
            if self._pool.mail is not None and any(map(self._pool._needs_complete, columns)):
                self._check_complete()
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

    def _is_complete(self) -> bool:
        control = self._pool._control
        return control.look(self.grant.slot)[control.READY] == self.grant.generation

    def _check_complete(self) -> None:
        slot, generation = self.grant[:2]
        if self._pool._control.look(slot)[self._pool._control.POISON] == generation:
            raise LeaseError(slot, generation, "is poisoned, which cannot be told by message")
        if not self._is_complete():
            raise LeaseNotReady(slot, generation, "is not complete yet: dispatch it to this consumer once `prepared`")

    def _settle(self) -> None:
        self.data = None
        self._pool._lock.run(self._end)

    def _end(self) -> None:
        if self._pool._closed:
            return
        self._publish()  # also when cancelled: the range may be lent again when the writer is done
        self._pool._ledger.settle(self.grant)
