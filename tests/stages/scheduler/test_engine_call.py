"""What becomes of a batch that its engine does not finish: which owners are told, and which have given it up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.engines.base import EngineRequest
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.scheduler.engine_call import EngineCall
from tensorferry.stages.scheduler.engine_side import CompleteRequest

REQUEST = bytes(16)
OWNER = wire.Origin("tokenizer", 0, 3)


class Silent:
    """An engine that never answers; `began` and `ended` tell of its call."""

    def __init__(self) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def run(self, requests: Any) -> Any:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


class Quitting:
    """An engine whose call cancels itself."""

    async def run(self, requests: Any) -> Any:
        raise asyncio.CancelledError


def batch(patience_s: float) -> list[CompleteRequest]:
    deadline_ns = time.monotonic_ns() + int(patience_s * 1e9)
    admit = wire.Admit(REQUEST, 0, 7, OWNER, (wire.Rank(0, 7),), bytes(16), (), 1, 60_000)
    request = EngineRequest(REQUEST, np.zeros(4, np.int32), [], [], 1, deadline_ns=deadline_ns)
    return [CompleteRequest(admit, request, {})]


@pytest.fixture
def counters() -> Iterator[Counters]:
    counters = Counters()
    yield counters
    counters.close()


def call_of(engine: Any, counters: Counters) -> tuple[EngineCall, FinishedRequests]:
    finished = FinishedRequests(60.0)
    return EngineCall(engine, "my:Engine", counters, finished, lambda problem: None), finished


@pytest.mark.parametrize(
    ("make", "patience_s", "given_up"), [(Silent, 0.01, True), (Quitting, 60.0, False)], ids=["late", "quits"]
)
async def test_an_owner_that_still_waits_is_told(
    make: Callable[[], Any], patience_s: float, given_up: bool, counters: Counters
) -> None:
    """Once its deadline has passed, the owner has given it up by itself."""
    call, finished = call_of(make(), counters)
    async with asyncio.timeout(10):
        [answer] = await call.answers(batch(patience_s))
    assert str(answer) == "the engine gave the request up"
    assert finished.is_finished(REQUEST, 0) is given_up
    assert counters.value("batches_abandoned") == 1


async def test_a_batch_is_cancelled_once_all_its_requests_are_finished(counters: Counters) -> None:
    engine, requests = Silent(), batch(60.0)
    call, finished = call_of(engine, counters)
    running = asyncio.create_task(call.answers(requests))
    async with asyncio.timeout(10):
        await engine.began.wait()
        call.cancel_if_over(requests)
        await asyncio.sleep(0)
        assert not engine.ended.is_set()
        finished.add(REQUEST, 0)
        call.cancel_if_over(requests)
        await running
    assert engine.ended.is_set()
    assert counters.value("batches_abandoned") == 1


async def test_a_scheduler_that_is_cancelled_takes_its_engine_s_call_with_it(counters: Counters) -> None:
    engine = Silent()
    call, _ = call_of(engine, counters)
    running = asyncio.create_task(call.answers(batch(60.0)))
    async with asyncio.timeout(10):
        await engine.began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await engine.ended.wait()
    assert counters.value("batches_abandoned") == 0
