"""Vision towers on a GPU: transformers' numbers, whatever is encoded together, and a host that waits for nothing."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
from structlog.testing import capture_logs

from tensorferry.codecs.errors import BadItem
from tensorferry.codecs.tensors import View, view_of
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters import registry
from tensorferry.stages.adapters.base import ItemInfo
from tensorferry.stages.adapters.packed_forward import Packed

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")
from tensorferry.stages.adapters.kimi_k25 import FAMILY as KIMI

Grid = tuple[int, int, int]
Outputs = dict[str, Any]
#: Two layers of the true width, so that heads are 80 and 72 wide; of each kind that a family has, one.
VISION: dict[str, dict[str, Any]] = {
    "qwen2.5-vl": {"depth": 2, "hidden_size": 1280, "fullatt_block_indexes": [1]},
    "qwen3-vl": {"depth": 2, "deepstack_visual_indexes": [0]},
    "kimi-k25": {"vt_num_hidden_layers": 2},
}
TYPES = {"qwen2.5-vl": "qwen2_5_vl", "qwen3-vl": "qwen3_vl", "kimi-k25": "kimi_k25"}
FEATURES = {"qwen2.5-vl": 3 * 2 * 14 * 14, "qwen3-vl": 3 * 2 * 16 * 16, "kimi-k25": 3 * 14 * 14}
BATCHES: dict[str, list[Grid]] = {
    "one": [(1, 32, 48)],
    "equal": [(1, 24, 32)] * 6,
    "mixed": [(1, 2 * n, 66 - 2 * n) for n in range(1, 33)],
    "a video among images": [(1, 16, 16), (4, 8, 12), (1, 2, 2)],
}
WORSE = 1.5  #: our error in bfloat16, times transformers' own; both against its numbers in float32
#: The largest difference in float32, in root mean squares of the numbers. Other orders of summation leave 6e-6 (on a
#: CPU, both families); TF32 in the embedding of patches alone leaves 1.6e-3, and two blocks that change places 4.
CLOSE = 1e-4


@dataclass
class Made:
    """A tower, and what transformers makes of batches with the same weights. For all tests of this file."""

    torch: Any
    family: str
    tower: Any
    _features: dict[str, Any] = field(default_factory=dict)
    _numbers: dict[tuple[str, bool], Outputs] = field(default_factory=dict)

    @cached_property
    def exact(self) -> Any:
        """transformers' module in float32."""
        return copy.deepcopy(self.tower.model).float()

    def features(self, batch: str) -> Any:
        if batch not in self._features:
            generator = self.torch.Generator().manual_seed(1)
            patches = sum(map(math.prod, BATCHES[batch]))
            self._features[batch] = self.torch.randn(patches, FEATURES[self.family], generator=generator).cuda()
        return self._features[batch]

    def theirs(self, batch: str, model: Any) -> Outputs:
        """transformers' own pass."""
        features = self.features(batch)
        with self.torch.inference_mode():
            result = model(features, grid_thw=self.torch.tensor(BATCHES[batch], device="cuda"))
            outputs = {"embeddings": result.pooler_output}
            if hasattr(result, "deepstack_features"):
                outputs["deepstack"] = self.torch.stack(result.deepstack_features)
            return outputs

    def numbers(self, batch: str, *, exact: bool) -> Outputs:
        """Of the same, in float32 or in the tower's dtype."""
        if (batch, exact) not in self._numbers:
            self._numbers[batch, exact] = self.theirs(batch, self.exact if exact else self.tower.model)
        return self._numbers[batch, exact]

    def on_host(self, batch: str, model: Any) -> Outputs:
        """Our own pass, in host memory: where transformers' module is not the tower's."""
        packed = Packed(KIMI.packing, model, compile=False)
        features = self.features(batch).cpu().to(next(model.parameters()).dtype)
        with self.torch.inference_mode():
            outputs = packed(features, self.tower.batch(BATCHES[batch], features.device))
            return {name: numbers.cuda() for name, numbers in outputs.items()}

    def forward(self, batch: str) -> Outputs:
        features = self.features(batch)
        with self.torch.inference_mode():
            found: Outputs = self.tower.forward(features, BATCHES[batch])
            return found


