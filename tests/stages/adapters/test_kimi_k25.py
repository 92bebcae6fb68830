"""Kimi-K2.5's tower and projector as a model adapter: the numbers of transformers, from its checkpoint."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tensorferry.codecs.errors import BadItem, ConfigError
from tensorferry.codecs.tensors import View, nbytes_of, view_of
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters import registry
from tensorferry.stages.adapters.base import ItemInfo
from tensorferry.stages.processors.registry import make_processor

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")

FEATURES = 3 * 14 * 14
#: Images wide, high and of one block, and videos of two and of four frames.
GRIDS = [(1, 4, 18), (1, 20, 2), (2, 6, 10), (1, 2, 2), (4, 4, 6), (1, 4, 18)]
VISION = {
    "vt_hidden_size": 32, "vt_intermediate_size": 48, "vt_num_hidden_layers": 3, "vt_num_attention_heads": 2,
    "init_pos_emb_height": 6, "init_pos_emb_width": 6, "init_pos_emb_time": 4, "text_hidden_size": 64,
    "patch_size": 14, "merge_kernel_size": [2, 2], "mm_hidden_size": 32, "projector_ln_eps": 1e-5,
    "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "projector_hidden_act": "gelu",
    "pos_emb_type": "divided_fixed", "video_attn_type": "spatial_temporal",
}  # fmt: skip


def item_of(index: int, grid: tuple[int, int, int]) -> ItemInfo:
    return ItemInfo(index, "image", grid, math.prod(grid), grid[1] * grid[2] // 4, bytes(16))


ITEMS = [item_of(index, grid) for index, grid in enumerate(GRIDS)]
PIXELS = {
    item.index: torch.randn(item.patches, FEATURES, generator=torch.Generator().manual_seed(item.index))
    for item in ITEMS
}


@dataclass
class Rank:
    """What an encoder rank is to its adapter."""

    outputs: dict[int, View] = field(default_factory=dict)

    def load(self, indices: Sequence[int]) -> View:
        return view_of(torch.cat([PIXELS[index] for index in indices]))

    def out(self, index: int, name: str, shape: tuple[int, ...], dtype: str) -> View:
        assert name == "embeddings"
        assert index not in self.outputs
        self.outputs[index] = View(np.full(nbytes_of(dtype, shape), 0xA5, np.uint8), dtype, shape)
        return self.outputs[index]


def make(path: Path | None, **options: Any) -> Any:
    options = {"dtype": "float32", **({} if path else {"tiny": True}), **options}
    spec = ModelSpec(adapter="kimi-k25", path=None if path is None else str(path), options=options)
    return registry.make_adapter(spec, 1)


def encode(adapter: Any, items: Sequence[ItemInfo]) -> list[torch.Tensor]:
    rank = Rank()
    adapter.encode(items, rank.load, rank.out)
    return [rank.outputs[item.index].torch() for item in items]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A tiny model of transformers, language model and all, with weights that are not the initial ones."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    text = {
        "model_type": "deepseek_v3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64,
        "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "pos_emb_height": 6, "pos_emb_width": 6,
    }  # fmt: skip
    config = Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=32)
    config.vision_config._attn_implementation = "sdpa"
    model = Kimi_K25ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (*model.model.vision_tower.parameters(), *model.model.mm_projector.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(max(1, parameter.shape[-1])))
    return model


@pytest.fixture
def checkpoint(theirs: Any, tmp_path: Path) -> Path:
    """As Moonshot has them: transformers writes the tensors, but two under other names than those it reads."""
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {
        name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.").removeprefix("model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    (tmp_path / "config.json").rename(tmp_path / "theirs.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "vision_config": VISION}))
    return tmp_path


def test_transformers_reads_the_same_checkpoint(theirs: Any, checkpoint: Path) -> None:
    """So the names are those of a checkpoint, by its conversion table."""
    (checkpoint / "theirs.json").rename(checkpoint / "config.json")
    again, notes = type(theirs).from_pretrained(checkpoint, output_loading_info=True)
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    written = theirs.state_dict()
    assert all(torch.equal(tensor, written[name]) for name, tensor in again.state_dict().items())


@torch.inference_mode()
def expected(theirs: Any, items: Sequence[ItemInfo], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What transformers makes of each alone: it takes no items of different numbers of frames together."""
    found = []
    for item in items:
        pixels = PIXELS[item.index].view(-1, 3, 14, 14).to(dtype)
        pooled = theirs.model.vision_tower(pixels, grid_thw=torch.tensor([item.grid])).pooler_output
        found.append(theirs.model.mm_projector(pooled).squeeze(1))
    return found


