"""The life of one of our processes: how it is asked to stop, how long it may take, and what its exit status says.

The first SIGINT or SIGTERM drains a process: it takes nothing new, finishes what it has, and ends. A second one
cancels it. A process that is not ready yet has nothing to drain, so the first cancels it. When the supervisor of
a stage process is gone, however it went, the process is cancelled and takes its own children with it.

Exit status: 0 drained, stopped before it was ready, or simply done; 1 an error (a line for what a user can be told,
a traceback for a bug), or not drained within its grace period; 130 cancelled. A process that does not answer even
to being cancelled prints where its threads are stuck, and is ended with status 1.
"""

from __future__ import annotations

import asyncio
import faulthandler
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from tensorferry.codecs.errors import FerryError, leaves
from tensorferry.pipeline.process.tether import Tether, kill_group

log = structlog.get_logger()

CANCELLED = 130
CANCEL_S = 5.0
_STDERR = 2


class Stop:
    """What a process's main is told of its end, and tells of its start."""

    def __init__(self, drain_s: float = 30.0, on_ready: Callable[[], None] = lambda: None) -> None:
        """drain_s: the grace period. on_ready: told once that the process is ready."""
        self.drain_s = drain_s
        self.ready = False
        self._on_ready = on_ready
        self._draining = asyncio.Event()

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    async def wait_draining(self) -> None:
        """Until the process should take nothing new, finish what it has, and return from its main."""
        await self._draining.wait()

    def drain(self) -> None:
        """Ask for that; what the first signal does."""
        self._draining.set()

    def announce_ready(self) -> None:
        """The process does what it is for from now on; whoever started it is told."""
        if not self.ready:
            self.ready = True
            self._on_ready()


def run_process(
    main: Callable[[Stop], Awaitable[None]],
    *,
    name: str,
    drain_s: float,
    cancel_s: float = CANCEL_S,
    tether: Tether | None = None,
    on_orphaned: Callable[[], object] = lambda: None,
) -> int:
    """Run `main` on an event loop of its own, in the main thread, to the end; returns the exit status.

    name: what the process is called in its last words. drain_s: the grace period of a drain. cancel_s: how long
    it may take to end once it is cancelled, or its main has returned. on_orphaned: what remains to be done where
    there is no supervisor any more to do it. A bug in `main` is raised, so that it keeps its traceback.
    """
    life = _Life(name, drain_s, cancel_s, tether)
    _take_all_descriptors()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(life.live(main))
    except (asyncio.CancelledError, KeyboardInterrupt):
        return CANCELLED if life.status is None else life.status
    except FerryError as problem:
        return life.failed(problem)
    except ExceptionGroup as group:
        if group.split(FerryError)[1] is not None:  # a bug is among them
            raise
        return life.failed(*leaves(group))
    finally:
        faulthandler.cancel_dump_traceback_later()
        if life.orphaned:
            try:
                on_orphaned()
            finally:
                kill_group()  # and so itself: nobody is there to ask for its exit status
    return life.status or 0


class _Life:
    """The signals, deadlines and outcome of `run_process`."""

    def __init__(self, name: str, drain_s: float, cancel_s: float, tether: Tether | None) -> None:
        self.status: int | None = None  #: what the exit status will be, once something has decided it
        self._name, self._cancel_s, self._tether = name, cancel_s, tether
        self._lost = False
        self._stop = Stop(drain_s, on_ready=self._ready)
        self._task: asyncio.Task[None] | None = None

    async def live(self, main: Callable[[Stop], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        if self._tether is not None:
            loop.add_signal_handler(signal.SIGHUP, self._orphan)
            self._tether.watch(lambda: self._call(loop, self._told), lambda: self._call(loop, self._orphan))
        try:
            await main(self._stop)
        except Exception as problem:
            problem.add_note(f"in {self._name}")
            raise
        finally:
            _end_within(self._cancel_s)

    def failed(self, *problems: BaseException) -> int:
        texts = list(dict.fromkeys(map(str, problems)))
        for text in texts:
            print(f"{self._name}: {text}", file=sys.stderr, flush=True)
        if self._tether is not None and not self._stop.ready:
            self._tether.explain("; ".join(texts))
        return 1

    def _ready(self) -> None:
        log.info("ready")
        if self._tether is not None:
            self._tether.announce()

    def _signalled(self, number: int) -> None:
        name, stop = signal.Signals(number).name, self._stop
        if stop.draining:
            self._cancel(CANCELLED, f"second signal, {name}")
            return
        stop.drain()
        if not stop.ready:
            self._cancel(0, f"{name} before it was ready")
            return
        log.info("asked_to_stop", signal=name, grace_s=stop.drain_s)
        asyncio.get_running_loop().call_later(stop.drain_s, self._cancel, 1, f"not drained within {stop.drain_s} s")
        _end_within(stop.drain_s + self._cancel_s)

    @property
    def orphaned(self) -> bool:
        return self._tether is not None and (self._lost or self._tether.cut)

    def _told(self) -> None:
        self._cancel(CANCELLED, "the supervisor says so")

    def _orphan(self) -> None:
        self._lost = True
        self._cancel(CANCELLED, "the supervisor is gone")

    def _cancel(self, status: int, reason: str) -> None:
        if self.status is None and self._task is not None and not self._task.done():
            self.status = status
            (log.warning if status else log.info)("cancelled", reason=reason)
            _end_within(self._cancel_s)
            self._task.cancel()

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is ending already
            loop.call_soon_threadsafe(function)


def _take_all_descriptors() -> None:
    """As many open files as we may have at all: the soft limit is low for the sake of select(), which we do not use,
    and at the limit ZeroMQ ends the process. Source: the `errno_assert` in `ipc_listener_t::accept`, libzmq 4.3.5."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _end_within(seconds: float) -> None:
    """Replace the deadline after which the process says where it is stuck and ends, whatever holds its threads."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        from uvloop import new_event_loop
    except ImportError:  # it is not made for every platform
        return asyncio.new_event_loop
    return new_event_loop
