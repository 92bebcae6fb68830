"""How a tokenizer waits for room in an elastic pool: on its event loop, and no longer than it was told."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tensorferry.pipeline.deployment.spec import Deployment, PoolSpec
from tensorferry.stages.tokenizer.dispatch import Dispatch


class Publisher:
    """Has room after so many looks; grows until then, or does not."""

    def __init__(self, looks: float, grows: bool = True) -> None:
        self.looks, self.grows, self.looked = looks, grows, 0

    def fits(self, layouts: Any) -> bool:
        self.looked += 1
        return self.looked > self.looks

    def growing(self, layouts: Any) -> bool:
        return self.grows


async def waited(publisher: Publisher, transport: str = "cuda_vmm", **pool: Any) -> tuple[Counter[str], float]:
    """What was counted, and the seconds that it took."""
    counted: Counter[str] = Counter()
    dispatch = Dispatch.__new__(Dispatch)
    deployment = Deployment(name="a", transport=transport, pool=PoolSpec(**pool))  # type: ignore[arg-type]
    counters = SimpleNamespace(count=lambda name: counted.update([name]))
    dispatch._stage = SimpleNamespace(deployment=deployment, publisher=publisher, counters=counters)  # type: ignore[assignment]
    started = time.monotonic()
    async with asyncio.timeout(20):
        await dispatch._wait_for_room([[("uint8", (1,))]])
    return counted, time.monotonic() - started


async def test_room_is_not_waited_for_where_it_is() -> None:
    assert (await waited(Publisher(0)))[0] == {}


async def test_a_pool_that_grows_is_waited_for_also_without_when_full_wait() -> None:
    publisher = Publisher(3)
    assert (await waited(publisher, grow_wait_ms=10_000))[0] == {"growth_waits": 1}
    assert publisher.looked == 4


async def test_but_no_longer_than_it_was_told() -> None:
    counted, took = await waited(Publisher(float("inf")), grow_wait_ms=30)
    assert counted == {"growth_waits": 1}
    assert took >= 0.03


async def test_a_pool_at_its_budget_is_not() -> None:
    publisher = Publisher(float("inf"), grows=False)
    assert (await waited(publisher, grow_wait_ms=60_000))[0] == {}
    assert publisher.looked == 1


async def test_when_full_wait_waits_for_leases_after_that() -> None:
    counted, took = await waited(Publisher(float("inf")), grow_wait_ms=10, when_full="wait", wait_ms=20)
    assert counted == {"growth_waits": 1, "pool_waits": 1}
    assert took >= 0.03


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc"])
async def test_other_pools_are_not_even_looked_at(transport: str) -> None:
    publisher = Publisher(float("inf"))
    assert (await waited(publisher, transport, grow_wait_ms=60_000))[0] == {}
    assert publisher.looked == 0
