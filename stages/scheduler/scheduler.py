"""Scheduler ranks: collect a request's embeddings in item order, admit it under a token budget, run it, report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import cast

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Buffer
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.process.run_process import Stop
from tensorferry.pipeline.process.stage import Stage
from tensorferry.pipeline.process.start_stage import opened
from tensorferry.stages.engines.base import Engine, EngineDied, StreamingEngine, is_streaming
from tensorferry.stages.engines.registry import make_engine
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.scheduler.batches import Batches
from tensorferry.stages.scheduler.collector import Collector
from tensorferry.stages.scheduler.engine_side import EngineSide
from tensorferry.stages.scheduler.replies import Replies
from tensorferry.stages.scheduler.streams import Streams

log = structlog.get_logger()

SWEEP_PERIOD_S = 1.0


async def main(deployment: Deployment, rank: int, stop: Stop) -> None:
    """Run scheduler rank `rank` until `stop` drains it."""
    engine = make_engine(deployment.scheduler)  # before any peer hears of this process: it may take its time
    async with started(engine, deployment.timeouts.start_s), opened(deployment, "scheduler", rank) as stage:
        copier = stage.channels.enter_context(ThreadPoolExecutor(1, "copy"))
        scheduler = Scheduler(stage, engine, copier)
        with stage.running(stage.serve(scheduler), scheduler.run(), scheduler.sweep()):
            stage.peers.open()
            stop.announce_ready()
            await stop.wait_draining()
            await scheduler.drain()


@asynccontextmanager
async def started(engine: Engine | StreamingEngine, start_s: float) -> AsyncIterator[None]:
    """An engine that is able to answer, for the length of the block. Raises ConfigError, EngineDied."""
    if not is_streaming(engine):
        yield
        return
    try:
        try:
            async with asyncio.timeout(start_s):
                await engine.start()
        except TimeoutError:
            raise EngineDied(f"it was not ready after {start_s:g} s (timeouts.start_s)") from None
        yield
    finally:
        await engine.close()


def engine_side(
    stage: Stage, engine: Engine | StreamingEngine, finished: FinishedRequests, replies: Replies
) -> EngineSide:
    if is_streaming(engine):
        watch = Watch("scheduler.engine", stage.deployment.scheduler.engine, stage.counters)
        return Streams(engine, replies, watch, stage.tasks.create_task)
    return Batches(stage, cast(Engine, engine), finished, replies)


class Scheduler:
    """See the module. A request passes `take`, the collector, the engine side and the replies."""

    def __init__(self, stage: Stage, engine: Engine | StreamingEngine, copier: Executor) -> None:
        self._stage = stage
        self._finished = FinishedRequests(stage.deployment.limits.request_timeout_s)
        self._replies = Replies(stage, self._finished)
        self._engine = engine_side(stage, engine, self._finished, self._replies)
        self._collector = Collector(stage, copier, self._finished, self._engine, self._replies)

    # --- what its process asks: see `Work`

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> bool:
        match message:
            case wire.Admit() as admit:
                self._admit(admit)
            case wire.Embeddings() as embeddings:
                self._collector.arrived(embeddings, frames)
            case wire.Cancel(request=request, attempt=attempt):
                self._give_up(request, attempt)
            case _:
                return False
        return True

    def in_flight(self) -> int:
        return len(self._collector.pending) + self._engine.in_flight

    def unfinished(self) -> int:
        """What `drain` waits for: requests that are complete, and embeddings that are being copied."""
        return self._engine.unfinished

    def busy_since(self) -> float | None:
        return self._engine.busy_since

    def gauges(self) -> Mapping[str, float]:
        return self._engine.gauges()

    def connection_mended(self, peer: Peer) -> None:
        """Tell it again of the answers that run. `Peers` sends its reports again."""
        self._engine.tell_again(peer.epoch)

    # --- from receive to reply

    def _admit(self, admit: wire.Admit) -> None:
        if not self._stage.peers.knows(admit.owner):
            self._stage.counters.count("messages_unknown_peer")
        elif self._finished.is_finished(admit.request, admit.attempt):
            self._stage.counters.count("admits_late")
        else:
            self._collector.admit(admit)
            if admit.attempt:  # an older one may wait, or run
                self._engine.drop_over()

    def _give_up(self, request: bytes, attempt: int) -> None:
        """Nobody waits for this attempt any more, nor for an older one."""
        self._collector.forget(request, attempt)
        self._engine.drop_over()

    async def run(self) -> None:
        """Have the engine answer what is complete, for ever. Raises EngineDied."""
        await self._engine.run()

    async def sweep(self) -> None:
        """Drop what can never become complete, once a second, for ever."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self._collector.expire()

    async def drain(self) -> None:
        """Finish what is complete, or may become so by embeddings that are being copied. The owners of all other
        requests have given them up: they left before this process."""
        self._stage.peers.tell(wire.Drain(self._stage.origin))
        log.info("draining", in_flight=self.in_flight())
        await self._engine.join()
