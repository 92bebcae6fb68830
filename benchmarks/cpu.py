"""CPU time of a request over all stages of a running deployment, when processor, adapter and engine do nothing."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.results import Outcome, Scale, Verdict, measurement
from benchmarks.tied import tied
from tensorferry.codecs.messages import Result
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.lock_owner import Owner
from tensorferry.pipeline.process.runtime_dir import Runtime

STAGES = ("tokenizer", "encoder", "scheduler")
START_S = 60.0
_REQUESTS = 256  #: a turn: the kernel counts in steps of 10 ms
_IMAGE_NBYTES = 64 << 10  #: of the encoded image that the client sends
_TICKS = os.sysconf("SC_CLK_TCK")

#: Everything else is as a user gets it, a log line of each stage for each request included.
DEPLOYMENT = """
name: cpu-benchmark
transport: shm
runtime_dir: {folder}/run
model: {{adapter: "benchmarks.plugins:NoAdapter"}}
tokenizer: {{workers: 1, processor: "benchmarks.plugins:NoProcessor"}}
encoder: {{ranks: 1}}
pool: {{budget_mb: 256}}
embeddings_pool: {{budget_mb: 64}}
scheduler: {{groups: 1, tp_size: 1}}
"""


def cpu(scale: Scale) -> Outcome:
    """One tokenizer, encoder and scheduler; requests of a sentence and one feature of 1 MiB."""
    found = asyncio.run(_measured(scale))
    outcome = Outcome(
        "cpu",
        "CPU time of a request, no-op adapters, 1 x 1 x 1 ranks, one 1 MiB feature",
        tuple(measurement(name, "ms", values) for name, values in found.items()),
    )
    verdicts = tuple(
        Verdict.of(f"all stages, {how}: at most 3 ms", outcome.of(f"{how}: all stages").p50, "<=", 3)
        for how in ("eight in flight", "one at a time")
    )
    return Outcome(outcome.name, outcome.title, outcome.measurements, verdicts)


async def _measured(scale: Scale) -> dict[str, list[float]]:
    """Milliseconds of CPU a request, by how many are in flight and by stage."""
    found: dict[str, list[float]] = {}
    with TemporaryDirectory(prefix="ferry-") as folder, running(Path(folder), DEPLOYMENT) as deployment:
        runtime = Runtime.of(deployment)
        async with Client.connect(deployment, timeout_s=START_S) as client:
            pids = {stage: pid_of(runtime, stage) for stage in STAGES}
            await _requests(client, scale.of(_REQUESTS), 8)
            for _ in range(max(1, scale.rounds // 4)):
                for how, in_flight in (("one at a time", 1), ("eight in flight", 8)):
                    count = scale.of(_REQUESTS)
                    before = {stage: _cpu_ms(pid) for stage, pid in pids.items()}
                    await _requests(client, count, in_flight)
                    spent = {stage: (_cpu_ms(pid) - before[stage]) / count for stage, pid in pids.items()}
                    for stage, ms in (*spent.items(), ("all stages", sum(spent.values()))):
                        found.setdefault(f"{how}: {stage}", []).append(ms)
    return found


async def _requests(client: Client, count: int, in_flight: int) -> None:
    free = asyncio.Semaphore(in_flight)
    image = secrets.token_bytes(_IMAGE_NBYTES)

    async def request() -> None:
        async with free:
            outcome = await client.submit(["What is in the picture? ", image], output_tokens=16)
            if not isinstance(outcome, Result):
                raise RuntimeError(f"not a result: {outcome}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(request())


@contextmanager
def running(folder: Path, text: str) -> Iterator[Deployment]:
    """`tensorferry up`, ready, its log in a file; it ends with this process.

    text: of its file, where `{folder}` is the folder.
    """
    file, log = folder / "deployment.yaml", folder / "log"
    file.write_text(text.format(folder=folder), encoding="utf-8")
    command = tied("-m", "tensorferry", "up", "--config", str(file))
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]  # for our plug-ins
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with (
        open(log, "wb") as stderr,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr) as up,
    ):
        assert up.stdout is not None
        if b"is ready" not in up.stdout.readline():  # its last words come first when it cannot start
            raise RuntimeError(log.read_text(encoding="utf-8"))
        try:
            yield load(file)
        finally:
            up.terminate()


def pid_of(runtime: Runtime, stage: str) -> int:
    return msgspec.json.decode(runtime.lock(stage, 0).read_bytes(), type=Owner).pid


def _cpu_ms(pid: int) -> float:
    """CPU time so far, user and system, of all threads. Source: proc(5), fields 14 and 15 of /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS * 1e3
