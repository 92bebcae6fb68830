"""Soak: a deployment under a steady load for long, and nothing of it may grow.

`python -m benchmarks.soak --minutes 30`: without a GPU, as fast as it goes for a moment, and then at 70 % of that, with
requests at random times. Of every process memory (RSS, and how much of it is shared), descriptors and threads are
sampled, and of the requests the p99 of their latency. What goes up is named: by the Theil-Sen estimator over the time
after the first fifth, whose confidence interval is above zero and whose growth matters (`MATTERS`); see `trend.py`. Who
is told `busy` asks again, as a user would, and that is named, too.

By itself glibc keeps what the largest burst so far has needed: memory goes up in steps, and small leaks hide in it. So
the stages run with a fixed threshold (`GIVE_BACK`), above which it gives back what is free, unless `--as-deployed`.

`--plant descriptors` or `memory` has one process leak, which must be found. `--samples FILE` keeps every sample.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import psutil

from benchmarks.chaos import photo
from benchmarks.trend import Trend, trend
from tensorferry.cli.values import Real
from tensorferry.codecs import messages as wire
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.process.supervisor import Supervisor, start_command

LOAD = 0.7  #: of what the deployment can do
WARM_UP = 0.2  #: of the time, which is not judged: allocators and books that forget find their size
SAMPLES = 200
WINDOWS = 40  #: of the time, each with a p99
AT_ONCE = 8  #: for what the deployment can do
CALIBRATE_S = 10.0  #: at most, for what the deployment can do
PHOTOS = 16
GIVE_BACK = ("env", "MALLOC_TRIM_THRESHOLD_=131072")  #: its default, which then no longer moves (mallopt(3))
LEAKY = ("tokenizer", 0)  #: who leaks, where it is to be seen that leaks are found

DEPLOYMENT = """
name: soak
transport: {transport}
runtime_dir: {folder}/run
model: {{adapter: fingerprint}}
tokenizer: {{workers: 1, threads: 1}}
encoder: {{ranks: 2, cache_mb: 8}}
scheduler: {{options: {{digests: true}}}}
pool: {{budget_mb: 64, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 32, inline_below_kb: 0}}
limits: {{request_timeout_s: 10, in_flight_requests: 32}}
restarts: {{most: 0}}
telemetry: {{log_level: error, log_format: json}}
"""

#: Growth over the time judged, by what is sampled, that matters: so much, or such a part of the median if that is more.
MATTERS = {
    "rss_mib": (2.0, 0.02),
    "shared_mib": (2.0, 0.02),
    "descriptors": (1.0, 0.0),
    "threads": (1.0, 0.0),
    "p99_ms": (2.0, 0.25),
}

#: A stage with a leak; what follows are its arguments.
_LEAKS = {
    "descriptors": "kept.append(os.open('/dev/null', os.O_RDONLY))",
    "memory": "kept.append(bytes(range(256)) * 4096)",
}
_LEAKING = """
import os, runpy, sys, threading
kept, every_s = [], float(sys.argv.pop(1))
def leak():
    while not threading.Event().wait(every_s):
        {leak}
threading.Thread(target=leak, daemon=True).start()
runpy.run_module("tensorferry", run_name="__main__", alter_sys=True)
"""


@dataclass
class Series:
    """Samples of one number."""

    at_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at_s: float, value: float) -> None:
        self.at_s.append(at_s)
        self.values.append(value)

    def judged(self, what: str, from_s: float) -> Trend:
        least, part = MATTERS[what]
        kept = [(at_s, value) for at_s, value in zip(self.at_s, self.values, strict=True) if at_s >= from_s]
        middle = float(np.median([value for _, value in kept])) if kept else 0.0
        return trend([at_s for at_s, _ in kept], [value for _, value in kept], max(least, part * middle))


class Soak:
    """One run over a deployment."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client, self._rng = client, random.Random(seed)
        self._photos = [photo(seed * PHOTOS + number) for number in range(PHOTOS)]
        self._began = time.monotonic()
        self._took = np.zeros((0, 2))  # when each request was sent, s, and how long it took, ms
        self.requests = self.busy = 0
        self.failed: Counter[str] = Counter()
        self.series: dict[tuple[str, str], Series] = {}  #: by process and what is sampled

    async def capacity(self, for_s: float) -> float:
        """Requests a second, as fast as it goes."""
        until, done = time.monotonic() + for_s, 0

        async def ask() -> None:
            nonlocal done
            while time.monotonic() < until:
                await self.request()
                done += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(ask())
        return done / for_s

    async def run(self, pids: dict[str, int], rate: float, for_s: float) -> None:
        """Requests at random times, so many a second, while everything is sampled."""
        self._took = np.full((int(2 * rate * for_s) + SAMPLES, 2), -1.0)  # at once, else our own memory would grow
        self._began, self.requests, self.busy, self.failed = time.monotonic(), 0, 0, Counter()
        sampling = asyncio.create_task(self._sample(pids, for_s / SAMPLES))
        async with asyncio.TaskGroup() as requests:
            due = self._began
            while (due := due + self._rng.expovariate(rate)) < self._began + for_s:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                requests.create_task(self.request())
        sampling.cancel()
        await asyncio.wait([sampling])
        latencies = self.series["requests", "p99_ms"] = Series()
        for window in np.array_split(self._took[: self.requests], WINDOWS):
            if len(window):
                latencies.add(float(window[0, 0]), float(np.quantile(window[:, 1], 0.99)))

    async def request(self) -> None:
        at_s = time.monotonic() - self._began
        chosen = self._rng.choices(self._photos, k=self._rng.randrange(4))
        while isinstance(outcome := await self._client.submit(["soak ", *chosen], output_tokens=1), wire.Busy):
            self.busy += 1
            await asyncio.sleep(outcome.retry_ms / 1e3)
        if isinstance(outcome, wire.Failed):
            self.failed[outcome.failure.kind] += 1
        if self.requests < len(self._took):
            self._took[self.requests] = at_s, (time.monotonic() - self._began - at_s) * 1e3
        self.requests += 1

    async def _sample(self, pids: dict[str, int], every_s: float) -> None:
        processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        while True:
            at_s = time.monotonic() - self._began
            for name, process in processes.items():
                with process.oneshot():
                    memory = process.memory_info()
                    sampled = {
                        "rss_mib": memory.rss / (1 << 20),
                        "shared_mib": memory.shared / (1 << 20),
                        "descriptors": process.num_fds(),
                        "threads": process.num_threads(),
                    }
                for what, value in sampled.items():
                    self.series.setdefault((name, what), Series()).add(at_s, value)
            await asyncio.sleep(every_s)


