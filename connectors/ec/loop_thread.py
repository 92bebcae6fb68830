"""An event loop in a thread of its own, beside an engine that has the process's main thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import structlog

log = structlog.get_logger()

CLOSE_S = 10.0  #: for the thread to end


class LoopThread:
    """Runs one coroutine until `close`, which cancels it; `call` hands work to its loop."""

    def __init__(
        self, name: str, run: Callable[[Callable[[], None]], Coroutine[Any, Any, None]], timeout_s: float = 30.0
    ) -> None:
        """Returns once the coroutine has called what it is given, raises what it raised before that."""
        self._run, self._loop = run, asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        if not self._started.wait(timeout_s):
            self.close()
            raise TimeoutError(f"{name} has not started within {timeout_s} s")
        self._check_started()

    def _check_started(self) -> None:
        if self._problem is not None:
            self._thread.join(CLOSE_S)
            raise self._problem

    def call(self, function: Callable[..., object], *arguments: object) -> bool:
        """Call it on the loop, soon; from any thread. False: the loop has ended."""
        with suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(function, *arguments)
            return True
        return False

    def close(self) -> None:
        """End the coroutine, and wait until its belongings are closed."""
        self.call(self._cancel)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("thread_does_not_end", thread=self._thread.name, waited_s=CLOSE_S)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _main(self) -> None:
        try:
            self._task = self._loop.create_task(self._run(self._started.set), name=self._thread.name)
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        except BaseException as problem:  # any kind: who started the thread waits to hear why it ended
            if self._started.is_set():
                log.exception("thread_failed", thread=self._thread.name)
            self._problem = problem
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._started.set()
