"""A full pool: what fits is known without taking it, nothing waits while it holds, statistics size a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.codecs.errors import PoolFull
from tensorferry.codecs.pool.ledger import Ledger
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.create(1 << 20, slots=8) as pool:
        yield pool


@given(st.lists(st.integers(0, 6), max_size=8), st.lists(st.integers(0, 6), max_size=4))
def test_r9_fits_says_what_lending_would_do_and_changes_nothing(lent: list[int], wanted: list[int]) -> None:
    ledger = Ledger(16, 6, granule=1)
    for size in lent:
        try:
            ledger.lend(size)
        except PoolFull:
            break
    before = (ledger.free_nbytes, ledger.longest_free_nbytes, ledger.free_ranges, ledger.free_slots)
    promised = ledger.fits(wanted)
    assert (ledger.free_nbytes, ledger.longest_free_nbytes, ledger.free_ranges, ledger.free_slots) == before
    try:
        for size in wanted:
            ledger.lend(size)
        fitted = True
    except PoolFull:
        fitted = False
    assert promised == fitted


def test_r9_fits_takes_back_what_has_ended_first(pool: Pool) -> None:
    publisher = Publisher(pool, inline_below_nbytes=0)
    layout = [("uint8", (700_000,))]
    with publisher.draft(layout):
        assert not publisher.fits([layout])
        assert publisher.fits([[("uint8", (100_000,))]])
    assert publisher.fits([layout])  # the draft was cancelled: reclaimed on demand
    assert publisher.drafts == {"pool": 1}


def test_small_drafts_need_no_room(pool: Pool) -> None:
    publisher = Publisher(pool, inline_below_nbytes=1000)
    with pool.lease(1 << 20):
        assert publisher.fits([[("uint8", (999,))]])
        assert not publisher.fits([[("uint8", (1000,))]])


def test_statistics_say_how_long_leases_were_out_and_how_free_space_lies(pool: Pool) -> None:
    with pool.lease(256 << 10), pool.lease(256 << 10) as middle:
        middle.data[:] = np.uint8(7)
        with pool.lease(256 << 10):
            pass
    assert pool.reclaim() == 3
    statistics = pool.statistics()
    assert statistics.ended == 3
    assert 0 < statistics.lent_ms <= statistics.longest_lent_ms
    assert statistics.fragmentation == 0.0
    with ExitStack() as others:
        others.enter_context(pool.lease(256 << 10))
        with pool.lease(256 << 10):
            others.enter_context(pool.lease(256 << 10))
        assert pool.reclaim() == 1
        assert pool.statistics().fragmentation == 0.5  # a quarter MiB between two leases, and one at the end
    assert pool.statistics().peak_lent_nbytes == 768 << 10
    assert pool.statistics().peak_lent_slots == 3
