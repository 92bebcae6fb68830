"""The parts of a packed forward pass: attention within stretches, rotary embedding, and layers that are compiled."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch._inductor import async_compile
from torch.nn import functional

from tensorferry.codecs.errors import ConfigError
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters import registry, rotary, tower
from tensorferry.stages.adapters.attention import attend, stretches_of
from tensorferry.stages.adapters.base import WarmsUp
from tensorferry.stages.adapters.packed_forward import Packed
from tensorferry.stages.adapters.rotary import angles_of, turned

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")

CPU = torch.device("cpu")
FEATURES = {"qwen2.5-vl": 3 * 2 * 14 * 14, "qwen3-vl": 3 * 2 * 16 * 16}
Grid = tuple[int, int, int]
BATCHES: list[list[Grid]] = [
    [(1, 4, 18)],
    [(1, 4, 18), (1, 4, 18)],
    [(1, 20, 2), (1, 2, 2), (3, 6, 10)],
    [(1, 2, 2)],
    [(1, 8, 8)] * 5,
    [(4, 8, 8)],
    [(1, 10, 12), (1, 12, 10), (1, 10, 12)],  # as many patches, in windows of other lengths
    [(1, 2 * n, 34) for n in range(1, 17)],
]


@pytest.fixture(params=FEATURES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of torch.compile but the last step, which takes half a minute and a C++ compiler."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def make(family: str, **options: Any) -> Any:
    options = {"dtype": "float32", "tiny": True, **options}
    return registry.make_adapter(ModelSpec(adapter=family, options=options), 1).tower  # type: ignore[attr-defined]


def features_of(family: str, grids: list[Grid]) -> torch.Tensor:
    return torch.randn(sum(map(math.prod, grids)), FEATURES[family], generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def check(tower: Any, family: str, grids: list[Grid]) -> None:
    """The same as transformers' own pass."""
    features = features_of(family, grids)
    expected = tower.model(features, grid_thw=torch.tensor(grids)).pooler_output
    torch.testing.assert_close(tower.forward(features, grids)["embeddings"], expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_in_bfloat16_we_are_as_near_to_float32_as_transformers_is(family: str) -> None:
    rounded = make(family, dtype="bfloat16")
    exact = copy.deepcopy(rounded.model).float()
    for grids in BATCHES:
        features = features_of(family, grids)
        numbers, theirs = (
            model(features, grid_thw=torch.tensor(grids)).pooler_output for model in (exact, rounded.model)
        )
        ours = rounded.forward(features, grids)["embeddings"]
        error, allowed = ((found.float() - numbers).square().mean().sqrt() for found in (ours, theirs))
        assert 0 < error <= 1.5 * allowed


# --- attention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [3, 1, 7], [1, 1]])
def test_a_stretch_attends_to_itself_alone(lengths: list[int]) -> None:
    q, k, v = torch.randn(3, sum(lengths), 2, 8)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    stretches = stretches_of(ends, CPU)
    assert stretches.longest == max(lengths)
    assert stretches.equal == (len(lengths) if len(set(lengths)) == 1 else 0)
    mask = torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()
    expected = functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), mask)
    torch.testing.assert_close(attend(q, k, v, stretches), expected.transpose(0, 1).flatten(1))


def test_queries_and_keys_turn_as_transformers_turns_them() -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

    qkv, radians = torch.randn(7, 3, 2, 16), 9 * torch.randn(7, 8)
    twice = torch.cat([radians, radians], -1)
    expected = apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], twice.cos(), twice.sin())
    q, k, v = turned(qkv, angles_of(radians))
    torch.testing.assert_close((q, k), expected)
    assert torch.equal(v, qkv[:, 2])


def test_without_the_kernel_a_gpu_does_what_is_written_out_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "tensorferry.stages.adapters.rotary_kernel", raising=False)
    device = torch.device("cuda", 99)  # no other test asks about it, and the answer is kept
    with capture_logs() as logs:
        assert not any(rotary.has_kernel(device) for _ in range(3))
    assert [(event["event"], event["device"]) for event in logs] == [("rotary_kernel_missing", "cuda:99")]
    assert "triton" in logs[0]["problem"]


