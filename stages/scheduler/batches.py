"""Requests at an engine that answers batches: as many together as the token budget allows."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tensorferry.pipeline.process.stage import Stage
from tensorferry.stages.engines.base import Engine
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.scheduler.answer import Answer
from tensorferry.stages.scheduler.backlog import Backlog
from tensorferry.stages.scheduler.engine_call import EngineCall
from tensorferry.stages.scheduler.engine_side import CompleteRequest
from tensorferry.stages.scheduler.replies import Replies


class Batches:
    """See the module, and `EngineSide`."""

    def __init__(self, stage: Stage, engine: Engine, finished: FinishedRequests, replies: Replies) -> None:
        spec = stage.deployment.scheduler
        self._replies = replies
        self._backlog = Backlog(spec.batch_tokens, replies.is_over)
        self._engine = EngineCall(engine, spec.engine, stage.counters, finished, stage.outlive)
        self._busy_since: float | None = None
        self.add, self.join = self._backlog.add, self._backlog.join
        self.copy_began, self.copy_ended = self._backlog.copy_began, self._backlog.copy_ended

    @property
    def busy_since(self) -> float | None:
        return self._busy_since

    @property
    def in_flight(self) -> int:
        return self._backlog.waiting + len(self._backlog.running)

    @property
    def unfinished(self) -> int:
        return self._backlog.unfinished

    def gauges(self) -> Mapping[str, float]:
        return {"queued": self._backlog.waiting}

    def tell_again(self, owner: int) -> None:
        """Nothing: nobody is told of an answer before its end."""

    def drop_over(self) -> None:
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
        if self._replies.is_over(one):
            return
        try:
            if isinstance(result, Exception):
                raise result
            answer = Answer.whole(result, len(one.admit.items))
        except Exception as problem:
            self._replies.failed(one.admit, problem)
        else:
            self._replies.done(one.admit, answer, {**one.marks, "running": started_ns})
