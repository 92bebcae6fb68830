"""Backing off: a request that is told `busy` is offered again, later and later, for as long as it has time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from tensorferry.codecs.messages import Busy
from tensorferry.pipeline.client.argument_checks import check_arguments
from tensorferry.pipeline.client.client import Client, Outcome
from tensorferry.pipeline.client.prompt_parts import Part

LONGEST_S = 5.0  #: of a pause, whatever the tokenizer says
GROWTH = 1.5


async def submit_patiently(
    client: Client,
    parts: Sequence[Part],
    *,
    output_tokens: int = 0,
    deadline_s: float = 60.0,
    traceparent: str | None = None,
) -> Outcome:
    """`client.submit`, and again after each `Busy`, until deadline_s is over: of all attempts and pauses together.

    The pause is what the tokenizer said, longer by GROWTH each time, at most LONGEST_S, and a random half of it more or
    less, so that many who were told `busy` at once do not come back at once. Returns the last `Busy` once there is no
    time for another pause; every other outcome as it is, also a failure that is `retryable`. Each attempt is a request
    with an id of its own. Cancelled with the caller. Raises what `Client.submit` raises.
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
