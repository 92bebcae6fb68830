"""A rank that is stopped, or acknowledges nonsense, gets nothing new; the others go on; what it has stays with it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.client.client import Client, Outcome
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment, port_offset
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.assignment import assign

PROGRAMS = Path(__file__).parents[1] / "programs"
START_S = 60.0
PATIENCE_S = 30.0
DEADLINE_S = 5.0  #: of requests to a rank that is stopped
ROWS_GATED, ROWS_MAD = 11, 13  #: of an item that the odd adapter waits at, or goes mad at

pytestmark = pytest.mark.timeout(120)

DEPLOYMENT = """
name: quarantine-test
transport: shm
runtime_dir: {folder}/run
model: {{adapter: "odd_adapter:Odd", options: {{gate: {folder}/gate}}}}
tokenizer: {{workers: 1, threads: 1}}
encoder: {{ranks: {encoders}}}
scheduler: {{groups: {groups}, options: {{digests: true}}}}
pool: {{budget_mb: 16, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 16, inline_below_kb: 0}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 2.0}}
telemetry: {{log_level: error, log_format: json, prometheus_port: {port}}}
"""


@dataclass
class Running:
    """A deployment, with a client."""

    deployment: Deployment
    supervisor: Supervisor
    client: Client
    gate: Path

    def submit(self, request: bytes, rows: int = 4, deadline_s: float | None = None) -> asyncio.Future[Outcome]:
        return self.client.submit_nowait([image(rows)], request=request, deadline_s=deadline_s)

    async def stop(self, stage: str, rank: int) -> int:
        pid = self.supervisor.processes[stage, rank]
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        return pid

    async def becomes(self, stage: str, rank: int, state: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                members = await self.client.refresh()
                if (stage, rank, state) in {(member.stage, member.rank, member.state) for member in members}:
                    return
                await asyncio.sleep(0.02)

    async def waits_at_gate(self, request: asyncio.Future[Outcome]) -> None:
        entered = self.gate.with_suffix(".entered")
        await eventually(lambda: entered.exists() or request.done())
        assert not request.done(), request.result()

    async def gauges(self, name: str) -> dict[str, float]:
        """What all processes say of this number, by process; zeros are left out."""
        return {
            f"{member.stage}-{member.rank}": gauge.value
            for member in await self.client.refresh()
            for gauge in member.gauges
            if gauge.name == name and gauge.value
        }

    async def says(self, name: str, wanted: dict[str, float]) -> None:
        """Until they say this."""
        end = time.monotonic() + PATIENCE_S
        while (said := await self.gauges(name)) != wanted:
            assert time.monotonic() < end, f"{name} is {said}, not {wanted}"
            await asyncio.sleep(0.02)

    async def lends(self, wanted: dict[str, float]) -> None:
        """Until so many leases are out, by process."""
        await self.says("pool_lent_slots", wanted)

    def counted(self, stage: str, rank: int, name: str) -> int:
        """What the process has counted, by its metrics."""
        port = self.deployment.telemetry.prometheus_port
        assert port is not None
        url = f"http://127.0.0.1:{port + port_offset(self.deployment, stage, rank)}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"tensorferry_{name}_total")))


@pytest.fixture
def run(may_start_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS), prepend=os.pathsep)

    @asynccontextmanager
    async def running(encoders: int = 1, groups: int = 1) -> AsyncIterator[Running]:
        file = tmp_path / "deployment.yaml"
        port = free_ports(1 + encoders + groups)
        file.write_text(DEPLOYMENT.format(folder=folder, encoders=encoders, groups=groups, port=port))
        deployment = load(file)
        async with (
            Supervisor.running(deployment, file) as supervisor,
            Client.connect(deployment, timeout_s=START_S) as client,
        ):
            it = Running(deployment, supervisor, client, Path(folder) / "gate")
            await it.says("peers_quarantined", {})  # a machine may be busy while all start at once
            yield it

    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        yield running


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has now."""
    for first in range(20_000 + os.getpid() % 1000 * 20, 60_000, 20):
        with ExitStack() as sockets:
            try:
                for port in range(first, first + count):
                    sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no ports")


