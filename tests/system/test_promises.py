"""Promises that only a deployment of real processes can keep: each was broken on purpose, and a test here failed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Limits
from tensorferry.pipeline.channels.channels import Inbox, Outbox, open_context
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment, port_offset
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.supervisor import Supervisor

PROGRAMS = Path(__file__).parents[1] / "programs"
START_S = 60.0
DEADLINE_S = 20.0

pytestmark = pytest.mark.timeout(120)

DEPLOYMENT = """
name: promises
transport: shm
runtime_dir: {folder}/run
model: {{adapter: {adapter}}}
tokenizer: {{threads: 1, processor: {processor}}}
encoder: {{ranks: 1, {encoder}}}
scheduler: {{{scheduler}}}
pool: {{inline_below_kb: 0, {pool}}}
embeddings_pool: {{budget_mb: 16, inline_below_kb: 0, slots: {embedding_slots}}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0}}
telemetry: {{log_level: warning, log_format: json{telemetry}}}
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Whose path leaves room for the names of sockets; the plug-ins can be imported."""
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS), prepend=os.pathsep)
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield Path(path)


def write(folder: Path, **settings: object) -> Path:
    values: dict[str, object] = {
        "folder": folder,
        "adapter": "fingerprint",
        "processor": "qwen2-vl",
        "encoder": "threads: 1",
        "scheduler": "groups: 1",
        "pool": "budget_mb: 64",
        "embedding_slots": 64,
        "telemetry": "",
    }
    file = folder / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(**(values | settings)))
    return file


@asynccontextmanager
async def running(file: Path) -> AsyncIterator[tuple[Deployment, Client]]:
    """Up for the length of the block; at its end every lease is back."""
    deployment = load(file)
    async with Supervisor.running(deployment, file), Client.connect(deployment, timeout_s=START_S) as client:
        yield deployment, client
        async with asyncio.timeout(DEADLINE_S):
            while sum(  # noqa: ASYNC110
                gauge.value
                for member in await client.refresh()
                for gauge in member.gauges
                if gauge.name == "pool_lent_slots"
            ):
                await asyncio.sleep(0.05)


def picture(size: int, seed: int) -> bytes:
    """A PNG that no other seed gives."""
    coarse = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8))
    with io.BytesIO() as file:
        coarse.resize((size, size)).save(file, "PNG")
        return file.getvalue()


def noted(journal: Path, who: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return [line for line in lines if line["who"] == who]


# --- E6: who is sent what


@pytest.mark.parametrize(("tp_size", "attention_tp_size"), [(2, 1), (4, 2)])
async def test_e6_a_request_is_sent_to_its_attention_group_and_to_nobody_else(
    folder: Path, tp_size: int, attention_tp_size: int
) -> None:
    journal = folder / "journal"
    ranks = f'groups: 1, tp_size: {tp_size}, attention_tp_size: {attention_tp_size}, engine: "witness:Engine"'
    file = write(folder, scheduler=f"{ranks}, options: {{journal: {journal}}}")
    requests = [number.to_bytes(8, "big") * 2 for number in range(12)]
    async with running(file) as (_, client):
        for number, request in enumerate(requests):
            parts = ["text ", picture(60, number)] if number % 3 else ["text alone"]
            assert isinstance(await client.submit(parts, request=request), wire.Result)
    ran = defaultdict(list)
    for line in noted(journal, "engine"):
        ran[line["request"]].append(line["pid"])
    assert ran.keys() == {request.hex() for request in requests}
    groups = {request: frozenset(pids) for request, pids in ran.items()}
    assert all(len(pids) == attention_tp_size == len(groups[request]) for request, pids in ran.items())
    assert len(set(groups.values())) == tp_size // attention_tp_size, "each group has its share"
    assert len(frozenset().union(*groups.values())) == tp_size, "no rank is in two groups"


# --- P8: what a front end must be able to do


@pytest.mark.parametrize(
    ("capabilities", "refused"), [((), True), (("pool", "shm"), True), (("pool", "cuda_ipc"), False)], ids=str
)
async def test_p8_a_stage_refuses_a_front_end_that_cannot_hand_over_what_the_deployment_uses(
    folder: Path, capabilities: tuple[str, ...], refused: bool
) -> None:
    """A scheduler's process, and a front end that is this test."""
    file = folder / "deployment.yaml"
    file.write_text(f"name: foreign\ntransport: cuda_ipc\nruntime_dir: {folder}/run\ntelemetry: {{log_level: error}}\n")
    deployment = load(file)
    runtime = Runtime.of(deployment)
    mine, its = runtime.inbox("tokenizer", 0), runtime.inbox("scheduler", 0)
    with ExitStack() as undo:
        undo.enter_context(runtime.own("tokenizer", 0))
        program = [sys.executable, str(PROGRAMS / "lone_scheduler.py"), str(file)]
        process = undo.enter_context(subprocess.Popen(program))  # noqa: ASYNC220
        undo.callback(process.terminate)
        context = undo.enter_context(open_context())
        inbox = Inbox(context, mine, Limits(), lambda problem: pytest.fail(str(problem)))
        undo.callback(inbox.close)
        outbox = Outbox(context, its, "scheduler-0")
        undo.callback(outbox.close)
        outbox.send_nowait(wire.Hello(wire.PROTOCOL_VERSION, wire.Origin("tokenizer", 0, 5), mine, capabilities))
        async with asyncio.timeout(START_S):
            async for received in inbox:
                if isinstance(received.message, wire.Welcome):
                    break
    refusal = received.message.refusal
    assert bool(refusal) is refused, refusal
    assert not refused or "tokenizer-0 cannot hand tensors over by cuda_ipc" in refusal


