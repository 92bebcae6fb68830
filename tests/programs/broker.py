"""A broker of a small pool: `broker.py SOCKET`. Prints the pool's nonce, and then why it refuses the first consumer."""

from __future__ import annotations

import asyncio
import sys

from structlog.testing import capture_logs

from tensorferry.codecs.pool.pool import Pool
from tensorferry.pipeline.pools.broker import Broker


async def serve(path: str) -> None:
    with Pool.create(1 << 16, 16) as pool, capture_logs() as logs:
        async with Broker(path, pool, lambda origin, column: print("admitted", flush=True)) as broker:
            print(pool.description.pool, flush=True)
            async with asyncio.timeout(20):
                while not broker.refused:  # noqa: ASYNC110 - what another process does sets no event
                    await asyncio.sleep(0.01)
    print(next(log["reason"] for log in logs if log["event"] == "consumer_refused"), flush=True)


asyncio.run(serve(sys.argv[1]))
