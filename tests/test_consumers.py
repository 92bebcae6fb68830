"""Promises L7 and L8: who acknowledges."""

from __future__ import annotations

import pytest

from tensorferry.codecs.consumers import acknowledging, column_of
from tensorferry.codecs.errors import BadMessage


def test_l7_columns_of_global_ranks_do_not_collide() -> None:
    assert [column_of(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [column_of(rank, 4) for rank in (4, 5, 6, 7)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("rank", "consumers"), [(-1, 4), (0, 0)])
def test_l7_a_rank_that_is_none_is_refused(rank: int, consumers: int) -> None:
    with pytest.raises(BadMessage, match=f"rank {rank} among {consumers}"):
        column_of(rank, consumers)


@pytest.mark.parametrize(
    ("requested", "declared", "group", "count"),
    [(1, 8, 2, 1), (2, 8, 2, 2), (8, 8, 2, 8), (9, 8, 2, 8), (8, 1, 8, 1), (4, 2, 4, 2), (3, 3, 1, 3)],
)
def test_l7_l8_one_a_group_or_all_clamped_to_what_is_declared(
    requested: int, declared: int, group: int, count: int
) -> None:
    assert acknowledging(requested, declared, group) == count


@pytest.mark.parametrize(("requested", "declared", "group"), [(3, 8, 2), (0, 8, 2), (7, 8, 4), (-1, 2, 1)])
def test_l7_any_other_number_is_an_error(requested: int, declared: int, group: int) -> None:
    with pytest.raises(BadMessage, match=f"{requested} of {declared} consumers"):
        acknowledging(requested, declared, group)