def image(rows: int) -> bytes:
    """A picture that becomes so many rows of embeddings: 28 x 28 pixels each."""
    pixels = np.random.default_rng(rows).integers(0, 256, (28, 28 * rows, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()


def ids(rank: int, ranks: int) -> Iterator[bytes]:
    """Requests whose only item belongs to this encoder rank, for ever."""
    number = 0
    while True:
        number += 1
        request = number.to_bytes(16, "big")
        if assign(request, [4], ranks) == [rank]:
            yield request


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.005)


async def outcomes(futures: list[asyncio.Future[Outcome]]) -> list[Outcome]:
    async with asyncio.timeout(PATIENCE_S):
        return list(await asyncio.gather(*futures))


async def test_b07_c5_while_an_encoder_is_stopped_the_others_serve(run: Callable[..., Any]) -> None:
    async with run(encoders=3) as it:
        its = ids(1, 3)
        it.gate.touch()
        held = [it.submit(next(its), ROWS_GATED, DEADLINE_S)]
        await it.waits_at_gate(held[0])
        held += [it.submit(next(its), deadline_s=DEADLINE_S) for _ in range(3)]  # behind the one it encodes
        await it.lends({"tokenizer-0": 4, "encoder-1": 2})  # its two outputs are not sent yet
        pid = await it.stop("encoder", 1)
        it.gate.unlink()
        held += [it.submit(next(its), deadline_s=DEADLINE_S) for _ in range(2)]  # nobody has noticed yet
        await it.becomes("encoder", 1, "quarantined")

        fresh = await outcomes([it.submit(next(its)) for _ in range(30)])
        assert not [outcome for outcome in fresh if not isinstance(outcome, wire.Result)], fresh
        ranks = {item.rank for outcome in fresh if isinstance(outcome, wire.Result) for item in outcome.items}
        assert ranks == {0, 2}

        healed = await outcomes(held)
        assert not [outcome for outcome in healed if not isinstance(outcome, wire.Result)], healed
        assert {item.rank for outcome in healed if isinstance(outcome, wire.Result) for item in outcome.items} == {0, 2}
        await it.lends({"tokenizer-0": len(held), "encoder-1": 2})  # what it may still read is nobody else's

        os.kill(pid, signal.SIGCONT)
        await it.becomes("encoder", 1, "ready")
        await it.lends({})
        late = it.counted("encoder", 1, "embeddings_late") + it.counted("scheduler", 0, "embeddings_late")
        assert late == 1, "what it had made of the first of them"
        assert it.counted("encoder", 1, "jobs_late") == len(held) - 1
        [again] = await outcomes([it.submit(next(its))])
        assert isinstance(again, wire.Result)
        assert again.items[0].rank == 1


async def test_b07_while_a_scheduler_is_stopped_the_other_group_serves(run: Callable[..., Any]) -> None:
    """And gets what it had; the encoder does not give it what it has made for it meanwhile."""
    async with run(encoders=1, groups=2) as it:
        numbers = (number.to_bytes(8, "big") * 2 for number in range(2, 1000))  # even ones go to the first group
        it.gate.touch()
        made = it.submit(next(numbers), ROWS_GATED)
        await it.waits_at_gate(made)
        pid = await it.stop("scheduler", 0)
        held = [it.submit(next(numbers), deadline_s=DEADLINE_S) for _ in range(8)]
        await it.becomes("scheduler", 0, "quarantined")
        await it.says("peers_quarantined", {"tokenizer-0": 1, "encoder-0": 1})
        it.gate.unlink()
        [again] = await outcomes([made])
        assert isinstance(again, wire.Result), again

        fresh = await outcomes([it.submit(next(numbers)) for _ in range(20)])
        assert not [outcome for outcome in fresh if not isinstance(outcome, wire.Result)], fresh
        healed = await outcomes(held)
        assert not [outcome for outcome in healed if not isinstance(outcome, wire.Result)], healed

        os.kill(pid, signal.SIGCONT)
        await it.becomes("scheduler", 0, "ready")
        await it.says("peers_quarantined", {})
        await it.lends({})
        back = await outcomes([it.submit(next(numbers)) for _ in range(4)])
        assert not [outcome for outcome in back if not isinstance(outcome, wire.Result)], back


async def test_an_encoder_that_acknowledges_nonsense_gets_nothing_new(run: Callable[..., Any]) -> None:
    async with run(encoders=2) as it:
        its = ids(1, 2)
        [first, mad] = await outcomes([it.submit(next(its)), it.submit(next(its), ROWS_MAD)])
        assert isinstance(first, wire.Result)
        assert isinstance(mad, wire.Result), "it had read the bytes before, and its digest is right"
        await it.becomes("encoder", 1, "quarantined")
        fresh = await outcomes([it.submit(next(its)) for _ in range(10)])
        assert {item.rank for outcome in fresh if isinstance(outcome, wire.Result) for item in outcome.items} == {0}
        assert len([outcome for outcome in fresh if isinstance(outcome, wire.Result)]) == 10
        assert await it.gauges("pool_acks_invalid") == {"tokenizer-0": 1}
        assert await it.gauges("pool_quarantined_consumers") == {"tokenizer-0": 1}
