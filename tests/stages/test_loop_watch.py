"""A plug-in that holds the event loop is found out and named, and nobody else is."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tensorferry.codecs.messages import Result
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.loop_watch import BLOCKED_S, Watch

DEADLINE_S = 60.0
HELD_S = 2.5 * BLOCKED_S

pytestmark = pytest.mark.timeout(120)


def hold_the_lock(seconds: float) -> None:
    """Keep Python's lock, at work, for so long at least: one call into C that never looks whether others wait."""
    began, most = time.thread_time(), 1 << 20
    while time.thread_time() - began < seconds:
        began = time.thread_time()
        sum(range(most))
        most *= 2


async def in_thread(watch: Watch, work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as thread, watch.beside():
        await asyncio.get_running_loop().run_in_executor(thread, work)


@pytest.fixture
def watch() -> Watch:
    return Watch("scheduler.engine", "my:Engine", Counters())


def blocks(watch: Watch) -> float:
    return watch.counters.value("plugin_blocks")


async def test_a_step_that_holds_the_loop_is_told_with_its_time(watch: Watch) -> None:
    async def run(seconds: float) -> str:
        await asyncio.sleep(0)
        time.sleep(seconds)  # noqa: ASYNC251 - the fault
        return "answer"

    with capture_logs() as logs:
        assert await watch.steps(lambda: run(HELD_S)) == "answer"
        assert await watch.steps(lambda: run(BLOCKED_S)) == "answer"
    [line] = [line for line in logs if line["event"] == "event_loop_blocked"]  # the shorter one is counted alone
    assert (line["key"], line["plugin"], line["log_level"]) == ("scheduler.engine", "my:Engine", "warning")
    assert HELD_S * 1e3 <= line["held_ms"] < 10 * HELD_S * 1e3
    assert blocks(watch) == 2


async def test_steps_pass_on_answers_errors_and_cancelling(watch: Watch) -> None:
    cleaned = []

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaned.append(True)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await watch.steps(fail)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await watch.steps(wait)
    assert cleaned == [True]
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    answer.set_result(7)
    assert await watch.steps(lambda: answer) == 7


@pytest.mark.slow
async def test_a_thread_that_keeps_the_lock_is_told_of(watch: Watch) -> None:
    with capture_logs() as logs:
        await in_thread(watch, lambda: hold_the_lock(HELD_S))
    assert "event_loop_blocked" in [line["event"] for line in logs]
    assert blocks(watch) >= 1


async def test_nobody_is_blamed_who_waits_or_for_what_others_do(watch: Watch) -> None:
    async def hold() -> None:
        time.sleep(HELD_S)  # noqa: ASYNC251 - somebody else's fault

    with capture_logs() as logs:
        await watch.steps(lambda: asyncio.sleep(HELD_S))
        await in_thread(watch, lambda: time.sleep(HELD_S))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(in_thread(watch, lambda: time.sleep(HELD_S)))
            tasks.create_task(hold())
    assert [line for line in logs if line["event"] == "event_loop_blocked"] == []
    assert blocks(watch) == 0


# --- in a deployment ----------------------------------------------------------------------------------------------

PLUGINS = """
import asyncio, time
from tensorferry.stages.engines.base import EngineResult
from tensorferry.stages.processors.qwen2_vl import Qwen2VLProcessor
from tensorferry.stages.adapters.fingerprint import Fingerprint

def hold_the_lock():
    began, most = time.thread_time(), 1 << 20
    while time.thread_time() - began < 0.625:
        began = time.thread_time()
        sum(range(most))
        most *= 2

class Processor(Qwen2VLProcessor):
    def write(self, *given):
        hold_the_lock()
        return super().write(*given)

class Adapter(Fingerprint):
    def encode(self, items, load, out):
        if items:
            hold_the_lock()
        return super().encode(items, load, out)

class Engine:
    def __init__(self, spec): ...
    async def run(self, batch):
        await asyncio.sleep(0.01)
        time.sleep(0.625)
        return [EngineResult(1) for request in batch]

class Importer(Engine):
    async def run(self, batch):
        import torch
        return [EngineResult(1) for request in batch]

class Sleeper(Engine):
    async def run(self, batch):
        await asyncio.sleep(0.625)
        return [EngineResult(1) for request in batch]
"""
#: Settings, and who is to be named: stage, key, class.
CASES = {
    "processor": (
        "tokenizer: {processor: 'holding:Processor'}\nmodel: {adapter: fingerprint}\n",
        ("tokenizer", "tokenizer.processor", "holding:Processor"),
    ),
    "adapter": ("model: {adapter: 'holding:Adapter'}\n", ("encoder", "model.adapter", "holding:Adapter")),
    "engine": (
        "scheduler: {engine: 'holding:Engine'}\nmodel: {adapter: fingerprint}\n",
        ("scheduler", "scheduler.engine", "holding:Engine"),
    ),
    "first_import": (
        "scheduler: {engine: 'holding:Importer'}\nmodel: {adapter: fingerprint}\n",
        ("scheduler", "scheduler.engine", "holding:Importer"),
    ),
    "nobody": ("scheduler: {engine: 'holding:Sleeper'}\nmodel: {adapter: fingerprint}\n", None),
}


@pytest.mark.processes
@pytest.mark.parametrize(("text", "named"), CASES.values(), ids=CASES)
async def test_a_deployment_names_the_plug_in_that_held_a_stage(text: str, named: tuple[str, str, str] | None) -> None:
    image = (Path(__file__).parents[1] / "data" / "images" / "tiny_20x20.jpg").read_bytes()
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        (Path(folder) / "holding.py").write_text(PLUGINS)
        file = Path(folder) / "a.yaml"
        log = "telemetry: {log_format: json}\npool: {budget_mb: 4}\nembeddings_pool: {budget_mb: 4}\n"
        file.write_text(f"name: held\nruntime_dir: {folder}/run\ntransport: cpu\n{text}{log}")
        command = [sys.executable, "-m", "tensorferry", "up", "--config", str(file)]
        environ = {**os.environ, "PYTHONPATH": folder}
        up = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environ
        )
        try:
            assert up.stdout is not None
            assert (await asyncio.wait_for(up.stdout.readline(), DEADLINE_S)).startswith(b"held is ready")
            async with Client.connect(load(file)) as client:
                outcome = await asyncio.wait_for(client.submit(["what?", image]), DEADLINE_S)
            assert isinstance(outcome, Result), outcome
            up.terminate()
            said = (await asyncio.wait_for(up.communicate(), DEADLINE_S))[1].decode()
        finally:
            if up.returncode is None:
                up.kill()
                await up.communicate()
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    blamed = [line for line in lines if line["event"] == "event_loop_blocked"]
    assert {(line["stage"], line["key"], line["plugin"]) for line in blamed} == ({named} if named else set())
    if named:
        assert max(line["held_ms"] for line in blamed) >= 250
