"""Which outputs a producer forgets first."""

from __future__ import annotations

from tensorferry.connectors.ec.kept import Kept


def filled() -> Kept[str]:
    kept: Kept[str] = Kept(100)
    for number in range(4):
        kept.add(f"x{number}", f"what{number}", 25, float(number))
    return kept


def test_what_somebody_has_read_goes_first_and_then_the_oldest() -> None:
    kept = filled()
    kept.read("x2", 5.0)
    assert kept.room_for(0) == []
    assert kept.room_for(25) == ["what2"]
    assert kept.room_for(50) == ["what0"]
    assert ("x1" in kept, "x0" in kept, len(kept), kept.nbytes) == (True, False, 2, 50)


def test_what_was_read_last_stays_longest() -> None:
    kept = filled()
    for name in ("x0", "x1", "x0"):
        kept.read(name, 5.0)
    assert kept.room_for(25) == ["what1"]


def test_one_that_is_larger_than_the_budget_makes_everything_go() -> None:
    kept = filled()
    assert len(kept.room_for(1000)) == 4
    assert (len(kept), kept.nbytes) == (0, 0)


def test_what_nobody_has_asked_for_goes_by_age() -> None:
    kept = filled()
    kept.read("x0", 9.0)
    assert sorted(kept.older(2.5)) == ["what1", "what2"]
    assert kept.get("x1") is None
    assert kept.get("x0") == "what0"