@pytest.fixture(params=["qwen2.5-vl", "qwen3-vl"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def made(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """`made(family, **options)`, each once."""
    kept: dict[object, Made] = {}

    def make(family: str, **options: Any) -> Made:
        key = (family, *sorted(options.items()))
        if key not in kept:
            path = tmp_path_factory.mktemp("checkpoint")
            config = {"model_type": TYPES[family], "vision_config": VISION[family]}
            (path / "config.json").write_text(json.dumps(config))
            spec = ModelSpec(adapter=family, path=str(path), options={"random_weights": True, **options})
            adapter: Any = registry.make_adapter(spec, 2, device=0)
            kept[key] = Made(torch, family, adapter.tower)
        return kept[key]

    return make


@pytest.fixture(autouse=True)
def float32_is_float32(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch lets convolutions, and transformers' patch embedding is one, round their float32 operands to TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def faults(made: Made, batch: str, exact: Outputs, near: Outputs) -> list[str]:
    """What is wrong with a tower's outputs. near: transformers' own in the tower's dtype, which decide how far bfloat16
    may be from the exact ones."""
    found = made.forward(batch)
    if list(found) != list(exact):
        return [f"{batch}: outputs are {list(found)}"]
    wrong = []
    for name, numbers in exact.items():
        ours, theirs = ((one[name].float() - numbers).abs() for one in (found, near))
        scale = numbers.square().mean().sqrt().item()
        if near[name].dtype == made.torch.float32:
            error, allowed = ours.max().item() / scale, CLOSE
        else:
            error, other = (one.square().mean().sqrt().item() / scale for one in (ours, theirs))
            allowed = WORSE * other
        if found[name].dtype != near[name].dtype or not error <= allowed:
            wrong.append(f"{batch}: {name}, {found[name].dtype}, are off by {error:.2e}; {allowed:.2e} is allowed")
    return wrong


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_are_those_of_transformers(made: Callable[..., Made], family: str, dtype: str) -> None:
    one = made(family, dtype=dtype)
    wrong = [
        fault
        for batch in BATCHES
        for fault in faults(one, batch, one.numbers(batch, exact=True), one.numbers(batch, exact=False))
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kimi_s_numbers_are_those_of_the_host(
    made: Callable[..., Made], dtype: str, no_host_waits: Callable[..., AbstractContextManager[Any]]
) -> None:
    """Which are transformers', as `tests/stages/adapters/test_kimi_k25.py` shows."""
    one = made("kimi-k25", dtype=dtype)
    rounded = copy.deepcopy(one.tower.model).cpu()
    exact = copy.deepcopy(rounded).float()
    wrong: list[str] = []
    for batch in ("equal", "a video among images"):
        wrong += faults(one, batch, one.on_host(batch, exact), one.on_host(batch, rounded))
        one.forward(batch)  # tables are where they were used last
        with no_host_waits():
            one.forward(batch)
    assert not wrong, wrong


@pytest.mark.timeout(200)
def test_compiled_ones_too(
    made: Callable[..., Made], family: str, no_host_waits: Callable[..., AbstractContextManager[Any]]
) -> None:
    plain = made(family, dtype="bfloat16")
    wrong: list[str] = []
    with warnings.catch_warnings(), capture_logs() as logs:
        warnings.simplefilter("ignore")  # torch's compiler's are not ours
        compiled = made(family, dtype="bfloat16", compile=True)  # by their seed, the weights are the same
        for batch in BATCHES:
            exact, near = plain.numbers(batch, exact=True), plain.numbers(batch, exact=False)
            wrong += faults(compiled, batch, exact, near)
            try:
                with no_host_waits(compiled=True):
                    compiled.forward(batch)
            except (RuntimeError, AssertionError) as problem:  # torch's, and the fixture's
                wrong.append(f"{batch}: the host waits: {type(problem).__name__}: {problem}")
    wrong += [str(event["problem"]) for event in logs if event["event"] == "batch_not_compiled"]
    assert not wrong, "\n\n".join(wrong)
    assert compiled.tower.refused == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_host_waits_for_nothing_in_a_forward_pass(
    made: Callable[..., Made], family: str, dtype: str, no_host_waits: Callable[..., AbstractContextManager[Any]]
) -> None:
    one = made(family, dtype=dtype)
    for batch in BATCHES:
        one.forward(batch)  # tables are made on the host, once a grid
        with no_host_waits():
            one.forward(batch)
        with pytest.raises((RuntimeError, AssertionError)), no_host_waits():  # transformers' own does wait
            one.theirs(batch, one.tower.model)


def test_an_encoding_is_queued_and_what_waits_for_it_finds_the_item_at_fault(
    torch: Any, made: Callable[..., Made], family: str, no_host_waits: Callable[..., AbstractContextManager[Any]]
) -> None:
    tower, grid = made(family, dtype="bfloat16").tower, (1, 16, 16)
    items = [ItemInfo(index, "image", grid, 256, 64, bytes(16)) for index in range(3)]
    good = torch.randn(3 * 256, FEATURES[family], device="cuda", dtype=torch.bfloat16)
    bad = good.clone()
    bad[600, 7] = math.nan
    tower.forward(good, [grid] * 3)  # tables are made
    for features in (good, bad):
        outputs: dict[tuple[int, str], View] = {}

        def out(index: int, name: str, shape: tuple[int, ...], dtype: str, outputs: Any = outputs) -> View:
            outputs[index, name] = View.empty(dtype, shape, 0)
            return outputs[index, name]

        with no_host_waits():
            finish = tower.encode(items, lambda _, features=features: view_of(features), out)
        if features is good:
            finish()
            assert all(view.torch().isfinite().all() for view in outputs.values())
            continue
        with pytest.raises(BadItem, match="NaN or infinity") as caught:
            finish()
        assert caught.value.index == 2


@pytest.mark.parametrize("width", [72, 80, 16])
def test_the_rotary_kernel_turns_as_what_is_written_out(torch: Any, width: int) -> None:
    from tensorferry.stages.adapters.rotary import Angles, angles_of, has_kernel, turned

    assert has_kernel(torch.device("cuda", 0))
    for dtype in (torch.float32, torch.bfloat16):
        qkv = torch.randn(513, 3, 16, width, device="cuda", dtype=dtype)
        angles = angles_of(9 * torch.randn(513, width // 2, device="cuda"))
        on_host = turned(qkv.cpu(), Angles(angles.cos.cpu(), angles.sin.cpu()))
        tolerance = 2**-7 if dtype is torch.bfloat16 else 1e-5  # a rounding apart, where products are fused with sums
        for found, expected in zip(turned(qkv, angles), on_host, strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
