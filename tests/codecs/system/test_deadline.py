"""A deadline runs from when it is made, and never has less than nothing left."""

from __future__ import annotations

import pytest

from tensorferry.codecs.system import deadline
from tensorferry.codecs.system.deadline import Deadline


def test_a_deadline_passes_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now_s)
    wait = Deadline(2.0)
    assert (wait.left_s, wait.has_passed) == (2.0, False)
    now_s = 101.5
    assert (wait.left_s, wait.has_passed) == (0.5, False)
    now_s = 102.0
    assert (wait.left_s, wait.has_passed) == (0.0, True)
    now_s = 500.0
    assert (wait.left_s, wait.has_passed) == (0.0, True)


def test_a_deadline_without_time_has_passed_at_once() -> None:
    assert Deadline(0.0).has_passed
