"""Requests at an engine that streams: as many as it has capacity for, and the others in line before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import text_of
from tensorferry.stages.engines.base import EngineDied, EngineRequest, StreamingEngine
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.scheduler.answer import Answer, BadAnswer
from tensorferry.stages.scheduler.waiting import Cost, Waiting

log = structlog.get_logger()

COALESCE_S = 0.005  #: an owner is told of an answer this often at most; what comes meanwhile travels together


@dataclass(slots=True, eq=False)
class Job:
    """A complete request, from when it is put in line until its answer is whole."""

    admit: wire.Admit
    request: EngineRequest
    cost: Cost
    marks: dict[str, int] = field(default_factory=dict)  #: step -> when it was reached


class Owners(Protocol):
    """Who hears what becomes of a job. None of these raises, nor waits."""

    origin: wire.Origin  #: of this rank

    def is_over(self, job: Job) -> bool:
        """Whether nobody waits for it any more."""
        ...

    def answering(self, job: Job, delta: wire.Delta) -> None: ...

    def answered(self, job: Job, answer: Answer) -> None: ...

    def failed(self, job: Job, problem: Exception) -> None: ...

    def expired(self, job: Job) -> None:
        """Its deadline has passed."""
        ...


class Streams:
    """See the module. `put` what is complete, `cancel` what nobody waits for."""

    def __init__(
        self, engine: StreamingEngine, owners: Owners, watch: Watch, start: Callable[..., asyncio.Task[None]]
    ) -> None:
        """start: `create_task` of the group that ends the process when one of its tasks raises."""
        self._engine, self._owners, self._watch, self._start = engine, owners, watch, start
        self._waiting: Waiting[Job] = Waiting()
        self._running: dict[Job, asyncio.Task[None]] = {}
        self._tokens = 0  #: of the running ones
        self._progress_s: float | None = None  #: when the engine was seen to move
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def busy_since(self) -> float | None:
        """Since when the engine has given no sign, while it has something to do."""
        return self._progress_s if self._running else None

    def put(self, job: Job) -> None:
        admit = job.admit
        self._waiting.put(job, priority=admit.priority, tenant=admit.tenant, cost=job.cost)
        self._idle.clear()
        self._fill()

    def drop_over(self) -> None:
        """Cancel all that nobody waits for any more."""
        self._waiting.drop(self._owners.is_over)
        for job, task in list(self._running.items()):
            if self._owners.is_over(job):
                task.cancel()
        self._fill()

    async def wait_idle(self) -> None:
        """Until everything that was put has ended."""
        await self._idle.wait()

    def _fill(self) -> None:
        """Begin as many as there is room for. One that is larger than the engine's capacity runs alone."""
        requests, tokens = self._engine.capacity
        while (first := self._waiting.first()) is not None:
            _, cost = first
            if self._running and (len(self._running) >= requests or self._tokens + cost.tokens > tokens):
                break
            job = self._waiting.take()
            self._tokens += cost.tokens
            if not self._running:
                self._progress_s = time.monotonic()
            self._running[job] = task = self._start(self._answer(job), name="answer")
            task.add_done_callback(partial(self._ended, job))  # also of one that was cancelled before its first step
        if not self._running and not self._waiting:
            self._idle.set()

    async def _answer(self, job: Job) -> None:
        """Until its answer is whole, its deadline has passed, or it is cancelled, which closes the engine's
        generator."""
        answer = Answer(len(job.admit.items), job.admit.output_tokens, job.admit.stream)
        teller = _Teller(self._owners, job, answer)
        limit = asyncio.timeout_at(job.request.deadline_ns / 1e9)
        try:
            job.marks["running"] = time.monotonic_ns()
            async with limit, aclosing(self._engine.submit(job.request)) as deltas:
                steps = aiter(deltas)
                while not answer.finish:
                    delta = await self._watch.steps(lambda: anext(steps))
                    self._progress_s = time.monotonic()
                    answer.add(delta, time.monotonic_ns())
                    teller.tell()
            job.marks["done"] = time.monotonic_ns()
            teller.flush()
            self._owners.answered(job, answer)
        except EngineDied:
            raise
        except StopAsyncIteration:
            self._owners.failed(job, BadAnswer("the engine's answer ended without a reason (`finish`)"))
        except SystemExit as problem:  # else it would end this process
            self._owners.failed(job, RuntimeError(f"SystemExit: {text_of(problem)}"))
        except Exception as problem:
            if limit.expired():
                self._owners.expired(job)
            else:
                self._owners.failed(job, problem)
        finally:
            teller.close()

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        del self._running[job]
        self._tokens -= job.cost.tokens
        self._fill()


class _Teller:
    """Tells an owner of an answer as it comes: at once, or COALESCE_S after the last time."""

    def __init__(self, owners: Owners, job: Job, answer: Answer) -> None:
        self._owners, self._job, self._answer = owners, job, answer
        self._next_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        """Something may have come."""
        if not self._answer.stream or not self._answer.untold or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_s:
            self.flush()
        else:
            self._timer = loop.call_at(self._next_s, self.flush)

    def flush(self) -> None:
        """All that has come."""
        self.close()
        if not self._answer.stream:
            return
        while (delta := self._next()) is not None:
            self._owners.answering(self._job, delta)
        self._next_s = asyncio.get_running_loop().time() + COALESCE_S

    def _next(self) -> wire.Delta | None:
        admit = self._job.admit
        return self._answer.next_delta(admit.request, admit.attempt, admit.owner.epoch, self._owners.origin)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
