"""Encoder ranks in the pipeline beside the bare tower: `python -m benchmarks.gpu_encoder [--ranks N] [--json FILE]`.

On a machine with a GPU, with the `hf` extra. The tower is Qwen3-VL-8B's with seeded weights, in bfloat16. The bare one
is fed batches that lie ready in GPU memory; only its forward passes count. A deployment, one for each transport, has
two tokenizers, one encoder rank and a scheduler whose engine does nothing, all processes on that one GPU; tokenizers
make patches at the cost of a copy, and requests of one image each keep it saturated. All images come in the same sizes,
in the same order. The contenders are up together and take turns, each of which is printed when it is over. Whatever
happens the whole ends within `--budget` seconds: a deployment that is not up in time is passed over, and there are as
many rounds as there is time for.

`--ranks N` compares deployments of one rank and of N ranks, each on a GPU of its own and with tokenizers and requests
in proportion, of one transport: more GPUs, or the same ones in turn where there are fewer. `--compile` compiles the
layers of all. `--smoke` is a tiny tower over host memory, to see that everything runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import msgspec
import torch

from benchmarks.gpu_plugins import patches_of
from benchmarks.results import Outcome, Verdict, measurement, speedup
from benchmarks.tables import table
from benchmarks.tied import tied
from tensorferry.codecs.messages import Result
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.grid_tables import Grid
from tensorferry.stages.adapters.qwen3_vl import FAMILY
from tensorferry.stages.adapters.tower import Tower

BARE = "bare tower"
FLOOR = 0.92
SCALING = 0.925  #: of what as many single ranks would do
BATCH_PATCHES = 16384  #: of a call of the tower; as encoder.batch_patches is by default
BUDGET_S = 95.0  #: for everything
END_S = 6.0  #: of which so much is for ending the deployments
LATE_S = 10.0  #: how much longer than it should a turn may take

#: Images in patches, in the order they come: photos as they are, and reduced ones.
IMAGES: Sequence[Grid] = tuple(
    (1, height, width)
    for height, width in ((64, 64), (32, 48), (16, 16), (48, 64), (24, 32), (32, 32), (64, 48), (20, 30))
)

DEPLOYMENT = """
name: gpu-encoder-{transport}
transport: {transport}
gpus: {gpus}
runtime_dir: {folder}/run
model: {{adapter: {adapter}, options: {options}}}
tokenizer: {{workers: {tokenizers}, threads: 4, processor: "benchmarks.gpu_plugins:ReadyPatches"{devices}}}
encoder: {{ranks: {ranks}, threads: 4{devices}}}
scheduler: {{groups: 1}}
pool: {{budget_mb: {pool_mb}}}
embeddings_pool: {{budget_mb: {embeddings_mb}}}
telemetry: {{log_level: warning}}
"""


@dataclass(frozen=True)
class Contender:
    """A deployment."""

    transport: str
    ranks: int = 1

    def __str__(self) -> str:
        return self.transport if self.ranks == 1 else f"{self.transport}, {self.ranks} ranks"


@dataclass(frozen=True)
class Size:
    """How much is measured; tokenizers and requests in flight are those of each encoder rank."""

    contenders: Sequence[Contender]
    gpu: bool
    adapter: str
    options: dict[str, str | int | float | bool]
    tokenizers: int
    rounds: int  #: turns that each contender has
    turn_s: float
    measure_s: float  #: kept for turns and the end: deployments that are not up by then are passed over
    in_flight: int  #: requests, more than two batches
    pool_mb: int
    embeddings_mb: int


GPU = Size(
    contenders=(Contender("cuda_ipc"), Contender("cuda_vmm"), Contender("cpu")),
    gpu=True,
    adapter='"benchmarks.gpu_plugins:GpuTower"',
    options={"dtype": "bfloat16"},
    tokenizers=2,
    rounds=3,
    turn_s=2.5,
    measure_s=35.0,
    in_flight=48,
    pool_mb=2048,
    embeddings_mb=4096,
)
SMOKE = Size(
    contenders=(Contender("shm"),),
    gpu=False,
    adapter="qwen3-vl",
    options={"dtype": "bfloat16", "tiny": True},
    tokenizers=1,
    rounds=1,
    turn_s=0.2,
    measure_s=15.0,
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


async def measure(size: Size, found: Mapping[str, list[float]], until_s: float, pids: set[int]) -> None:
    """Add to `found`, until then by the monotonic clock; see `Up` for `pids`."""
    over = asyncio.Event()
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        bare = tasks.create_task(asyncio.to_thread(Bare, size))
        ups = {str(each): Up(each, size, pids) for each in size.contenders}
        holding = {name: tasks.create_task(up.hold(over)) for name, up in ups.items()}
        try:
            ready = [tasks.create_task(up.ready.wait()) for up in ups.values()]
            await asyncio.wait([bare, *ready], timeout=until_s - size.measure_s - time.monotonic())
            for name, task in holding.items():
                if not ups[name].ready.is_set():
                    say(f"{name}: not up after {time.monotonic() - began:.1f} s")
                    task.cancel()
            for waiting in ready:
                waiting.cancel()
            clients = {name: client for name, up in ups.items() if (client := up.client) is not None}
            say(f"{', '.join(clients)} and the bare tower after {time.monotonic() - began:.1f} s")
            await take_turns(size, found, until_s, await bare, clients)
        finally:
            over.set()


async def take_turns(
    size: Size, found: Mapping[str, list[float]], until_s: float, bare: Bare, clients: dict[str, Client]
) -> None:
    """As many rounds as there is time for. Whoever does not answer is asked no more."""

    ranks = {str(each): each.ranks for each in size.contenders}

    async def one(name: str, turn_s: float) -> float | None:
        try:
            async with asyncio.timeout(turn_s + LATE_S):
                return await turn(clients[name], turn_s, size.in_flight * ranks[name])
        except Exception as problem:
            say(f"{name}: {type(problem).__name__}: {problem}")
            del clients[name]
            return None

    for name in list(clients):
        await one(name, size.turn_s / 2)  # tables are made, and pools grow
    for number in range(1, size.rounds + 1):
        for name in (BARE, *clients):
            if time.monotonic() + size.turn_s + 1 > until_s - END_S and found[BARE]:
                return say(f"no time left in round {number}")
            rate = await (asyncio.to_thread(bare.turn, size.turn_s) if name == BARE else one(name, size.turn_s))
            if rate is not None:
                found[name].append(rate)
                share = "" if name == BARE else f", {rate / found[BARE][-1]:.3f} of the bare tower's"
                print(f"round {number}: {name}: {rate:.1f} images/s{share}", flush=True)
    for name, client in clients.items():
        say(f"{name}: mean batch of {await mean_batch(client):.1f} images")


def outcome_of(size: Size, found: Mapping[str, Sequence[float]]) -> Outcome:
    title = f"encoder ranks, {size.in_flight} requests of one image in flight for each"
    measurements = tuple(measurement(name, "images/s", rates) for name, rates in found.items() if rates)
    outcome = Outcome("gpu_encoder", title, measurements)
    verdicts = [
        Verdict.of(f"{each}, share of the bare tower", speedup(outcome, str(each), BARE), ">=", FLOOR)
        for each in size.contenders
        if each.ranks == 1 and each.transport != "cpu"
    ]
    for each in size.contenders:
        if each.ranks > 1:
            alone = str(replace(each, ranks=1))
            floor = SCALING * each.ranks
            verdicts.append(Verdict.of(f"{each}, of one rank", speedup(outcome, str(each), alone), ">=", floor))
    return msgspec.structs.replace(outcome, verdicts=tuple(verdicts))


class Up:
    """A deployment in a task of its own."""

    def __init__(self, contender: Contender, size: Size, pids: set[int]) -> None:
        """pids: its supervisor's is there while it runs."""
        self._contender, self._size, self._pids = contender, size, pids
        self.ready = asyncio.Event()  #: it is up, or never will be
        self.client: Client | None = None  #: once it is up

    async def hold(self, over: asyncio.Event) -> None:
        """Start it, and end it when that is set; what goes wrong is said."""
        try:
            with TemporaryDirectory(prefix="ferry-") as folder:
                file = Path(folder) / "deployment.yaml"
                file.write_text(self._text(folder), encoding="utf-8")
                async with self._process(file), Client.connect(load(file), timeout_s=BUDGET_S) as self.client:
                    self.ready.set()
                    await over.wait()
        except Exception as problem:
            say(f"{self._contender}: {type(problem).__name__}: {problem}")
        finally:
            self.client = None
            self.ready.set()

    @asynccontextmanager
    async def _process(self, file: Path) -> AsyncIterator[None]:
        """`tensorferry up`, ready. Ended by force where it does not end in time: its stages end with it."""
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]  # for our plug-ins
        with TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(
                *tied("-m", "tensorferry", "up", "--config", str(file)),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, stdout=asyncio.subprocess.PIPE, stderr=log,
            )  # fmt: skip
            self._pids.add(process.pid)
            try:
                assert process.stdout is not None
                if b"is ready" not in await process.stdout.readline():
                    log.seek(0)
                    raise RuntimeError(log.read().decode(errors="replace"))
                yield
            finally:
                with suppress(ProcessLookupError):
                    process.terminate()
                try:
                    async with asyncio.timeout(END_S / 2):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
                self._pids.discard(process.pid)

    def _text(self, folder: str) -> str:
        size, ranks = self._size, self._contender.ranks
        return DEPLOYMENT.format(
            transport=self._contender.transport,
            folder=folder,
            ranks=ranks,
            devices=f", devices: {[rank % torch.cuda.device_count() for rank in range(ranks)]}" if size.gpu else "",
            gpus=str(size.gpu).lower(),
            adapter=size.adapter,
            options=msgspec.json.encode(size.options).decode(),
            tokenizers=size.tokenizers * ranks,
            pool_mb=size.pool_mb,
            embeddings_mb=size.embeddings_mb,
        )


