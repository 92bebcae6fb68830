"""Finished requests are remembered as long as messages of them can come, and then forgotten."""

from __future__ import annotations

import pytest

from tensorferry.stages import finished_requests as module
from tensorferry.stages.finished_requests import FinishedRequests


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_an_attempt_and_all_older_ones_are_finished(clock: Clock) -> None:
    finished = FinishedRequests(60.0)
    finished.add(name(1), 3)
    finished.add(name(1), 2)
    assert [finished.is_finished(name(1), attempt) for attempt in range(5)] == [True, True, True, True, False]
    assert not finished.is_finished(name(2), 0)


def test_a_request_is_forgotten_after_twice_the_longest_deadline(clock: Clock) -> None:
    finished = FinishedRequests(60.0)
    for second in range(1000):
        finished.add(name(second), 0)
        clock.now += 1.0
        assert all(finished.is_finished(name(known), 0) for known in range(max(0, second - 119), second + 1))
    assert len(finished) <= 121, "memory for two minutes, not for all that ever was"


def test_at_most_so_many_are_remembered(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 10)
    finished = FinishedRequests(60.0)
    for number in range(100):
        finished.add(name(number), 0)
    finished.add(name(90), 1)
    finished.add(name(100), 0)
    assert len(finished) == 10
    assert finished.is_finished(name(90), 1), "one that ended again is the latest"
    assert not finished.is_finished(name(91), 0)