# --- compiled ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_inductor")
def test_what_is_compiled_at_the_start_takes_batches_of_any_size(family: str) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    with capture_logs() as logs:
        compiled = make(family, compile=True)
    [event] = [event for event in logs if event["event"] == "tower_warmed_up"]
    assert event["compiled"]
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 3, "one for all layers, and for each kind of batch"
    for grids in BATCHES:
        check(compiled, family, grids)
    assert counters["stats"]["unique_graphs"] == graphs
    assert compiled.refused == 0


@pytest.mark.usefixtures("no_inductor")
def test_a_batch_that_would_be_compiled_in_a_request_is_not_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower, "_KINDS", ((7,),))
    compiled = make("qwen3-vl", compile=True)
    check(compiled, "qwen3-vl", BATCHES[0])
    assert compiled.refused == 0
    with capture_logs() as logs:
        check(compiled, "qwen3-vl", BATCHES[2])
    [event] = [event for event in logs if event["event"] == "batch_not_compiled"]
    assert event["log_level"] == "warning"
    assert event["patches"] == sum(map(math.prod, BATCHES[2]))
    assert "recompile" in event["problem"]
    assert compiled.refused == 1


@pytest.mark.usefixtures("no_inductor")
def test_the_compilers_processes_end_when_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU there are as many as cores; on the host torch compiles without."""
    warm_ups: list[int] = []
    ended: list[int] = []
    warm_up = Packed.warm_up
    monkeypatch.setattr(Packed, "warm_up", lambda *given: (warm_ups.append(1), warm_up(*given)))
    monkeypatch.setattr(async_compile, "shutdown_compile_workers", lambda: ended.append(len(warm_ups)))
    make("qwen3-vl")
    assert ended == []
    make("qwen3-vl", compile=True)
    assert ended == [3]


@pytest.mark.usefixtures("no_inductor")
def test_another_error_of_a_compiled_batch_is_not_taken_for_that() -> None:
    compiled = make("qwen3-vl", compile=True)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"shape|size|expand|broadcast"):
        compiled.forward(features_of("qwen3-vl", BATCHES[0])[1:], BATCHES[0])
    assert compiled.refused == 0


def test_a_machine_that_cannot_compile_is_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        raise RuntimeError("Failed to find C compiler")

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with pytest.raises(ConfigError, match=r"(?s)cannot compile the tower on cpu.*Failed to find C compiler") as caught:
        make("qwen3-vl", compile=True)
    assert caught.value.key == "model.options.compile"


# --- options ----------------------------------------------------------------------------------------------


def test_transformers_own_pass_is_not_compiled() -> None:
    with pytest.raises(ConfigError, match="compile: true needs attention: packed"):
        make("qwen3-vl", compile=True, attention="eager")


def test_transformers_own_pass_may_be_chosen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = make(family, attention="eager")
    for grids in BATCHES:
        check(eager, family, grids)
    calls: list[object] = []
    monkeypatch.setattr(eager.model, "forward", lambda *given, **named: calls.append(given))
    with pytest.raises(AttributeError):  # what it returned is not used
        check(eager, family, BATCHES[0])
    assert calls


def test_transformers_own_pass_is_not_used_otherwise(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make(family)
    for grids in BATCHES:
        check(packed, family, grids)
    monkeypatch.delattr(type(packed.model), "forward")
    grids = BATCHES[2]
    outputs = packed.forward(features_of(family, grids), grids)
    assert outputs["embeddings"].shape == (sum(map(math.prod, grids)) // 4, 64)


def test_an_adapter_that_can_is_warmed_up_for_the_device_of_its_rank(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    adapter = registry.make_adapter(ModelSpec(adapter=family, options={"tiny": True}), 1)
    assert isinstance(adapter, WarmsUp)
    monkeypatch.setattr(type(adapter), "warm_up", lambda self, device: asked.append(device))
    registry.make_adapter(ModelSpec(adapter=family, options={"tiny": True}), 1, device=3)
    registry.make_adapter(ModelSpec(adapter="fingerprint"), 1, device=3)  # has nothing to warm up
    assert asked == [3]
