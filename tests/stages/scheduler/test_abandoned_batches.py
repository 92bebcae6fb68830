"""What becomes of a batch that its engine does not finish: who is told, and who has given it up already."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import pytest
from tests.stages.played_peers import PlayedPeers

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.engines.base import EngineRequest, EngineResult
from tensorferry.stages.scheduler.scheduler import Scheduler

REQUEST = bytes(16)
OWNER = wire.Origin("tokenizer", 0, 3)
FOR_EVER_S = 1e6
DEADLINE_S = 10.0


class Hangs:
    """An engine that never answers."""

    def __init__(self) -> None:
        self.called, self.ended = asyncio.Event(), asyncio.Event()

    async def run(self, batch: Sequence[EngineRequest]) -> Sequence[EngineResult | Exception]:
        self.called.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise AssertionError


class CancelsItself(Hangs):
    async def run(self, batch: Sequence[EngineRequest]) -> Sequence[EngineResult | Exception]:
        raise asyncio.CancelledError


class Rank:
    """A scheduler rank, with one request of text for its engine."""

    def __init__(self, engine: Hangs, patience_s: float, copier: ThreadPoolExecutor, undo: AsyncExitStack) -> None:
        self._played = PlayedPeers("scheduler", undo, OWNER)
        stage = self._played.stage
        self.engine, self.counters, self.scheduler = engine, stage.counters, Scheduler(stage, engine, copier)
        deadline_ns = time.monotonic_ns() + int(patience_s * 1e9)
        admit = wire.Admit(REQUEST, 0, stage.epoch, OWNER, (wire.Rank(0, stage.epoch),), bytes(16), (), 1, deadline_ns)
        self.scheduler.take(admit, ())
        self.running = asyncio.create_task(self.scheduler.run())

    def failures(self) -> list[str]:
        """The problems that the owner was told since this was last asked."""
        sent = [received.message for received in self._played.sent(OWNER)]
        return [message.failure.problem for message in sent if isinstance(message, wire.Failed)]


MakeRank = Callable[[Hangs, float], Rank]


@pytest.fixture
async def rank_of() -> AsyncIterator[MakeRank]:
    async with AsyncExitStack() as undo:
        copier = undo.enter_context(ThreadPoolExecutor(1))
        made: list[Rank] = []

        def make(engine: Hangs, patience_s: float) -> Rank:
            made.append(Rank(engine, patience_s, copier, undo))
            return made[-1]

        yield make
        for rank in made:
            rank.running.cancel()
            await asyncio.wait([rank.running])


async def abandoned(counters: Counters) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not counters.value("batches_abandoned"):  # noqa: ASYNC110  (counted by the scheduler's task)
            await asyncio.sleep(0)
    for _ in range(3):  # until what follows in the same task is done
        await asyncio.sleep(0)


async def test_an_owner_whose_deadline_has_passed_is_not_told(rank_of: MakeRank) -> None:
    """It has given the request up by itself."""
    rank = rank_of(Hangs(), 0.01)
    await abandoned(rank.counters)
    assert (rank.failures(), rank.counters.value("batches_abandoned")) == ([], 1)
    assert rank.engine.ended.is_set()


async def test_an_owner_that_still_waits_is_told(rank_of: MakeRank) -> None:
    rank = rank_of(CancelsItself(), FOR_EVER_S)
    await abandoned(rank.counters)
    [problem] = rank.failures()
    assert "the engine gave it up" in problem
    assert rank.counters.value("batches_abandoned") == 1


async def test_a_scheduler_that_is_cancelled_takes_its_engine_s_call_with_it(rank_of: MakeRank) -> None:
    rank = rank_of(Hangs(), FOR_EVER_S)
    async with asyncio.timeout(DEADLINE_S):
        await rank.engine.called.wait()
        rank.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rank.running
        await rank.engine.ended.wait()
    assert rank.counters.value("batches_abandoned") == 0
