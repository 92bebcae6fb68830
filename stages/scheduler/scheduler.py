"""Scheduler ranks: collect a request's embeddings in item order, admit it under a token budget, run it, report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Buffer
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.process.run_process import Stop
from tensorferry.pipeline.process.stage import Stage
from tensorferry.pipeline.process.start_stage import opened
from tensorferry.stages.engines.base import Engine
from tensorferry.stages.engines.registry import make_engine
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.scheduler.backlog import Backlog, CompleteRequest
from tensorferry.stages.scheduler.collector import Collector
from tensorferry.stages.scheduler.engine_call import EngineCall
from tensorferry.stages.scheduler.replies import Replies
from tensorferry.stages.scheduler.splice import Answer

log = structlog.get_logger()

SWEEP_PERIOD_S = 1.0


async def main(deployment: Deployment, rank: int, stop: Stop) -> None:
    """Run scheduler rank `rank` until `stop` drains it."""
    engine = make_engine(deployment.scheduler)  # before any peer hears of this process: it may take its time
    async with opened(deployment, "scheduler", rank) as stage:
        copier = stage.channels.enter_context(ThreadPoolExecutor(1, "copy"))
        scheduler = Scheduler(stage, engine, copier)
        with stage.running(stage.serve(scheduler), scheduler.run(), scheduler.sweep()):
            stage.peers.open()
            stop.announce_ready()
            await stop.wait_draining()
            await scheduler.drain()


class Scheduler:
    """See the module. A request passes `take`, the collector, the backlog, `run` and `_reply`."""

    def __init__(self, stage: Stage, engine: Engine, copier: Executor) -> None:
        self._stage = stage
        self._finished = FinishedRequests(stage.deployment.limits.request_timeout_s)
        self._replies = Replies(stage, self._finished)
        self._backlog = Backlog(stage.deployment.scheduler.batch_tokens, self._is_finished)
        self._collector = Collector(stage, copier, self._finished, self._backlog, self._replies)
        name = stage.deployment.scheduler.engine
        self._engine = EngineCall(engine, name, stage.counters, self._finished, stage.outlive)
        self._busy_since: float | None = None

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
        return len(self._collector.pending) + self._backlog.waiting + len(self._backlog.running)

    def unfinished(self) -> int:
        """What `drain` waits for: requests that are complete, and embeddings that are being copied."""
        return self._backlog.unfinished

    def busy_since(self) -> float | None:
        return self._busy_since

    def gauges(self) -> Mapping[str, float]:
        return {"queued": self._backlog.waiting}

    def connection_mended(self, peer: Peer) -> None:
        """Nothing: `Peers` sends its reports again."""

    # --- from receive to reply

    def _admit(self, admit: wire.Admit) -> None:
        if not self._stage.peers.knows(admit.owner):
            self._stage.counters.count("messages_of_strangers")
        elif self._finished.is_finished(admit.request, admit.attempt):
            self._stage.counters.count("admits_late")
        else:
            self._collector.admit(admit)
            self._engine.cancel_if_over(self._backlog.running)  # an older attempt may be running

    def _give_up(self, request: bytes, attempt: int) -> None:
        """Nobody waits for this attempt any more, nor for an older one."""
        self._collector.forget(request, attempt)
        self._engine.cancel_if_over(self._backlog.running)

    async def run(self) -> None:
        """Take as many complete requests as the token budget allows, run them, and answer each; for ever."""
        while True:
            await self._backlog.arrives()
            with self._backlog.batch() as batch:
                if batch:
                    self._busy_since = time.monotonic()
                    started_ns = time.monotonic_ns()
                    answers = await self._engine.answers(batch)
                    for one, result in zip(batch, answers, strict=True):
                        self._reply(one, result, started_ns)
                    self._busy_since = None

    def _reply(self, one: CompleteRequest, result: object, started_ns: int) -> None:
        """Tell the owner what the engine answered, unless the request was given up meanwhile."""
        if self._is_finished(one):
            return
        try:
            if isinstance(result, Exception):
                raise result
            answer = Answer.of(result, len(one.admit.spans))
        except Exception as problem:
            self._replies.failed(one.admit, problem)
        else:
            self._replies.done(one.admit, answer, {**one.marks, "running": started_ns})

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
        await self._backlog.join()

    def _is_finished(self, one: CompleteRequest) -> bool:
        return self._finished.is_finished(one.admit.request, one.admit.attempt)