@contextmanager
def within(budget_s: float, size: Size, found: Mapping[str, Sequence[float]], pids: set[int]) -> Iterator[None]:
    """End this process when the block takes longer, with what is known by then: nothing in it can prevent that."""

    def give_up() -> None:
        print(f"\nnot done within {budget_s:g} s; what is known:\n{table(outcome_of(size, found))}", flush=True)
        for pid in tuple(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        os._exit(1)

    timer = threading.Timer(budget_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


async def mean_batch(client: Client) -> float:
    """Images of a call of an encoder, so far."""
    gauges: Counter[str] = Counter()
    for member in await client.refresh():
        if member.stage == "encoder":
            gauges.update({gauge.name: gauge.value for gauge in member.gauges})
    return gauges["encoded_items"] / max(1.0, gauges["encode_calls"])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="compare N ranks with one")
    parser.add_argument("--transport", default="cuda_ipc", help="of that comparison; cuda_ipc")
    parser.add_argument("--compile", action="store_true", help="compiled layers, for all; a start takes a minute more")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help=f"seconds for everything; {BUDGET_S:g}")
    parser.add_argument("--smoke", action="store_true", help="a tiny tower over host memory: nothing is measured")
    options = parser.parse_args()
    size = SMOKE if options.smoke else GPU
    if options.compile:
        size = replace(size, options={**size.options, "compile": True})
    if options.ranks > 1:
        transport = size.contenders[0].transport if options.smoke else options.transport
        size = replace(size, contenders=(Contender(transport), Contender(transport, options.ranks)))
    found: dict[str, list[float]] = {name: [] for name in (BARE, *map(str, size.contenders))}
    pids: set[int] = set()
    with within(options.budget, size, found, pids):
        asyncio.run(measure(size, found, time.monotonic() + options.budget, pids))
    outcome = outcome_of(size, found)
    print(table(outcome))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))


if __name__ == "__main__":
    main()
