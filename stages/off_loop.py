"""Work off the event loop that is never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from tensorferry.codecs.errors import text_of

T = TypeVar("T")


def contained(work: Callable[[], T]) -> T:
    """Do the work of a plug-in. RuntimeError stands for what would go further than the one who asked for it: no future
    takes a StopIteration, so that its task would wait for ever, and a SystemExit ends the event loop."""
    try:
        return work()
    except BaseException as problem:  # a plug-in's, in a thread that nobody interrupts
        if isinstance(problem, Exception) and not isinstance(problem, StopIteration):
            raise
        raise RuntimeError(f"{type(problem).__name__}: {text_of(problem)}") from problem


async def run_to_end(executor: Executor, work: Callable[[], T]) -> T:
    """Run `work` in a thread; when the caller is cancelled, wait for the thread first.

    A thread that writes into a leased range must be done with it before the lease's block ends, whatever
    became of the task that started it: otherwise the range is lent again under the writer's hands.

    Whatever it raises is an exception that a task can have: see `contained`.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, contained, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:  # asked again: still wait
                continue
        if not future.cancelled():
            future.exception()  # retrieved: the caller's cancellation is what counts
        raise
