"""P4: what the log says of the transport at start is what the deployment file says, and what its pools then are."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tensorferry.cli import transport as cli_transport
from tensorferry.cli.config import load_deployment
from tensorferry.codecs.machine.facts import CudaFacts, Facts, Gpu, HostFacts, Trial
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.spec import Deployment, EmbeddingsPoolSpec, EncoderSpec, PoolSpec, TokenizerSpec
from tensorferry.pipeline.process.supervisor import Supervisor

DEADLINE_S = 60.0
WORKS = Trial(True)
GPUS = tuple(Gpu("NVIDIA H200", f"GPU-000{number}") for number in range(3))
FACTS = Facts(
    HostFacts("6.18.0", WORKS, 1 << 30, 1 << 34, None, 1 << 16, 0, False, False, False),
    CudaFacts(driver=13000, gpus=GPUS, words=WORKS, ipc=WORKS),
)


def line_of(deployment: Deployment) -> dict[str, Any]:
    """What is logged of it at its start."""
    with structlog.testing.capture_logs() as lines:
        cli_transport.settle(deployment, {})
    [line] = [line for line in lines if line["event"] == "transport_chosen"]
    return dict(line)


@pytest.mark.parametrize(("budget_mb", "workers", "cached"), [(96, 3, False), (2048, 2, True)])
def test_p4_the_start_line_has_the_numbers_of_the_deployment_file(
    monkeypatch: pytest.MonkeyPatch, budget_mb: int, workers: int, cached: bool
) -> None:
    monkeypatch.setattr(cli_transport, "gather", lambda environ, cuda: FACTS)
    pool, tokenizer = PoolSpec(budget_mb=budget_mb, handle_cache=cached), TokenizerSpec(workers=workers)
    embeddings, encoder = EmbeddingsPoolSpec(budget_mb=budget_mb // 2), EncoderSpec(ranks=workers + 1)
    line = line_of(Deployment("a", pool=pool, tokenizer=tokenizer, embeddings_pool=embeddings, encoder=encoder))
    assert line["transport"] == "cuda_ipc"
    assert (line["hbm_budget_mib"], line["tokenizer_workers"]) == (budget_mb, workers)
    assert (line["mib_per_worker"], line["handle_cache"]) == (budget_mb // workers, cached)
    assert (line["embeddings_hbm_budget_mib"], line["encoder_ranks"]) == (budget_mb // 2, workers + 1)
    assert line["embeddings_mib_per_rank"] == budget_mb // 2 // (workers + 1)


@pytest.mark.parametrize(
    ("tokenizers", "encoders", "named"),
    [
        (None, None, ("NVIDIA H200 GPU-0000", "NVIDIA H200 GPU-0000")),
        ((2,), (1,), ("NVIDIA H200 GPU-0002", "NVIDIA H200 GPU-0001")),
        ((1, 0, 2), (0, 1), ("NVIDIA H200 GPU-0000, NVIDIA H200 GPU-0001", "NVIDIA H200 GPU-0000")),
    ],
    ids=["the first by default", "others", "one for each process"],
)
def test_p4_the_start_line_names_the_gpus_that_the_pools_are_on(
    monkeypatch: pytest.MonkeyPatch,
    tokenizers: tuple[int, ...] | None,
    encoders: tuple[int, ...] | None,
    named: tuple[str, str],
) -> None:
    monkeypatch.setattr(cli_transport, "gather", lambda environ, cuda: FACTS)
    stages = {"tokenizer": TokenizerSpec(workers=2, devices=tokenizers), "encoder": EncoderSpec(devices=encoders)}
    line = line_of(Deployment("a", **stages))
    assert (line["base_gpu"], line["embeddings_gpu"]) == named


# --- by the command, and in a deployment


DEPLOYMENT = """
name: start-line
runtime_dir: {runtime}/run
model: {{adapter: fingerprint}}
tokenizer: {{workers: 2, threads: 1{tokenizer}}}
encoder: {{ranks: 2, threads: 1{encoder}}}
pool: {{budget_mb: 22}}
embeddings_pool: {{budget_mb: 14}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0}}
telemetry: {{log_format: json}}
transport: {transport}
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield Path(path)


def write(folder: Path, transport: str, tokenizer: str = "", encoder: str = "") -> Path:
    file = folder / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(runtime=folder, transport=transport, tokenizer=tokenizer, encoder=encoder))
    return file


def test_p4_the_start_line_of_a_command_on_a_machine_with_gpus(folder: Path, stub_cuda: Any) -> None:
    """It is read up to this line, as the stub driver runs no stage."""
    file = write(folder, "cuda_ipc", ", devices: [1]", ", devices: [0, 1]")
    command = [sys.executable, "-P", "-m", "tensorferry", "start", "tokenizer", "--config", str(file)]
    with subprocess.Popen(command, env=stub_cuda.environ, stderr=subprocess.PIPE, text=True) as process:
        stop = threading.Timer(DEADLINE_S, process.kill)
        stop.start()
        try:
            assert process.stderr is not None
            said = (json.loads(line) for line in process.stderr)
            line = next(line for line in said if line["event"] == "transport_chosen")
        finally:
            stop.cancel()
            process.kill()
    first, second = line["embeddings_gpu"].split(", ")
    assert first != second == line["base_gpu"]
    assert (line["hbm_budget_mib"], line["mib_per_worker"]) == (22, 11)
    assert (line["embeddings_hbm_budget_mib"], line["embeddings_mib_per_rank"]) == (14, 7)


async def test_p4_the_start_line_says_what_the_pools_of_a_deployment_then_are(folder: Path) -> None:
    file = write(folder, "shm")
    deployment = load_deployment(file)
    line = line_of(deployment)
    promised = {
        "tokenizer": [line["mib_per_worker"] << 20] * line["tokenizer_workers"],
        "encoder": [line["embeddings_mib_per_rank"] << 20] * line["encoder_ranks"],
    }
    pools: dict[str, list[float]] = {}
    async with (
        Supervisor.running(deployment, file),
        Client.connect(deployment, timeout_s=DEADLINE_S) as client,
        asyncio.timeout(DEADLINE_S),
    ):
        while sum(map(len, pools.values())) < sum(map(len, promised.values())):  # each has sent a heartbeat
            pools = defaultdict(list)
            for member in await client.refresh():
                for gauge in member.gauges:
                    if gauge.name == "pool_capacity_nbytes":
                        pools[member.stage].append(gauge.value)
    assert pools == promised
    assert (line["host_budget_mib"], line["embeddings_host_budget_mib"]) == (22, 14)
