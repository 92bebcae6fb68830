"""The wait for room in the pool, before a request holds any of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tensorferry.codecs.pool.publisher import Layout
from tensorferry.pipeline.process.stage import Stage

LOOK_AGAIN_S = 0.002
GROWN_S = 0.0005  #: making a chunk takes about twice as long


async def wait_for_room(stage: Stage, layouts: Sequence[Layout]) -> None:
    """Until the pool has room for all tensors of a request, or the wait has lasted as long as the deployment allows.

    Requests wait with `pool.when_full: wait`, and for `pool.grow_wait_ms` while an elastic pool grows for them. They
    hold nothing meanwhile, so they cannot lock each other out.
    """
    spec, publisher, counters = stage.deployment.pool, stage.publisher, stage.counters
    waits, elastic = spec.when_full == "wait", stage.deployment.transport == "cuda_vmm"
    if not (waits or elastic) or publisher.fits(layouts):
        return
    if elastic and publisher.growing(layouts):
        counters.count("growth_waits")
        until_ns = time.monotonic_ns() + spec.grow_wait_ms * 1_000_000
        while time.monotonic_ns() < until_ns and publisher.growing(layouts):
            await asyncio.sleep(GROWN_S)
            if publisher.fits(layouts):
                return
    if not waits:
        return
    counters.count("pool_waits")
    until_ns = time.monotonic_ns() + spec.wait_ms * 1_000_000
    # Acknowledgements are words in memory, which wake nobody.
    while time.monotonic_ns() < until_ns and not publisher.fits(layouts):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_AGAIN_S)
