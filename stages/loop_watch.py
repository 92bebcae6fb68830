"""Finds plug-ins that block the event loop, for which heartbeats, answers and all requests wait.

Each step of a coroutine is timed, whether it sleeps or works. While a call runs in a thread, the loop looks at the
clock every TICK_S. If it is late by BLOCKED_S, and other threads used CPU time meanwhile, then a thread kept Python's
lock. A process that was stopped is late too, but its threads used no CPU time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog

from tensorferry.pipeline.telemetry.counters import Counters

log = structlog.get_logger()

BLOCKED_S = 0.25  #: of a heartbeat's 1 s; a step of our own takes a few milliseconds
TICK_S = 0.1

T = TypeVar("T")


@dataclass(slots=True)
class Watch:
    """Watches the calls of one processor, adapter or engine of this process, on one event loop."""

    key: str  #: of the deployment file, under which the plug-in is named
    name: str  #: its value there
    counters: Counters
    _running: int = 0  #: calls in threads
    _began_s: float = 0.0  #: the first of these
    _ticking: bool = False
    _since: _Clocks = field(default_factory=lambda: _Clocks.now())  #: when the tick was set
    _longest_s: float = 0.0

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Around the wait for a call that runs in a thread. Costs a microsecond, as ticks go on between calls."""
        self._running += 1
        if self._running == 1:
            self._began_s = time.monotonic()
            if not self._ticking:
                self._tick()
        try:
            yield
        finally:
            if time.monotonic() - self._since.wall_s > TICK_S + BLOCKED_S:  # the tick is late, and has not run yet
                self._look()
            self._running -= 1

    def steps(self, call: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """An awaitable for what `call` returns. Each of its steps is timed."""

        async def run() -> T:
            return await call()

        return _Steps(run().__await__(), self.held)

    def held(self, seconds: float) -> None:
        """Count that the plug-in blocked the loop for so long, and log the first time and each longer one."""
        if seconds < BLOCKED_S:
            return
        self.counters.count("plugin_blocks")
        self.counters.count("plugin_blocked_ms", round(seconds * 1e3))
        if seconds > self._longest_s:
            self._longest_s = seconds
            remedy = "let long work run in a thread or process, without Python's lock; import at the module's top"
            log.warning(
                "event_loop_blocked", key=self.key, plugin=self.name, held_ms=round(seconds * 1e3), remedy=remedy
            )

    def _tick(self) -> None:
        if self._ticking:
            self._look()
        self._ticking = bool(self._running)
        if self._ticking:
            self._since = _Clocks.now()
            asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _look(self) -> None:
        """See whether the tick is late while a call ran and other threads worked, and start to count again."""
        before, self._since = self._since, _Clocks.now()
        late_s = self._since.wall_s - max(before.wall_s + TICK_S, self._began_s)
        others_s = (self._since.process_s - before.process_s) - (self._since.thread_s - before.thread_s)
        if self._running and others_s >= max(
            BLOCKED_S / 2, late_s / 10
        ):  # on a busy machine they get a part of the time
            self.held(late_s)


@dataclass(frozen=True, slots=True)
class _Clocks:
    wall_s: float
    process_s: float  #: CPU time of all threads
    thread_s: float  #: and of the event loop's

    @classmethod
    def now(cls) -> _Clocks:
        return cls(time.monotonic(), time.process_time(), time.thread_time())


@dataclass(frozen=True, slots=True)
class _Steps(Generic[T]):
    """An awaitable that reports how long each step of another takes."""

    inner: Generator[Any, Any, T]
    tell: Callable[[float], None]

    def __await__(self) -> Generator[Any, Any, T]:
        problem: BaseException | None = None
        while True:
            began = time.monotonic()
            try:
                awaited = next(self.inner) if problem is None else self.inner.throw(problem)
            except StopIteration as done:
                answer: T = done.value
                return answer
            finally:
                self.tell(time.monotonic() - began)
            problem = None
            try:
                yield awaited
            except BaseException as raised:  # mostly CancelledError, for the coroutine inside
                problem = raised
