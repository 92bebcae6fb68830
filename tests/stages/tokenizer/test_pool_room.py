"""A tokenizer waits for room in its pool on its event loop, and for a limited time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from tensorferry.pipeline.deployment.spec import Deployment, PoolSpec
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.tokenizer.pool_room import wait_for_room


class Publisher:
    """Has room after so many looks; grows until then, or does not."""

    def __init__(self, looks: float, grows: bool = True) -> None:
        self.looks, self.grows, self.looked = looks, grows, 0

    def fits(self, layouts: Any) -> bool:
        self.looked += 1
        return self.looked > self.looks

    def growing(self, layouts: Any) -> bool:
        return self.grows


@dataclass(frozen=True)
class Waiting:
    """What a wait for room uses of a stage."""

    deployment: Deployment
    publisher: Publisher
    counters: Counters = field(default_factory=Counters)


async def waited(publisher: Publisher, transport: str = "cuda_vmm", **pool: Any) -> tuple[dict[str, float], float]:
    """What was counted, and the seconds that it took."""
    deployment = Deployment(name="a", transport=transport, pool=PoolSpec(**pool))  # type: ignore[arg-type]
    stage, started = Waiting(deployment, publisher), time.monotonic()
    async with asyncio.timeout(20):
        await wait_for_room(stage, [[("uint8", (1,))]])  # type: ignore[arg-type]
    values = {name: stage.counters.value(name) for name in ("growth_waits", "pool_waits")}
    return {name: value for name, value in values.items() if value}, time.monotonic() - started


async def test_room_is_not_waited_for_where_it_is() -> None:
    assert (await waited(Publisher(0)))[0] == {}


async def test_a_pool_that_grows_is_waited_for_also_without_when_full_wait() -> None:
    publisher = Publisher(3)
    assert (await waited(publisher, grow_wait_ms=10_000))[0] == {"growth_waits": 1}
    assert publisher.looked == 4


async def test_a_pool_that_grows_is_waited_for_no_longer_than_grow_wait_ms() -> None:
    counted, took = await waited(Publisher(float("inf")), grow_wait_ms=30)
    assert counted == {"growth_waits": 1}
    assert took >= 0.03


async def test_a_pool_at_its_budget_is_not_waited_for() -> None:
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
