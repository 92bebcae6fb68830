"""Which chunks come and go: laws of the decisions, under any order of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tensorferry.codecs.pool.elastic.chunks import LAST_SERIAL, Chunks, Range, span

POSITIONS = 5
CHUNK = 4


def test_what_a_range_touches() -> None:
    assert [list(span(*at, CHUNK)) for at in [(0, 4), (3, 2), (4, 0), (8, 5), (15, 1)]] == [
        [0],
        [0, 1],
        [1],
        [2, 3],
        [3],
    ]


# --- growing ----------------------------------------------------------------------------------------------------


def fewest(free: list[Range], absent: list[int], size: int) -> int | None:
    """By trying every place: the fewest chunks that must come for a range of this size."""
    there = {byte for start, end in free for byte in range(start, end)}
    costs = []
    for start in range(POSITIONS * CHUNK - size + 1):
        window = range(start, start + size)
        missing = {byte // CHUNK for byte in window if byte not in there}
        if missing <= set(absent):
            costs.append(len(missing))
    return min(costs, default=None)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(st.sampled_from("amr"), min_size=POSITIONS, max_size=POSITIONS),
    st.sets(st.integers(0, POSITIONS * CHUNK - 1)),
    st.integers(1, POSITIONS * CHUNK + 1),
)
def test_as_few_chunks_as_will_do(states: list[str], lent: set[int], size: int) -> None:
    chunks = made(states)
    mapped = [position for position, state in enumerate(states) if state == "m"]
    free_bytes = [byte for byte in range(POSITIONS * CHUNK) if byte // CHUNK in mapped and byte not in lent]
    free = [(byte, byte + 1) for byte in free_bytes]
    absent = [position for position, state in enumerate(states) if state == "a"]
    needed = chunks.needed(free, [size])
    assert needed == sorted(set(needed))
    assert set(needed) <= set(absent)
    assert len(needed) == (fewest(free, absent, size) or 0)


def plainly_needed(chunks: Chunks, absent: list[int], free: list[Range], sizes: Sequence[int]) -> list[int]:
    """What `needed` is, said plainly: of every window, the absent positions that it touches."""
    real, planned = joined(free), list[int]()
    for size in sizes:
        if not any(end - start >= size for start, end in real):
            best: list[int] = []
            for start, end in joined([*real, *((position * CHUNK, (position + 1) * CHUNK) for position in absent)]):
                borders = range(-(-start // CHUNK) * CHUNK, end - size + 1, CHUNK)
                for window in (start, *borders, end - size):
                    if start <= window and window + size <= end:
                        touched = [position for position in chunks.span(window, size) if position in absent]
                        if not best or (len(touched), touched) < (len(best), best):
                            best = touched
            if not best:
                continue
            planned += best
            absent = [position for position in absent if position not in best]
            real = joined([*real, *((position * CHUNK, (position + 1) * CHUNK) for position in best)])
        start, end = min((r for r in real if r[1] - r[0] >= size), key=lambda r: (r[1] - r[0], r[0]))
        real.remove((start, end))
        if end - start > size:
            real.append((start + size, end))
    return planned


def joined(ranges: list[Range]) -> list[Range]:
    there = sorted(byte for start, end in ranges for byte in range(start, end))
    starts = [byte for byte in there if byte - 1 not in there]
    return list(zip(starts, [byte + 1 for byte in there if byte + 1 not in there], strict=True))


@pytest.mark.slow
@settings(max_examples=500)
@given(
    st.lists(st.sampled_from("aaamr"), min_size=1, max_size=12),
    st.sets(st.integers(0, 12 * CHUNK - 1)),
    st.lists(st.integers(1, 5 * CHUNK), max_size=5),
    st.sampled_from([0, 1, 2, 3, LAST_SERIAL]),
)
def test_what_is_needed_for_several_sizes_is_what_the_plain_definition_says(
    states: list[str], lent: set[int], sizes: list[int], serials: int
) -> None:
    chunks = made(states, serials)
    free_bytes = [byte for byte in range(len(states) * CHUNK) if states[byte // CHUNK] == "m" and byte not in lent]
    free = joined([(byte, byte + 1) for byte in free_bytes])
    absent = [position for position, state in enumerate(states) if state == "a"][:serials]
    assert chunks.needed(free, sizes) == plainly_needed(chunks, absent, free, sizes)


def test_the_lowest_come_first_and_each_size_finds_its_own_room() -> None:
    chunks = made("aaaaa")
    assert chunks.needed([], [CHUNK]) == [0]
    assert chunks.needed([], [1, 1, CHUNK]) == [0, 1]
    assert chunks.needed([], [CHUNK, 2 * CHUNK + 1]) == [0, 1, 2, 3]
    assert chunks.needed([], [9 * CHUNK, CHUNK]) == [0], "what never fits is passed over"
    assert made("mamaa").needed([(2, CHUNK), (2 * CHUNK, 3 * CHUNK)], [2 + CHUNK]) == [1]
    assert chunks.needed([], []) == []
    pieces = [(3, 4), (12, 14), (19, 20), (24, 25)]  # so one chunk is enough, at 2 or at 5
    assert made("maammam").needed(pieces, [CHUNK + 2]) == [2], (
        "the lowest, though another one joins what is free before"
    )


def made(states: Sequence[str], serials: int = LAST_SERIAL) -> Chunks:
    """Of positions that are absent, mapped or retiring; so many more can come."""
    there = sum(state != "a" for state in states)
    chunks = Chunks(len(states), CHUNK, first_serial=max(1, LAST_SERIAL - serials - there + 1))
    for position, state in enumerate(states):
        if state != "a":
            chunks.begin(position)
            chunks.came(position, 0)
        if state == "r":
            chunks.retire(position)
    return chunks


def test_serials_run_out_rather_than_come_again() -> None:
    chunks = Chunks(3, CHUNK, first_serial=LAST_SERIAL - 1)
    assert chunks.needed([], [3 * CHUNK]) == []
    assert chunks.needed([], [CHUNK, CHUNK]) == [0, 1]
    for position in (0, 1):
        chunks.begin(position)
        chunks.came(position, 0)
    assert chunks.serial(1) == LAST_SERIAL
    assert chunks.needed([], [CHUNK]) == []


def test_idle_is_counted_from_the_last_lease_and_from_the_last_growth() -> None:
    chunks = made("mm")
    assert chunks.idle(0) == [1, 0]
    chunks.touch(CHUNK - 1, 1, 50)
    assert chunks.idle(49) == [1]
    chunks.touch(CHUNK - 1, 2, 60)
    assert chunks.idle(59) == []
    chunks = Chunks(2, CHUNK)
    chunks.begin(0)
    chunks.came(0, 10)
    chunks.begin(1)
    chunks.came(1, 99)
    assert chunks.idle(98) == [], "the old spare was not what was needed alone"


# --- coming and going, in any order -----------------------------------------------------------------------------------


class ChunksKeepTheirLaws(RuleBasedStateMachine):
    """Keeps the books a second time: who really holds which memory."""

    chunks_type: type[Chunks] = Chunks

    def __init__(self) -> None:
        super().__init__()
        self.chunks = self.chunks_type(POSITIONS, CHUNK)
        self.coming: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.retiring: dict[int, int] = {}
        self.holders: dict[int, set[Any]] = {}  # serial -> who holds it: columns, or "us"
        self.dropped = {column: np.zeros(POSITIONS, np.uint32) for column in range(2)}
        self.serials: list[int] = []

    def held(self, position: int) -> bool:
        return bool(self.holders.get(self.retiring.get(position, 0)))

    @rule(position=st.integers(0, POSITIONS - 1))
    def begin(self, position: int) -> None:
        free = position not in self.mapped and position not in self.coming and not self.held(position)
        try:
            self.chunks.begin(position)
        except ValueError:
            assert not free, "refused a position that nobody holds"
            return
        assert free, "grew where somebody still holds memory"
        self.retiring.pop(position, None)
        self.coming.add(position)

    @precondition(lambda self: self.coming)
    @rule(which=st.integers(0, 9), fails=st.sampled_from([False, False, True]))
    def end(self, which: int, fails: bool) -> None:
        position = sorted(self.coming)[which % len(self.coming)]
        self.coming.remove(position)
        if fails:
            self.chunks.failed(position)
            return
        serial = self.chunks.came(position, 0)
        assert serial not in self.serials, "a serial came again"
        self.serials.append(serial)
        self.mapped[position] = serial
        self.holders[serial] = {"us"}

    @precondition(lambda self: self.mapped)
    @rule(which=st.integers(0, 9), columns=st.sets(st.integers(0, 1), min_size=1))
    def send(self, which: int, columns: set[int]) -> None:
        for column in sorted(columns & self.dropped.keys()):
            position = sorted(self.mapped)[which % len(self.mapped)]
            self.chunks.sent(position, column)
            assert self.chunks.is_sent(position, column)
            self.holders[self.mapped[position]].add(column)

    @precondition(lambda self: self.mapped)
    @rule(which=st.integers(0, 9))
    def retire(self, which: int) -> None:
        position = sorted(self.mapped)[which % len(self.mapped)]
        self.chunks.retire(position)
        self.retiring[position] = self.mapped.pop(position)

    @precondition(lambda self: self.retiring)
    @rule(which=st.integers(0, 9))
    def unmap(self, which: int) -> None:
        position = sorted(self.retiring)[which % len(self.retiring)]
        if "us" in self.holders[self.retiring[position]]:
            self.holders[self.retiring[position]].remove("us")
            self.chunks.unmapped(position)

    @rule(column=st.integers(0, 1), drops=st.sets(st.integers(0, POSITIONS - 1)))
    def hear(self, column: int, drops: set[int]) -> None:
        if column not in self.dropped:
            return
        for position in drops & self.retiring.keys():
            if column in self.holders[self.retiring[position]]:
                self.holders[self.retiring[position]].remove(column)
                self.dropped[column][position] = self.retiring[position]
        self.chunks.dropped(column, self.dropped[column])

    @rule(column=st.integers(0, 1), rarely=st.integers(0, 7))
    def strike(self, column: int, rarely: int) -> None:
        if rarely == 0 and self.dropped.pop(column, None) is not None:
            self.chunks.strike(column)
            for holders in self.holders.values():
                holders.discard(column)

    @invariant()
    def the_budget_holds(self) -> None:
        memory = sum(bool(holders) for holders in self.holders.values()) + len(self.coming)
        counted = (self.chunks.mapped_nbytes + self.chunks.retiring_nbytes) // CHUNK
        assert memory == counted <= POSITIONS, f"{memory} pieces of memory, {counted} counted"
        assert self.chunks.mapped == sorted(self.mapped)


@pytest.mark.slow
def test_chunks_keep_their_laws() -> None:
    run_state_machine_as_test(ChunksKeepTheirLaws, settings=settings(max_examples=200, stateful_step_count=50))


class GrowsARetiringPosition(Chunks):
    def begin(self, position: int) -> None:
        self._retiring.pop(position, None)
        super().begin(position)


class UsesASerialAgain(Chunks):
    def retire(self, position: int) -> None:
        self._serial -= 1
        super().retire(position)


class ForgetsItself(Chunks):
    def retire(self, position: int) -> None:
        super().retire(position)
        self._retiring[position].here = False


class ForgetsWhoWasSentIt(Chunks):
    def sent(self, position: int, column: int) -> None:
        super().sent(position, column)
        if column == 1:
            self._mapped[position].sent = {1}


class TakesAnyWord(Chunks):
    def dropped(self, column: int, words: Any) -> None:
        super().dropped(column, np.array([self._retiring[p].serial if p in self._retiring else 0 for p in range(5)]))


class TakesTheDeadForHolders(Chunks):
    def strike(self, column: int) -> None:
        for mapped in self._mapped.values():
            mapped.sent.discard(column)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [
        GrowsARetiringPosition,
        UsesASerialAgain,
        ForgetsItself,
        ForgetsWhoWasSentIt,
        TakesAnyWord,
        TakesTheDeadForHolders,
    ],
)
def test_chunks_that_break_a_law_are_caught(mutant: type[Chunks]) -> None:
    machine = type(mutant.__name__, (ChunksKeepTheirLaws,), {"chunks_type": mutant})
    thorough = settings(
        max_examples=500,
        stateful_step_count=50,
        phases=[Phase.generate],
        print_blob=False,
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=thorough)
