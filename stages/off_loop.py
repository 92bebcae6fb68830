"""Runs work in threads, and waits for its end even when the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from tensorferry.codecs.errors import text_of

T = TypeVar("T")


def contained(work: Callable[[], T]) -> T:
    """Do the work of a plug-in. StopIteration, and what is not an Exception, becomes RuntimeError: a future does not
    take StopIteration, so its task would wait for ever, and SystemExit would end the event loop."""
    try:
        return work()
    except BaseException as problem:  # raised by the plug-in, as nothing interrupts this thread
        if isinstance(problem, Exception) and not isinstance(problem, StopIteration):
            raise
        raise RuntimeError(f"{type(problem).__name__}: {text_of(problem)}") from problem


async def run_to_end(executor: Executor, work: Callable[[], T]) -> T:
    """Run `work` in a thread; when the caller is cancelled, wait for the thread first.

    A thread that writes into a leased range must be done before the lease's block ends. Otherwise the range would be
    lent again while the thread still writes.

    Raises what `work` raises, as `contained` does.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, contained, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:  # a second cancellation: still wait
                continue
        if not future.cancelled():
            future.exception()  # retrieved, so that it is not logged; the cancellation goes on
        raise
