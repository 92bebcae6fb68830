"""What sharing a call of the encoder is worth to requests of one small image each, and what needing none is."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.cpu import START_S, running
from benchmarks.results import Outcome, Scale, measurement
from tensorferry.codecs.messages import Result
from tensorferry.pipeline.client.client import Client

_REQUESTS = 256  #: a turn
_IN_FLIGHT = 32

#: The contenders, by how their encoder differs.
ENCODERS = {
    "each alone": "batch_patches: 0",
    "batched": "batch_wait_ms: 0",
    "batched, and waiting 1 ms": "batch_wait_ms: 1",
    "found in the cache": "cache_mb: 16",
}

DEPLOYMENT = """
name: batches-%d
transport: shm
runtime_dir: {folder}/run
model: {{adapter: patch-vit}}
tokenizer: {{workers: 1, processor: "benchmarks.plugins:SmallImage"}}
encoder: {{ranks: 1, %s}}
pool: {{budget_mb: 128}}
embeddings_pool: {{budget_mb: 64}}
telemetry: {{log_level: warning}}
"""


def batches(scale: Scale) -> Outcome:
    """One tokenizer, encoder and scheduler each; requests of one image of 64 patches, 32 in flight."""
    found = asyncio.run(_measured(scale))
    return Outcome(
        "batches",
        "requests of one image of 64 patches, patch-vit, 32 in flight",
        tuple(measurement(name, "requests/s", values) for name, values in found.items()),
    )


async def _measured(scale: Scale) -> dict[str, list[float]]:
    """Requests a second of each turn; the contenders are all up, and take turns."""
    contenders = dict(list(ENCODERS.items())[: len(ENCODERS) if scale.shrink == 1 else 1])
    found: dict[str, list[float]] = {name: [] for name in contenders}
    async with AsyncExitStack() as undo:
        clients: dict[str, Client] = {}
        for number, (name, encoder) in enumerate(contenders.items()):
            folder = Path(undo.enter_context(TemporaryDirectory(prefix="ferry-")))
            deployment = undo.enter_context(running(folder, DEPLOYMENT % (number, encoder)))
            clients[name] = await undo.enter_async_context(Client.connect(deployment, timeout_s=START_S))
            await _requests(clients[name], scale.of(_REQUESTS))
        for _ in range(max(1, scale.rounds // 4)):
            for name, client in clients.items():
                count = scale.of(_REQUESTS)
                began = time.perf_counter()
                await _requests(client, count)
                found[name].append(count / (time.perf_counter() - began))
    return found


async def _requests(client: Client, count: int) -> None:
    free = asyncio.Semaphore(_IN_FLIGHT)

    async def request() -> None:
        async with free:
            outcome = await client.submit(["What is in the picture? ", b"an image"], output_tokens=16)
            if not isinstance(outcome, Result):
                raise RuntimeError(f"not a result: {outcome}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(request())
