"""Plug-ins that make a mistake: whoever asked is told which; whoever else asked is served, by the same processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, ConfigError, item_of, text_of
from tensorferry.pipeline.client.client import Client, Outcome
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.engines.base import EngineResult
from tensorferry.stages.off_loop import run_to_end
from tensorferry.stages.plugin import import_class
from tensorferry.stages.scheduler.answer import Answer

PROGRAMS = Path(__file__).parents[1] / "programs"
PATIENCE_S = 60.0
DEPLOYMENT = """
name: slips-test
transport: shm
runtime_dir: {folder}/run
model: {{adapter: "slips:Adapter"}}
tokenizer: {{workers: 1, threads: 2, processor: "slips:Processor", options: {{max_pixels: 65536}}}}
encoder: {{ranks: 1}}
scheduler: {{groups: 1, engine: "slips:Engine"}}
pool: {{budget_mb: 16, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 16, inline_below_kb: 0}}
limits: {{request_mb: 16, item_mb: 8}}
telemetry: {{log_level: error}}
"""
#: What the client is told, by the rows of its item, and whether of the item.
ITEMS = {
    20: ("EncodeError", "RuntimeError: StopIteration"),
    21: ("EncodeError", "RuntimeError: SystemExit: 3"),
    22: ("EncodeError", "the adapter raised BadItem for item None of 1: item None: of none"),
    23: ("EncodeError", "the adapter raised BadItem for item 1180591620717411303424 of 1"),
    24: ("EncodeError", r"ValueError: \ud800"),
    25: ("BadItem", "item 0: the adapter asked for output 'nnn"),
    26: ("BadItem", "item 0: the adapter asked for output ''; a name is 1 to 64 printable characters"),
    27: ("EncodeError", "ValueError: output array is read-only"),
    28: (
        "BadRequest",
        "the pool has no room for 29360128 bytes of embeddings, and a message carries 16 MiB (limits.request_mb)",
    ),
    29: ("BadTensor", "9 dimensions; at most 8"),
    30: ("InternalError", "RuntimeError: StopIteration"),
    31: ("InternalError", "the plan's modality is 'mmm"),
    32: ("InternalError", "the plan's grid is (1.0, 2.0, 64.0); give ints from 0 to 2**31 - 1"),
    33: ("InternalError", "the plan's rows is"),
    34: ("InternalError", "Processor returned None in place of a Plan"),
    35: ("BadItem", r"item 0: \ud800"),
    36: ("InternalError", "Processor returned the content hash None; it must be 32 bytes"),
    37: ("InternalError", "Processor returned the content hash b'"),
    38: ("InternalError", "RuntimeError: SystemExit: 3"),
    39: ("InternalError", "RuntimeError: StopIteration"),
}
#: By the tokens that it asks for.
TOKENS = {
    102: "the engine answered with None, which is no EngineResult",
    103: "the engine answered with output_tokens=-1, not a number up to 1048576",
    104: "the engine answered with output_tokens=1000000000000000000000000000000",
    105: "the engine answered with digests=(b'",
    106: "not 1 byte strings of up to 64 bytes, nor none",
    107: "the engine answered with output_tokens=1.5",
    108: r"\ud800",
    109: "SystemExit: 3",
}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS), prepend=os.pathsep)
    with tempfile.TemporaryDirectory(prefix="tf-") as name:
        yield Path(name)


def image(rows: int) -> bytes:
    """A picture that becomes so many rows: 28 x 28 pixels each."""
    with BytesIO() as file:
        Image.new("RGB", (28 * rows, 28), (rows, 0, 0)).save(file, "PNG")
        return file.getvalue()


@pytest.mark.processes
@pytest.mark.timeout(180)
async def test_a_plug_in_s_mistake_fails_the_request_that_it_was_made_with(folder: Path) -> None:
    file = folder / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(folder=folder))
    deployment = load(file)
    wrong: list[str] = []

    def judge(name: str, outcome: Outcome, kind: str, said: str) -> None:
        if not isinstance(outcome, wire.Failed):
            wrong.append(f"{name}: {outcome}")
        elif outcome.failure.kind != kind or said not in outcome.failure.problem or outcome.failure.retryable:
            wrong.append(f"{name}: {outcome.failure.kind}: {outcome.failure.problem}")

    async with Supervisor.running(deployment, file) as supervisor, Client.connect(deployment) as client:
        pids = dict(supervisor.processes)
        for rows, (kind, said) in ITEMS.items():
            async with asyncio.timeout(PATIENCE_S):
                bad, *good = await asyncio.gather(
                    *(client.submit([image(n)], deadline_s=PATIENCE_S) for n in (rows, 4, 5))
                )
            judge(f"{rows} rows", bad, kind, said)
            wrong += [f"beside {rows} rows: {other}" for other in good if not isinstance(other, wire.Result)]
        for tokens, said in TOKENS.items():
            async with asyncio.timeout(PATIENCE_S):
                bad = await client.submit([image(4)], output_tokens=tokens, deadline_s=PATIENCE_S)
                good_one = await client.submit([image(4)], output_tokens=1, deadline_s=PATIENCE_S)
            judge(f"{tokens} tokens", bad, "EngineError", said)
            assert isinstance(good_one, wire.Result)
        assert not wrong, "\n".join(wrong)
        assert supervisor.processes == pids, "no process was lost"


@pytest.mark.parametrize(
    "problem", [StopIteration(7), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError("x")]
)
async def test_what_a_thread_raises_reaches_whoever_waits_for_it(problem: BaseException) -> None:
    def work() -> None:
        raise problem

    with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match=type(problem).__name__):
        async with asyncio.timeout(PATIENCE_S):
            await run_to_end(thread, work)


def test_an_engine_s_whole_numbers_may_be_numpy_s() -> None:
    answer = Answer.whole(EngineResult(np.int64(3), token_ids=np.arange(2)), 1)  # type: ignore[arg-type]
    assert (answer.count, answer.digests, bytes(answer.token_ids)) == (3, (), bytes(4) + b"\1\0\0\0")
    assert Answer.whole(EngineResult(3, [b"1", b"2"]), 2).digests == (b"1", b"2")  # type: ignore[arg-type]


def test_whatever_a_problem_says_can_travel() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise OSError

    assert text_of(ValueError("é\udcff")) == "é\\udcff"
    assert text_of(Mute()) == "(OSError while it was put into words)"
    assert len(text_of(ValueError("x" * 10_000))) == 4096


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "KeyboardInterrupt('stop')", "SystemExit(3)"])
def test_an_interrupt_that_a_plug_in_raises_names_the_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str
) -> None:
    (tmp_path / "interrupting.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ConfigError, match=r"cannot import interrupting of .*: (KeyboardInterrupt|SystemExit)"):
        import_class("model.adapter", "interrupting:Adapter")
    assert signal.getsignal(signal.SIGINT) is before


def test_the_user_s_interrupt_of_a_plug_in_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupted.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            import_class("model.adapter", "interrupted:Adapter")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("index", [None, "0", 0.0, True, -1, 2, sys.maxsize << 9])
def test_an_item_that_there_is_not_is_none(index: Any) -> None:
    assert item_of(BadItem(index, ""), 2) == -1
    assert item_of(BadItem(1, ""), 2) == 1
