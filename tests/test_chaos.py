"""The short form of `make chaos`: every kind of stage dies once under load, one is stopped, and the books balance."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.chaos import Ledger, blows, chaos

RANKS = {"tokenizer": 2, "encoder": 3, "scheduler": 2}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("seed", "transport"), [(1, "shm"), (2, "cpu")])
async def test_l12_every_request_ends_in_one_result_whoever_dies(seed: int, transport: str) -> None:
    found = await chaos(seed, requests=50, kills=3, stops=1, every_s=1.0, at_once=16, transport=transport)
    assert found["wrong"] == [], found
    assert found["killed"] == {"tokenizer": 1, "encoder": 1, "scheduler": 1}, found


def test_a_seed_says_who_is_hurt_and_every_stage_has_its_part() -> None:
    plan = blows(7, RANKS, 33, 6)
    assert plan == blows(7, RANKS, 33, 6)
    assert plan != blows(8, RANKS, 33, 6)
    assert Counter(blow.stage for blow in plan if not blow.stop_s) == {"tokenizer": 11, "encoder": 11, "scheduler": 11}
    assert all(blow.rank < RANKS[blow.stage] for blow in plan)


def test_a_ledger_that_does_not_balance_says_so() -> None:
    ledger = Ledger(sent=5, ok=2, wrong=1)
    ledger.failed["PeerGone"] += 1
    assert ledger.lost == 1