# --- L5: a full pool


@pytest.mark.parametrize(
    ("settings", "stage", "key"),
    [
        ({"pool": "budget_mb: 1"}, "tokenizer", "pool.budget_mb"),
        ({"pool": "budget_mb: 64, slots: 1"}, "tokenizer", "pool.slots"),
        ({"embedding_slots": 1}, "encoder", "embeddings_pool.slots"),
    ],
    ids=["bytes", "slots", "slots for embeddings"],
)
@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_l5_what_finds_no_room_is_counted_and_warned_of_once_with_the_key_to_raise(
    folder: Path, settings: dict[str, object], stage: str, key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = min(free.getsockname()[1], 65000)
    file = write(folder, telemetry=f", prometheus_port: {port}", **settings)
    async with running(file) as (deployment, client):
        for seed in range(3):
            assert isinstance(await client.submit([picture(448, seed), picture(448, seed + 10)]), wire.Result)
        reader, writer = await asyncio.open_connection("127.0.0.1", port + port_offset(deployment, stage, 0))
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            page = (await reader.read()).decode()
        writer.close()
    counted = [line for line in page.splitlines() if "pool_full_fallbacks" in line and not line.startswith("#")]
    assert sum(float(line.rsplit(maxsplit=1)[1]) for line in counted if "_created" not in line) >= 3, counted
    said = [json.loads(line) for line in capfd.readouterr().err.splitlines() if '"pool_full"' in line]
    assert [(line["stage"], line["level"]) for line in said] == [(stage, "warning")], said
    assert said[0]["tensor_nbytes"] > 0
    assert said[0]["pool_nbytes"] > 0
    assert f"raise {key} " in said[0]["remedy"]


# --- E5, L10, L6: what an encoder does with features


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_e5_l10_features_are_borrowed_or_copied_once(folder: Path) -> None:
    """One item is read where it lies. Of several there is the batch, and no other memory of that size for a moment."""
    journal = folder / "journal"
    options = f"options: {{journal: {journal}}}"
    file = write(folder, adapter=f"witness:Adapter, {options}", processor=f"witness:Processor, {options}")
    async with running(file) as (_, client):
        assert isinstance(await client.submit([picture(448, 0)]), wire.Result)
        assert isinstance(await client.submit([picture(448, seed) for seed in range(1, 5)]), wire.Result)
    assert [line["in_a_pool"] for line in noted(journal, "processor")] == [True] * 5, "made in its lease"
    one, four = noted(journal, "adapter")
    assert (one["items"], four["items"]) == (1, 4)
    assert one["in_a_pool"], "borrowed"
    assert one["peak_nbytes"] < one["nbytes"] / 8
    assert four["nbytes"] == 4 * one["nbytes"]
    assert four["nbytes"] <= four["peak_nbytes"] < four["nbytes"] + one["nbytes"] / 2


@pytest.mark.parametrize("handle_cache", [True, False])
async def test_l6_the_stages_read_as_handle_cache_says(folder: Path, handle_cache: bool) -> None:
    journal = folder / "journal"
    pool = f"budget_mb: 64, handle_cache: {str(handle_cache).lower()}"
    file = write(folder, adapter=f"witness:Adapter, options: {{journal: {journal}}}", pool=pool)
    async with running(file) as (_, client):
        assert isinstance(await client.submit([picture(60, 0)]), wire.Result)
    assert [line["cache_handles"] for line in noted(journal, "adapter")] == [handle_cache]


# --- L8: what proxies declare


@pytest.mark.parametrize("field", ["consumers", "uses"])
@pytest.mark.parametrize("liar", ["tokenizer", "encoder"])
async def test_l8_a_proxy_that_declares_what_it_was_not_lent_for_is_refused_and_keeps_no_lease(
    folder: Path, liar: str, field: str
) -> None:
    """Whoever reads it says so, also where it would not have to read: the cache has its picture."""
    lie = folder / "lie"
    where, plugin = {"tokenizer": ("processor", "liar:Processor"), "encoder": ("adapter", "liar:Adapter")}[liar]
    file = write(folder, encoder="cache_mb: 16", **{where: f"{plugin}, options: {{lie: {lie}}}"})
    async with running(file) as (_, client):
        assert isinstance(await client.submit([picture(100, 0)]), wire.Result)
        lie.write_text(field)
        for seed in (0, 1):
            failed = await client.submit([picture(100, seed), "and ", picture(100, seed + 10)])
            assert isinstance(failed, wire.Failed)
            assert (failed.failure.kind, failed.failure.retryable) == ("BadMessage", False)
            assert "declares" in failed.failure.problem
            assert failed.failure.origin.stage == {"tokenizer": "encoder", "encoder": "scheduler"}[liar]
        lie.unlink()
        assert isinstance(await client.submit([picture(100, 0), picture(100, 1)]), wire.Result)
