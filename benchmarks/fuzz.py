"""Bad bytes: every socket of a deployment is fed malformed messages while good traffic goes on, and is measured.

`python -m benchmarks.fuzz` runs a deployment of its own, without a GPU. Good requests come at a set rate, in turns
alone and beside a flood, A B A B. Every good request must end with the digests of its images; no process may die, grow
or meet a bug; and every message that the flood sends must be refused, and counted, where it should be. What is sent
follows from the seed, which is printed first.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import click
import msgspec
import psutil

from benchmarks.cpu import running
from benchmarks.flood import Burst, Traffic
from benchmarks.malformed import Layer
from benchmarks.results import quantile
from benchmarks.tied import tied
from benchmarks.workload import Tally, Workload
from tensorferry.cli.values import Real
from tensorferry.codecs import messages as wire
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.spec import STAGES, Deployment, port_offset, ranks_of
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.stages.adapters.fingerprint import fingerprint_of
from tensorferry.stages.processors.registry import make_processor

START_S = 60.0
PHOTOS = ("rocket.jpg", "coffee_lossy.webp", "camera_gray.jpg", "coffee_palette_trns.png")
IMAGES = Path(__file__).parents[1] / "examples" / "images"
WARM_S = (
    5.0  #: of a flood, before anything is measured: what is remembered of strangers is bounded, but must fill first
)
GROWTH_NBYTES = 48 << 20  #: of a process that is no leak: allocators, and 65,536 finished requests of each kind
GROWTH_HANDLES = 8  #: descriptors, and threads: of pools of threads that are not full yet
MOST_RATIO = 1.5  #: of the p99 of good traffic, with a flood to without
MOST_STRAY = 100  #: messages in one connection's noise
LEAST_PER_S = 5_000
LEAST_PAST_HEADER, LEAST_PAST_SCHEMA = 0.20, 0.05

DEPLOYMENT = """
name: fuzz
transport: shm
runtime_dir: {folder}/run
model: {{adapter: fingerprint}}
tokenizer: {{workers: 1, threads: 2, options: {{max_pixels: 50176}}}}
encoder: {{ranks: 1}}
scheduler: {{groups: 1, options: {{digests: true}}}}
pool: {{budget_mb: 64, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 16, inline_below_kb: 0}}
restarts: {{most: 0}}
telemetry: {{log_level: warning, log_format: json, prometheus_port: PORT}}
"""

#: Counters of what gets past the schema and has no effect. The rest of that is answered, or changes nothing.
COUNTED = (
    "messages_unknown_peer",
    "messages_stale_epoch",
    "reports_late",
    "cancels_late",
    "submits_repeated",
    "requests_failed",
    "requests_busy",
    "admits_late",
    "jobs_late",
    "embeddings_late",
)


@dataclass
class Good:
    """The good traffic: requests at a set rate, whatever became of those before."""

    client: Client
    photos: Sequence[bytes]
    digests: Sequence[bytes]
    latencies_ms: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, client: Client, deployment: Deployment) -> Good:
        processor = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)
        photos = [(IMAGES / name).read_bytes() for name in PHOTOS]
        digests = []
        for photo in photos:
            plan = processor.plan(photo)
            out = View.empty(plan.dtype, plan.shape)
            processor.write(photo, plan, out)
            digests.append(fingerprint_of(out.data.data, plan.dtype, plan.shape))
        return cls(client, photos, digests)

    async def run(self, per_s: float, seconds: float) -> list[float]:
        """Milliseconds from when each request was due to its outcome."""
        self.latencies_ms = []
        started, loop = time.monotonic(), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(per_s * seconds)):
                due = started + number / per_s
                await asyncio.sleep(max(0.0, due - loop.time()))
                tasks.create_task(self._ask(number, due))
        return self.latencies_ms

    async def _ask(self, number: int, due: float) -> None:
        chosen = [(number + other) % len(self.photos) for other in range(1 + number % 2)]
        parts: list[str | bytes] = ["a good request ", *(self.photos[index] for index in chosen)]
        outcome = await self.client.submit(parts, output_tokens=1, deadline_s=30.0)
        self.latencies_ms.append((time.monotonic() - due) * 1e3)
        match outcome:
            case wire.Result(items=items):
                if [item.digest for item in items] != [self.digests[index] for index in chosen]:
                    self.wrong["another's answer"] += 1
            case wire.Failed(failure=failure):
                self.wrong[failure.kind] += 1
            case wire.Busy():
                self.wrong["Busy"] += 1


@dataclass(frozen=True)
class Look:
    """The processes of the deployment in one moment."""

    pids: dict[str, int]
    rss: dict[str, int]  #: bytes
    threads: dict[str, int]
    descriptors: dict[str, int]
    counts: dict[str, dict[str, float]]  #: by process, of the counters that have moved

    @classmethod
    def now(cls, deployment: Deployment) -> Look:
        runtime = Runtime.of(deployment)
        port = deployment.telemetry.prometheus_port
        assert port is not None
        pids, counts = {}, {}
        for stage, ranks in ranks_of(deployment).items():
            for rank in range(ranks):
                owner = runtime.owner(stage, rank)
                if owner is None:
                    raise RuntimeError(f"{stage}-{rank} is not there any more")
                pids[f"{stage}-{rank}"] = owner.pid
                counts[f"{stage}-{rank}"] = _counters(port + port_offset(deployment, stage, rank))
        processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        return cls(
            pids,
            {name: process.memory_info().rss for name, process in processes.items()},
            {name: process.num_threads() for name, process in processes.items()},
            {name: process.num_fds() for name, process in processes.items()},
            counts,
        )

    def worse_than(self, before: Look) -> list[str]:
        """Who has died since, or grown."""
        found = [f"{name} has died" for name, pid in before.pids.items() if self.pids[name] != pid]
        for what, ours, theirs, most in (
            ("bytes", self.rss, before.rss, GROWTH_NBYTES),
            ("threads", self.threads, before.threads, GROWTH_HANDLES),
            ("descriptors", self.descriptors, before.descriptors, GROWTH_HANDLES),
        ):
            found += [
                f"{name} has grown from {theirs[name]:,} {what} to {size:,}"
                for name, size in ours.items()
                if size > theirs[name] + most
            ]
        return found

    def counted_since(self, before: Look) -> dict[str, Counter[str]]:
        """By process: what its counters have counted since."""
        return {
            name: Counter({key: int(value - before.counts[name].get(key, 0)) for key, value in counts.items()})
            for name, counts in self.counts.items()
        }


def _counters(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name.startswith("tensorferry_") and "_total{" in name:
            found[name.removeprefix("tensorferry_").partition("_total{")[0]] = float(value)
    return found


class Sender:
    """The process that floods."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def of(cls, folder: Path, traffic: Traffic) -> Iterator[Sender]:
        file = folder / "traffic"
        file.write_bytes(msgspec.msgpack.encode(traffic))
        command = tied("-m", "benchmarks.flood", str(file))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            try:
                yield cls(process)
            finally:
                process.terminate()

    def burst(self, per_s: float, seconds: float) -> Burst:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(per_s, seconds, file=self._process.stdin, flush=True)
        return msgspec.json.decode(self._process.stdout.readline(), type=Burst)


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of good traffic."""

    flooded: bool
    latencies_ms: Sequence[float]

    def row(self) -> str:
        p50, p90, p99 = (quantile(self.latencies_ms, share) for share in (0.5, 0.9, 0.99))
        name = "flood" if self.flooded else "quiet"
        return f"{name}  {len(self.latencies_ms):6,} requests  p50 {p50:7.1f}  p90 {p90:7.1f}  p99 {p99:7.1f} ms"


async def fuzz(
    seed: int,
    *,
    rounds: int,
    seconds: float,
    per_s: float,
    good_per_s: float,
    made: int,
    port: int | None = None,
    warm_s: float = WARM_S,
) -> dict[str, object]:
    """Run it; the numbers, with what is wrong under `wrong`: nothing, if all is well.

    rounds: of a quiet stretch and a flooded one, of so many seconds each. made: different messages. port: of the first
    process's metrics; None: some.
    """
    rng = Random(seed)
    port = free_ports(len(STAGES)) if port is None else port
    with TemporaryDirectory(prefix="tf-") as path:
        folder = Path(path)
        with running(folder, DEPLOYMENT.replace("PORT", str(port))) as deployment:
            async with Client.connect(deployment, timeout_s=START_S) as client:
                good = Good.of(client, deployment)
                epochs = {member.stage: member.epoch for member in await client.refresh()}
                workload = Workload(rng, deployment, epochs, made)
                with Sender.of(folder, Traffic(workload.targets, tuple(workload.packets))) as sender:
                    start = Look.now(deployment)
                    bursts, windows = [await asyncio.to_thread(sender.burst, per_s, warm_s)], []
                    await good.run(good_per_s, min(WARM_S, seconds))
                    before = Look.now(deployment)
                    for _ in range(rounds):
                        windows.append(Window(False, await good.run(good_per_s, seconds)))
                        flood = asyncio.create_task(asyncio.to_thread(sender.burst, per_s, seconds))
                        windows.append(Window(True, await good.run(good_per_s, seconds)))
                        bursts.append(await flood)
                    tallies = workload.tally(sum(burst.sent for burst in bursts))
                    wrong = await settled(deployment, start, tallies)
                    after = Look.now(deployment)
        log = (folder / "log").read_text(encoding="utf-8", errors="replace")
    wrong += after.worse_than(before) + crashes(log)
    if good.wrong:
        wrong.append(f"good requests ended badly: {dict(good.wrong)}")
    return report(seed, windows, bursts, tallies, after.counted_since(start), wrong)


def free_ports(count: int) -> int:
    """The first of so many in a row that nobody listens at now, on loopback."""
    for _ in range(100):
        first = 20_000 + secrets.randbelow(12_000)
        with ExitStack() as listening, suppress(OSError):
            for port in range(first, first + count):
                listening.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise RuntimeError(f"no {count} ports in a row are free")


def median_p99(windows: Sequence[Window], flooded: bool) -> float:
    """Of the p99 of each stretch: what a few bad moments of the machine do not change. Milliseconds."""
    return median(quantile(one.latencies_ms, 0.99) for one in windows if one.flooded is flooded)


def crashes(log: str) -> list[str]:
    """What a deployment's log has that no message may bring about."""
    found = [
        line for line in log.splitlines() if "crashed" in line or "Traceback" in line or '"level": "error"' in line
    ]
    return [f"in the log: {line[:500]}" for line in found[:5]]


