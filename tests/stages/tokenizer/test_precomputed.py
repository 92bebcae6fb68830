"""Embeddings that come with a request (E3): checked against the model, handed to the schedulers, seen by no encoder."""

from __future__ import annotations

import asyncio
import io
import json
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, BadRequest, ConfigError
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.tensors import CODES, View, view_of
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.client.prompt_parts import Embeddings, Part, on_wire
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec, ModelSpec
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.adapters.base import ItemInfo
from tensorferry.stages.adapters.embedding_form import Form
from tensorferry.stages.adapters.registry import embedding_form, make_adapter
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.tokenizer.planner import Planner, Prompt
from tensorferry.stages.tokenizer.text import TextEncoder

LIMITS = LimitsSpec()
FORM = Form("float32", 8)
DEEP = Form("float32", 8, {"deepstack": (2, None, 8)})


def rows_of(count: int, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def planned(parts: Sequence[Part], form: Form | None = FORM, limits: LimitsSpec = LIMITS) -> Prompt:
    frames: list[Buffer] = []
    submit = wire.Submit(bytes(16), 0, tuple(on_wire(part, frames) for part in parts), 1, 1000)
    planner = Planner(make_processor("qwen2-vl", {}, limits), TextEncoder.from_file(None), limits, form)
    return planner.plan(submit, frames)


def jpeg(width: int, height: int, seed: int) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(coarse).resize((width, height)).save(file, "JPEG")
        return file.getvalue()


# --- what is accepted -----------------------------------------------------------------------------------------


def test_e3_it_has_a_place_in_the_prompt_and_no_patches() -> None:
    prompt = planned(
        ["a", Embeddings({"embeddings": rows_of(5)}), jpeg(56, 56, 1), Embeddings({"embeddings": rows_of(2)})]
    )
    assert [(plan.rows, plan.patches) for plan in prompt.plans] == [(5, 0), (4, 16), (2, 0)]
    assert [length for _, length in prompt.spans] == [5, 4, 2]
    assert list(prompt.precomputed) == [0, 2]
    assert prompt.layouts == [[("float32", (5, 8))], [("float32", (16, 1176))], [("float32", (2, 8))]]


def test_e3_all_outputs_are_kept_and_embeddings_come_first() -> None:
    deepstack, rows = rows_of(6, dtype=torch.bfloat16), rows_of(3, dtype=torch.bfloat16)
    form = Form("bfloat16", 8, {"deepstack": (2, None, 8)})
    prompt = planned([Embeddings({"deepstack": deepstack.view(2, 3, 8), "embeddings": rows}, "video")], form)
    item = prompt.precomputed[0]
    assert {name: view.shape for name, view in item.outputs.items()} == {"embeddings": (3, 8), "deepstack": (2, 3, 8)}
    assert prompt.plans[0].modality == "video"
    into = [View.empty(*form) for form in item.layout]
    item.write(into)
    assert into[0].torch().equal(rows)
    assert into[1].torch().equal(deepstack.view(2, 3, 8))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            rows_of(5, 9),
            r"item 1: its embeddings are float32 \(5, 9\); the deployment's model makes float32 of width 8",
        ),
        (
            rows_of(5, dtype=torch.bfloat16),
            r"its embeddings are bfloat16 \(5, 8\); the deployment's model makes float32",
        ),
        (rows_of(0), r"its embeddings are float32 \(0, 8\); \(rows, width\) is needed, one row or more"),
        (rows_of(5).view(-1), r"its embeddings are float32 \(40,\); \(rows, width\) is needed"),
    ],
)
def test_e3_what_the_model_would_not_make_is_refused(rows: torch.Tensor, problem: str) -> None:
    good, bad = (Embeddings({"embeddings": tensor}) for tensor in (rows_of(1), rows))
    with pytest.raises(BadItem, match=problem):
        planned(["a", good, bad])


