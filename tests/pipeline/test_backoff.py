"""Waits before another try: doubled, bounded, and still bounded after any number of them."""

from __future__ import annotations

import pytest

from tensorferry.pipeline.backoff import backoff_s


def test_each_wait_is_twice_the_one_before_up_to_the_longest() -> None:
    assert [backoff_s(0.5, 3.0, waits) for waits in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("waits", [1023, 1024, 1 << 31])
def test_any_number_of_waits_is_followed_by_the_longest(waits: int) -> None:
    """`restarts.most` may be so large, and 2.0 ** 1024 is an OverflowError."""
    assert backoff_s(0.1, 5.0, waits) == 5.0


def test_no_wait_is_longer_than_the_longest() -> None:
    assert backoff_s(10.0, 5.0, 0) == 5.0
