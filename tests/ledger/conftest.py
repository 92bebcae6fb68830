"""The laws of the ledger, as a machine that does whatever may happen and keeps the books a second time.

The pool has 16 bytes and few slots, so that edges meet; generations start near the last, so that slots retire.
The machine keeps the books a second time, naively, and compares after every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from tensorferry.codecs.errors import LeaseError, PoolFull, StaleLease
from tensorferry.codecs.pool.ledger import LAST_GENERATION, Grant, Ledger, Words

CAPACITY = 16
MOST_COLUMNS = 3

any_of_them = st.integers(0, 63)  #: taken modulo how many there are
any_column = st.integers(0, MOST_COLUMNS + 1)  #: also one that nobody has
#: What is written to a control word, counted from its lease's own generation: that, older, newer, 0.
distance = st.sampled_from([0] * 16 + [-1, 1, 2, -LAST_GENERATION])
word = st.sampled_from([0] * 12 + [-1, 1, 2, -LAST_GENERATION] + [None] * 6)  #: None: what is there stays

#: What may happen, how often beside the others, and with what.
EVENTS: dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]] = {
    "lend": (6, {"nbytes": st.one_of(st.integers(0, 4), st.integers(0, CAPACITY + 1)), "told": st.sets(any_column)}),
    "everybody_acts": (
        6,
        {"acts": st.lists(st.tuples(st.booleans(), *[word] * (1 + MOST_COLUMNS)), min_size=3, max_size=3)},
    ),
    "reclaim": (6, {"limit": st.integers(1, 5)}),
    "dispatch": (2, {"which": any_of_them, "choice": st.sets(any_of_them, min_size=1, max_size=2)}),
    "dispatch_to_nobody": (1, {"which": any_of_them, "column": any_column}),
    "retract": (2, {"which": any_of_them, "column": any_column}),
    "settle": (3, {"which": any_of_them}),
    "acknowledge_by_message": (2, {"which": any_of_them, "column": any_column, "off": distance}),
    "admit": (1, {"by_message": st.booleans()}),
    "strike": (1, {"which": any_of_them}),
    "quarantine": (1, {"which": any_of_them}),
    "resize": (3, {"start": st.integers(0, CAPACITY - 1), "nbytes": st.integers(1, 6)}),
}
events = st.one_of(
    [
        st.tuples(st.just(name), st.fixed_dictionaries(arguments))
        for name, (weight, arguments) in EVENTS.items()
        for _ in range(weight)
    ]
)


@dataclass
class Lent:
    """A lease, as the machine sees it."""

    grant: Grant
    owes: set[int] = field(default_factory=set)
    settled: bool = False


class LedgerKeepsItsLaws(RuleBasedStateMachine):
    """See the module."""

    ledger_type: type[Ledger] = Ledger

    @initialize(
        slots=st.integers(1, 3),
        first=st.sampled_from([1, 1, LAST_GENERATION - 2, LAST_GENERATION]),
        by_message=st.lists(st.sampled_from([False, False, False, True]), min_size=2, max_size=MOST_COLUMNS),
        there=st.sampled_from([CAPACITY, CAPACITY, CAPACITY // 2, 0]),
    )
    def open_the_books(self, slots: int, first: int, by_message: list[bool], there: int) -> None:
        self.slots = slots
        self.ledger = self.ledger_type(there, slots, granule=1, first_generation=first)
        self.there = set(range(there))  # the bytes that the pool has
        self.fifo = deque((slot, first) for slot in range(slots))
        self.retired = 0
        self.peak = 0
        self.live: list[Lent] = []
        self.over: list[Grant] = []
        self.names: set[tuple[int, int]] = set()
        self.columns: set[int] = set()
        self.distrusted: set[int] = set()
        self.columns_ever: set[int] = set()
        self.ready = np.zeros(slots, np.uint32)
        self.acks: dict[int, Words] = {}
        for silent in by_message:
            self.admit(silent)

    # One rule for all events: with a rule each, Hypothesis switches half of them off in every example, and
    # hardly a lease ever came back.
    @rule(event=events)
    def happens(self, event: tuple[str, dict[str, Any]]) -> None:
        name, arguments = event
        getattr(self, name)(**arguments)

    # --- what may happen

    def admit(self, by_message: bool) -> None:
        if len(self.columns) == MOST_COLUMNS:
            return
        column = self.ledger.admit()
        assert column not in self.columns_ever, "a column was given out twice"
        self.columns.add(column)
        self.columns_ever.add(column)
        if not by_message:
            self.acks[column] = np.zeros(self.slots, np.uint32)

    def strike(self, which: int) -> None:
        if not self.columns:
            return
        column = sorted(self.columns)[which % len(self.columns)]
        self.ledger.strike(column)
        self.columns.remove(column)
        self.distrusted.discard(column)
        self.acks.pop(column, None)
        for lent in self.live:
            lent.owes.discard(column)

    def quarantine(self, which: int) -> None:
        if not self.columns:
            return
        column = sorted(self.columns)[which % len(self.columns)]
        self.ledger.quarantine(column)
        self.distrusted.add(column)

    def lend(self, nbytes: int, told: set[int]) -> None:
        longest = max(self.free_runs(), default=0)
        possible = bool(self.fifo) and longest >= max(1, nbytes)
        grant, said = None, (0, 0, 0)
        try:
            grant = self.ledger.lend(nbytes)
        except PoolFull as full:
            said = full.wanted_nbytes, full.longest_free_nbytes, full.free_slots
        if grant is None:
            assert not possible, "refused although there was room"
            assert said == (nbytes, longest, len(self.fifo)), "refused with the wrong numbers"
            return
        assert possible, "lent although there was no room"
        assert grant.nbytes == max(1, nbytes), "not the bytes asked for"
        given = set(range(grant.offset, grant.offset + grant.nbytes))
        assert given <= self.there, "a byte past the pool is lent"
        assert not given & self.taken(), "a byte is lent twice"
        name = (grant.slot, grant.generation)
        assert name not in self.names, "a name was given out twice"
        assert grant.generation <= LAST_GENERATION, "a generation after the last"
        assert name == self.fifo.popleft(), "not the slot that was free for longest"
        self.names.add(name)
        self.live.append(Lent(grant))
        self.peak = max(self.peak, sum(lent.grant.nbytes for lent in self.live))
        told &= self.columns - self.distrusted
        self.ledger.dispatch(grant, told)
        self.live[-1].owes.update(told)

    def resize(self, start: int, nbytes: int) -> None:
        """Take a range away that is there as a whole, or add those of its bytes that are not."""
        wanted = set(range(start, min(CAPACITY, start + nbytes)))
        if wanted <= self.there:
            gone = self.ledger.shrink(start, len(wanted))
            assert gone == (not wanted & self.taken()), "a range went that is lent, or did not though it is free"
            if gone:
                self.there -= wanted
        elif not wanted & self.there:
            self.ledger.grow(start, len(wanted))
            self.there |= wanted

    def dispatch(self, which: int, choice: set[int]) -> None:
        if not (self.live and self.columns):
            return
        lent = self.live[which % len(self.live)]
        columns = [sorted(self.columns)[number % len(self.columns)] for number in choice]
        allowed = not lent.settled and not self.distrusted & set(columns)
        self.must_be(allowed, lambda: self.ledger.dispatch(lent.grant, columns), "dispatched")
        if allowed:
            lent.owes.update(columns)

    def dispatch_to_nobody(self, which: int, column: int) -> None:
        if not self.live:
            return
        lent = self.live[which % len(self.live)]
        if column not in self.columns:
            columns = [*self.columns, column]
            self.must_be(False, lambda: self.ledger.dispatch(lent.grant, columns), "dispatched")

    def retract(self, which: int, column: int) -> None:
        if not self.live:
            return
        lent = self.live[which % len(self.live)]
        struck = column in self.columns_ever - self.columns
        allowed = not lent.settled and (column in lent.owes or struck)
        self.must_be(allowed, lambda: self.ledger.retract(lent.grant, column), "retracted")
        if allowed:
            lent.owes.discard(column)

    def settle(self, which: int) -> None:
        grants = [*(lent.grant for lent in self.live), *self.over]
        if not grants:
            return
        grant = grants[which % len(grants)]
        lent = next((lent for lent in self.live if lent.grant == grant), None)
        allowed = lent is not None and not lent.settled
        self.must_be(allowed, lambda: self.ledger.settle(grant), "settled")
        if allowed and lent is not None:
            lent.settled = True

    def everybody_acts(self, acts: list[tuple[Any, ...]]) -> None:
        """Each slot's holder may settle it, and its words may be written, by the rules or against them."""
        for lent in self.live:
            slot, generation = lent.grant[:2]
            settle, ready, *acks = acts[slot]
            if settle and not lent.settled:
                self.ledger.settle(lent.grant)
                lent.settled = True
            if ready is not None:
                self.ready[slot] = max(0, generation + ready)
            for (column, words), off in zip(self.acks.items(), acks, strict=False):
                if off is not None and (off or column in lent.owes):
                    words[slot] = max(0, generation + off)

    def acknowledge_by_message(self, which: int, column: int, off: int) -> None:
        if not self.live:
            return
        lent = self.live[which % len(self.live)]
        owed = off == 0 and column in lent.owes - self.distrusted
        slot, generation = lent.grant.slot, lent.grant.generation + off
        self.must_be(owed, lambda: self.ledger.acknowledge(slot, generation, column), "acknowledged", StaleLease)
        if owed:
            lent.owes.remove(column)

    def reclaim(self, limit: int) -> None:
        over = [lent for lent in self.live if self.may_end(lent)]
        looked_up, scanned = (see(self.ready, self.acks) for see in (self.ledger._looked_up, self.ledger._scanned))
        assert looked_up == scanned, "the two ways to see what is over disagree"
        ended = self.ledger.reclaim(self.ready, self.acks, limit)
        assert set(ended) <= {lent.grant for lent in over}, "a lease ended before its time"
        assert len(ended) == min(limit, len(over)), "not as many leases ended as could"
        assert len(set(ended)) == len(ended), "a lease ended twice"
        for grant in ended:
            if grant.generation < LAST_GENERATION:
                self.fifo.append((grant.slot, grant.generation + 1))
            else:
                self.retired += 1
            self.over.append(grant)
        self.live = [lent for lent in self.live if lent.grant not in ended]

    # --- the second books

    def may_end(self, lent: Lent) -> bool:
        slot, generation = lent.grant[:2]
        return (
            lent.settled
            and self.ready[slot] == generation
            and not lent.owes & self.distrusted
            and all(column in self.acks and self.acks[column][slot] == generation for column in lent.owes)
        )

    def must_be(self, allowed: bool, act: Callable[[], None], done: str, error: type[LeaseError] = LeaseError) -> None:
        refused = False
        try:
            act()
        except error:
            refused = True
        assert refused or allowed, f"{done} although that was not allowed"
        assert allowed != refused, f"not {done} although that was allowed"

    def taken(self) -> set[int]:
        return {byte for lent in self.live for byte in range(lent.grant.offset, lent.grant.offset + lent.grant.nbytes)}

    def free_runs(self) -> list[int]:
        """The length of every longest run of bytes that nobody has."""
        taken = self.taken()
        runs = groupby(range(CAPACITY), key=lambda byte: byte in self.there and byte not in taken)
        return [len(list(run)) for is_free, run in runs if is_free]

    # --- the laws

    @invariant()
    def no_byte_is_lost(self) -> None:
        lent = sum(lent.grant.nbytes for lent in self.live)
        there = len(self.there)
        assert (self.ledger.lent_nbytes, self.ledger.free_nbytes) == (lent, there - lent), "a byte is lost"
        assert self.ledger.capacity_nbytes == there, "a byte is lost"
        free = {byte for start, end in self.ledger.free for byte in range(start, end)}
        assert free == self.there - self.taken(), "a byte is lost"
        assert self.ledger.peak_lent_nbytes == self.peak, "the peak is wrong"

    @invariant()
    def freed_neighbours_join(self) -> None:
        runs = self.free_runs()
        assert self.ledger.free_ranges == len(runs), "freed neighbours did not join"
        longest = max(runs, default=0)
        assert self.ledger.longest_free_nbytes == longest, "the longest free range is wrong"

    @invariant()
    def no_slot_is_lost(self) -> None:
        counts = self.ledger.free_slots, self.ledger.lent_slots, self.ledger.retired_slots
        assert counts == (len(self.fifo), len(self.live), self.retired), "a slot is lost"

    @invariant()
    def it_knows_who_owes_what(self) -> None:
        assert sorted(self.ledger.leases()) == sorted(lent.grant for lent in self.live), "it forgot a lease"
        assert self.ledger.columns == self.columns, "it forgot who is there"
        for column in self.columns:
            owed = sorted(lent.grant for lent in self.live if column in lent.owes)
            assert sorted(self.ledger.outstanding(column)) == owed, "it forgot who owes what"


@pytest.fixture
def laws() -> type[LedgerKeepsItsLaws]:
    return LedgerKeepsItsLaws