@pytest.mark.parametrize(
    ("others", "form", "problem"),
    [
        (
            {"nonsense": rows_of(2)},
            FORM,
            "item 0: the deployment's model makes no output 'nonsense'; it makes embeddings; leave this output out",
        ),
        ({"deepstack": rows_of(6).view(2, 3, 8)}, FORM, "makes no output 'deepstack'; it makes embeddings; leave"),
        (
            {"nonsense": rows_of(2)},
            DEEP,
            "no output 'nonsense'; it makes embeddings and deepstack; leave this output out",
        ),
        (
            {"deepstack": rows_of(9).view(3, 3, 8)},
            DEEP,
            r"its deepstack is float32 \(3, 3, 8\); for 3 rows the deployment's model makes float32 \(2, 3, 8\)",
        ),
        ({"deepstack": rows_of(4).view(2, 2, 8)}, DEEP, r"its deepstack is float32 \(2, 2, 8\); for 3 rows"),
        ({"deepstack": rows_of(6).view(2, 3, 8).half()}, DEEP, r"its deepstack is float16 \(2, 3, 8\); .*float32"),
    ],
)
def test_e3_other_outputs_must_be_the_models(others: dict[str, Any], form: Form, problem: str) -> None:
    item = Embeddings({"embeddings": rows_of(3), **others})
    planned([item], None)  # not known: the engine's to take or to refuse
    with pytest.raises(BadItem, match=problem):
        planned([item], form)


@pytest.mark.parametrize(
    ("outputs", "modality", "problem"),
    [
        ([("rows", 0, (2, 8))], "image", "its first output is 'rows'; `embeddings` come first"),
        ([("embeddings", 0, (2, 8)), ("embeddings", 0, (2, 8))], "image", "its output 'embeddings' comes twice"),
        ([("embeddings", 0, (2, 8))], "audio", "embeddings of modality 'audio'; image and video have placeholders"),
        ([("embeddings", 0, (3, 8))], "image", "its output 'embeddings': .*bytes"),
        ([("embeddings", 7, (2, 8))], "image", "its output 'embeddings': .*frame 7"),
        ([("embeddings", 0, (1 << 30, 1 << 30))], "image", "its output 'embeddings': "),
        (
            [("embeddings", None, (2, 8))],
            "image",
            "its output 'embeddings' is a proxy; a client sends",
        ),
    ],
)
def test_e3_a_part_that_lies_is_refused(
    outputs: list[tuple[str, int | None, tuple[int, ...]]], modality: str, problem: str
) -> None:
    def payload(frame: int | None, shape: tuple[int, ...]) -> wire.Payload:
        code = CODES["float32"]
        return wire.Proxy(1, 0, 1, 0, code, shape) if frame is None else wire.Inline(frame, code, shape)

    part = wire.EmbeddingsPart(
        tuple(wire.Tensor(name, payload(frame, shape)) for name, frame, shape in outputs), modality
    )
    planner = Planner(make_processor("qwen2-vl", {}, LIMITS), TextEncoder.from_file(None), LIMITS, FORM)
    with pytest.raises(BadItem, match=problem):
        planner.plan(wire.Submit(bytes(16), 0, (part,), 1, 1000), [bytes(64)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_e3_nan_and_infinity_are_refused(dtype: torch.dtype, value: float) -> None:
    rows = rows_of(3, dtype=dtype)
    item = planned([Embeddings({"embeddings": rows})], None).precomputed[0]
    item.write([View.empty(*form) for form in item.layout])
    rows[1, 2] = value
    item = planned([Embeddings({"embeddings": rows})], None).precomputed[0]
    with pytest.raises(Exception, match="its embeddings hold NaN or infinity"):
        item.write([View.empty(*form) for form in item.layout])


def test_e3_tensors_count_against_the_limit_of_a_request() -> None:
    item = Embeddings({"embeddings": rows_of(1), "more": torch.zeros(1 << 20, dtype=torch.uint8)})
    with pytest.raises(BadRequest, match=r"tensors of 1 MiB; limits\.request_mb is 1"):
        planned([item], None, LimitsSpec(request_mb=1, item_mb=1))


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ({}, r"the outputs \[\]; `embeddings` must be among them"),
        ({"rows": rows_of(1)}, r"the outputs \['rows'\]; `embeddings` must"),
        ({"embeddings": [[1.0]]}, "output 'embeddings': .*list"),
        ({"embeddings": np.array(["a"])}, "output 'embeddings': .*numpy"),
    ],
)
def test_e3_a_client_is_told_at_once(outputs: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        on_wire(Embeddings(outputs), [])


# --- the form of a model's embeddings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec(adapter="fingerprint"),
        ModelSpec(adapter="patch-vit"),
        ModelSpec(adapter="patch-vit", options={"out_width": 48, "dtype": "bfloat16"}),
        ModelSpec(adapter="qwen2.5-vl", options={"tiny": True}),
        ModelSpec(adapter="qwen3-vl", options={"tiny": True, "dtype": "float32"}),
    ],
    ids=lambda spec: f"{spec.adapter} {spec.options}",
)
def test_e3_the_form_is_what_the_adapter_makes(spec: ModelSpec) -> None:
    if spec.adapter.startswith("qwen"):
        pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")
    made: dict[str, View] = {}
    features = 3 * 2 * (16 if spec.adapter == "qwen3-vl" else 14) ** 2

    def out(index: int, name: str, shape: tuple[int, ...], dtype: str) -> View:
        made[name] = View.empty(dtype, shape)
        return made[name]

    item = ItemInfo(0, "image", (1, 2, 4), 8, 2, bytes(16))
    make_adapter(spec, 1).encode([item], lambda _: view_of(rows_of(8, features)), out)
    form = embedding_form(spec)
    assert form is not None
    shapes = {"embeddings": (None, form.width), **form.others}
    assert {name: (view.dtype, view.shape) for name, view in made.items()} == {
        name: (form.dtype, tuple(item.rows if extent is None else extent for extent in shape))
        for name, shape in shapes.items()
    }


