"""The discard engine, and how an engine is found by name."""

from __future__ import annotations

import asyncio
import re
import sys
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs.errors import BadRequest, ConfigError
from tensorferry.codecs.tensors import View, view_of
from tensorferry.pipeline.deployment.spec import SchedulerSpec
from tensorferry.stages.engines import registry
from tensorferry.stages.engines.base import EngineRequest, EngineResult
from tensorferry.stages.engines.discard import CorruptEmbeddings, Discard, DiscardStatistics

Outputs = dict[str, View]


def request_of(*embeddings: Outputs, tokens: int = 10, output_tokens: int = 5) -> EngineRequest:
    spans, offset = [], 1
    for outputs in embeddings:
        length = next(iter(outputs.values())).shape[0]
        spans.append((offset, length))
        offset += length
    return EngineRequest(bytes(16), np.zeros(tokens + offset, np.int32), spans, embeddings, output_tokens)


def floats(rows: int, seed: int = 0) -> View:
    return view_of(np.random.default_rng(seed).standard_normal((rows, 8)).astype(np.float32))


def fingerprints(fingerprint: bytes, rows: int, digest: bytes | None = None) -> Outputs:
    outputs = {"embeddings": view_of(np.frombuffer(fingerprint * rows, np.uint8).reshape(rows, 32))}
    if digest is not None:
        outputs["digest"] = view_of(np.frombuffer(digest, np.uint8))
    return outputs


A, B = bytes(range(32)), bytes(range(1, 33))


async def test_answers_what_was_asked_for_and_counts() -> None:
    engine = Discard({})
    batch = [request_of({"embeddings": floats(3)}, {"embeddings": floats(4)}, output_tokens=7), request_of()]
    assert await engine.run(batch) == [EngineResult(7), EngineResult(5)]
    assert await engine.run([request_of(output_tokens=0)]) == [EngineResult(0)]
    prompt = (10 + 8) + (10 + 1) + (10 + 1)
    assert engine.statistics() == DiscardStatistics(
        batches=2, requests=3, prompt_tokens=prompt, output_tokens=12, items=2, rows=7
    )


async def test_digests_cover_all_outputs_in_the_order_of_their_names() -> None:
    outputs = {"embeddings": floats(3), "deepstack": floats(3, seed=1)}
    expected = blake2b(digest_size=16)
    for name in ("deepstack", "embeddings"):
        expected.update(outputs[name].data.tobytes())
    empty = {"embeddings": view_of(np.zeros((0, 8), np.float32))}
    (result,) = await Discard({"digests": True}).run([request_of(outputs, empty)])
    assert result == EngineResult(5, (expected.digest(), blake2b(digest_size=16).digest()))


async def test_digest_of_fingerprints_is_the_fingerprint() -> None:
    batch = [request_of(fingerprints(A, 4), fingerprints(B, 1, B), fingerprints(A, 0, A)), request_of()]
    results = await Discard({"digests": True}).run(batch)
    assert results == [EngineResult(5, (A, B, A)), EngineResult(5, ())]


async def test_a_wrong_row_of_a_fingerprint_fails_that_request_alone() -> None:
    mixed = fingerprints(A, 4)
    mixed["embeddings"] = view_of(mixed["embeddings"].numpy().copy())
    mixed["embeddings"].numpy()[2, 31] ^= 1
    batch = [
        request_of(fingerprints(A, 4)),
        request_of(fingerprints(A, 4), mixed),
        request_of(fingerprints(A, 2, B)),
        request_of(fingerprints(B, 2, B)),
    ]
    first, second, third, fourth = await Discard({"digests": True}).run(batch)
    assert (first, fourth) == (EngineResult(5, (A,)), EngineResult(5, (B,)))
    assert isinstance(second, CorruptEmbeddings)
    assert (second.item, second.row) == (1, 2)
    assert isinstance(third, CorruptEmbeddings)
    assert (third.item, third.row) == (0, 0)


async def test_without_the_option_nothing_is_digested() -> None:
    assert await Discard({"service_ms": 0}).run([request_of(fingerprints(A, 2, B))]) == [EngineResult(5)]


@pytest.mark.parametrize(
    ("options", "expected_s"),
    [
        ({}, []),
        ({"service_ms": 25}, [0.025]),
        ({"per_token_us": 100}, [0.0032]),
        ({"service_ms": 1.5, "per_token_us": 0.5}, [0.001516]),
    ],
)
async def test_serves_as_long_as_it_was_told(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float], expected_s: list[float]
) -> None:
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    batch = [request_of(), request_of(tokens=14, output_tokens=1)]  # 11 + 15 tokens in, 5 + 1 out
    await Discard(options).run(batch)
    assert slept == pytest.approx(expected_s)


async def test_the_loop_goes_on_while_a_batch_is_served() -> None:
    engine, done = Discard({"service_ms": 20}), asyncio.Event()
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def serve() -> None:
        await engine.run([request_of()])
        done.set()

    ticks = 0
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(serve())
        while not done.is_set():
            await asyncio.sleep(0)
            ticks += 1
    assert loop.time() - began >= 0.019
    assert ticks > 3


# --- registry and options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key", "problem"),
    [
        ({"service_s": 1}, "scheduler.options.service_s", "discard has: digests, per_token_us, service_ms"),
        ({"service_ms": -1}, "scheduler.options.service_ms", ">= 0"),
        ({"service_ms": "5"}, "scheduler.options.service_ms", "Expected `float`"),
        ({"digests": "yes"}, "scheduler.options.digests", "Expected `bool`"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], key: str, problem: str) -> None:
    spec = SchedulerSpec(options=options)
    for reader in (registry.check_engine, registry.make_engine):
        with pytest.raises(ConfigError) as caught:
            reader(spec)
        assert caught.value.key == key
        assert problem in caught.value.problem


def test_every_built_in_engine_can_be_made() -> None:
    for name, entry in registry.BUILT_IN.items():
        registry.check_engine(SchedulerSpec(engine=name))
        if entry.needs is None or find_spec(entry.needs):
            engine = registry.make_engine(SchedulerSpec(engine=name))
            assert f"{type(engine).__module__}:{type(engine).__qualname__}" == entry.reference


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("discord", "'discord'; give one of discard, hf-causal, paced, or package.module:Class"),
        ("no_such_module:Engine", "ModuleNotFoundError"),
        ("tensorferry.stages.engines.base:EngineResult", "is not an engine: it has no method run"),
        ("tensorferry.stages.engines.base:Absent", "has no class Absent"),
    ],
)
def test_an_engine_that_cannot_be_had_is_a_clear_error(name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.make_engine(SchedulerSpec(engine=name))
    assert caught.value.key == "scheduler.engine"
    assert problem in caught.value.problem


async def test_the_documented_engine_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[3].joinpath("docs", "adapters.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python parrot\.py\n(.*?)```", page, re.DOTALL)
    assert code.count("\n") <= 35
    (tmp_path / "parrot.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "parrot", raising=False)
    spec = SchedulerSpec(engine="parrot:Parrot", options={"step_ms": 0.1, "context": 100})
    registry.check_engine(spec)
    outputs = {"embeddings": floats(3)}
    fits, too_long = await registry.make_engine(spec).run([request_of(outputs), request_of(tokens=200)])
    assert fits == EngineResult(5, (blake2b(outputs["embeddings"].data.tobytes()).digest(),))
    assert isinstance(too_long, BadRequest)
