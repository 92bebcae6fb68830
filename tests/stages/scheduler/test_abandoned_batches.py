"""What becomes of a batch that its engine does not finish: who is told, and who has given it up already."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs import messages as wire
from tensorferry.stages.engines.base import EngineRequest
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.scheduler.scheduler import Pending, Scheduler

REQUEST = bytes(16)
OWNER = wire.Origin("tokenizer", 0, 3)


def scheduler_with(run: Any) -> tuple[Any, list[str]]:
    counted: list[str] = []
    scheduler = object.__new__(Scheduler)
    counters = SimpleNamespace(count=counted.append)
    scheduler._stage = SimpleNamespace(counters=counters, outlive=lambda problem: None)  # type: ignore[assignment]
    scheduler._watch = Watch("scheduler.engine", "my:Engine", counters)
    scheduler._engine, scheduler._over, scheduler._call = SimpleNamespace(run=run), FinishedRequests(60.0), None
    return scheduler, counted


def batch(patience_s: float) -> list[Any]:
    deadline_ns = time.monotonic_ns() + int(patience_s * 1e9)
    admit = wire.Admit(REQUEST, 0, 7, OWNER, (wire.Rank(0, 7),), bytes(16), (), 1, deadline_ns)
    return [(admit, Pending(admit), EngineRequest(REQUEST, np.zeros(4, np.int32), [], [], 1))]


async def for_ever(requests: Any) -> Any:
    await asyncio.Event().wait()


async def cancels_itself(requests: Any) -> Any:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("run", "patience_s", "given_up"), [(for_ever, 0.01, True), (cancels_itself, 60.0, False)], ids=["late", "quits"]
)
async def test_an_owner_that_still_waits_is_told(run: Any, patience_s: float, given_up: bool) -> None:
    """Once its deadline has passed, the owner has given it up by itself."""
    scheduler, counted = scheduler_with(run)
    async with asyncio.timeout(10):
        [answer] = await scheduler._answers(batch(patience_s))
    assert str(answer) == "the engine gave it up"
    assert scheduler._over.is_finished(REQUEST, 0) is given_up
    assert counted == ["batches_abandoned"]


async def test_a_scheduler_that_is_cancelled_takes_its_engine_s_call_with_it() -> None:
    ended = asyncio.Event()

    async def run(requests: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    scheduler, counted = scheduler_with(run)
    running = asyncio.create_task(scheduler._answers(batch(60.0)))
    async with asyncio.timeout(10):
        while scheduler._call is None:  # noqa: ASYNC110  (set by the task, without a word)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await ended.wait()
    assert counted == []
