"""Waiting for a GPU, and holding up neither it nor the event loop: for bytes to be written, or to reach the host.

Where no GPU writes neither ever waits: a lease is ready before it is sent, and a draft lies where messages are sent
from. A reader cannot know, though: a pool in host memory may have a GPU at work on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from tensorferry.codecs.errors import LeaseNotReady
from tensorferry.codecs.messages import Payload, Proxy
from tensorferry.codecs.pool.publisher import Draft
from tensorferry.codecs.pool.reader import Reader

LOOK_AGAIN_S = 0.0002  #: words and events change without a word to the event loop


def unready(reader: Reader, payloads: Iterable[Payload]) -> Proxy | None:
    """The first payload whose bytes are not written yet. Raises as `Reader.is_ready`, of whichever never will be."""
    proxies = (payload for payload in payloads if isinstance(payload, Proxy))
    late = [proxy for proxy in proxies if not reader.is_ready(proxy)]  # all of them: a later one may be poisoned
    return late[0] if late else None


async def wait_ready(
    reader: Reader, payloads: Iterable[Payload], patience_s: float, *, unless: Callable[[], bool] = lambda: False
) -> None:
    """Until all payloads can be opened, or `unless` says that nobody wants them any more.

    Raises LeaseNotReady, and as `Reader.is_ready` where they never can.
    """
    payloads = list(payloads)
    until = time.monotonic() + patience_s
    while not unless() and (late := unready(reader, payloads)) is not None:
        if time.monotonic() > until:
            raise LeaseNotReady(late.slot, late.generation, f"was not written within {patience_s:g} s")
        await asyncio.sleep(LOOK_AGAIN_S)


async def stage(ways: Callable[[], Iterable[tuple[Draft, int | None]]]) -> None:
    """Bring to the host what has to leave GPU memory inline, and wait until what is told of by message is complete;
    nothing may be awaited between this and the dispatch.

    ways: every draft with the column of a consumer that it goes to, as things are now: a consumer may lose its
    column, or a lesser one come, while the copy is under way.
    """
    while not all([draft.prepared(column) for draft, column in ways()]):  # noqa: ASYNC110  (all of them are begun)
        await asyncio.sleep(LOOK_AGAIN_S)
