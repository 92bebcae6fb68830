"""Chaos: random stages are killed, stopped, starved, cut off and flooded under load, and the client's ledger must
balance to zero.

`python -m benchmarks.chaos --seed 7` runs a deployment of its own, without a GPU. Requests with images come as fast as
the deployment takes them; meanwhile something is done to a process every few seconds (`faults.py`). Every request must
end exactly once, with the digests of its images where it ends well; afterwards every lease is back, every process lives
and reads the pools of the others, and with the deployment all of its files, sockets and processes are gone.

Who is hurt, how and when follows from the seed, which is printed first. What is under way in that moment does not.

`--transport cuda_ipc --seconds 60` does the same over pools in GPU memory, all stages on one GPU, within two minutes;
afterwards the GPU has as much free memory as before. `--device` with `shm`: stages on a GPU, pools in host memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import click
import numpy as np
import psutil
from PIL import Image

from benchmarks.faults import KINDS, LONGEST_S, Births, Fault, Faults, plan
from tensorferry.cli.values import Real
from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.machine.transport import GPU_TRANSPORTS
from tensorferry.codecs.memory.cuda_driver import Driver
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment, ranks_of
from tensorferry.pipeline.peers.handshake import DOWNSTREAM
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.adapters.fingerprint import fingerprint_of
from tensorferry.stages.processors.registry import make_processor

PATIENCE_S = 60.0  #: with a request, and for everybody to be ready and everything back at the end
SHORT_S = 20.0  #: the same of a run that is measured in seconds
SHORT_EVERY_S = 2.5  #: between two faults of such a run, and how long one lasts at most
START_S = 90.0
HBM_S = 10.0  #: for the memory of the dead to be free again
HBM_NBYTES = 32 << 20  #: that may seem to be missing: the driver keeps some, as tests/gpu found
PHOTOS = 16
MOST_IMAGES = 4  #: of a request

DEPLOYMENT = """
name: chaos
transport: {transport}
runtime_dir: {folder}/run
model: {{adapter: fingerprint}}
tokenizer: {{workers: 2, threads: 1, devices: {devices}}}
encoder: {{ranks: 3, devices: {devices}}}
scheduler: {{groups: 2, batch_tokens: 4096, devices: {devices}, options: {{digests: true, service_ms: 5}}}}
pool: {{budget_mb: 32, inline_below_kb: 0, chunk_mb: 4, idle_s: 0.5}}
embeddings_pool: {{budget_mb: 32, inline_below_kb: 0}}
timeouts: {{heartbeat_s: 0.25, quarantine_s: 3.0, start_s: 90}}
restarts: {{most: 1000}}
telemetry: {{log_level: error, log_format: json, record: {folder}/traffic.jsonl}}
"""


@dataclass
class Ledger:
    """What became of every request."""

    sent: int = 0
    ok: int = 0
    wrong: int = 0  #: results with another digest than the image has
    busy: int = 0  #: answers `busy`; the request is then offered again
    failed: Counter[str] = field(default_factory=Counter)
    early: int = 0  #: failures before the deadline
    healed_s: list[float] = field(default_factory=list)  #: from an encoder's death to what it owed being encoded

    @property
    def lost(self) -> int:
        return self.sent - self.ok - self.wrong - self.failed.total()


class Chaos:
    """One run over a deployment; `balance` is its verdict."""

    def __init__(
        self,
        deployment: Deployment,
        faults: Faults,
        client: Client,
        photos: Mapping[bytes, bytes],
        seed: int,
        patience_s: float,
    ) -> None:
        """photos: each with its digest. patience_s: for a request, and for all to heal in the end."""
        self._deployment, self._faults, self._client = deployment, faults, client
        self._rng = random.Random(seed + 1)
        self._photos, self._digests = list(photos), list(photos.values())
        self._patience_s = patience_s
        self._deaths: list[int] = []  # of encoders, CLOCK_MONOTONIC
        self.ledger = Ledger()
        self.inflicted: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}  #: how often, by stage

    async def run(self, faults: Sequence[Fault], every_s: float, requests: int, at_once: int) -> None:
        """All faults, and at least so many requests."""
        hurting = asyncio.create_task(self._hurt(faults, every_s))
        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(self._ask(hurting, requests))
        await hurting

    async def _hurt(self, faults: Sequence[Fault], every_s: float) -> None:
        async with asyncio.TaskGroup() as lasting:
            for fault in faults:
                await asyncio.sleep(every_s)
                lasting.create_task(self._inflict(fault))

    async def _inflict(self, fault: Fault) -> None:
        at_ns = time.monotonic_ns()
        if await self._faults.inflict(fault):
            self.inflicted[fault.kind][fault.stage] += 1
            if (fault.kind, fault.stage) == ("kill", "encoder"):
                self._deaths.append(at_ns)

    async def _ask(self, hurting: asyncio.Task[None], requests: int) -> None:
        while self.ledger.sent < requests or not hurting.done():
            self.ledger.sent += 1
            await self._request()

    async def _request(self) -> None:
        ledger, chosen = self.ledger, self._rng.choices(range(PHOTOS), k=self._rng.randrange(MOST_IMAGES + 1))
        parts: list[str | bytes] = ["chaos ", *(self._photos[number] for number in chosen)]
        until = time.monotonic() + self._patience_s
        while True:
            left_s = max(0.001, until - time.monotonic())
            outcome = await self._client.submit(parts, output_tokens=1, deadline_s=left_s)
            match outcome:
                case wire.Busy(retry_ms=retry_ms) if left_s > retry_ms / 1000:
                    ledger.busy += 1
                    await asyncio.sleep(retry_ms / 1000)
                    continue
                case wire.Busy():
                    ledger.failed["Busy"] += 1
                case wire.Failed(failure=failure):
                    ledger.failed[failure.kind] += 1
                    ledger.early += time.monotonic() < until
                case wire.Result(items=items):
                    right = [item.digest for item in items] == [self._digests[number] for number in chosen]
                    ledger.ok += right
                    ledger.wrong += not right
                    self._time(outcome)
            return

    def _time(self, result: wire.Result) -> None:
        marks = {mark.step: mark.at_ns for mark in result.marks}
        again, encoded = marks.get("sent_again"), marks.get("encoded")
        deaths = [at for at in self._deaths if again is not None and marks["received"] < at < again]
        if deaths and encoded is not None and encoded > deaths[-1]:
            self.ledger.healed_s.append((encoded - deaths[-1]) / 1e9)

    async def settle(self) -> list[str]:
        """Until everybody is ready and every lease is back; what is not."""
        wrong: list[str] = ["nobody has answered"]
        try:
            async with asyncio.timeout(self._patience_s):
                while wrong:
                    members = await self._client.refresh(self._patience_s)
                    wrong = [f"{m.stage}-{m.rank} is {m.state}" for m in members if m.state != "ready"]
                    wrong += [
                        f"{m.stage}-{m.rank}: {gauge.name} is {gauge.value:g}"
                        for m in members
                        for gauge in m.gauges
                        if gauge.value != self._in_the_end(m.stage).get(gauge.name, gauge.value)
                    ]
                    await asyncio.sleep(0.1)
        except TimeoutError:
            pass
        return wrong

    def _in_the_end(self, stage: str) -> dict[str, int]:
        """What the gauges of a stage say when all is well: nothing is lent, and everybody downstream reads its pool."""
        ranks = ranks_of(self._deployment)
        return {"pool_lent_slots": 0, "pool_consumers": sum(ranks[reader] for reader in DOWNSTREAM[stage])}


async def chaos(
    seed: int,
    *,
    requests: int,
    counts: Mapping[str, int],
    every_s: float,
    longest_s: float = LONGEST_S,
    at_once: int = 16,
    transport: str = "shm",
    device: int | None = None,
    patience_s: float = PATIENCE_S,
) -> dict[str, object]:
    """Run it; the numbers, with what is wrong under `wrong`: nothing, if all is well."""
    if transport in GPU_TRANSPORTS and device is None:
        device = 0
    if device is not None:
        Driver.load()  # says best why there is no GPU
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        file = Path(folder) / "chaos.yaml"
        devices = "null" if device is None else f"[{device}]"
        file.write_text(DEPLOYMENT.format(folder=folder, transport=transport, devices=devices))
        deployment = load(file)
        photos = _digested([photo(seed * PHOTOS + number) for number in range(PHOTOS)], deployment, device)
        before, free_nbytes = _belongings(device), _free_nbytes(device)
        births = Births(file)
        async with (
            Supervisor.running(deployment, file, command=births.command) as supervisor,
            Client.connect(deployment, timeout_s=START_S) as client,
        ):
            run = Chaos(deployment, Faults(deployment, supervisor, births), client, photos, seed, patience_s)
            started = time.monotonic()
            faults = plan(seed, ranks_of(deployment), counts, longest_s)
            await run.run(faults, every_s, requests, at_once)
            took_s = time.monotonic() - started
            wrong = await run.settle()
        wrong += _wrong_with_record(Path(folder) / "traffic.jsonl")
        wrong += [f"{path.name} is left" for path in (Path(folder) / "run").rglob("*") if not path.is_dir()]
    wrong += [f"{what} is left" for what in _belongings(device) - before]
    kept_nbytes, until = free_nbytes - _free_nbytes(device), time.monotonic() + HBM_S
    while kept_nbytes > HBM_NBYTES and time.monotonic() < until:  # the driver tidies up behind the dead
        await asyncio.sleep(0.1)
        kept_nbytes = free_nbytes - _free_nbytes(device)
    if kept_nbytes > HBM_NBYTES:
        wrong.append(f"{kept_nbytes >> 20} MiB of GPU memory are left")
    ledger = run.ledger
    if ledger.lost or ledger.wrong:
        wrong.append(f"{ledger.lost} lost, {ledger.wrong} wrong")
    if ledger.early:
        wrong.append(f"{ledger.early} failed before their deadline: {dict(ledger.failed)}")
    if ledger.ok < 0.995 * ledger.sent:
        wrong.append(f"{ledger.ok} of {ledger.sent} ok; 99.5 % are needed")
    return {
        "seed": seed,
        "transport": transport,
        "requests": ledger.sent,
        "ok": ledger.ok,
        "failed": dict(ledger.failed),
        "busy": ledger.busy,
        "inflicted": {kind: dict(stages) for kind, stages in run.inflicted.items() if stages},
        "took_s": round(took_s, 1),
        "healed": len(ledger.healed_s),
        "healed_p50_s": _quantile(ledger.healed_s, 0.5),
        "healed_p99_s": _quantile(ledger.healed_s, 0.99),
        "wrong": wrong,
    }


def _belongings(device: int | None) -> Counter[str]:
    """Children of this process and its descriptors, by what they are; where it uses a GPU only what is surely ours, as
    CUDA opens and closes as it likes."""
    found = Counter(f"process {child.pid}" for child in psutil.Process().children(recursive=True))
    for name in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{name}").split(":")[0]
        except FileNotFoundError:  # the listing's own
            continue
        if device is None or "tensorferry" in what or what.startswith(tempfile.gettempdir()):
            found[what] += 1
    return found


def _digested(photos: Sequence[bytes], deployment: Deployment, device: int | None) -> dict[bytes, bytes]:
    """The digest of each photo, made where tokenizers will."""
    processor = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)
    found = {}
    for image in photos:
        made = processor.plan(image)
        out = View.empty(made.dtype, made.shape, device)
        processor.write(image, made, out)
        found[image] = fingerprint_of(out.host().data.data, made.dtype, made.shape)
    return found


def _wrong_with_record(record: Path) -> list[str]:
    """Of the traffic that was recorded: no request twice. Those that came while a disk was full are missing."""
    ids = [json.loads(line)["id"] for line in record.read_text().splitlines()] if record.exists() else []
    again = len(ids) - len(set(ids))
    return [] if ids and not again else [f"{len(ids)} recorded, {again} of them again"]


def _free_nbytes(device: int | None) -> int:
    """Of a GPU; 0 where there is none to look at. Whatever else runs on it shows too."""
    if device is None:
        return 0
    import torch

    torch.cuda.empty_cache()
    free_nbytes: int = torch.cuda.mem_get_info(device)[0]
    return free_nbytes


def counts_for(faults: int) -> dict[str, int]:
    """So many: every second one a kill, the others of the other kinds in turn."""
    others = [kind for kind in KINDS if kind != "kill"]
    counts = Counter({"kill": faults - faults // 2})
    counts.update(others[number % len(others)] for number in range(faults // 2))
    return dict(counts)


def photo(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    width, height = (int(extent) for extent in rng.integers(60, 400, 2))
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    with BytesIO() as file:
        coarse.resize((width, height), Image.Resampling.BILINEAR).save(file, "JPEG", quality=90)
        return file.getvalue()


def _quantile(values: Sequence[float], q: float) -> float | None:
    return round(float(np.quantile(values, q)), 3) if values else None


@click.command()
@click.option("--seed", type=int, help="Of a run to be repeated; random by default.")
@click.option("--requests", type=click.IntRange(min=1), default=10_000, show_default=True, help="At least so many.")
@click.option("--kills", type=click.IntRange(min=0), default=33, show_default=True)
@click.option(
    "--others", type=click.IntRange(min=0), default=6, show_default=True, help="Of every other kind of fault."
)
@click.option("--only", multiple=True, type=click.Choice(list(KINDS)), help="These kinds of fault alone.")
@click.option("--every-s", type=Real(0.01, 86_400), default=5.0, show_default=True)
@click.option(
    "--seconds",
    type=Real(2 * SHORT_EVERY_S, 1e7),
    help="As many faults and requests as this takes, in place of the numbers above.",
)
@click.option("--at-once", type=click.IntRange(min=1), default=16, show_default=True, help="Requests in flight.")
@click.option("--transport", type=click.Choice(["shm", "cpu", *GPU_TRANSPORTS]), default="shm", show_default=True)
@click.option("--device", type=int, help="The GPU of all stages; 0 by default where pools are in GPU memory.")
def main(
    seed: int | None,
    requests: int,
    kills: int,
    others: int,
    only: Sequence[str],
    every_s: float,
    seconds: float | None,
    at_once: int,
    transport: str,
    device: int | None,
) -> None:
    """Hurt a deployment under load, and balance the books."""
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    click.echo(f"seed {seed}", err=True)
    counts, patience_s, longest_s = (
        {kind: kills if kind == "kill" else others for kind in only or KINDS},
        PATIENCE_S,
        LONGEST_S,
    )
    if seconds is not None:
        every_s, requests, patience_s, longest_s = min(every_s, SHORT_EVERY_S), 0, SHORT_S, SHORT_EVERY_S
        counts = counts_for(int(seconds / every_s))
    run = chaos(
        seed,
        requests=requests,
        counts=counts,
        every_s=every_s,
        longest_s=longest_s,
        at_once=at_once,
        transport=transport,
        device=device,
        patience_s=patience_s,
    )
    try:
        numbers = asyncio.run(run)
    except FerryError as problem:
        raise click.ClickException(str(problem)) from problem
    click.echo(json.dumps(numbers))
    sys.exit(1 if numbers["wrong"] else 0)


if __name__ == "__main__":
    main()