async def settled(deployment: Deployment, start: Look, tallies: Mapping[str, Tally]) -> list[str]:
    """Wait until every message that was sent has been refused and counted; what is not."""
    wrong = ["nothing was counted"]
    deadline = time.monotonic() + START_S
    while wrong and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        counted = Look.now(deployment).counted_since(start)
        wrong = []
        for name, counts in counted.items():
            its = {target: tally for target, tally in tallies.items() if target.startswith(f"{name} ")}
            due = sum(tally.refusals for tally in its.values())
            # To ZeroMQ some noise is its protocol's first version, in which a few bytes are a message.
            stray = MOST_STRAY * sum(tally.sent for target, tally in its.items() if target.endswith("no ZMTP"))
            if not due <= counts["messages_refused"] <= due + stray:
                wrong.append(f"{name} has refused {counts['messages_refused']} messages, and {due} were to be")
            if counts["messages_crashed"]:
                wrong.append(f"{name}: {counts['messages_crashed']} messages brought out a bug")
    return wrong


def report(
    seed: int,
    windows: Sequence[Window],
    bursts: Sequence[Burst],
    tallies: Mapping[str, Tally],
    counted: Mapping[str, Counter[str]],
    wrong: list[str],
) -> dict[str, object]:
    """The numbers, and the floors; windows and sockets go to stderr as a table."""
    for window in windows:
        click.echo(window.row(), err=True)
    for name, tally in tallies.items():
        shares = [f"{layer.name.lower()} {tally.layers[layer]:9,}" for layer in Layer] if tally.layers else []
        click.echo(f"{name:32} sent {tally.sent:9,}  {'  '.join(shares)}", err=True)
    for process, counts in counted.items():
        said = ", ".join(f"{name} {counts[name]:,}" for name in sorted(counts) if counts[name])
        click.echo(f"{process:32} {said}", err=True)
    messages = [tally for tally in tallies.values() if tally.layers]
    sent = sum(tally.layers.total() for tally in messages)
    past_header = sum(tally.past_header for tally in messages) / sent
    past_schema = sum(tally.layers[Layer.STAGE] for tally in messages) / sent
    took_s = sum(burst.took_s for burst in bursts)
    p99 = {
        flooded: quantile([ms for one in windows if one.flooded is flooded for ms in one.latencies_ms], 0.99)
        for flooded in (False, True)
    }
    ratio = p99[True] / p99[False]
    floors = (
        (ratio <= MOST_RATIO, f"p99 of good traffic is {ratio:.2f} times what it is without a flood"),
        (sent / took_s >= LEAST_PER_S, f"{sent / took_s:,.0f} messages a second"),
        (past_header >= LEAST_PAST_HEADER, f"{past_header:.1%} past the header"),
        (past_schema >= LEAST_PAST_SCHEMA, f"{past_schema:.1%} past the schema"),
    )
    return {
        "seed": seed,
        "messages": sent,
        "per_s": round(sent / took_s),
        "past_header": round(past_header, 3),
        "past_schema": round(past_schema, 3),
        "counted_past_schema": sum(counts[name] for counts in counted.values() for name in COUNTED),
        "other_connections": sum(tally.sent for tally in tallies.values() if not tally.layers),
        "good": sum(len(window.latencies_ms) for window in windows),
        "p99_quiet_ms": round(p99[False], 1),
        "p99_flood_ms": round(p99[True], 1),
        "p99_ratio": round(ratio, 2),
        "p99_ratio_of_medians": round(median_p99(windows, True) / median_p99(windows, False), 2),
        "wrong": wrong,
        "below": [said for met, said in floors if not met],
    }


@click.command()
@click.option("--seed", type=int, help="Of a run to be repeated; random by default.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=12, show_default=True, help="Of a quiet stretch and a flooded one."
)
@click.option("--seconds", type=Real(0.1, 86_400), default=16.0, show_default=True, help="Of each stretch.")
@click.option("--per-s", type=Real(1, 1e6), default=5_500.0, show_default=True, help="Malformed messages.")
@click.option(
    "--good-per-s", type=Real(0.1, 1e6), default=10.0, show_default=True, help="Good requests, of one image or two."
)
@click.option(
    "--made",
    type=click.IntRange(min=1),
    default=60_000,
    show_default=True,
    help="Different messages, sent round and round.",
)
def main(seed: int | None, rounds: int, seconds: float, per_s: float, good_per_s: float, made: int) -> None:
    """Flood a deployment with malformed messages, and measure its good traffic."""
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    click.echo(f"seed {seed}", err=True)
    run = fuzz(seed, rounds=rounds, seconds=seconds, per_s=per_s, good_per_s=good_per_s, made=made)
    numbers = asyncio.run(run)
    click.echo(json.dumps(numbers))
    sys.exit(1 if numbers["wrong"] or numbers["below"] else 0)


if __name__ == "__main__":
    main()
