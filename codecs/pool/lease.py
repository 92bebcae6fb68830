"""One lease of a pool, while its bytes are written and dispatched to consumers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from tensorferry.codecs.errors import LeaseError
from tensorferry.codecs.memory.memory import Bytes, Order
from tensorferry.codecs.pool.ledger import Grant
from tensorferry.codecs.pool.lending import Lending


class Lease:
    """An open lease, for the length of its block, where it has `grant` and `data`: uint8 of the size asked for.

    A class and not a generator: entering and leaving one is a third of what a small tensor costs here.
    """

    grant: Grant
    data: Bytes
    order: Order  #: of the writes; ready comes after them in it

    def __init__(self, lending: Lending, nbytes: int, patient: bool = True) -> None:
        self.nbytes, self._patient = nbytes, patient
        self._lending = lending
        self._published = self._used = False
        self._notified: set[int] = set()

    def __enter__(self) -> Self:
        if self._used:
            raise LeaseError(self.grant.slot, self.grant.generation, "is for one block; take another lease")
        self.order = self._lending.segment.order()
        grant = self.grant = self._lending.lend(self.nbytes, self._patient)
        self._used = True
        try:
            self.data = self._lending.segment.lend(grant.offset, self.nbytes, self.order)
        except BaseException:  # it was dispatched to no consumer, so it comes back
            self._settle()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()

    def publish(self) -> None:
        """The bytes are complete, in GPU memory as soon as what was queued is done. Implied by the first dispatch.

        Raises PoolClosed; StreamCapturing.
        """
        with self._lending.lock():
            self._lending.check_open()
            self._publish()

    def poison(self) -> None:
        """Declare that the bytes will never be valid. Consumers that have the lease get an error instead of a value.
        The lease can no longer be dispatched to consumers that acknowledge by message.

        Raises LeaseError when the lease has ended, PoolClosed.
        """
        with self._lending.lock():
            self._lending.check_open()
            self._lending.poison(self.grant)

    def prepared(self, column: int) -> bool:
        """Whether `dispatch` to this consumer would succeed now. If it acknowledges by message, the bytes must be in
        memory first: this publishes them, and is True once the host has seen them there. It never waits: ask again.

        Raises PoolClosed; StreamCapturing.
        """
        with self._lending.lock():
            self._lending.check_open()
            if not self._lending.needs_complete(column):
                return True
            self._publish()
            return self._lending.is_complete(self.grant)

    def dispatch(self, columns: Iterable[int]) -> None:
        """Book that these consumers are about to be sent a proxy. Call it before the send.

        Raises LeaseError, also for a consumer that was written off or quarantined, or has the lease already: if a
        second send to it failed, `retract` would take back the first. Raises LeaseNotReady for a consumer that
        acknowledges by message, while the bytes are not in memory: see `prepared`. Raises PoolClosed.
        """
        columns = tuple(columns)
        with self._lending.lock():
            self._lending.check_open()
            for column in columns:
                if column in self._notified:
                    raise LeaseError(
                        self.grant.slot, self.grant.generation, f"column {column}: was dispatched to it already"
                    )
                self._lending.check_sent(column, self.grant)
            self._publish()
            self._lending.dispatch(self.grant, columns)
            self._notified.update(columns)

    def retract(self, column: int) -> None:
        """Take a dispatch back whose send certainly did not happen. Raises LeaseError if the consumer owes nothing."""
        with self._lending.lock():
            self._lending.ledger.retract(self.grant, column)
            self._notified.discard(column)

    def _publish(self) -> None:
        if not self._published:
            self._lending.publish(self.grant, self.order)
            self._published = True

    def _settle(self) -> None:
        self.data = None
        self._lending.lock.run(self._end)

    def _end(self) -> None:
        if self._lending.closed:
            return
        self._publish()  # also when cancelled: the range may be lent again when the writer is done
        self._lending.ledger.settle(self.grant)
