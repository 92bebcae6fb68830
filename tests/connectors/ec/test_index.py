"""The index's laws, in whatever order the engine, its ranks and their queues act."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorferry.connectors.ec.index import Index
from tensorferry.connectors.ec.messages import LetGo, Take

RANKS, PATIENCE_S, ROWS = 2, 5.0, 7
NAMES = st.sampled_from(["a", "b"])
RANK = st.integers(0, RANKS - 1)


class Rank:
    """What `Consumer` does, without sockets: see its `_take`, `_forget`, `_came`, `load` and `let_go`."""

    def __init__(self) -> None:
        self.heard: deque[Take | LetGo] = deque()  # by socket
        self.steps: deque[tuple[list[str], list[tuple[str, int]]]] = deque()  # by the engine
        self.said: deque[tuple[str, int]] = deque()
        self.places: dict[str, list[object]] = {}  # [hold, whether it is here]

    def hear(self) -> None:
        message = self.heard.popleft()
        if isinstance(message, LetGo):
            self.let_go(message.name, message.hold)
            return
        place = self.places.setdefault(message.name, [message.hold, False])
        place[0] = message.hold
        if place[1]:
            self.said.append((message.name, message.hold))

    def comes(self, name: str) -> None:
        place = self.places.get(name)
        if place is not None and not place[1]:
            place[1] = True
            assert isinstance(place[0], int)
            self.said.append((name, place[0]))

    def step(self) -> None:
        loads, drops = self.steps.popleft()
        for name in loads:
            assert self.places[name][1], f"{name} was promised, and the engine ends here"
        for name, hold in drops:
            self.let_go(name, hold)

    def let_go(self, name: str, hold: int) -> None:
        if name in self.places and self.places[name][0] == hold:
            del self.places[name]


class IndexKeepsItsLaws(RuleBasedStateMachine):
    """What is said to be held is held by every rank and loads, and stays so for who was told; what nobody claims is
    held by none in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.ranks = Index(RANKS, PATIENCE_S), [Rank() for _ in range(RANKS)]
        self.requests: dict[str, list[str]] = {}
        self.promised: set[tuple[str, str]] = set()  # request and item
        self.allocated: set[str] = set()  # since the last step that ran
        self.count, self.now = 0, 0.0

    def speak(self) -> None:
        for message in self.index.say():
            for rank in self.ranks:
                rank.heard.append(message)

    @rule(names=st.sets(NAMES, min_size=1))
    def admit(self, names: set[str]) -> None:
        self.count += 1
        self.requests[f"r{self.count}"] = sorted(names)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        names = self.requests[request]
        if self.index.need(request, [(name, ROWS) for name in names], self.now):
            for name in names:
                assert self.index.is_held(name)
                self.index.allocated(name)
                self.promised.add((request, name))
                self.allocated.add(name)
        self.speak()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), name=NAMES)
    def computed(self, data: st.DataObject, name: str) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        self.index.let_go(request, name)
        self.promised.discard((request, name))
        self.speak()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        self.end(request)
        self.speak()

    def end(self, request: str) -> None:
        self.requests.pop(request, None)
        self.index.finished(request)
        self.promised = {pair for pair in self.promised if pair[0] != request}

    @rule(runs=st.booleans())
    def step(self, runs: bool) -> None:
        step = self.index.step(runs)
        if runs:
            assert set(step[0]) == self.allocated
            self.allocated.clear()
            for rank in self.ranks:
                rank.steps.append(step)

    @rule(rank=RANK)
    def hear(self, rank: int) -> None:
        if self.ranks[rank].heard:
            self.ranks[rank].hear()

    @rule(rank=RANK)
    def run(self, rank: int) -> None:
        if self.ranks[rank].steps:
            self.ranks[rank].step()

    @rule(rank=RANK, name=NAMES)
    def comes(self, rank: int, name: str) -> None:
        self.ranks[rank].comes(name)

    @rule(rank=RANK)
    def answer(self, rank: int) -> None:
        if self.ranks[rank].said:
            self.index.held(*self.ranks[rank].said.popleft(), rank, ROWS)

    @rule()
    def everything_comes(self) -> None:
        """What happens most often; one event at a time it would seldom happen here."""
        for number, rank in enumerate(self.ranks):
            while rank.heard:
                rank.hear()
            for name in list(rank.places):
                rank.comes(name)
            while rank.said:
                self.index.held(*rank.said.popleft(), number, ROWS)

    @rule(seconds=st.floats(0.1, 2 * PATIENCE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for request in self.index.unavailable(self.now):
            self.end(request)
        self.speak()

    @invariant()
    def what_is_said_to_be_held_is_held(self) -> None:
        for name in ("a", "b"):
            if self.index.is_held(name):
                assert all(rank.places[name][1] for rank in self.ranks)

    @invariant()
    def what_was_promised_is_held(self) -> None:
        assert all(self.index.is_held(name) for _, name in self.promised)

    def teardown(self) -> None:
        for request in list(self.requests):
            self.index.finished(request)
        assert self.index.claims == 0
        self.speak()
        for number, rank in enumerate(self.ranks):
            while rank.heard:
                rank.hear()
            while rank.said:
                self.index.held(*rank.said.popleft(), number, ROWS)
        step = self.index.step(True)
        for rank in self.ranks:
            rank.steps.append(step)
            while rank.steps:
                rank.step()
            assert not rank.places, "held, and nobody claims it"
        assert not any(self.index.is_held(name) for name in ("a", "b"))


TestIndexKeepsItsLaws = IndexKeepsItsLaws.TestCase
TestIndexKeepsItsLaws.settings = settings(max_examples=200, stateful_step_count=40)
TestIndexKeepsItsLaws.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]


def test_a_request_fails_once_its_patience_is_over_and_another_waits_on() -> None:
    index = Index(1, PATIENCE_S)
    assert not index.need("first", [("a", ROWS)], 0.0)
    assert not index.need("second", [("a", ROWS)], 3.0)
    assert index.unavailable(4.9) == {}
    assert index.unavailable(5.0) == {"first": "a: nobody has sent it for 5 s (patience_s)"}
    index.finished("first")
    assert index.unavailable(7.9) == {}
    assert [take.left_ms for take in index.say() if isinstance(take, Take)] == [5000, 5000]


def test_ranks_that_got_different_rows_of_an_item_fail_its_request() -> None:
    index = Index(2, PATIENCE_S)
    index.need("r", [("a", ROWS)], 0.0)
    [take] = index.say()
    index.held("a", take.hold, 0, ROWS)
    index.held("a", take.hold, 1, ROWS + 1)
    assert not index.is_held("a")
    index.need("r", [("a", ROWS)], 0.0)
    assert index.unavailable(0.0) == {"r": "a: the ranks got different numbers of rows: [7, 8]"}


def test_what_a_rank_says_of_a_holding_that_is_over_changes_nothing() -> None:
    index = Index(1, PATIENCE_S)
    index.need("r", [("a", ROWS)], 0.0)
    index.finished("r")
    index.need("r", [("a", ROWS)], 0.0)
    old, over, new = index.say()
    assert isinstance(over, LetGo)
    assert old.hold == over.hold < new.hold
    index.held("a", old.hold, 0, ROWS)
    index.refused("a", old.hold, "bad")
    assert not index.is_held("a")
    assert index.unavailable(0.0) == {}
    index.held("a", new.hold, 0, ROWS)
    assert index.is_held("a")


def test_a_rank_that_joins_late_is_told_of_all_that_is_claimed() -> None:
    index = Index(1, PATIENCE_S)
    index.need("r", [("a", ROWS), ("b", ROWS)], 0.0)
    index.let_go("r", "b")
    assert [take.name for take in index.joined(1.0)] == ["a"]
    assert [take.left_ms for take in index.joined(1.0)] == [4000]


def test_an_item_that_is_claimed_anew_before_the_ranks_have_let_go_of_it_stays() -> None:
    index = Index(1, PATIENCE_S)
    index.need("first", [("a", ROWS)], 0.0)
    [take] = index.say()
    index.held("a", take.hold, 0, ROWS)
    index.finished("first")
    assert index.need("second", [("a", ROWS)], 0.0)
    assert index.step(True) == ([], [])
    assert index.is_held("a")
    index.finished("second")
    assert index.step(True) == ([], [("a", take.hold)])
    assert not index.is_held("a")
