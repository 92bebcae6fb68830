"""Requests at an engine that streams: as many as it has capacity for, and the others in line before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Protocol

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import text_of
from tensorferry.stages.engines.base import EngineDied, StreamingEngine
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.scheduler.answer import Answer, BadAnswer
from tensorferry.stages.scheduler.engine_side import CompleteRequest
from tensorferry.stages.scheduler.waiting import Waiting

COALESCE_S = 0.005  #: an owner is told of an answer this often at most; what comes meanwhile travels together
AGAIN_S = 0.05  #: after which one whose queue was full is told again


class Owners(Protocol):
    """Who hears what becomes of a request. None of these raises, nor waits."""

    @property
    def origin(self) -> wire.Origin:
        """Of this rank."""
        ...

    def is_over(self, one: CompleteRequest) -> bool:
        """Whether nobody waits for it any more."""
        ...

    def delta(self, admit: wire.Admit, delta: wire.Delta) -> bool:
        """False: the owner's queue is full, and nothing was sent."""
        ...

    def done(self, admit: wire.Admit, answer: Answer, marks: dict[str, int]) -> None: ...

    def failed(self, admit: wire.Admit, problem: Exception) -> None: ...

    def expired(self, admit: wire.Admit) -> None:
        """Its deadline has passed."""
        ...


class Streams:
    """See the module, and `EngineSide`."""

    def __init__(
        self, engine: StreamingEngine, owners: Owners, watch: Watch, start: Callable[..., asyncio.Task[None]]
    ) -> None:
        """start: `create_task` of the group that ends the process when one of its tasks raises."""
        self._engine, self._owners, self._watch, self._start = engine, owners, watch, start
        self._waiting: Waiting[CompleteRequest] = Waiting()
        self._running: dict[CompleteRequest, asyncio.Task[None]] = {}
        self._tellers: dict[CompleteRequest, _Teller] = {}
        self._copying = 0
        self._tokens = 0  #: of the running ones
        self._progress_s: float | None = None  #: when the engine was seen to move
        self._idle = asyncio.Event()

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def unfinished(self) -> int:
        return self._copying + self.in_flight

    @property
    def busy_since(self) -> float | None:
        return self._progress_s if self._running else None

    def gauges(self) -> Mapping[str, float]:
        return {"queued": len(self._waiting), "running": len(self._running), "running_tokens": self._tokens}

    def copy_began(self) -> None:
        self._copying += 1

    def copy_ended(self) -> None:
        self._copying -= 1
        self._idle.set()

    def add(self, request: CompleteRequest) -> None:
        admit = request.admit
        self._waiting.put(request, priority=admit.priority, tenant=admit.tenant, cost=request.cost)
        self._fill()

    def drop_over(self) -> None:
        self._waiting.drop(self._owners.is_over)
        for one, task in self._running.items():
            if self._owners.is_over(one):
                task.cancel()
        self._fill()

    def tell_again(self, owner: int) -> None:
        for one, teller in self._tellers.items():
            if one.admit.owner.epoch == owner:
                teller.tell_again()

    async def run(self) -> None:
        """Nothing: requests run when they are added, or when there is room for them."""

    async def join(self) -> None:
        while self.unfinished:
            self._idle.clear()
            await self._idle.wait()

    # --- one request

    def _fill(self) -> None:
        """Begin as many as there is room for. One that is larger than the engine's capacity runs alone."""
        requests, tokens = self._engine.capacity
        while (first := self._waiting.first()) is not None:
            cost = first[1]
            if self._running and (len(self._running) >= requests or self._tokens + cost.tokens > tokens):
                break
            one = self._waiting.take()
            self._tokens += cost.tokens
            if not self._running:
                self._progress_s = time.monotonic()
            self._running[one] = task = self._start(self._answer(one), name="answer")
            task.add_done_callback(partial(self._ended, one))  # also of one that was cancelled before its first step
        self._idle.set()

    def _ended(self, one: CompleteRequest, task: asyncio.Task[None]) -> None:
        del self._running[one]
        self._tokens -= one.cost.tokens
        self._fill()

    async def _answer(self, one: CompleteRequest) -> None:
        """Until its answer is whole, its deadline has passed, or it is cancelled, which closes the engine's
        generator."""
        admit = one.admit
        own = self._owners.origin.rank
        tells = own == min((each.rank for each in admit.schedulers), default=own)  # one of the group does
        answer = Answer(len(admit.items), admit.output_tokens, admit.stream and tells)
        teller = self._tellers[one] = _Teller(self._owners, admit, answer)
        limit = asyncio.timeout_at(one.request.deadline_ns / 1e9)
        began_ns = time.monotonic_ns()
        try:
            async with limit, aclosing(self._engine.submit(one.request)) as deltas:
                steps = aiter(deltas)
                while not answer.finish:
                    with self._watch.beside():  # an engine has threads of its own
                        delta = await self._watch.steps(lambda: anext(steps))
                    self._progress_s = time.monotonic()
                    answer.add(delta, time.monotonic_ns())
                    teller.tell()
            teller.flush()
            self._owners.done(admit, answer, {**one.marks, "running": began_ns})
        except EngineDied:
            raise
        except StopAsyncIteration:
            self._owners.failed(admit, BadAnswer("the engine's answer ended without a reason (`finish`)"))
        except SystemExit as problem:  # else it would end this process
            self._owners.failed(admit, RuntimeError(f"SystemExit: {text_of(problem)}"))
        except Exception as problem:
            if limit.expired():
                self._owners.expired(admit)
            else:
                self._owners.failed(admit, problem)
        finally:
            del self._tellers[one]
            teller.close()


class _Teller:
    """Tells an owner of an answer as it comes: at once, or COALESCE_S after the last time."""

    def __init__(self, owners: Owners, admit: wire.Admit, answer: Answer) -> None:
        self._owners, self._admit, self._answer = owners, admit, answer
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

    def tell_again(self) -> None:
        self._answer.tell_again()
        self.tell()

    def flush(self) -> None:
        """All that has come, as far as the owner's queue has room. `Done` has the whole answer, too."""
        self.close()
        loop = asyncio.get_running_loop()
        while self._answer.stream and (delta := self._next()) is not None:
            if not self._owners.delta(self._admit, delta):
                self._answer.take_back()
                self._timer = loop.call_later(AGAIN_S, self.flush)
                return
        self._next_s = loop.time() + COALESCE_S

    def _next(self) -> wire.Delta | None:
        admit = self._admit
        return self._answer.next_delta(admit.request, admit.attempt, admit.owner.epoch, self._owners.origin)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
