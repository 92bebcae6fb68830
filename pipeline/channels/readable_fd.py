"""Waiting for a descriptor on the event loop."""

from __future__ import annotations

import asyncio


async def readable(fd: int) -> None:
    """Until `fd` can be read: data or a connection is there, its other end is closed, or its process has ended.

    At most one task may wait for a descriptor. The caller keeps it open until this has returned or was
    cancelled; then the loop has forgotten it.
    """
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
