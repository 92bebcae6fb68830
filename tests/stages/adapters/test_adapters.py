"""The model adapters: what they make of items, what they refuse, and how one is found by name (P7)."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tensorferry.codecs.errors import BadItem, BadTensor, ConfigError
from tensorferry.codecs.tensors import View, nbytes_of, view_of
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters import patch_vit, registry
from tensorferry.stages.adapters.base import ItemInfo, split
from tensorferry.stages.adapters.fingerprint import fingerprint_of
from tensorferry.stages.adapters.options import PatchVitOptions
from tensorferry.stages.weights import seeded_weights

FEATURES = 1176
Grid = tuple[int, int, int]


def item_of(index: int, grid: Grid, rows: int | None = None) -> ItemInfo:
    patches = math.prod(grid)
    return ItemInfo(index, "image", grid, patches, patches // 4 if rows is None else rows, bytes(16))


def pixels_of(item: ItemInfo, features: int = FEATURES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(item.index)
    return torch.randn(item.patches, features, generator=generator)


@dataclass
class Rank:
    """What an encoder rank is to its adapter: gives read-only pixels, takes outputs, notes who asked for what."""

    pixels: dict[int, torch.Tensor]
    loads: list[list[int]] = field(default_factory=list)
    outputs: dict[int, dict[str, View]] = field(default_factory=dict)

    def load(self, indices: Sequence[int]) -> View:
        self.loads.append(list(indices))
        view = view_of(torch.cat([self.pixels[index] for index in indices]))
        view.data.flags.writeable = False  # as a consumer's mapping of a pool is
        return view

    def out(self, index: int, name: str, shape: tuple[int, ...], dtype: str) -> View:
        outputs = self.outputs.setdefault(index, {})
        assert name not in outputs, "out() twice for one output"
        outputs[name] = View(np.full(nbytes_of(dtype, shape), 0xA5, np.uint8), dtype, shape)
        return outputs[name]

    def embeddings(self, index: int) -> torch.Tensor:
        return self.outputs[index]["embeddings"].torch().float()


def encode(adapter: Any, items: Sequence[ItemInfo], pixels: dict[int, torch.Tensor] | None = None) -> Rank:
    rank = Rank(pixels or {item.index: pixels_of(item) for item in items})
    adapter.encode(items, rank.load, rank.out)
    return rank


def vit(seed: int = 0, path: str | None = None, **options: Any) -> Any:
    return registry.make_adapter(ModelSpec(adapter="patch-vit", seed=seed, path=path, options=options), 1)


ITEMS = [item_of(4, (1, 4, 6)), item_of(0, (1, 8, 2)), item_of(7, (2, 4, 4)), item_of(2, (1, 2, 2))]


# --- base -------------------------------------------------------------------------------------------------


def test_split_cuts_without_copying() -> None:
    whole = view_of(torch.arange(60 * 3, dtype=torch.bfloat16).view(60, 3))
    views = split(whole, [item_of(0, (1, 4, 6)), item_of(1, (1, 6, 6)), item_of(2, (0, 0, 0))])
    assert [view.shape for view in views] == [(24, 3), (36, 3), (0, 3)]
    assert all(np.shares_memory(view.data, whole.data) for view in views[:2])
    assert torch.equal(torch.cat([view.torch() for view in views]), whole.torch())


@pytest.mark.parametrize("shape", [(23, 3), (25, 3), ()])
def test_split_refuses_rows_that_are_not_the_items(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadTensor):
        split(view_of(torch.zeros(shape)), [item_of(0, (1, 4, 6))])


# --- fingerprint ------------------------------------------------------------------------------------------


def fingerprint(**options: Any) -> Any:
    return registry.make_adapter(ModelSpec(adapter="fingerprint", options=options), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("load_each", [False, True])
def test_fingerprint_is_of_the_items_own_bytes(load_each: bool, dtype: torch.dtype) -> None:
    pixels = {item.index: (pixels_of(item, 12) * 50).to(dtype) for item in ITEMS}
    rank = encode(fingerprint(load_each=load_each), ITEMS, pixels)
    indices = [item.index for item in ITEMS]
    assert rank.loads == ([[index] for index in indices] if load_each else [indices])
    for item in ITEMS:
        data = pixels[item.index].view(torch.uint8).numpy().tobytes()
        name = str(dtype).removeprefix("torch.")
        header = f"{name} {item.patches},12\n".encode()  # the format spelled out once, away from the code
        expected = blake2b(header + data, digest_size=32).digest()
        assert fingerprint_of(data, name, (item.patches, 12)) == expected
        outputs = rank.outputs[item.index]
        assert list(outputs) == ["embeddings", "digest"]
        assert (outputs["embeddings"].dtype, outputs["embeddings"].shape) == ("uint8", (item.rows, 32))
        assert outputs["embeddings"].data.tobytes() == expected * item.rows
        assert outputs["digest"].data.tobytes() == expected


def test_fingerprint_tells_bytes_dtype_and_shape_apart() -> None:
    data = bytes(range(48))
    variants = [(data, "float32", (4, 3)), (data, "int32", (4, 3)), (data, "float32", (3, 4)),
                (data[::-1], "float32", (4, 3)), (b"", "float32", (0, 3)), (data, "float32", (12,))]  # fmt: skip
    assert len({fingerprint_of(*variant) for variant in variants}) == len(variants)


# --- patch-vit: numbers -----------------------------------------------------------------------------------


def test_patch_vit_gives_a_row_for_each_block() -> None:
    rank = encode(vit(out_width=40), ITEMS)
    assert rank.loads == [[4, 0, 7, 2]]
    for item in ITEMS:
        (name, view), *others = rank.outputs[item.index].items()
        assert (name, view.dtype, view.shape, others) == ("embeddings", "float32", (item.rows, 40), [])
        assert view.torch().isfinite().all()
        assert view.torch().std() > 0.05


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_patch_vit_alone_or_together_is_the_same(dtype: str, tolerance: float) -> None:
    adapter = vit(dtype=dtype)
    together = encode(adapter, ITEMS)
    for item in ITEMS:
        assert together.outputs[item.index]["embeddings"].dtype == dtype
        alone = encode(adapter, [item]).embeddings(item.index)
        torch.testing.assert_close(together.embeddings(item.index), alone, rtol=tolerance, atol=tolerance)


def test_patch_vit_is_the_textbook_model() -> None:
    """Against the plainest form: one item, patches in raster order, attention spelled out, float64."""
    options: dict[str, Any] = {"width": 24, "heads": 2, "depth": 2, "out_width": 10, "patch_features": 12}
    shapes = patch_vit.weight_shapes(PatchVitOptions(**options))
    w = {name: tensor.double() for name, tensor in seeded_weights(shapes, 5).items()}
    item = item_of(0, (1, 4, 6))
    pixels = pixels_of(item, 12)
    # where the merge-block order puts the patch of row y, column x
    place = {(y, x): (y // 2 * 3 + x // 2) * 4 + y % 2 * 2 + x % 2 for y in range(4) for x in range(6)}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: torch.Tensor) -> torch.Tensor:  # seeded norm weights are 1 and 0
        return (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-6).sqrt()

    def wave(at: int) -> list[float]:
        angles = [at / 10_000 ** (i / 6) for i in range(6)]
        return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    x = linear("patch_embed", torch.stack([pixels[place[y, x]] for y in range(4) for x in range(6)]).double())
    x = x + torch.tensor([wave(y) + wave(x) for y in range(4) for x in range(6)], dtype=torch.float64)
    for b in range(2):
        q, k, v = linear(f"blocks.{b}.qkv", norm(x)).split_with_sizes([24, 24, 24], dim=1)
        heads = []
        for h in (slice(0, 12), slice(12, 24)):
            heads.append(torch.softmax(q[:, h] @ k[:, h].T / math.sqrt(12), dim=1) @ v[:, h])
        x = x + linear(f"blocks.{b}.proj", torch.cat(heads, dim=1))
        x = x + linear(f"blocks.{b}.fc2", gelu(linear(f"blocks.{b}.fc1", norm(x))))
    raster = norm(x).view(4, 6, 24)
    blocks = [raster[y : y + 2, x : x + 2].reshape(-1) for y in (0, 2) for x in (0, 2, 4)]
    expected = linear("merger.fc2", gelu(linear("merger.fc1", torch.stack(blocks))))
    got = encode(vit(seed=5, **options), [item], {0: pixels}).embeddings(0)
    torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)


def test_patch_vit_positions_follow_the_merge_block_order() -> None:
    """Patchify an image whose pixels are their own coordinates with the processor's published transpose."""
    frames, height, width = grid = (2, 4, 6)
    coordinates = np.stack(np.broadcast_arrays(*np.ogrid[:frames, :height, :width]))  # (3, frames, height, width)
    # one "pixel" a patch: (t, tps=1, c, h/2, 2, p=1, w/2, 2, p=1), then transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    image = coordinates.transpose(1, 0, 2, 3).reshape(frames, 1, 3, height // 2, 2, 1, width // 2, 2, 1)
    patches = image.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3)
    rows, columns = patch_vit.grid_positions(grid)
    assert rows.tolist() == patches[:, 1].tolist()
    assert columns.tolist() == patches[:, 2].tolist()


