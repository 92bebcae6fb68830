"""Waits for a GPU to write bytes, or to copy them to the host, without blocking the GPU or the event loop.

Without a GPU nothing waits: a lease is ready before it is sent, and a draft is in host memory. A reader waits for host
memory too, because a GPU may write into a pool there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from tensorferry.codecs.errors import LeaseNotReady
from tensorferry.codecs.messages import Payload, Proxy
from tensorferry.codecs.pool.publisher import Draft
from tensorferry.codecs.pool.reader import Reader

LOOK_AGAIN_S = 0.0002  #: the event loop hears nothing of words and events that change


def unready(reader: Reader, payloads: Iterable[Payload]) -> Proxy | None:
    """The first payload whose bytes are not written yet. Raises as `Reader.is_ready` if one never will be."""
    proxies = (payload for payload in payloads if isinstance(payload, Proxy))
    late = [proxy for proxy in proxies if not reader.is_ready(proxy)]  # all of them: a later one may be poisoned
    return late[0] if late else None


async def wait_ready(
    reader: Reader, payloads: Iterable[Payload], patience_s: float, *, unless: Callable[[], bool] = lambda: False
) -> None:
    """Until all payloads can be opened, or `unless` returns True because they are not wanted any more.

    Raises LeaseNotReady after `patience_s`, and as `Reader.is_ready` if a payload can never be opened.
    """
    payloads = list(payloads)
    until = time.monotonic() + patience_s
    while not unless() and (late := unready(reader, payloads)) is not None:
        if time.monotonic() > until:
            raise LeaseNotReady(late.slot, late.generation, f"was not written within {patience_s:g} s")
        await asyncio.sleep(LOOK_AGAIN_S)


async def stage(ways: Callable[[], Iterable[tuple[Draft, int | None]]]) -> None:
    """Copy to the host what has to leave GPU memory inline, and wait until drafts that are announced by message are
    complete. Nothing may be awaited between this and the dispatch.

    ways: returns every draft with the column of each present consumer. It is called again and again, because a
    consumer may lose its column while a copy is under way.
    """
    while not all([draft.prepared(column) for draft, column in ways()]):  # noqa: ASYNC110  (all of them are begun)
        await asyncio.sleep(LOOK_AGAIN_S)
