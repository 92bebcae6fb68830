"""The short form of `make chaos`: each kind of fault under load, and the books balance."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.chaos import Ledger, chaos
from benchmarks.faults import KINDS, plan

ROOT = Path(__file__).parents[2]
RANKS = {"tokenizer": 2, "encoder": 3, "scheduler": 2}


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("seed", "transport", "counts"),
    [
        (1, "shm", {"kill": 3, "stop": 1, "memory": 1, "descriptors": 1, "flood": 1}),
        (2, "cpu", {"cut": 3, "unlinked": 1, "disk": 2}),
    ],
    ids=["shm", "cpu"],
)
async def test_l12_every_request_ends_in_one_result_whatever_is_done_to_whom(
    seed: int, transport: str, counts: dict[str, int]
) -> None:
    found = await chaos(seed, requests=50, counts=counts, every_s=0.4, longest_s=0.8, at_once=4, transport=transport)
    assert found["wrong"] == [], found


def test_a_seed_says_who_is_hurt_and_how_and_every_stage_has_its_part() -> None:
    counts = {"kill": 33} | {kind: 6 for kind in KINDS if kind != "kill"}
    faults = plan(7, RANKS, counts)
    assert faults == plan(7, RANKS, counts)
    assert faults != plan(8, RANKS, counts)
    parts = Counter((fault.kind, fault.stage) for fault in faults)
    assert parts == {(kind, stage): count // 3 for kind, count in counts.items() for stage in RANKS}
    assert all(fault.rank < RANKS[fault.stage] for fault in faults)


def test_a_ledger_that_does_not_balance_says_so() -> None:
    ledger = Ledger(sent=5, ok=2, wrong=1)
    ledger.failed["PeerGone"] += 1
    assert ledger.lost == 1


def test_the_page_on_faults_names_tests_and_kinds_that_there_are() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    there = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 30
    assert named <= there
    assert {kind for line in re.findall(r"chaos: (.*?) \|", page) for kind in re.findall(r"`(\w+)`", line)} <= set(
        KINDS
    )
