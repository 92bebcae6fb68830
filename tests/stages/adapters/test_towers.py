"""The vision towers of transformers as model adapters: the same numbers, whatever is encoded together."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tensorferry.codecs.errors import BadItem, BadTensor, ConfigError
from tensorferry.codecs.tensors import View, nbytes_of, view_of
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages import plugin
from tensorferry.stages.adapters import registry
from tensorferry.stages.adapters.base import ItemInfo
from tensorferry.stages.adapters.grid_tables import TableCache, Tables, joined
from tensorferry.stages.processors.registry import make_processor

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")

Grid = tuple[int, int, int]
FAMILIES = ("qwen2.5-vl", "qwen3-vl")
MODEL_TYPES = {"qwen2.5-vl": "qwen2_5_vl", "qwen3-vl": "qwen3_vl"}
FEATURES = {"qwen2.5-vl": 3 * 2 * 14 * 14, "qwen3-vl": 3 * 2 * 16 * 16}
#: Images wide, high and of one block, one of more than one window, and a video of three temporal patches.
GRIDS: list[Grid] = [(1, 4, 18), (1, 20, 2), (1, 2, 2), (3, 6, 10), (1, 4, 18)]


def item_of(index: int, grid: Grid, rows: int | None = None) -> ItemInfo:
    patches = math.prod(grid)
    return ItemInfo(index, "image", grid, patches, patches // 4 if rows is None else rows, bytes(16))


ITEMS = [item_of(3 * index, grid) for index, grid in enumerate(GRIDS)]


def pixels_of(adapter: str, item: ItemInfo) -> torch.Tensor:
    generator = torch.Generator().manual_seed(item.index)
    return torch.randn(item.patches, FEATURES[adapter], generator=generator)


@dataclass
class Rank:
    """What an encoder rank is to its adapter."""

    pixels: dict[int, torch.Tensor]
    outputs: dict[int, dict[str, View]] = field(default_factory=dict)

    def load(self, indices: Sequence[int]) -> View:
        view = view_of(torch.cat([self.pixels[index] for index in indices]))
        view.data.flags.writeable = False  # as a consumer's mapping of a pool is
        return view

    def out(self, index: int, name: str, shape: tuple[int, ...], dtype: str) -> View:
        outputs = self.outputs.setdefault(index, {})
        assert name not in outputs, "out() twice for one output"
        outputs[name] = View(np.full(nbytes_of(dtype, shape), 0xA5, np.uint8), dtype, shape)
        return outputs[name]


def make(adapter: str, path: Path | None = None, seed: int = 0, **options: Any) -> Any:
    options = {"dtype": "float32", **({} if path else {"tiny": True}), **options}
    return registry.make_adapter(
        ModelSpec(adapter=adapter, path=None if path is None else str(path), seed=seed, options=options), 1
    )


def encode(adapter: Any, items: Sequence[ItemInfo], pixels: dict[int, torch.Tensor]) -> dict[int, dict[str, View]]:
    rank = Rank(pixels)
    adapter.encode(items, rank.load, rank.out)
    return rank.outputs


@torch.inference_mode()
def directly(model: Any, items: Sequence[ItemInfo], pixels: dict[int, torch.Tensor]) -> Any:
    """What transformers itself makes of a batch."""
    grids = torch.tensor([item.grid for item in items])
    return model(torch.cat([pixels[item.index] for item in items]), grid_thw=grids)


Outputs = dict[int, dict[str, View]]


def check_equal(outputs: Outputs, expected: Any, items: Sequence[ItemInfo], tolerance: float = 1e-5) -> None:
    start = 0
    for item in items:
        stop = start + item.rows
        wanted = {"embeddings": expected.pooler_output[start:stop]}
        if hasattr(expected, "deepstack_features"):
            wanted["deepstack"] = torch.stack([layer[start:stop] for layer in expected.deepstack_features])
        assert list(outputs[item.index]) == list(wanted)
        for name, tensor in wanted.items():
            found = outputs[item.index][name].torch()
            assert found.dtype == tensor.dtype
            assert tensor.std() > 0.01
            torch.testing.assert_close(found, tensor, rtol=tolerance, atol=tolerance)
        start = stop


# --- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_a_batch_of_many_grids_is_what_transformers_makes_of_it(adapter: str, dtype: str, tolerance: float) -> None:
    encoder = make(adapter, dtype=dtype)
    pixels = {item.index: pixels_of(adapter, item) for item in ITEMS}
    expected = directly(encoder.tower.model, ITEMS, pixels)
    check_equal(encode(encoder, ITEMS, pixels), expected, ITEMS, tolerance)
    again = encode(encoder, ITEMS, pixels)  # with tables that are there already
    check_equal(again, expected, ITEMS, tolerance)


@pytest.mark.parametrize("adapter", FAMILIES)
def test_an_item_does_not_depend_on_its_company(adapter: str) -> None:
    encoder = make(adapter)
    pixels = {item.index: pixels_of(adapter, item) for item in ITEMS}
    together = encode(encoder, ITEMS[::-1], pixels)
    for item in ITEMS:
        alone = encode(encoder, [item], pixels)[item.index]
        for name, view in alone.items():
            torch.testing.assert_close(together[item.index][name].torch(), view.torch(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adapter", FAMILIES)
def test_the_seed_decides_the_weights(adapter: str) -> None:
    pixels = {item.index: pixels_of(adapter, item) for item in ITEMS}
    first, same, other = (
        encode(make(adapter, seed=seed), ITEMS[:1], pixels)[0]["embeddings"].torch() for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.allclose(first, other, atol=0.1)


@pytest.mark.parametrize("adapter", FAMILIES)
def test_transformers_works_nothing_out_of_the_grids(adapter: str) -> None:
    """What it would work out it reads back from the GPU, image by image."""
    tower = make(adapter).tower
    pixels = {item.index: pixels_of(adapter, item) for item in ITEMS}
    expected = directly(tower.model, ITEMS, pixels)
    batch = tower.batch([item.grid for item in ITEMS], torch.device("cpu"))
    nonsense = torch.full((1, 3), -1)
    with torch.inference_mode():
        found = tower.model(torch.cat([pixels[item.index] for item in ITEMS]), grid_thw=nonsense, **batch)
    torch.testing.assert_close(found.pooler_output, expected.pooler_output)


@pytest.mark.parametrize("adapter", FAMILIES)
def test_a_forward_pass_reads_nothing_back_from_its_device(adapter: str) -> None:
    """On torch's meta device a tensor has no values, so that whoever asks for one fails."""
    tower, meta = make(adapter).tower, torch.device("meta")
    tower.model.to(meta)
    patches = sum(item.patches for item in ITEMS)
    with torch.inference_mode():
        outputs = tower.forward(torch.empty(patches, FEATURES[adapter], device=meta), [item.grid for item in ITEMS])
    assert outputs["embeddings"].shape == (patches // 4, 64)
    assert outputs["embeddings"].device == meta


@pytest.mark.parametrize("adapter", FAMILIES)
def test_without_items_nothing_is_loaded(adapter: str) -> None:
    assert encode(make(adapter), [], {}) == {}


def test_without_a_path_the_architecture_is_the_published_one() -> None:
    from tensorferry.stages.adapters import qwen2_5_vl, qwen3_vl

    for family, expected in (
        (qwen2_5_vl.FAMILY, {"depth": 32, "hidden_size": 1280, "num_heads": 16, "out_hidden_size": 3584}),
        (qwen3_vl.FAMILY, {"depth": 27, "hidden_size": 1152, "num_heads": 16, "out_hidden_size": 4096}),
    ):
        config = family.tower.config_class(**family.architecture)
        assert {name: getattr(config, name) for name in expected} == expected


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", FAMILIES)
def test_a_poisoned_item_is_named(adapter: str) -> None:
    encoder = make(adapter)
    pixels = {item.index: pixels_of(adapter, item) for item in ITEMS}
    pixels[6][0, 5] = math.nan
    with pytest.raises(BadItem, match="NaN or infinity") as caught:
        encode(encoder, ITEMS, pixels)
    assert caught.value.index == 6
    pixels[6] = torch.full_like(pixels[6], 3e38)
    with pytest.raises(BadItem, match="overflow float32") as caught:
        encode(encoder, ITEMS, pixels)
    assert caught.value.index == 6


@pytest.mark.parametrize("bad", [item_of(9, (1, 3, 4)), item_of(9, (1, 4, 4), rows=3), item_of(9, (0, 4, 4))])
def test_an_item_whose_numbers_disagree_is_refused(bad: ItemInfo) -> None:
    with pytest.raises(BadItem) as caught:
        encode(make("qwen3-vl"), [ITEMS[0], bad], {})
    assert caught.value.index == 9


@pytest.mark.parametrize(
    "pixels", [torch.zeros(72, 1176), torch.zeros(71, 1536), torch.zeros(72, 1536, dtype=torch.uint8)]
)
def test_features_of_another_processor_are_refused(pixels: torch.Tensor) -> None:
    with pytest.raises(BadTensor, match=r"qwen3-vl takes floating-point \(72, 1536\); see patch_size"):
        encode(make("qwen3-vl"), ITEMS[:1], {0: pixels})


# --- checkpoints ------------------------------------------------------------------------------------------


def whole_model(adapter: str) -> Any:
    """A tiny model of transformers, language model and all, with weights that are not the initial ones."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    from tensorferry.stages.adapters import qwen2_5_vl, qwen3_vl

    text = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    if adapter == "qwen3-vl":
        vision, config, kind = qwen3_vl.FAMILY.tiny, Qwen3VLConfig, Qwen3VLForConditionalGeneration
        text["head_dim"] = 16
    else:
        vision, config, kind = qwen2_5_vl.FAMILY.tiny, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    model = kind(config(vision_config=dict(vision), text_config={**text, "rope_parameters": rope})).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A family, its whole model, and the directory that transformers saved it to, in several files."""
    adapter: str = request.param
    folder = tmp_path_factory.mktemp("saved")
    model = whole_model(adapter)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return adapter, model, folder


def copied(folder: Path, to: Path) -> dict[str, torch.Tensor]:
    """The configuration of a checkpoint, and its weights to be saved again."""
    (to / "config.json").write_text((folder / "config.json").read_text())
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_checkpoint_that_transformers_saved(saved: tuple[str, Any, Path]) -> None:
    adapter, model, folder = saved
    pixels = {item.index: pixels_of(adapter, item) for item in ITEMS}
    found = encode(make(adapter, folder), ITEMS, pixels)
    check_equal(found, directly(model.model.visual, ITEMS, pixels), ITEMS)


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
def test_either_way_to_name_the_weights_in_one_file(saved: tuple[str, Any, Path], tmp_path: Path, prefix: str) -> None:
    adapter, model, folder = saved
    weights = {
        re.sub(r"^(model\.)?visual\.", prefix, name): tensor for name, tensor in copied(folder, tmp_path).items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    pixels = {item.index: pixels_of(adapter, item) for item in ITEMS}
    check_equal(
        encode(make(adapter, tmp_path), ITEMS, pixels), directly(model.model.visual, ITEMS, pixels), ITEMS, 1e-5
    )


def test_random_weights_for_the_configuration_of_a_checkpoint(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    adapter, _, folder = saved
    copied(folder, tmp_path)
    pixels = {item.index: pixels_of(adapter, item) for item in ITEMS}
    found = encode(make(adapter, tmp_path, seed=3, random_weights=True), ITEMS[:1], pixels)
    assert torch.equal(
        found[0]["embeddings"].torch(), encode(make(adapter, seed=3), ITEMS[:1], pixels)[0]["embeddings"].torch()
    )


def refused(adapter: str, path: Path, *parts: str, **options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make(adapter, path, **options)
    assert caught.value.key in ("model.path", "model.options.tiny", "model")
    assert all(part in caught.value.problem for part in parts), caught.value.problem


def test_a_configuration_of_another_model_is_refused(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    adapter, _, folder = saved
    (other,) = set(FAMILIES) - {adapter}
    refused(
        other,
        folder,
        "config.json",
        f"model_type is {json.loads((folder / 'config.json').read_text())['model_type']!r}",
    )
    refused(adapter, folder, "leave one away", tiny=True)
    refused(adapter, tmp_path, str(tmp_path / "config.json"), "No such file")
    for text, problem in (
        ("{", "truncated"),
        ('{"model_type": "llama"}', "model_type is 'llama'"),
        ("{}", "model_type is None"),
        (
            json.dumps({"model_type": MODEL_TYPES[adapter]}),
            "there is no vision_config; it must be an object with the tower's sizes, so restore the config.json",
        ),
        (
            json.dumps({"model_type": MODEL_TYPES[adapter], "vision_config": None}),
            "vision_config is None; it must be an object with the tower's sizes, so restore the config.json",
        ),
        ("[]", "Expected `object`"),
    ):
        (tmp_path / "config.json").write_text(text)
        refused(adapter, tmp_path, str(tmp_path / "config.json"), problem)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["depth"] = "three"
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(adapter, tmp_path, "config.json", "vision_config", "depth")


COMMON = {
    "hidden_size": [-4, 0, 10**9, "wide", 33, None, 1.5], "num_heads": [0, -1, 7, 10**6], "depth": [0, -3, 10**6],
    "hidden_act": ["foo", 3, None], "intermediate_size": [0, -48], "out_hidden_size": [0, 10**9], "in_channels": [0],
    "patch_size": [0, -14, [14, 14], 10**5], "spatial_merge_size": [0, -2], "temporal_patch_size": [0, "2"],
    "rope_parameters": ["x", {"rope_type": "foo"}, {"rope_theta": 0}],
}  # fmt: skip
IMPOSSIBLE: dict[str, dict[str, list[Any]]] = {
    "qwen2.5-vl": COMMON | {"window_size": [0, 27], "fullatt_block_indexes": [[99], [-1], 3, ["a"]]},
    "qwen3-vl": COMMON
    | {"num_position_embeddings": [0, -4, 35], "deepstack_visual_indexes": [[99], [-1], [1, 0], [0, 0], 3]},
}


@pytest.mark.parametrize(
    ("adapter", "key"), [(adapter, key) for adapter, keys in IMPOSSIBLE.items() for key in keys], ids=str
)
def test_impossible_values_of_a_configuration_are_named(adapter: str, key: str, tmp_path: Path) -> None:
    from tensorferry.stages.adapters import qwen2_5_vl, qwen3_vl

    family = {"qwen2.5-vl": qwen2_5_vl.FAMILY, "qwen3-vl": qwen3_vl.FAMILY}[adapter]
    for value in IMPOSSIBLE[adapter][key]:
        config = {"model_type": MODEL_TYPES[adapter], "vision_config": {**family.tiny, key: value}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        said = "" if isinstance(value, dict) else str(value)
        refused(
            adapter, tmp_path, "config.json: vision_config", key, said, "restore the config.json", random_weights=True
        )


@pytest.mark.parametrize("adapter", FAMILIES)
def test_keys_that_a_configuration_leaves_away_are_what_transformers_makes_of_them(adapter: str) -> None:
    from transformers.activations import ACT2FN

    from tensorferry.stages.adapters import architecture, qwen2_5_vl, qwen3_vl

    family = {"qwen2.5-vl": qwen2_5_vl.FAMILY, "qwen3-vl": qwen3_vl.FAMILY}[adapter]
    theirs = family.tower.config_class().to_dict()
    ours = msgspec.to_builtins(family.vision())
    del ours["rope_parameters"]
    assert {key: theirs[key] for key in ours} == ours | {
        key: list(value) for key, value in ours.items() if isinstance(value, tuple)
    }
    assert set(get_args(architecture.Activation)) <= set(ACT2FN)


def test_sizes_that_no_memory_holds_are_refused_before_it_is_asked_for(tmp_path: Path) -> None:
    vision = {"depth": 256, "hidden_size": 1 << 16, "intermediate_size": 1 << 16, "num_heads": 4}
    config = {"model_type": "qwen3_vl", "vision_config": {**vision, "deepstack_visual_indexes": []}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("qwen3-vl", tmp_path, "bytes of weights", "are available", random_weights=True)


def test_weights_that_are_not_the_configurations_are_named(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    adapter, _, folder = saved
    weights = copied(folder, tmp_path)
    refused(adapter, tmp_path, "cannot read", "model.safetensors")
    name = next(name for name in weights if "visual.blocks.1.attn.qkv.weight" in name)
    for problem, changed in (
        ("lacks", {key: tensor for key, tensor in weights.items() if key != name}),
        ("shape (2, 32), not (96, 32)", {**weights, name: weights[name][:2].contiguous()}),
        ("finite", {**weights, name: weights[name] * math.inf}),
        ("unknown", {**weights, (extra := name.replace("blocks.1", "blocks.9")): weights[name].clone()}),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        refused(adapter, tmp_path, problem, extra if problem == "unknown" else name)
    lost = name.replace("blocks.1", "blocks.2")
    changed = {key: tensor for key, tensor in weights.items() if key != lost}
    save_file({**changed, name: weights[name][:2].contiguous()}, tmp_path / "model.safetensors")
    refused(adapter, tmp_path, f"lacks tensor {lost}; has tensor {name} of shape (2, 32), not (96, 32)")
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    refused(adapter, tmp_path, "lacks tensor", "and ", " more")


def test_a_file_of_a_checkpoint_that_is_not_there_is_named(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    adapter, _, folder = saved
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = next(name for name in index["weight_map"] if "visual.blocks.1.attn.qkv.weight" in name)
    (tmp_path / index["weight_map"][name]).unlink()
    refused(adapter, tmp_path, index["weight_map"][name])
    save_file({"other": torch.zeros(1)}, tmp_path / index["weight_map"][name])
    refused(adapter, tmp_path, index["weight_map"][name], "lacks tensor", "which its index promises")
    for elsewhere in ("../../etc/passwd", "/etc/passwd", "a/../../b", "nosuch.safetensors", "a\0b"):
        promised = {**index, "weight_map": {**index["weight_map"], name: elsewhere}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(promised))
        refused(
            adapter,
            tmp_path,
            elsewhere.replace("\0", r"\x00"),
            *(["only files beside it"] if ".." in elsewhere else []),
        )


def test_a_broken_file_of_a_checkpoint_is_named(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    adapter, _, folder = saved
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    name = next(name for name in whole["weight_map"] if "visual.blocks.1.attn.qkv.weight" in name)
    for text, problem in (
        ("{", "Input data was truncated"),
        ("", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "missing required field `weight_map`"),
        ('{"weight_map": 3}', "Expected `object`, got `int` - at `$.weight_map`"),
    ):
        index.write_text(text)
        refused(adapter, tmp_path, f"cannot read {index}: ", problem, "fetch the file again")
    for file in ("", ".", "./", 3, None, ["a"]):
        index.write_text(json.dumps({"weight_map": {**whole["weight_map"], name: file}}))
        refused(adapter, tmp_path, f"{index} names {file!a} for tensor {name}; only files beside it are read")
    index.write_text(json.dumps(whole))
    shard = tmp_path / whole["weight_map"][name]
    data = shard.read_bytes()
    for broken in (data[:-8], data[:40], b"", b"version https://git-lfs.github.com/spec/v1"):
        shard.write_bytes(broken)
        refused(adapter, tmp_path, f"cannot read {shard}: ", "fetch the file again")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.int8,
        torch.int32,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
def test_weights_of_a_dtype_that_is_not_taken_are_named(
    saved: tuple[str, Any, Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    adapter, _, folder = saved
    weights = copied(folder, tmp_path)
    name = next(name for name in weights if "visual.blocks.1.attn.qkv.weight" in name)
    file = tmp_path / "model.safetensors"
    save_file({**weights, name: weights[name].abs().to(dtype)}, file)
    with safe_open(file, framework="pt") as opened:
        said = opened.get_slice(name).get_dtype()
    taken = "weights are taken in float16, bfloat16, float32, float64; convert them"
    refused(adapter, tmp_path, f"{file} has tensor {name} of {said}; {taken}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_other_floating_dtypes_are_taken(
    saved: tuple[str, Any, Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    adapter, _, folder = saved
    save_file(
        {name: tensor.to(dtype) for name, tensor in copied(folder, tmp_path).items()}, tmp_path / "model.safetensors"
    )
    make(adapter, tmp_path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "a shard"])
def test_a_fifo_among_a_checkpoint_s_files_is_refused_and_not_waited_for(
    saved: tuple[str, Any, Path], tmp_path: Path, name: str
) -> None:
    adapter, _, folder = saved
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if name == "a shard":
        name = next(file.name for file in folder.glob("*.safetensors"))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    refused(adapter, tmp_path, str(tmp_path / name), "not a regular file")


def test_without_transformers_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"qwen3-vl needs transformers; install it with: pip install 'tensorferry\[hf\]'"
    ):
        make("qwen3-vl")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_deployment_file_of_a_family_needs_only_its_paths_set(name: str, tmp_path: Path) -> None:
    """Processor and tower of the file fit each other, with a checkpoint of the family."""
    whole_model(name).save_pretrained(tmp_path)
    source = Path(__file__).parents[3] / "configs" / f"{name}.yaml"
    vocabulary = tmp_path / "tokenizer.json"
    vocabulary.write_text(files("tensorferry.stages.tokenizer").joinpath("bytelevel.json").read_text())
    text = source.read_text()
    for key, value in (("path", tmp_path), ("vocabulary", vocabulary)):  # as its comment says
        text, changed = re.subn(rf"^  # {key}: \S+", f"  {key}: {value}", text, flags=re.MULTILINE)
        assert changed == 1
    (tmp_path / "edited.yaml").write_text(text)
    deployment = load(tmp_path / "edited.yaml")
    assert deployment == load(source, [f"model.path={tmp_path}", f"tokenizer.vocabulary={vocabulary}"])
    processor = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)
    assert processor.largest_item_nbytes() < deployment.pool.budget_mb << 20
    data = (source.parents[1] / "examples" / "images" / "rocket.jpg").read_bytes()
    plan = processor.plan(data)
    pixels = View.empty(plan.dtype, plan.shape)
    digest = processor.write(data, plan, pixels)
    item = ItemInfo(0, plan.modality, plan.grid, plan.patches, plan.rows, digest)
    outputs = encode(registry.make_adapter(deployment.model, 1), [item], {0: pixels.torch()})
    assert outputs[0]["embeddings"].shape == (plan.rows, 64)


# --- tables -----------------------------------------------------------------------------------------------


def test_tables_are_made_once_and_kept_within_bounds() -> None:
    made: list[Grid] = []

    def tables(grid: Grid) -> Tables:
        made.append(grid)
        return Tables({"lines": torch.arange(math.prod(grid))}, {"ends": [math.prod(grid)]})

    cache, cpu = TableCache(tables, most_patches=20), torch.device("cpu")
    small, middle, large = (1, 2, 2), (1, 4, 4), (1, 6, 6)
    cache.get([small, middle, small], cpu)
    assert made == [small, middle]
    cache.get([small], cpu)
    cache.get([(1, 2, 4)], cpu)  # the one unused for longest goes: 16 of 28 patches
    cache.get([small], cpu)
    assert made == [small, middle, (1, 2, 4)]
    assert [len(each.lines["lines"]) for each in cache.get([large, middle], cpu)] == [36, 16]  # is not kept
    cache.get([large], cpu)
    assert made[3:] == [large, middle, large]


def test_tables_of_a_batch_stand_one_after_the_other() -> None:
    one = Tables({"lines": torch.tensor([[1], [2]])}, {"ends": [1, 1]}, {"order": torch.tensor([1, 0])}, 2)
    two = Tables({"lines": torch.tensor([[3]])}, {"ends": [1]}, {"order": torch.tensor([0])}, 1)
    batch = joined([one, two, one])
    assert batch["lines"].tolist() == [[1], [2], [3], [1], [2]]
    assert batch["ends"].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["ends"].dtype == torch.int32
    assert batch["order"].tolist() == [1, 0, 2, 4, 3]
