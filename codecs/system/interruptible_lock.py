"""A lock whose holder may be interrupted: by the garbage collector, and by a signal.

A block that is never left (a coroutine or generator in a cycle) is ended by the collector, in the thread that happens
to allocate, so perhaps inside the very lock that the block's end needs. Waiting for it there would be a deadlock, and
letting it in would find the data half written. So the end of a block is put off, and any other call is refused.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any


class Lock:
    """`with lock():` is a critical section. `run` is for what the collector may call.

    The sections are entered and left in C, so that a KeyboardInterrupt cannot come between that and their block.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_mine: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # as Condition asks
        self._late: deque[Callable[[], object]] = deque()

    def __call__(self) -> AbstractContextManager[Any]:
        """Raises RuntimeError in a finaliser that the collector runs inside the lock."""
        if self._is_mine():
            raise RuntimeError("called by a finaliser, within another call of the same pool or reader")
        if self._late:
            with self._lock:
                self._catch_up()
        return self._lock

    def run(self, work: Callable[[], object]) -> None:
        """Do `work` under the lock: now, or if this thread holds it already, before its next section."""
        if self._is_mine():
            self._late.append(work)
        else:
            with self():
                work()

    def _catch_up(self) -> None:
        while self._late:
            work = self._late.popleft()
            try:
                work()
            except Exception as problem:  # no caller could catch it: the block was left to the collector
                report: Any = SimpleNamespace(
                    exc_type=type(problem),
                    exc_value=problem,
                    exc_traceback=problem.__traceback__,
                    err_msg="a block that was never ended could not be ended",
                    object=work,
                )
                sys.unraisablehook(report)
