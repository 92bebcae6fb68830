"""The queue before an engine: priorities first, then tenants in turn by the work that they ask for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.stages.scheduler.waiting import Cost, Waiting

COSTS = st.builds(Cost, st.integers(0, 5000), st.integers(0, 5000))


def drained(waiting: Waiting[str]) -> list[str]:
    return [waiting.take() for _ in range(len(waiting))]


def test_equal_requests_go_in_the_order_in_which_they_came() -> None:
    waiting: Waiting[str] = Waiting()
    for name in "abc":
        waiting.put(name, cost=Cost(10))
    assert drained(waiting) == ["a", "b", "c"]


def test_a_lower_priority_number_goes_first() -> None:
    waiting: Waiting[str] = Waiting()
    waiting.put("batch", priority=1, cost=Cost(1))
    waiting.put("usual", cost=Cost(1))
    waiting.put("urgent", priority=-5, cost=Cost(1000))
    assert drained(waiting) == ["urgent", "usual", "batch"]


def test_a_tenant_with_many_requests_waits_for_its_turn() -> None:
    waiting: Waiting[str] = Waiting()
    for number in range(100):
        waiting.put(f"many {number}", tenant="many", cost=Cost(100))
    waiting.put("one", tenant="one", cost=Cost(100))
    assert drained(waiting).index("one") <= 1


def test_patches_count_as_tokens_do() -> None:
    waiting: Waiting[str] = Waiting()
    for number in range(4):
        waiting.put("images", tenant="images", cost=Cost(10, 990))
        waiting.put(f"text {number}", tenant="text", cost=Cost(100))
    order = drained(waiting)
    assert order.index("text 3") < 6, "four requests of a tenth cost no more than one with images"


def test_who_was_idle_has_saved_nothing_up() -> None:
    waiting: Waiting[str] = Waiting()
    for _ in range(10):
        waiting.put("busy", tenant="busy", cost=Cost(100))
    for _ in range(5):
        waiting.take()
    for _ in range(5):
        waiting.put("new", tenant="new", cost=Cost(100))
    turns = drained(waiting)
    assert Counter(turns[:4]) == {"new": 2, "busy": 2}


def test_taking_from_an_empty_queue_is_an_error() -> None:
    waiting: Waiting[str] = Waiting()
    assert waiting.first() is None
    with pytest.raises(IndexError):
        waiting.take()


def test_dropped_ones_are_gone_and_the_others_keep_their_order() -> None:
    waiting: Waiting[str] = Waiting()
    for name in "abcde":
        waiting.put(name, cost=Cost(10))
    assert waiting.drop(lambda name: name in "bd") == 2
    assert drained(waiting) == ["a", "c", "e"]


def test_tenants_that_asked_once_are_forgotten() -> None:
    waiting: Waiting[str] = Waiting()
    waiting.put("first", tenant="first", cost=Cost(1))
    for number in range(10_000):
        waiting.put("next", tenant=f"tenant {number}", cost=Cost(1))
        waiting.take()
    assert len(waiting._ends) < 200  # no public name: what it remembers is no behaviour but memory


@given(st.lists(st.tuples(st.sampled_from("abc"), COSTS), min_size=1, max_size=60))
def test_nothing_is_lost_and_shares_stay_even(requests: list[tuple[str, Cost]]) -> None:
    """While two tenants both wait, what they were given differs by no more than the two largest requests."""
    waiting: Waiting[tuple[str, Cost]] = Waiting()
    for tenant, cost in requests:
        waiting.put((tenant, cost), tenant=tenant, cost=cost)
    left = Counter(tenant for tenant, _ in requests)
    given_work: Counter[str] = Counter()
    largest = max(cost.work for _, cost in requests)
    taken = []
    while waiting.first():
        tenant, cost = waiting.take()
        taken.append((tenant, cost))
        left[tenant] -= 1
        given_work[tenant] += cost.work
        waits = [each for each in left if left[each]]
        for each in waits:
            for other in waits:
                assert given_work[each] - given_work[other] <= 2 * largest
    assert sorted(taken) == sorted(requests)
