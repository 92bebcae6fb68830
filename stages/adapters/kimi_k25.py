"""Kimi-K2.5's vision tower, MoonViT, and its projector: all frames of an item attend to each other, then become one.

The module has the tensors of Moonshot's checkpoints under their own names. Sources of the architecture: transformers
5.17, `Kimi_K25VisionModel` and `Kimi_K25MultimodalProjection`, whose numbers these are, and its `conversion_mapping.py`
for the names; of the configuration's keys and figures: `vision_config` in Kimi-K2.5's config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.kimi_k25.modeling_kimi_k25 import get_vision_frame_index, get_vision_temporal_merge_index
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from tensorferry.codecs.errors import BadItem
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.architecture import KimiVision
from tensorferry.stages.adapters.attention import Stretches, attend, stretches_of
from tensorferry.stages.adapters.base import Finish, ItemInfo, Load, Out
from tensorferry.stages.adapters.grid_tables import Tables
from tensorferry.stages.adapters.options import PackedOptions
from tensorferry.stages.adapters.packed_forward import Block, Packing
from tensorferry.stages.adapters.rotary import Angles, angles_of, turned
from tensorferry.stages.adapters.tower import Family, Tower

_EPS = 1e-5  #: of the tower's norms
_THETA = 10_000.0  #: of the rotary embedding, and of the sines that tell frames apart


class Model(nn.Module):
    """The tensors, by their names in a checkpoint."""

    config_class = KimiVision

    def __init__(self, config: KimiVision) -> None:
        super().__init__()
        self.config = config
        wide, merged = config.hidden_size, config.hidden_size * config.spatial_merge_size**2
        embed = nn.Module()
        embed.proj = nn.Conv2d(config.in_channels, wide, config.patch_size, config.patch_size)
        embed.pos_emb = nn.Module()
        embed.pos_emb.weight = nn.Parameter(torch.empty(config.init_pos_emb_height, config.init_pos_emb_width, wide))
        encoder = nn.Module()
        encoder.blocks = nn.ModuleList(_Layer(config) for _ in range(config.vt_num_hidden_layers))
        encoder.final_layernorm = nn.LayerNorm(wide, eps=_EPS)
        self.vision_tower, self.mm_projector = nn.Module(), nn.Module()
        self.vision_tower.patch_embed, self.vision_tower.encoder = embed, encoder
        self.mm_projector.pre_norm = nn.LayerNorm(wide, eps=config.projector_ln_eps)
        self.mm_projector.proj = nn.Sequential(
            nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, config.text_hidden_size)
        )


class _Layer(nn.Module):
    def __init__(self, config: KimiVision) -> None:
        super().__init__()
        wide, inner = config.hidden_size, config.vt_intermediate_size
        self.heads = config.num_attention_heads
        self.norm0, self.norm1 = nn.LayerNorm(wide, eps=_EPS), nn.LayerNorm(wide, eps=_EPS)
        self.wqkv, self.wo = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.mlp = nn.Module()
        self.mlp.fc0, self.mlp.fc1 = nn.Linear(wide, inner), nn.Linear(inner, wide)


def _settle(model: Any, config: KimiVision) -> None:
    """Reorder the components that rotate as a pair: side by side in a checkpoint, half a head apart in `rotary`."""
    heads, wide = config.num_attention_heads, config.hidden_size
    order = torch.arange(wide).view(heads, -1, 2).transpose(1, 2).flatten()
    order = torch.cat([order, order + wide, torch.arange(2 * wide, 3 * wide)])
    for layer in model.vision_tower.encoder.blocks:
        for tensor in (layer.wqkv.weight, layer.wqkv.bias):
            tensor.data = tensor.data[order]
    model.register_buffer("inv_freq", _frequencies(wide // heads // 2), persistent=False)
    angles = torch.arange(config.init_pos_emb_time)[:, None] * _frequencies(wide)
    times = torch.cat([angles.sin(), angles.cos()], dim=1)
    model.register_buffer("times", torch.cat([torch.zeros(1, wide), times]), persistent=False)  # the first: of images


def _frequencies(wide: int) -> torch.Tensor:
    """float32 (wide / 2,), from 1 down to almost 1 / _THETA."""
    return 1.0 / _THETA ** (torch.arange(0, wide, 2, dtype=torch.float32) / wide)


def _tables(model: Any, grid: torch.Tensor) -> Tables:
    """`pooled` has the numbers of the patches in the order of embeddings. `bags` has the starts of its groups; a group
    is one patch in all frames, and becomes one row. Here `blocks` counts patches too."""
    config, patches = model.config, int(grid.prod())
    indices, weights = get_vision_interpolation_indices_and_weights(grid, config.init_pos_emb_height, mode="bicubic")
    pooled = get_vision_temporal_merge_index(grid, *config.merge_kernel_size).transpose(1, 2).flatten()
    return Tables(
        {
            "interp_indices": indices,
            "interp_weights": weights,
            "position_ids": get_vision_position_ids(grid, 1),
            "frame_index": get_vision_frame_index(grid),
        },
        {"cu_seqlens": [patches]},
        {"pooled": pooled, "bags": torch.arange(0, patches, int(grid[0, 0]))},
        patches,
    )


def _block(layer: Any, hidden: torch.Tensor, angles: Angles, stretches: Stretches) -> torch.Tensor:
    qkv = layer.wqkv(layer.norm0(hidden)).unflatten(-1, (3, layer.heads, -1))
    hidden = hidden + layer.wo(attend(*turned(qkv, angles), stretches))
    inner = functional.gelu(layer.mlp.fc0(layer.norm1(hidden)), approximate="tanh")
    out: torch.Tensor = hidden + layer.mlp.fc1(inner)
    return out


def _run(
    model: Any, block: Block, features: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    tower, projector = model.vision_tower, model.mm_projector
    patch, table = tower.patch_embed.proj, tower.patch_embed.pos_emb.weight
    hidden = functional.linear(features, patch.weight.flatten(1), patch.bias)
    positions = functional.embedding_bag(
        batch["interp_indices"], table.flatten(0, 1).float(), per_sample_weights=batch["interp_weights"], mode="sum"
    )
    hidden = hidden + (positions + model.times[batch["frame_index"]]).to(hidden.dtype)
    turns = batch["position_ids"][..., None] * model.inv_freq  # of height and width, which alternate here
    angles = angles_of(turns.transpose(1, 2).flip(-1).flatten(1))
    stretches = stretches_of(batch["cu_seqlens"], features.device)
    for layer in tower.encoder.blocks:
        hidden = block(layer, hidden, angles, stretches)
    hidden = tower.encoder.final_layernorm(hidden)
    pooled = functional.embedding_bag(batch["pooled"], hidden, batch["bags"], mode="mean")
    corners = model.config.spatial_merge_size**2
    return {"embeddings": projector.proj(projector.pre_norm(pooled).reshape(len(pooled) // corners, -1))}


FAMILY = Family(
    adapter="kimi-k25",
    vision=KimiVision,
    tower=Model,
    architecture={},
    tiny={
        "vt_hidden_size": 32, "vt_intermediate_size": 48, "vt_num_hidden_layers": 3, "vt_num_attention_heads": 2,
        "init_pos_emb_height": 6, "init_pos_emb_width": 6, "text_hidden_size": 64,
    },
    tables=_tables,
    packing=Packing(_run, _block),
    settle=_settle,
    options=PackedOptions,
    parts=("vision_tower.", "mm_projector."),
    frames_become_one=True,
)  # fmt: skip


class KimiK25:
    """Output of an item: `embeddings`, (rows, text_hidden_size) in the configured dtype, rows = height * width / 4. The
    frames of a video, at most four, share one frame's rows."""

    supports_cuda_vmm_feature_transport: bool = True

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        """See `Tower`."""
        self.tower = Tower(FAMILY, spec, threads)

    def warm_up(self, device: int | None) -> None:
        """See `Tower.warm_up`."""
        self.tower.warm_up(device)

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        """See `Tower.encode`."""
        for item in items:
            if item.grid[0] > (most := self.tower.model.config.init_pos_emb_time):
                raise BadItem(item.index, f"the item has {item.grid[0]} frames; the limit is {most}")
        return self.tower.encode(items, load, out)