def test_patch_vit_seed_decides_the_weights() -> None:
    one, same, other = (encode(vit(seed=seed), ITEMS[:1]).embeddings(4) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other, atol=0.1)


def test_patch_vit_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    vit(seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_patch_vit_without_items_loads_nothing() -> None:
    for adapter in (vit(), fingerprint(), fingerprint(load_each=True)):
        rank = encode(adapter, [])
        assert (rank.loads, rank.outputs) == ([], {})


def test_patch_vit_default_is_light() -> None:
    """A 1,024-patch image in well under 100 ms of one core (38 ms where this was written)."""
    adapter, item = vit(), item_of(0, (1, 32, 32))
    pixels, best_s = pixels_of(item), math.inf
    for _ in range(5):
        began = time.thread_time()
        encode(adapter, [item], {0: pixels})
        best_s = min(best_s, time.thread_time() - began)
    assert best_s < 0.1


# --- patch-vit: what it refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_patch_vit_names_the_poisoned_item(poison: float, dtype: str) -> None:
    pixels = {item.index: pixels_of(item) for item in ITEMS}
    pixels[7][3, 5] = poison
    rank = Rank(pixels)
    with pytest.raises(BadItem) as caught:
        vit(dtype=dtype).encode(ITEMS, rank.load, rank.out)
    assert caught.value.args == (7, "its pixels hold NaN or infinity")
    assert rank.outputs == {}, "nothing may be given out before everything is known to be good"


def test_patch_vit_names_the_item_that_overflows() -> None:
    pixels = {item.index: pixels_of(item) for item in ITEMS}
    pixels[0] = pixels[0].sign() * 3e38
    with pytest.raises(BadItem) as caught:
        encode(vit(), ITEMS, pixels)
    assert caught.value.args == (0, "its embeddings overflow float32")


@pytest.mark.parametrize(
    "bad",
    [
        ItemInfo(9, "image", (1, 4, 6), 20, 5, b""),  # patches are not the grid's
        ItemInfo(9, "image", (1, 3, 8), 24, 6, b""),  # odd height
        ItemInfo(9, "image", (4, 4, 1), 16, 4, b""),  # odd width
        ItemInfo(9, "image", (1, 4, 6), 24, 5, b""),  # a row short
        ItemInfo(9, "image", (1, 4, 6), 24, 24, b""),
        ItemInfo(9, "video", (0, 1 << 30, 1 << 30), 0, 0, b""),  # exabytes of positions, backed by no byte
    ],
)
def test_patch_vit_refuses_an_item_whose_numbers_disagree(bad: ItemInfo) -> None:
    rank = Rank({item.index: pixels_of(item) for item in [*ITEMS, bad]})
    with pytest.raises(BadItem) as caught:
        vit().encode([*ITEMS, bad], rank.load, rank.out)
    assert caught.value.index == 9
    assert rank.loads == []


@pytest.mark.parametrize("pixels", [torch.zeros(24, 1175), torch.zeros(20, FEATURES), torch.zeros(24 * FEATURES),
                                    torch.zeros(24, FEATURES, dtype=torch.uint8)])  # fmt: skip
def test_patch_vit_refuses_features_it_was_not_made_for(pixels: torch.Tensor) -> None:
    with pytest.raises(BadTensor, match="patch-vit takes"):
        encode(vit(), ITEMS[:1], {4: pixels})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_patch_vit_takes_features_of_other_floating_dtypes(dtype: torch.dtype) -> None:
    pixels = pixels_of(ITEMS[0])
    exact, other = (encode(vit(), ITEMS[:1], {4: x}).embeddings(4) for x in (pixels, pixels.to(dtype)))
    torch.testing.assert_close(other, exact, rtol=0.1, atol=0.1)


# --- patch-vit: weights from a file -----------------------------------------------------------------------

SMALL: dict[str, Any] = {"width": 16, "heads": 2, "depth": 1, "out_width": 8}


def small_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    return seeded_weights(patch_vit.weight_shapes(PatchVitOptions(**SMALL)), seed)


@pytest.mark.parametrize("as_directory", [False, True])
def test_patch_vit_reads_a_checkpoint(tmp_path: Path, as_directory: bool) -> None:
    save_file(small_weights(seed=9), tmp_path / "model.safetensors")
    path = tmp_path if as_directory else tmp_path / "model.safetensors"
    read = encode(vit(path=str(path), **SMALL), ITEMS[:1]).embeddings(4)
    assert torch.equal(read, encode(vit(seed=9, **SMALL), ITEMS[:1]).embeddings(4))


def test_patch_vit_converts_a_checkpoint_of_another_dtype(tmp_path: Path) -> None:
    half = {name: tensor.bfloat16() for name, tensor in small_weights(seed=9).items()}
    save_file(half, tmp_path / "model.safetensors")
    view = encode(vit(path=str(tmp_path), **SMALL), ITEMS[:1]).outputs[4]["embeddings"]
    assert view.dtype == "float32"


def broken(how: str) -> tuple[dict[str, torch.Tensor], str]:
    weights, name = small_weights(), "blocks.0.qkv.weight"
    if how == "lacks":
        del weights[name]
    elif how == "has the unknown":
        weights[name := "blocks.1.qkv.weight"] = torch.zeros(1)
    elif how == "not (48, 16)":
        weights[name] = weights[name].T.contiguous()
    elif how == "finite":
        weights[name][3, 3] = math.nan
    else:
        weights[name] = weights[name].to(torch.int32)
    return weights, name


@pytest.mark.parametrize("how", ["lacks", "has the unknown", "not (48, 16)", "finite", "of I32; weights are taken in"])
def test_patch_vit_names_the_tensor_that_is_not_right(tmp_path: Path, how: str) -> None:
    weights, name = broken(how)
    file = tmp_path / "w.safetensors"
    save_file(weights, file)
    with pytest.raises(ConfigError) as caught:
        vit(path=str(file), **SMALL)
    assert caught.value.key == "model.path"
    assert all(part in caught.value.problem for part in (str(file), name, how))


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 64, b"not a checkpoint, by any reading of it"])
def test_patch_vit_refuses_what_is_no_checkpoint(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "w.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        vit(path=str(file))


# --- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "options", "key", "problem"),
    [
        ("patch-vit", {"widht": 64}, "model.options.widht", "patch-vit has: depth, dtype, heads, out_width, "),
        ("patch-vit", {"width": "64"}, "model.options.width", "Expected `int`"),
        ("patch-vit", {"depth": True}, "model.options.depth", "Expected `int`, got `bool`"),
        ("patch-vit", {"heads": 0}, "model.options.heads", ">= 1"),
        ("patch-vit", {"dtype": "float16"}, "model.options.dtype", "float16"),
        ("patch-vit", {"width": 192, "heads": 5}, "model.options", "multiple of 4 and of heads, 5"),
        ("patch-vit", {"width": 6, "heads": 3}, "model.options", "multiple of 4"),
        ("fingerprint", {"width": 64}, "model.options.width", "fingerprint has: load_each"),
        ("fingerprint", {"load_each": 1}, "model.options.load_each", "Expected `bool`"),
    ],
)
def test_wrong_options_are_named(adapter: str, options: dict[str, Any], key: str, problem: str) -> None:
    spec = ModelSpec(adapter=adapter, options=options)
    for reader in (registry.check_model, lambda spec: registry.make_adapter(spec, 1)):
        with pytest.raises(ConfigError) as caught:
            reader(spec)
        assert caught.value.key == key
        assert problem in caught.value.problem


