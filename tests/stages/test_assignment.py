"""Promise E1's first half: one pure function gives every item to one rank, evenly, the same everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.codecs.errors import BadMessage
from tensorferry.stages.assignment import affine, assign, first_rank, owners

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).parents[1].joinpath("vectors").joinpath("assignment.json").read_text(encoding="ascii")
)

requests = st.binary(min_size=16, max_size=16)
patch_counts = st.lists(st.one_of(st.integers(0, 8), st.integers(0, 1 << 40)), max_size=40)
rank_counts = st.integers(1, 9)


def loads_of(owners: list[int], patches: list[int], ranks: int) -> list[int]:
    loads = [0] * ranks
    for owner, count in zip(owners, patches, strict=True):
        loads[owner] += count
    return loads


@pytest.mark.parametrize("case", VECTORS["balanced"], ids=lambda case: case["name"])
def test_e1_golden_vectors(case: dict[str, Any]) -> None:
    assert assign(bytes.fromhex(case["request"]), case["patches"], case["ranks"]) == case["expected"]


@given(requests, patch_counts, rank_counts)
def test_e1_every_item_has_one_owner(request_id: bytes, patches: list[int], ranks: int) -> None:
    owners = assign(request_id, patches, ranks)
    assert len(owners) == len(patches)
    assert all(type(owner) is int and 0 <= owner < ranks for owner in owners)


@given(requests, patch_counts, rank_counts)
def test_e1_load_stays_within_mean_plus_largest(request_id: bytes, patches: list[int], ranks: int) -> None:
    loads = loads_of(assign(request_id, patches, ranks), patches, ranks)
    assert max(loads) * ranks <= sum(patches) + max(patches, default=0) * ranks


@given(requests, patch_counts, rank_counts)
def test_e1_is_the_rule_as_written(request_id: bytes, patches: list[int], ranks: int) -> None:
    """Against the slow and obvious form: scan for the largest item, scan for the least loaded rank."""
    order = [(first_rank(request_id, ranks) + place) % ranks for place in range(ranks)]
    loads, owners, left = [0] * ranks, [-1] * len(patches), list(range(len(patches)))
    while left:
        item = max(left, key=lambda index: patches[index])  # of equals, max takes the first
        left.remove(item)
        owners[item] = min(order, key=lambda rank: loads[rank])
        loads[owners[item]] += patches[item]
    assert assign(request_id, patches, ranks) == owners


@given(requests, st.integers(0, 1 << 20), rank_counts)
def test_e1_equal_items_go_round(request_id: bytes, patches: int, ranks: int) -> None:
    """One item to each rank from the first on, when there are as many as ranks."""
    first = first_rank(request_id, ranks)
    owners = assign(request_id, [patches + 1] * ranks, ranks)
    assert owners == [(first + place) % ranks for place in range(ranks)]


def random_ids(count: int) -> list[bytes]:
    random = Random(2)
    return [random.randbytes(16) for _ in range(count)]


def counting_ids(count: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(count)]


def aligned_ids(count: int) -> list[bytes]:
    """A host's name in front and an address-like end: every id is 0 modulo 64."""
    return [b"frontend" + (number * 64).to_bytes(8, "big") for number in range(count)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("ids", [random_ids, counting_ids, aligned_ids])
def test_e1_single_image_requests_spread_evenly(ids: Any, ranks: int) -> None:
    count = 10_000
    owners = Counter(assign(request_id, [1024], ranks)[0] for request_id in ids(count))
    # Five standard deviations of fair dice; the ids are fixed, so this cannot flicker.
    slack = 5 * (count * (ranks - 1)) ** 0.5 / ranks
    assert set(owners) == set(range(ranks))
    assert all(abs(owned - count / ranks) < slack for owned in owners.values()), owners


PROGRAM = """
import json, sys
from tensorferry.stages.assignment import assign
from tensorferry.stages.assignment import affine
cases = json.load(sys.stdin)
print(json.dumps([
    assign(bytes.fromhex(name), patches, ranks) + affine([bytes.fromhex(name)], range(ranks))
    for name, patches, ranks in cases
]))
assert "torch" not in sys.modules
"""


@pytest.mark.processes
def test_e1_same_in_every_process() -> None:
    """Other processes, other hash seeds, same answer."""
    random = Random(7)
    cases = [
        (random.randbytes(16).hex(), [random.randrange(1 << 14) for _ in range(random.randrange(30))], ranks)
        for ranks in range(1, 9)
        for _ in range(25)
    ]
    here = [
        assign(bytes.fromhex(name), patches, ranks) + affine([bytes.fromhex(name)], range(ranks))
        for name, patches, ranks in cases
    ]
    for seed in ("1", "4242"):
        child = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed},
            input=json.dumps(cases),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert child.returncode == 0, child.stderr
        assert json.loads(child.stdout) == here


def test_does_not_touch_its_input() -> None:
    patches = [3, 1, 2]
    assign(bytes(16), patches, 2)
    assert patches == [3, 1, 2]


@pytest.mark.parametrize(("patches", "ranks"), [([4], 0), ([], 0), ([4], -1), ([4, -1], 2)])
def test_impossible_numbers_are_a_bad_message(patches: list[int], ranks: int) -> None:
    with pytest.raises(BadMessage):
        assign(bytes(16), patches, ranks)


# --- affinity ---------------------------------------------------------------------------------------------

contents = st.lists(st.binary(min_size=16, max_size=16), max_size=30)
rank_lists = st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=9, unique=True)


@pytest.mark.parametrize("case", VECTORS["affinity"], ids=lambda case: case["name"])
def test_affinity_golden_vectors(case: dict[str, Any]) -> None:
    """Computed by another program: `b2sum -l 64` of the content and the rank's number."""
    assert affine([bytes.fromhex(content) for content in case["contents"]], case["ranks"]) == case["expected"]


@given(contents, rank_lists, st.randoms(use_true_random=False))
def test_affinity_depends_on_the_content_and_on_who_is_there_alone(
    items: list[bytes], ranks: list[int], random: Any
) -> None:
    """Neither on the order of the ranks, nor on what else is in a request."""
    chosen = [ranks[place] for place in affine(items, ranks)]
    shuffled = random.sample(ranks, len(ranks))
    assert [shuffled[place] for place in affine(items, shuffled)] == chosen
    assert [ranks[affine([item], ranks)[0]] for item in items] == chosen


@given(contents, rank_lists)
def test_affinity_moves_only_what_a_lost_rank_had(items: list[bytes], ranks: list[int]) -> None:
    before = [ranks[place] for place in affine(items, ranks)]
    if left := ranks[1:]:
        after = [left[place] for place in affine(items, left)]
        assert all(now == then for now, then in zip(after, before, strict=True) if then != ranks[0])


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_affinity_spreads_different_contents_evenly(ranks: int) -> None:
    count = 10_000
    owned = Counter(affine(random_ids(count), range(ranks)))
    slack = 5 * (count * (ranks - 1)) ** 0.5 / ranks
    assert set(owned) == set(range(ranks))
    assert all(abs(items - count / ranks) < slack for items in owned.values()), owned


def test_the_deployment_says_which_assignment() -> None:
    items = random_ids(6)
    assert owners("balanced", bytes(16), [5] * 6, items, [7, 8, 9]) == assign(bytes(16), [5] * 6, 3)
    assert owners("affinity", bytes(16), [5] * 6, items, [7, 8, 9]) == affine(items, [7, 8, 9])
    for how in ("balanced", "affinity"):
        with pytest.raises(BadMessage, match="over 0 ranks"):
            owners(how, bytes(16), [5], items[:1], [])  # type: ignore[arg-type]
