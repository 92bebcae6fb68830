"""Calls of the engine: one batch at a time, cancelled once nobody waits for any of its requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from tensorferry.codecs.errors import text_of
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.engines.base import Engine, EngineResult
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.scheduler.engine_side import CompleteRequest

log = structlog.get_logger()

Answers = Sequence[EngineResult | Exception]


class EngineCall:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        counters: Counters,
        finished: FinishedRequests,
        outlive: Callable[[BaseException], None],
    ) -> None:
        """name: of the engine in the deployment file. outlive: as `Stage.outlive`."""
        self._engine, self._counters, self._finished, self._outlive = engine, counters, finished, outlive
        self._watch = Watch("scheduler.engine", name, counters)
        self._call: asyncio.Task[Answers] | None = None

    async def answers(self, batch: Sequence[CompleteRequest]) -> Answers:
        """What the engine answers to each request of a batch, or why it did not."""
        patience_ns = max(one.request.deadline_ns for one in batch) - time.monotonic_ns()
        call = self._call = asyncio.create_task(self._ask(batch))
        late = False

        def give_up() -> None:
            nonlocal late
            late = True
            call.cancel()

        deadline = asyncio.get_running_loop().call_later(max(0, patience_ns) / 1e9, give_up)
        try:
            return await call
        except asyncio.CancelledError:
            if (ourselves := asyncio.current_task()) is not None and ourselves.cancelling():
                raise
            if late:  # their owners have given them up too, or are about to
                for one in batch:
                    self._finished.add(one.admit.request, one.admit.attempt)
            self._counters.count("batches_abandoned")
            log.info("abandoned", requests=len(batch))
            return [RuntimeError("the engine gave the request up")] * len(batch)  # for the owners that still wait
        except Exception as crash:
            self._outlive(crash)
            log.exception("engine_crashed", requests=len(batch))
            return [crash] * len(batch)
        finally:
            deadline.cancel()
            self._call = None

    def cancel_if_over(self, batch: Sequence[CompleteRequest]) -> None:
        """Cancel the call for this batch if nobody waits for any of its requests."""
        if self._call is not None and all(
            self._finished.is_finished(one.admit.request, one.admit.attempt) for one in batch
        ):
            self._call.cancel()

    async def _ask(self, batch: Sequence[CompleteRequest]) -> Answers:
        try:
            requests = [one.request for one in batch]
            with self._watch.beside():  # an engine has threads of its own
                answers = await self._watch.steps(lambda: self._engine.run(requests))
        except SystemExit as problem:  # else it would end this process
            raise RuntimeError(f"SystemExit: {text_of(problem)}") from problem
        if len(answers) != len(batch):
            raise ValueError(f"the engine gave {len(answers)} answers for {len(batch)} requests")
        return answers