def test_a_seed_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.seed"):
        vit(seed=1 << 64)
    vit(seed=(1 << 64) - 1)


# --- registry ---------------------------------------------------------------------------------------------

PLUGINS = """
raise_on_build = ValueError("no such model")

class OptedIn:
    supports_cuda_vmm_feature_transport = True
    def __init__(self, spec, threads):
        self.seen = (spec.options, threads)
    def encode(self, items, load, out): pass

class Silent:
    def encode(self, items, load, out): pass

class Truthy(Silent):
    supports_cuda_vmm_feature_transport = "yes"

class NotAnAdapter:
    pass

class Fails(Silent):
    def __init__(self, spec, threads):
        raise raise_on_build
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path, with a module of adapters."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ferry_plugins.py").write_text(PLUGINS)
    monkeypatch.delitem(sys.modules, "ferry_plugins", raising=False)
    return tmp_path


def test_p7_the_static_table_says_what_the_classes_say() -> None:
    for name, entry in registry.BUILT_IN.items():
        assert registry.supports_cuda_vmm_feature_transport(name) is entry.supports_cuda_vmm_feature_transport
        if entry.needs and not find_spec(entry.needs):
            continue
        adapter = registry.make_adapter(ModelSpec(adapter=name, options={"tiny": True} if entry.needs else {}), 1)
        assert f"{type(adapter).__module__}:{type(adapter).__qualname__}" == entry.reference
        assert type(adapter).supports_cuda_vmm_feature_transport is entry.supports_cuda_vmm_feature_transport
    assert registry.supports_cuda_vmm_feature_transport("patch-vit")
    assert registry.supports_cuda_vmm_feature_transport("fingerprint")


@pytest.mark.parametrize(
    ("model", "opted_in"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", True),
        ("Qwen3-VL-235B-A22B-Thinking", True),
        ("qwen3-vl", True),
        ("moonshotai/Kimi-K2.5", True),
        ("Kimi-K3", True),
        ("/models/Kimi-K2.5-FP8", True),
        ("Qwen/Qwen2.5-VL-7B-Instruct", False),
        ("Qwen2-VL-2B", False),
    ],
)
def test_p7_is_answered_from_a_models_name(model: str, opted_in: bool) -> None:
    assert registry.supports_cuda_vmm_feature_transport(model) is opted_in


@pytest.mark.parametrize("model", ["Qwen3-VLM", "kimi-k2", "kimi-k2.50", "my/qwen3", "qwen3-vl/lora"])
def test_p7_names_of_other_models_are_no_answer(model: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter"):
        registry.supports_cuda_vmm_feature_transport(model)


def test_p7_opt_in_of_a_plug_in_is_its_class_attribute(plugins: Path) -> None:
    assert registry.supports_cuda_vmm_feature_transport("ferry_plugins:OptedIn")
    assert not registry.supports_cuda_vmm_feature_transport("ferry_plugins:Silent")
    assert not registry.supports_cuda_vmm_feature_transport("ferry_plugins:Truthy")


WITHOUT_TORCH = """
import sys
from tensorferry.pipeline.deployment.load import ModelSpec
from tensorferry.stages.adapters import registry
assert registry.supports_cuda_vmm_feature_transport("patch-vit")
registry.check_model(ModelSpec(adapter="patch-vit", options={"width": 64, "heads": 2}))
registry.make_adapter(ModelSpec(adapter="fingerprint"), 1)
assert "torch" not in sys.modules, "torch was imported"
"""


def test_p7_answers_without_torch() -> None:
    child = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr


def test_a_plug_in_is_built_from_the_spec(plugins: Path) -> None:
    spec = ModelSpec(adapter="ferry_plugins:OptedIn", options={"anything": 1})
    registry.check_model(spec)
    adapter: Any = registry.make_adapter(spec, 3)
    assert adapter.seen == ({"anything": 1}, 3)


def test_what_a_plug_in_raises_comes_through(plugins: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.adapter: cannot make 'ferry_plugins:Fails': ValueError: no such model"
    ):
        registry.make_adapter(ModelSpec(adapter="ferry_plugins:Fails"), 1)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "patch-wit",
            "'patch-wit'; give one of fingerprint, kimi-k25, patch-vit, qwen2.5-vl, qwen3-vl, text-only, or "
            "package.module:Class",
        ),
        ("", "unknown: ''"),
        ("os.system", "unknown: 'os.system'"),
        ("ferry_plugins:Silent()", "unknown"),
        (".ferry_plugins:Silent", "unknown"),
        ("no_such_module:Adapter", "cannot import no_such_module of 'no_such_module:Adapter': ModuleNotFoundError"),
        ("ferry_broken:Adapter", "cannot import ferry_broken of 'ferry_broken:Adapter': ZeroDivisionError"),
        ("ferry_plugins:Absent", "module ferry_plugins has no class Absent"),
        ("ferry_plugins:raise_on_build", "has no class raise_on_build"),
        ("ferry_plugins:NotAnAdapter", "is not a model adapter: it has no method encode"),
    ],
)
def test_an_adapter_that_cannot_be_had_is_a_clear_error(plugins: Path, name: str, problem: str) -> None:
    (plugins / "ferry_broken.py").write_text("1 / 0\n")
    for ask in (lambda: registry.make_adapter(ModelSpec(adapter=name), 1),
                lambda: registry.supports_cuda_vmm_feature_transport(name)):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            ask()
        assert caught.value.key == "model.adapter"
        assert problem in caught.value.problem


# --- the documentation ------------------------------------------------------------------------------------


def test_the_documented_adapter_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[3].joinpath("docs", "adapters.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python mean_patch\.py\n(.*?)```", page, re.DOTALL)
    assert code.count("\n") <= 35
    (tmp_path / "mean_patch.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mean_patch", raising=False)
    adapter = registry.make_adapter(ModelSpec(adapter="mean_patch:MeanPatch", options={"scale": 2.0}), 1)
    assert not registry.supports_cuda_vmm_feature_transport("mean_patch:MeanPatch")
    rank = encode(adapter, ITEMS)
    for item in ITEMS:
        expected = pixels_of(item).view(item.rows, 4, FEATURES).mean(dim=1) * 2
        torch.testing.assert_close(rank.embeddings(item.index), expected)
    with pytest.raises(BadItem):
        encode(adapter, [item_of(5, (1, 4, 4), rows=3)])


def test_the_documented_tensors_are_the_models() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "adapters.md").read_text(encoding="utf-8")
    options = PatchVitOptions(depth=1)
    sizes = {"width": options.width, "patch_features": options.patch_features, "out_width": options.out_width}
    documented: dict[str, tuple[int, ...]] = {}
    for name, shapes in re.findall(r"^\| `([\w.]+)\.weight`, `\.bias` \| (.+) \|$", page, re.MULTILINE):
        found = re.findall(r"`\(([^)]+)\)`", shapes)
        weight, bias = found if len(found) == 2 else found * 2
        for suffix, shape in (("weight", weight), ("bias", bias)):
            documented[f"{name.replace('.N.', '.0.')}.{suffix}"] = tuple(
                math.prod(int(part) if part.isdigit() else sizes[part] for part in extent.split("*"))
                for extent in re.split(r",\s*", shape.rstrip(","))
            )
    assert documented == patch_vit.weight_shapes(options)
