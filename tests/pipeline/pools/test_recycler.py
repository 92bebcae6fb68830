"""The recycler of a pool."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from tests.pipeline.pools.conversations import (
    DEADLINE_S,
    eventually,
)

from tensorferry.codecs.pool.pool import Pool
from tensorferry.pipeline.pools.broker import recycle


async def test_l4_the_recycler_takes_everything_back_in_short_passes_without_new_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Pool.create(1 << 20, 256) as pool:
        with ExitStack() as leases:  # none ends before all are lent, which may take back some by itself
            for _ in range(200):
                leases.enter_context(pool.lease(1000))
        passes: list[int] = []
        reclaim = pool.reclaim

        def counted() -> int:
            passes.append(reclaim())
            return passes[-1]

        monkeypatch.setattr(pool, "reclaim", counted)
        turns = 0
        recycling = asyncio.create_task(recycle(pool, 3600.0))
        async with asyncio.timeout(DEADLINE_S):
            while pool.statistics().lent_slots:
                await asyncio.sleep(0)
                turns += 1
        assert passes == [64, 64, 64, 8]
        assert turns >= 4  # others ran between the passes
        recycling.cancel()
        await asyncio.wait([recycling])
        assert recycling.cancelled()
        assert len(passes) == 4


async def test_l4_the_recycler_goes_on_for_ever(pool: Pool) -> None:
    recycling = asyncio.create_task(recycle(pool, 0.001))
    for _ in range(3):
        with pool.lease(1000):
            pass
        await eventually(lambda: not pool.statistics().lent_slots)
    recycling.cancel()
    await asyncio.wait([recycling])
