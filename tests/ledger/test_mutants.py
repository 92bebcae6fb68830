"""Each law of the ledger is seen to catch a ledger that breaks it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tensorferry.codecs.errors import StaleLease
from tensorferry.codecs.pool.ledger import LAST_GENERATION, Grant, Ledger, Words

CAPACITY = 16  #: bytes of the machine's pool


class ForgetsReady(Ledger):
    def reclaim(self, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
        return super().reclaim(self._due.copy(), acks, limit)


class ForgetsAColumn(Ledger):
    def reclaim(self, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
        return super().reclaim(ready, {**acks, 1: self._due.copy()}, limit)


class TakesNewerWords(Ledger):
    def reclaim(self, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
        return super().reclaim(ready, {c: np.minimum(words, self._due) for c, words in acks.items()}, limit)


class TakesOlderWords(Ledger):
    def reclaim(self, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
        return super().reclaim(np.maximum(ready, np.where(ready != 0, self._due, 0)).astype(np.uint32), acks, limit)


class TakesSilenceForConsent(Ledger):
    def reclaim(self, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
        return super().reclaim(ready, {c: acks.get(c, self._due.copy()) for c in self._need}, limit)


class IgnoresTheLimit(Ledger):
    def reclaim(self, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
        return super().reclaim(ready, acks)


class BelievesTheQuarantined(Ledger):
    def reclaim(self, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
        distrusted, self.quarantined = self.quarantined, set()
        ended = super().reclaim(ready, acks, limit)
        self.quarantined = distrusted
        return ended


class ScansTheQuarantined(Ledger):
    def _scanned(self, ready: Words, acks: Mapping[int, Words]) -> list[int]:
        distrusted, self.quarantined = self.quarantined, set()
        over = super()._scanned(ready, acks)
        self.quarantined = distrusted
        return over


class TellsTheQuarantined(Ledger):
    def quarantine(self, column: int) -> None:
        pass


class LooksAtTheFirstColumnAlone(Ledger):
    def _is_over(self, slot: int, ready: Words, acks: Mapping[int, Words]) -> bool:
        grant, columns = self._settled[slot]
        self._settled[slot] = grant, columns[:1]
        over = super()._is_over(slot, ready, acks)
        self._settled[slot] = grant, columns
        return over


class ScansPastTheLastColumn(Ledger):
    def _scanned(self, ready: Words, acks: Mapping[int, Words]) -> list[int]:
        needed = self._need
        self._need = dict(list(needed.items())[:-1])
        over = super()._scanned(ready, acks)
        self._need = needed
        return over


class NeverJoins(Ledger):
    def _end(self, slot: int) -> Grant:
        self._ranges.give = self._ranges._add  # type: ignore[method-assign]
        return super()._end(slot)


class LosesAByte(Ledger):
    def _end(self, slot: int) -> Grant:
        grant, columns = self._settled[slot]
        if grant.nbytes > 1:
            self._settled[slot] = grant._replace(nbytes=grant.nbytes - 1), columns
        super()._end(slot)
        return grant


class LendsTwice(Ledger):
    def lend(self, nbytes: int) -> Grant:
        grant = super().lend(nbytes)
        overlapping = grant._replace(offset=max(0, grant.offset - 1))
        self._open[grant.slot] = overlapping, []
        return overlapping


class LendsPastTheEnd(Ledger):
    def lend(self, nbytes: int) -> Grant:
        grant = super().lend(nbytes)
        shifted = grant._replace(offset=grant.offset + (grant.offset + grant.nbytes == CAPACITY))
        self._open[grant.slot] = shifted, []
        return shifted


class ShrinksWhatIsLent(Ledger):
    def shrink(self, offset: int, nbytes: int) -> bool:
        super().shrink(offset, nbytes)
        return True


class NeverShrinks(Ledger):
    def shrink(self, offset: int, nbytes: int) -> bool:
        return False


class ShrinksTooMuch(Ledger):
    def shrink(self, offset: int, nbytes: int) -> bool:
        free = next((r for r in self.free if r[0] <= offset and offset + nbytes <= r[1]), None)
        return free is not None and super().shrink(free[0], free[1] - free[0])


class LendsWhatWasTakenAway(Ledger):
    def shrink(self, offset: int, nbytes: int) -> bool:
        if not super().shrink(offset, nbytes):
            return False
        self._ranges.give(offset, nbytes)
        return True


class GrowsWithoutJoining(Ledger):
    def grow(self, offset: int, nbytes: int) -> None:
        self._ranges._add(offset, nbytes)
        self._capacity += nbytes


class RepeatsAName(Ledger):
    def _end(self, slot: int) -> Grant:
        self._generations[slot] -= 1
        return super()._end(slot)


class OutlivesTheLastGeneration(Ledger):
    def _end(self, slot: int) -> Grant:
        grant = super()._end(slot)
        if grant.generation == LAST_GENERATION:
            self._free_slots.append(slot)
            self._retired_slots -= 1
        return grant


class LastInFirstOut(Ledger):
    def _end(self, slot: int) -> Grant:
        grant = super()._end(slot)
        self._free_slots.rotate(1)
        return grant


class LeavesTheNeedBehind(Ledger):
    def _end(self, slot: int) -> Grant:
        kept = {column: need.copy() for column, need in self._need.items()}
        grant = super()._end(slot)
        self._need.update(kept)
        return grant


class KeepsTheDead(Ledger):
    def strike(self, column: int) -> None:
        need = self._need[column]
        super().strike(column)
        self._need[column] = need


class KeepsTheirDebts(Ledger):
    def strike(self, column: int) -> None:
        del self._need[column]


class ReusesColumns(Ledger):
    def admit(self) -> int:
        self._admitted = next(number for number in range(9) if number not in self._need)
        return super().admit()


class RetractsHalf(Ledger):
    def retract(self, grant: Grant, column: int) -> None:
        need = self._need.get(column)
        kept = None if need is None else need.copy()
        super().retract(grant, column)
        if need is not None and kept is not None:
            need[:] = kept


class RetractsAnything(Ledger):
    def retract(self, grant: Grant, column: int) -> None:
        if column in self._opened(grant):
            super().retract(grant, column)


class EndsAtOnceWhatNobodyWasToldOf(Ledger):
    def settle(self, grant: Grant) -> None:
        told = bool(self._opened(grant))
        super().settle(grant)
        if not told:
            self._end(grant.slot)


class SettlesTwice(Ledger):
    def settle(self, grant: Grant) -> None:
        if grant.slot in self._open:
            super().settle(grant)


class DispatchesHalf(Ledger):
    def dispatch(self, grant: Grant, columns: Iterable[int]) -> None:
        for column in columns:
            super().dispatch(grant, (column,))


class DispatchesToNobody(Ledger):
    def dispatch(self, grant: Grant, columns: Iterable[int]) -> None:
        super().dispatch(grant, [column for column in columns if column in self._need])


class TakesAnyMessage(Ledger):
    def acknowledge(self, slot: int, generation: int, column: int) -> None:
        grant, columns = self._settled.get(slot) or self._open.get(slot) or (None, [])
        if grant is not None and column in columns:
            super().acknowledge(slot, grant.generation, column)


class RefusesEarlyMessages(Ledger):
    def acknowledge(self, slot: int, generation: int, column: int) -> None:
        if slot in self._open:
            raise StaleLease(slot, generation, "is still open")
        super().acknowledge(slot, generation, column)


MUTANTS: dict[type[Ledger], str] = {
    ForgetsReady: "a lease ended before its time",
    ForgetsAColumn: "a lease ended before its time",
    TakesNewerWords: "a lease ended before its time",
    TakesOlderWords: "a lease ended before its time",
    TakesSilenceForConsent: "a lease ended before its time",
    IgnoresTheLimit: "not as many leases ended",
    BelievesTheQuarantined: "a lease ended before its time",
    ScansTheQuarantined: "the two ways .* disagree",
    TellsTheQuarantined: "although that was not allowed|a lease ended|not as many|the two ways",
    LooksAtTheFirstColumnAlone: "the two ways .* disagree",
    ScansPastTheLastColumn: "the two ways .* disagree",
    NeverJoins: "freed neighbours did not join",
    LosesAByte: "did not join|a byte is lost|free range is wrong",
    LendsTwice: "a byte is lent twice",
    LendsPastTheEnd: "a byte past the pool is lent",
    ShrinksWhatIsLent: "a range went that is lent",
    NeverShrinks: "did not though it is free",
    ShrinksTooMuch: "a byte is lost|free range is wrong|did not join|although there was room",
    LendsWhatWasTakenAway: "a byte is lost|a byte past the pool is lent|free range is wrong|did not join",
    GrowsWithoutJoining: "did not join",
    RepeatsAName: "a name was given out twice",
    OutlivesTheLastGeneration: "a slot is lost",
    LastInFirstOut: "not the slot that was free for longest",
    LeavesTheNeedBehind: "the two ways .* disagree",
    KeepsTheDead: "it forgot who is there",
    KeepsTheirDebts: r"the two ways .* disagree|^\d+\n",
    ReusesColumns: "a column was given out twice",
    RetractsHalf: "the two ways .* disagree",
    RetractsAnything: "retracted although that was not allowed",
    EndsAtOnceWhatNobodyWasToldOf: "is lost|did not join|free range is wrong",
    SettlesTwice: "settled although that was not allowed",
    DispatchesHalf: "it forgot who owes what",
    DispatchesToNobody: "dispatched although that was not allowed",
    TakesAnyMessage: "acknowledged although that was not allowed",
    RefusesEarlyMessages: "not acknowledged although that was allowed",
}


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "law"), [pytest.param(*each, id=each[0].__name__) for each in MUTANTS.items()])
def test_a_ledger_that_breaks_a_law_is_caught(
    laws: type[RuleBasedStateMachine], mutant: type[Ledger], law: str
) -> None:
    machine = type(mutant.__name__, (laws,), {"ledger_type": mutant})
    thorough = settings(
        max_examples=1000,
        stateful_step_count=40,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KeyError), match=law):
        run_state_machine_as_test(machine, settings=thorough)
