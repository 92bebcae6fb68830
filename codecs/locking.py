"""A lock whose holder may be interrupted by the garbage collector.

A block that nobody ends (a coroutine or generator in a cycle) is ended by the collector, in whatever thread happens to
allocate, so perhaps inside the very lock that the block's end needs. Waiting for it there would be waiting for oneself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Lock:
    """A mutex. `run` is for what the collector may call: done now, or if this thread holds it, before it lets go."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._late: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        while self._late and self._depth == 1:
            self._late.popleft()()
        self._depth -= 1
        self._lock.release()

    def run(self, work: Callable[[], object]) -> None:
        """Do `work` under the lock."""
        if self._depth and self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            self._late.append(work)
        else:
            with self:
                work()