async def soak(
    for_s: float,
    *,
    seed: int = 0,
    transport: str = "shm",
    as_deployed: bool = False,
    plant: Sequence[str] = (),
    leak_every_s: float = 1.0,
) -> dict[str, object]:
    """Run it; the numbers, with what goes up, or failed, under `wrong`: nothing, if all is well."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        file = Path(folder) / "soak.yaml"
        file.write_text(DEPLOYMENT.format(folder=folder, transport=transport))
        deployment = load(file)
        start = start_command(file, ())

        def command(stage: str, rank: int) -> Sequence[str]:
            argv = start(stage, rank)
            if plant and (stage, rank) == LEAKY:
                code = _LEAKING.format(leak="; ".join(_LEAKS[what] for what in plant))
                argv = [sys.executable, "-P", "-c", code, str(leak_every_s), *argv[argv.index("tensorferry") + 1 :]]
            return argv if as_deployed else [*GIVE_BACK, *argv]

        async with (
            Supervisor.running(deployment, file, command=command) as supervisor,
            Client.connect(deployment) as client,
        ):
            run = Soak(client, seed)
            capacity = await run.capacity(min(CALIBRATE_S, for_s / 5))
            pids = {f"{stage}-{rank}": pid for (stage, rank), pid in supervisor.processes.items()}
            pids["client and supervisor"] = psutil.Process().pid
            await run.run(pids, LOAD * capacity, for_s)
    judged = {key: series.judged(key[1], WARM_UP * for_s) for key, series in run.series.items()}
    wrong = [
        f"{name}: {what} goes up by {found.growth:.3g} in {(1 - WARM_UP) * for_s:.0f} s"
        for (name, what), found in judged.items()
        if found.goes_up
    ]
    if run.failed:
        wrong.append(f"requests failed: {dict(run.failed)}")
    if run.busy:
        wrong.append(f"told busy at {LOAD:.0%} load: {run.busy} times, {run.requests} requests")
    return {
        "seed": seed,
        "seconds": for_s,
        "capacity_rps": round(capacity, 1),
        "requests": run.requests,
        "busy": run.busy,
        "samples": {f"{name}: {what}": [series.at_s, series.values] for (name, what), series in run.series.items()},
        "series": {
            f"{name}: {what}": {
                "median": round(float(np.median(run.series[name, what].values)), 2),
                "growth": round(found.growth, 3),
                "goes_up": found.goes_up,
            }
            for (name, what), found in judged.items()
        },
        "wrong": wrong,
    }


@click.command()
@click.option("--minutes", type=Real(0.01, 1e6), default=30.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--transport", type=click.Choice(["shm", "cpu"]), default="shm", show_default=True)
@click.option("--as-deployed", is_flag=True, help="Let glibc keep what bursts have needed.")
@click.option("--samples", type=click.Path(dir_okay=False, path_type=Path), help="A file for every sample, as JSON.")
@click.option("--plant", multiple=True, type=click.Choice(list(_LEAKS)), help="A leak that must be found.")
def main(
    minutes: float, seed: int, transport: str, as_deployed: bool, samples: Path | None, plant: Sequence[str]
) -> None:
    """Load a deployment for long, and see whether anything of it grows."""
    numbers = asyncio.run(soak(minutes * 60, seed=seed, transport=transport, as_deployed=as_deployed, plant=plant))
    taken = json.dumps(numbers.pop("samples"))
    if samples is not None:
        samples.write_text(taken)
    click.echo(json.dumps(numbers, indent=1))
    sys.exit(1 if numbers["wrong"] else 0)


if __name__ == "__main__":
    main()
