"""One encoder rank in the pipeline beside the bare tower: `python -m benchmarks.gpu_encoder [--compile] [--json FILE]`.

On a machine with a GPU, with the `hf` extra. The tower is Qwen3-VL-8B's with seeded weights, in bfloat16. The bare one
is fed batches that lie ready in GPU memory; only its forward passes count. A deployment, one for each transport, has
two tokenizers, one encoder rank and a scheduler whose engine does nothing, all processes on that one GPU; tokenizers
make patches at the cost of a copy, and requests of one image each keep it saturated. All images come in the same sizes,
in the same order. The contenders are up together and take turns. `--smoke` is a tiny tower over host memory, to see
that everything runs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch

from benchmarks.cpu import running
from benchmarks.gpu_plugins import patches_of
from benchmarks.results import Outcome, Verdict, measurement, speedup
from benchmarks.tables import table
from tensorferry.codecs.messages import Result
from tensorferry.pipeline.client import Client
from tensorferry.pipeline.config import Deployment, ModelSpec
from tensorferry.stages.adapters.qwen3_vl import FAMILY
from tensorferry.stages.adapters.tables import Grid
from tensorferry.stages.adapters.tower import Tower

BARE = "bare tower"
FLOOR = 0.92
BATCH_PATCHES = 16384  #: of a call of the tower; as encoder.batch_patches is by default
START_S = 120.0

#: Images in patches, in the order they come: photos as they are, and reduced ones.
IMAGES: Sequence[Grid] = tuple(
    (1, height, width)
    for height, width in ((64, 64), (32, 48), (16, 16), (48, 64), (24, 32), (32, 32), (64, 48), (20, 30))
)

DEPLOYMENT = """
name: gpu-encoder-{transport}
transport: {transport}
gpus: {gpus}
runtime_dir: {{folder}}/run
model: {{{{adapter: {adapter}, options: {options}}}}}
tokenizer: {{{{workers: {tokenizers}, threads: 4, processor: "benchmarks.gpu_plugins:ReadyPatches"}}}}
encoder: {{{{ranks: 1, threads: 4}}}}
scheduler: {{{{groups: 1}}}}
pool: {{{{budget_mb: {pool_mb}}}}}
embeddings_pool: {{{{budget_mb: {embeddings_mb}}}}}
telemetry: {{{{log_level: warning}}}}
"""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    transports: Sequence[str]
    gpu: bool
    adapter: str
    options: dict[str, str | int | float | bool]
    tokenizers: int
    rounds: int  #: turns that each contender has
    turn_s: float
    in_flight: int  #: requests, more than two batches
    pool_mb: int
    embeddings_mb: int


GPU = Size(
    transports=("cuda_ipc", "cuda_vmm", "cpu"),
    gpu=True,
    adapter='"benchmarks.gpu_plugins:GpuTower"',
    options={"dtype": "bfloat16"},
    tokenizers=2,
    rounds=3,
    turn_s=3.0,
    in_flight=48,
    pool_mb=2048,
    embeddings_mb=4096,
)
SMOKE = Size(
    transports=("shm",),
    gpu=False,
    adapter="qwen3-vl",
    options={"dtype": "bfloat16", "tiny": True},
    tokenizers=1,
    rounds=1,
    turn_s=0.2,
    in_flight=4,
    pool_mb=128,
    embeddings_mb=32,
)


def batches() -> Iterator[list[Grid]]:
    """The images as an encoder rank that is never idle takes them: in order, as many as the budget allows."""
    batch: list[Grid] = []
    for grid in cycle(IMAGES):
        if batch and sum(map(prod, batch)) + prod(grid) > BATCH_PATCHES:
            yield batch
            batch = []
        batch.append(grid)


class Bare:
    """The tower alone, in this process."""

    def __init__(self, size: Size) -> None:
        self._device = torch.device("cuda", 0) if size.gpu else torch.device("cpu")
        self._tower = Tower(FAMILY, ModelSpec(adapter="qwen3-vl", options=size.options), 4)
        self._tower.warm_up(0 if size.gpu else None)
        self._features = patches_of(BATCH_PATCHES).to(self._device)
        self._batches = batches()
        self.turn(0)

    @torch.inference_mode()
    def turn(self, turn_s: float) -> float:
        """Images a second. It waits for the GPU after each pass, as a rank has to."""
        count, began = 0, time.perf_counter()
        while not count or time.perf_counter() - began < turn_s:
            batch = next(self._batches)
            self._tower.forward(self._features[: sum(map(prod, batch))], batch)
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            count += len(batch)
        return count / (time.perf_counter() - began)


async def turn(client: Client, turn_s: float, in_flight: int) -> float:
    """Images a second that were answered while the turn lasted, with so many requests in flight all the time."""
    images = cycle(IMAGES)
    began = time.perf_counter()
    count = 0

    async def requests() -> None:
        nonlocal count
        while time.perf_counter() - began < turn_s:
            _, height, width = next(images)
            outcome = await client.submit([f"{height}x{width}".encode()], output_tokens=1)
            if not isinstance(outcome, Result):
                raise RuntimeError(f"not a result: {outcome}")
            if time.perf_counter() - began < turn_s:
                count += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(requests())
    return count / turn_s


async def measured(size: Size) -> Outcome:
    found: dict[str, list[float]] = {name: [] for name in (BARE, *size.transports)}
    async with AsyncExitStack() as undo:
        deployments = await started(size, undo)
        clients = {
            name: await undo.enter_async_context(Client.connect(deployment, timeout_s=START_S))
            for name, deployment in deployments.items()
        }
        bare = await asyncio.to_thread(Bare, size)
        for client in clients.values():
            await turn(client, size.turn_s / 2, size.in_flight)  # tables are made, and pools grow
        for _ in range(size.rounds):
            found[BARE].append(await asyncio.to_thread(bare.turn, size.turn_s))
            for name, client in clients.items():
                found[name].append(await turn(client, size.turn_s, size.in_flight))
        for name, client in clients.items():
            say(f"{name}: mean batch of {await mean_batch(client):.1f} images")
    title = f"one encoder rank, {size.in_flight} requests of one image in flight"
    measurements = tuple(measurement(name, "images/s", rates) for name, rates in found.items())
    outcome = Outcome("gpu_encoder", title, measurements)
    verdicts = tuple(
        Verdict.of(f"{name}, share of the bare tower", speedup(outcome, name, BARE), ">=", FLOOR)
        for name in size.transports
        if name != "cpu"
    )
    return msgspec.structs.replace(outcome, verdicts=verdicts)


async def started(size: Size, undo: AsyncExitStack) -> dict[str, Deployment]:
    """All deployments at once, as most of their start is weights that are made in one thread."""
    ups = {}
    for transport in size.transports:
        folder = Path(undo.enter_context(TemporaryDirectory(prefix="ferry-")))
        text = DEPLOYMENT.format(
            transport=transport,
            gpus=str(size.gpu).lower(),
            adapter=size.adapter,
            options=msgspec.json.encode(size.options).decode().replace("{", "{{").replace("}", "}}"),
            tokenizers=size.tokenizers,
            pool_mb=size.pool_mb,
            embeddings_mb=size.embeddings_mb,
        )
        ups[transport] = running(folder, text)
    began = time.monotonic()
    found = await asyncio.gather(*(asyncio.to_thread(up.__enter__) for up in ups.values()), return_exceptions=True)
    deployments: dict[str, Deployment] = {}
    for (name, up), deployment in zip(ups.items(), found, strict=True):
        if isinstance(deployment, Deployment):
            undo.push(up)
            deployments[name] = deployment
    for problem in found:
        if isinstance(problem, BaseException):
            raise problem
    say(f"{len(ups)} deployments started in {time.monotonic() - began:.1f} s")
    return deployments


async def mean_batch(client: Client) -> float:
    """Images of a call of the encoder, so far."""
    [encoder] = [member for member in await client.refresh() if member.stage == "encoder"]
    gauges = {gauge.name: gauge.value for gauge in encoder.gauges}
    return gauges["encoded_items"] / max(1.0, gauges["encode_calls"])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    parser.add_argument("--compile", action="store_true", help="compiled layers, for all; a start takes a minute more")
    parser.add_argument("--smoke", action="store_true", help="a tiny tower over host memory: nothing is measured")
    options = parser.parse_args()
    size = SMOKE if options.smoke else GPU
    if options.compile:
        size = replace(size, options={**size.options, "compile": True})
    outcome = asyncio.run(measured(size))
    print(table(outcome))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))


if __name__ == "__main__":
    main()