def test_a_checkpoint_gives_the_numbers_of_transformers(theirs: Any, checkpoint: Path) -> None:
    for items in (ITEMS, ITEMS[::-1], ITEMS[:1], ITEMS[::5]):  # of many sizes, one, two equal ones
        for found, numbers in zip(encode(make(checkpoint), items), expected(theirs, items), strict=True):
            assert numbers.std() > 0.01
            torch.testing.assert_close(found, numbers, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_we_are_as_near_to_float32_as_transformers_is(theirs: Any, checkpoint: Path) -> None:
    ours = torch.cat(encode(make(checkpoint, dtype="bfloat16"), ITEMS)).float()
    rounded = copy.deepcopy(theirs).bfloat16()
    exact = copy.deepcopy(rounded).float()  # with the same weights
    for model in (exact, rounded):  # not weights: they stay in float32 when transformers loads a checkpoint
        model.model.vision_tower.rotary_emb.inv_freq = theirs.model.vision_tower.rotary_emb.inv_freq
        embed, times = model.model.vision_tower.patch_embed.pos_emb, theirs.model.vision_tower.patch_embed.pos_emb
        embed.time_position_embeddings = times.time_position_embeddings
    numbers = torch.cat(expected(exact, ITEMS))
    near = torch.cat(expected(rounded, ITEMS, torch.bfloat16)).float()
    error, allowed = ((found - numbers).square().mean().sqrt() for found in (ours, near))
    assert 0 < error <= 1.5 * allowed


@pytest.mark.slow
def test_what_is_compiled_takes_items_of_any_size(
    theirs: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    adapter = make(checkpoint, compile=True)
    for items in (ITEMS, ITEMS[:1], ITEMS[::5]):
        for found, numbers in zip(encode(adapter, items), expected(theirs, items), strict=True):
            torch.testing.assert_close(found, numbers, rtol=1e-4, atol=1e-5)
    assert adapter.tower.refused == 0


def test_without_a_path_the_architecture_is_the_published_one() -> None:
    from transformers import Kimi_K25Config

    from tensorferry.stages.adapters.architecture import KimiVision

    config, published = KimiVision(), Kimi_K25Config()
    for ours, name in (
        ("vt_hidden_size", "hidden_size"),
        ("vt_intermediate_size", "intermediate_size"),
        ("vt_num_hidden_layers", "num_hidden_layers"),
        ("vt_num_attention_heads", "num_attention_heads"),
        ("patch_size", "patch_size"),
        ("init_pos_emb_height", "pos_emb_height"),
        ("init_pos_emb_time", "pos_emb_time"),
    ):
        assert getattr(config, ours) == getattr(published.vision_config, name)
    assert config.projector_ln_eps == published.projection_layer_norm_eps
    assert [tensor.shape for tensor in encode(make(None), ITEMS[:3])] == [(18, 64), (10, 64), (15, 64)]


def test_the_deployment_file_needs_only_its_path_set(checkpoint: Path, tmp_path: Path) -> None:
    """Processor and tower of the file fit each other."""
    source = Path(__file__).parents[3] / "configs" / "kimi-k25.yaml"
    text, changed = re.subn(r"^  # path: \S+", f"  path: {checkpoint}", source.read_text(), flags=re.MULTILINE)
    assert changed == 1
    (tmp_path / "edited.yaml").write_text(text)
    deployment = load(tmp_path / "edited.yaml")
    assert deployment == load(source, [f"model.path={checkpoint}"])
    processor = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)
    assert processor.largest_item_nbytes() < deployment.pool.budget_mb << 20
    data = (source.parents[1] / "examples" / "images" / "rocket.jpg").read_bytes()
    plan = processor.plan(data)
    pixels = View.empty(plan.dtype, plan.shape)
    digest = processor.write(data, plan, pixels)
    item = ItemInfo(0, plan.modality, plan.grid, plan.patches, plan.rows, digest)
    rank = Rank()
    registry.make_adapter(deployment.model, 1).encode([item], lambda indices: pixels, rank.out)
    assert rank.outputs[0].shape == (plan.rows, 64)


def test_items_that_it_cannot_take_are_named() -> None:
    adapter = make(None)
    for bad, problem in ((item_of(9, (5, 2, 2)), "5 frames; the limit is 4"), (item_of(9, (1, 3, 4)), "blocks")):
        with pytest.raises(BadItem, match=problem) as caught:
            encode(adapter, [ITEMS[0], bad])
        assert caught.value.index == 9
    rows_of_every_frame = ItemInfo(9, "video", (2, 4, 4), 32, 8, bytes(16))
    with pytest.raises(BadItem, match="32 patches do not make 8 embeddings"):
        encode(adapter, [rows_of_every_frame])


def test_a_checkpoint_of_something_else_is_refused(checkpoint: Path) -> None:
    def refused(*parts: str) -> None:
        with pytest.raises(ConfigError) as caught:
            make(checkpoint)
        assert all(part in caught.value.problem for part in parts), caught.value.problem

    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    name = "vision_tower.encoder.blocks.1.wqkv.weight"
    save_file({key: tensor for key, tensor in weights.items() if key != name}, file)
    refused("lacks tensor", name)
    save_file(weights, file)
    for key, value, problem in (
        ("merge_type", "sd3", "merge_type: Invalid enum value 'sd3'"),
        ("projector_hidden_act", "relu", "projector_hidden_act: Invalid enum value 'relu', not 'relu'; restore"),
        ("vt_hidden_size", "wide", "vt_hidden_size: Expected `int`, got `str`, not 'wide'"),
        ("vt_num_hidden_layers", 0, "vt_num_hidden_layers: Expected `int` >= 1, not 0"),
        ("projector_ln_eps", 0, "not 0"),
        ("init_pos_emb_time", -1, "not -1"),
        ("text_hidden_size", 10**9, "not 1000000000"),
        ("vt_num_attention_heads", 3, "multiple of 4"),
        ("init_pos_emb_width", 7, "init_pos_emb_height: 6"),
        ("merge_kernel_size", [2, 3], "square"),
    ):
        config = {"model_type": "kimi_k25", "vision_config": {**VISION, key: value}}
        (checkpoint / "config.json").write_text(json.dumps(config))
        refused("config.json: vision_config", problem)