def test_e3_the_form_of_a_published_model_and_of_a_checkpoint(tmp_path: Path) -> None:
    assert embedding_form(ModelSpec(adapter="qwen2.5-vl")) == Form("bfloat16", 3584)
    deepstack = {"deepstack": (3, None, 4096)}
    assert embedding_form(ModelSpec(adapter="qwen3-vl", options={"dtype": "float32"})) == ("float32", 4096, deepstack)
    assert embedding_form(ModelSpec(adapter="kimi-k25")) == Form("bfloat16", 7168)
    assert embedding_form(ModelSpec(adapter="some.module:Encoder")) is None
    assert embedding_form(ModelSpec(adapter="text-only")) is None
    spec = ModelSpec(adapter="qwen3-vl", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.path.*cannot read .*config\.json"):
        embedding_form(spec)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {"out_hidden_size": 2560}}')
    assert embedding_form(spec) == Form("bfloat16", 2560, {"deepstack": (3, None, 2560)})
    vision = {"out_hidden_size": 2560, "deepstack_visual_indexes": []}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": vision}))
    assert embedding_form(spec) == Form("bfloat16", 2560)


# --- through a deployment -------------------------------------------------------------------------------------

DEPLOYMENT = """
name: precomputed-test
transport: {transport}
runtime_dir: {runtime_dir}
model: {{adapter: {adapter}}}
tokenizer: {{threads: 1}}
encoder: {{ranks: 2}}
scheduler: {{groups: {groups}, tp_size: {tp_size}, attention_tp_size: {attention}, options: {{digests: true}}}}
pool: {{budget_mb: {budget_mb}, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 32, inline_below_kb: 0}}
limits: {{request_mb: 1024}}
timeouts: {{heartbeat_s: 0.2, quarantine_s: 5}}
telemetry: {{log_level: warning}}
"""


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., tuple[Deployment, Path]]]:
    with tempfile.TemporaryDirectory(prefix="tf-") as short:  # sockets' paths have 107 bytes

        def make(**settings: object) -> tuple[Deployment, Path]:
            values = dict(transport="shm", adapter="fingerprint", groups=1, tp_size=1, attention=1, budget_mb=64)
            file = tmp_path / "deployment.yaml"
            file.write_text(DEPLOYMENT.format(runtime_dir=Path(short) / "run", **(values | settings)))
            return load(file), file

        yield make


