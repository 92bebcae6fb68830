"""Vision towers on a GPU: transformers' numbers, whatever is encoded together, and a host that waits for nothing."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tensorferry.pipeline.config import ModelSpec
from tensorferry.stages.adapters import registry

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")

Grid = tuple[int, int, int]
#: Few layers of the true width, so that heads are 80 and 72 wide.
VISION: dict[str, dict[str, Any]] = {
    "qwen2.5-vl": {"depth": 4, "hidden_size": 1280, "fullatt_block_indexes": [1, 3]},
    "qwen3-vl": {"depth": 4, "deepstack_visual_indexes": [0, 2]},
}
TYPES = {"qwen2.5-vl": "qwen2_5_vl", "qwen3-vl": "qwen3_vl"}
FEATURES = {"qwen2.5-vl": 3 * 2 * 14 * 14, "qwen3-vl": 3 * 2 * 16 * 16}
BATCHES: dict[str, list[Grid]] = {
    "one": [(1, 32, 48)],
    "equal": [(1, 24, 32)] * 6,
    "mixed": [(1, 2 * n, 66 - 2 * n) for n in range(1, 33)],
    "a video among images": [(1, 16, 16), (5, 8, 12), (1, 2, 2)],
}
WORSE = 1.5  #: our error in bfloat16, times transformers' own; both against its numbers in float32


@pytest.fixture(params=VISION)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make(torch: Any, family: str, tmp_path: Path) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        config = {"model_type": TYPES[family], "vision_config": VISION[family]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        spec = ModelSpec(adapter=family, path=str(tmp_path), options={"random_weights": True, **options})
        adapter: Any = registry.make_adapter(spec, 2, device=0)
        return adapter.tower

    return make


def features_of(torch: Any, family: str, grids: list[Grid]) -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(map(math.prod, grids)), FEATURES[family], generator=generator).cuda()


def theirs(torch: Any, model: Any, features: Any, grids: Any) -> dict[str, Any]:
    """transformers' own pass. grids: int64 (items, 3), on the GPU."""
    result = model(features, grid_thw=grids)
    outputs = {"embeddings": result.pooler_output}
    if hasattr(result, "deepstack_features"):
        outputs["deepstack"] = torch.stack(result.deepstack_features)
    return outputs


def check(torch: Any, tower: Any, family: str, grids: list[Grid]) -> None:
    features = features_of(torch, family, grids)
    there = torch.tensor(grids, device="cuda")
    with torch.inference_mode():
        exact = theirs(torch, copy.deepcopy(tower.model).float(), features, there)
        rounded = theirs(torch, tower.model, features, there)
        found = tower.forward(features, grids)
    assert list(found) == list(exact)
    for name, numbers in exact.items():
        assert found[name].dtype == rounded[name].dtype
        allowed = WORSE * (rounded[name].float() - numbers).square().mean().sqrt() + 1e-5
        error = (found[name].float() - numbers).square().mean().sqrt()
        assert error <= allowed, f"{name} are off by {error}, {allowed} is allowed"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_are_those_of_transformers(torch: Any, make: Callable[..., Any], family: str, dtype: str) -> None:
    tower = make(dtype=dtype)
    for grids in BATCHES.values():
        check(torch, tower, family, grids)


@pytest.mark.timeout(400)
def test_compiled_ones_too(
    torch: Any, make: Callable[..., Any], family: str, no_host_waits: Callable[..., AbstractContextManager[Any]]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler's are not ours
        tower = make(compile=True)
        for grids in BATCHES.values():
            check(torch, tower, family, grids)
            features = features_of(torch, family, grids)
            with torch.inference_mode(), no_host_waits():
                tower.forward(features, grids)
    assert tower.refused == 0


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_host_waits_for_nothing_in_a_forward_pass(
    torch: Any,
    make: Callable[..., Any],
    family: str,
    dtype: str,
    batch: str,
    no_host_waits: Callable[..., AbstractContextManager[Any]],
) -> None:
    tower, grids = make(dtype=dtype), BATCHES[batch]
    features = features_of(torch, family, grids)
    with torch.inference_mode():
        tower.forward(features, grids)  # tables are made on the host, once a grid
        with no_host_waits():
            tower.forward(features, grids)
        there = torch.tensor(grids, device="cuda")
        with pytest.raises((RuntimeError, AssertionError)), no_host_waits():  # transformers' own does wait
            theirs(torch, tower.model, features, there)


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
