"""What is over is remembered for as long as something of it can come, and not for ever."""

from __future__ import annotations

import pytest

from tensorferry.stages import finished_requests as module
from tensorferry.stages.finished_requests import Tombstones


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


def test_an_attempt_that_is_over_covers_itself_and_older_ones(clock: Clock) -> None:
    over = Tombstones(60.0)
    over.add(name(1), 3)
    over.add(name(1), 2)
    assert [over.covers(name(1), attempt) for attempt in range(5)] == [True, True, True, True, False]
    assert not over.covers(name(2), 0)


def test_what_no_request_can_be_late_for_is_forgotten(clock: Clock) -> None:
    over = Tombstones(60.0)
    for second in range(1000):
        over.add(name(second), 0)
        clock.now += 1.0
        assert all(over.covers(name(known), 0) for known in range(max(0, second - 119), second + 1))
    assert len(over) <= 121, "memory for two minutes, not for all that ever was"


def test_there_are_never_more_than_so_many(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 10)
    over = Tombstones(60.0)
    for number in range(100):
        over.add(name(number), 0)
    over.add(name(90), 1)
    over.add(name(100), 0)
    assert len(over) == 10
    assert over.covers(name(90), 1), "one that ended again is the latest"
    assert not over.covers(name(91), 0)
