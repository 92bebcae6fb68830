"""Backing off: a request that is answered `busy` is submitted again, after longer and longer pauses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from tensorferry.codecs.messages import Busy
from tensorferry.pipeline.client.answer_stream import Outcome
from tensorferry.pipeline.client.argument_checks import check_arguments
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.client.prompt_parts import Part

LONGEST_S = 5.0  #: the longest pause, even if the tokenizer asks for more
GROWTH = 1.5


async def submit_patiently(
    client: Client,
    parts: Sequence[Part],
    *,
    output_tokens: int = 0,
    deadline_s: float = 60.0,
    traceparent: str | None = None,
) -> Outcome:
    """Call `client.submit`, and again after each `Busy`. deadline_s bounds all attempts and pauses together.

    A pause is the tokenizer's `retry_ms`, times GROWTH for each pause before it, at most LONGEST_S. It is then
    multiplied by a random factor of 0.5 to 1.5, so that clients that were refused at once do not return at once.
    Returns the last `Busy` when no time is left for another pause, and every other outcome, a `retryable` failure
    included. Each attempt is a request with an id of its own. The attempt is cancelled with the caller. Raises
    what `Client.submit` raises.
    """
    check_arguments(output_tokens, deadline_s, None, traceparent)
    loop = asyncio.get_running_loop()
    until, longer = loop.time() + deadline_s, 1.0
    left_s = deadline_s
    while True:
        outcome = await client.submit(parts, output_tokens=output_tokens, deadline_s=left_s, traceparent=traceparent)
        if not isinstance(outcome, Busy):
            return outcome
        pause_s = min(LONGEST_S, longer * outcome.retry_ms / 1e3) * random.uniform(0.5, 1.5)
        if (left_s := until - loop.time() - pause_s) <= 0:
            return outcome
        longer *= GROWTH
        await asyncio.sleep(pause_s)
