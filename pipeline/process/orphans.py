"""Processes that others have started and left, whose exit statuses a container's PID 1 has to take."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

PERIOD_S = 1.0


def reap(ours: Collection[int]) -> list[int]:
    """Take the exit statuses of ended children that are not `ours`; their pids.

    Stops at an ended one of ours, which its owner is about to wait for: the kernel names one at a time.
    """
    reaped: list[int] = []
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # there are no children
            return reaped
        if found is None or found.si_pid in ours:
            return reaped
        os.waitid(os.P_PID, found.si_pid, os.WEXITED)
        reaped.append(found.si_pid)


@asynccontextmanager
async def reaping(ours: Callable[[], Collection[int]]) -> AsyncIterator[None]:
    """Do so every PERIOD_S within the block, where this process is PID 1. ours: of now."""
    if os.getpid() != 1:
        yield
        return
    task = asyncio.create_task(_reaping(ours), name="orphans")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _reaping(ours: Callable[[], Collection[int]]) -> None:
    while True:
        reap(ours())
        await asyncio.sleep(PERIOD_S)
