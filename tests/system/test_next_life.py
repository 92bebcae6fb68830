"""A process that is killed under load and comes again: nothing of its former life is shown under the new epoch."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorferry.codecs.messages import Member
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.process.supervisor import Supervisor

DEADLINE_S = 60.0
PHOTO = Path(__file__).parents[2] / "examples" / "images" / "coffee_lossy.webp"
DEPLOYMENT = """
name: next-life
transport: shm
runtime_dir: {folder}/run
model: {{adapter: fingerprint}}
encoder: {{ranks: 2}}
pool: {{budget_mb: 64}}
embeddings_pool: {{budget_mb: 16}}
timeouts: {{heartbeat_s: 2.0, quarantine_s: 20.0}}
telemetry: {{log_level: error}}
"""


@pytest.fixture
def file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        path = Path(folder) / "deployment.yaml"
        path.write_text(DEPLOYMENT.format(folder=folder))
        yield path


def first(members: list[Member]) -> tuple[int, dict[str, float]]:
    """Epoch and gauges of the first encoder rank."""
    [member] = [member for member in members if (member.stage, member.rank) == ("encoder", 0)]
    return member.epoch, {gauge.name: gauge.value for gauge in member.gauges}


@pytest.mark.processes
@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_s4_a_new_epoch_has_no_gauges_but_its_own(file: Path) -> None:
    """As soon as it is there, which is before its first heartbeat, and until that has come."""
    deployment, over = load(file), asyncio.Event()
    photo = PHOTO.read_bytes()

    async def one_after_the_other(client: Client) -> None:
        while not over.is_set():
            await client.submit(["a ", photo], output_tokens=1)

    async with (
        Supervisor.running(deployment, file) as supervisor,
        Client.connect(deployment, timeout_s=DEADLINE_S) as client,
        asyncio.timeout(DEADLINE_S),
        asyncio.TaskGroup() as load_of_four,
    ):
        for _ in range(4):
            load_of_four.create_task(one_after_the_other(client))
        epoch, gauges = first(await client.refresh())
        while gauges.get("encoded_items", 0) < 20:
            epoch, gauges = first(await client.refresh())
        os.kill(supervisor.processes["encoder", 0], signal.SIGKILL)
        killed_s, former, seen = time.monotonic(), epoch, []
        while not seen or not seen[-1]:  # until its first heartbeat
            epoch, of_now = first(await client.refresh())
            if epoch != former:
                seen.append(of_now)
        over.set()
    assert seen[0] == {}, "it was looked at before its first heartbeat"
    assert seen[-1]["uptime_s"] < time.monotonic() - killed_s