@asynccontextmanager
async def running(deployed: tuple[Deployment, Path]) -> AsyncIterator[Client]:
    deployment, file = deployed
    async with Supervisor.running(deployment, file), Client.connect(deployment, timeout_s=60.0) as client:
        yield client


def total(members: Sequence[wire.Member], name: str) -> float:
    return sum(gauge.value for member in members for gauge in member.gauges if gauge.name == name)


async def settled(client: Client, encoded: int) -> None:
    """Until heartbeats say that every lease is back and that encoders have done this many items; no more than these."""
    async with asyncio.timeout(20):
        members = await client.refresh()
        while total(members, "pool_lent_slots") or total(members, "encoded_items") < encoded:
            await asyncio.sleep(0.1)
            members = await client.refresh()
    assert total(members, "encoded_items") == encoded


def digested(seed: int, rows: int) -> tuple[Embeddings, bytes]:
    """Embeddings as the fingerprint adapter makes them, and the digest that the engine makes of them."""
    digest = random.Random(seed).randbytes(32)
    array = np.frombuffer(digest, np.uint8)
    return Embeddings({"digest": array, "embeddings": np.broadcast_to(array, (rows, 32))}), digest


@pytest.mark.processes
@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
@pytest.mark.parametrize(
    ("settings", "how"),
    [
        ({}, {"shm"}),
        ({"tp_size": 4, "attention": 2}, {"shm"}),
        ({"groups": 2, "tp_size": 2, "attention": 2, "budget_mb": 1}, {"shm", "inline"}),
        ({"transport": "cpu"}, {"inline"}),
    ],
    ids=["one scheduler", "attention groups of two", "a small pool", "no pool"],
)
async def test_e3_e6_they_reach_every_scheduler_of_the_group_and_no_encoder(
    deploy: Callable[..., tuple[Deployment, Path]], settings: dict[str, object], how: set[str]
) -> None:
    rng, requests, images = random.Random(3), [], 0
    most_rows = 12000 if "budget_mb" in settings else 300
    for number in range(40):
        parts: list[Part] = [f"request {number}"]
        expected: list[bytes | None] = []
        for place in range(rng.randrange(1, 5)):
            if rng.random() < 0.6:
                item, digest = digested(100 * number + place, rng.randrange(1, most_rows))
                parts.append(item)
                expected.append(digest)
            else:
                parts.append(jpeg(rng.randrange(30, 200), rng.randrange(30, 200), 100 * number + place))
                expected.append(None)
                images += 1
        requests.append((parts, expected))
    async with running(deploy(**settings)) as client:
        results = await asyncio.gather(*(client.submit(parts, output_tokens=1) for parts, _ in requests))
        travelled = set()
        for (_, expected), result in zip(requests, results, strict=True):
            assert isinstance(result, wire.Result), result
            for item, digest in zip(result.items, expected, strict=True):
                assert (item.rank == -1) == (item.grid == (0, 0, 0)) == (digest is not None)
                if digest is not None:
                    assert item.digest == digest
                    travelled.add(item.transport)
        assert travelled == how
        await settled(client, images)


@pytest.mark.processes
async def test_e3_one_that_does_not_match_fails_alone(deploy: Callable[..., tuple[Deployment, Path]]) -> None:
    good = Embeddings({"embeddings": rows_of(4, 256)})
    nan = rows_of(4, 256, seed=1)
    nan[3, 255] = float("nan")
    async with running(deploy(adapter="patch-vit")) as client:
        for bad, problem in (
            (rows_of(4, 255), "its embeddings are float32 (4, 255); the deployment's model makes float32 of width 256"),
            (nan, "its embeddings hold NaN or infinity"),
        ):
            failed = await client.submit(["a", good, jpeg(60, 60, 1), Embeddings({"embeddings": bad})], output_tokens=1)
            assert isinstance(failed, wire.Failed)
            assert (failed.failure.kind, failed.failure.item, failed.failure.retryable) == ("BadItem", 2, False)
            assert problem in failed.failure.problem
            assert isinstance(await client.submit(["a", good, jpeg(60, 60, 1)], output_tokens=1), wire.Result)
        await settled(client, 2)
