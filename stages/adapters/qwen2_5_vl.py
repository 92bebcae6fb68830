"""Qwen2.5-VL's vision tower: most layers attend within windows of 8 x 8 patches, a few within a whole frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.architecture import Qwen25Vision
from tensorferry.stages.adapters.attention import Stretches, attend, stretches_of
from tensorferry.stages.adapters.base import Finish, ItemInfo, Load, Out
from tensorferry.stages.adapters.grid_tables import Tables
from tensorferry.stages.adapters.packed_forward import Block, Packing
from tensorferry.stages.adapters.rotary import Angles, angles_of, turned
from tensorferry.stages.adapters.tower import QWEN_PREFIXES, Family, Tower, make_rotary


def _tables(tower: Any, grid: torch.Tensor) -> Tables:
    """Source of names and meaning: transformers 5.17, `Qwen2_5_VisionTransformerPretrainedModel.forward`."""
    merge = tower.spatial_merge_size
    order, windows = get_vision_window_index(grid, merge, tower.window_size, tower.patch_size)
    return Tables(
        {"position_ids": get_vision_position_ids(grid, merge)},
        {"cu_seqlens": get_vision_cu_seqlens(grid).diff().tolist(), "cu_window_seqlens": windows.diff().tolist()},
        {"window_index": order},
        len(order),
    )


def _norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _block(layer: Any, hidden: torch.Tensor, angles: Angles, stretches: Stretches) -> torch.Tensor:
    """Source of the arithmetic here and below: transformers 5.17, `Qwen2_5_VLVisionBlock` and
    `Qwen2_5_VisionTransformerPretrainedModel`."""
    qkv = layer.attn.qkv(_norm(layer.norm1, hidden)).unflatten(-1, (3, layer.attn.num_heads, -1))
    hidden = hidden + layer.attn.proj(attend(*turned(qkv, angles), stretches))
    out: torch.Tensor = hidden + layer.mlp(_norm(layer.norm2, hidden))
    return out


def _run(
    model: Any, block: Block, features: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    order, unit = batch["window_index"], model.spatial_merge_unit

    def ordered(lines: torch.Tensor) -> torch.Tensor:
        """Window after window; the patches of a block stay together."""
        return lines.reshape(-1, unit, lines.shape[-1])[order].flatten(0, 1)

    weight = model.patch_embed.proj.weight  # see qwen3_vl
    hidden = ordered(functional.linear(features, weight.flatten(1)))
    angles = angles_of((ordered(batch["position_ids"])[..., None] * model.rotary_pos_emb.inv_freq).flatten(1))
    frames = stretches_of(batch["cu_seqlens"], features.device)
    windows = stretches_of(batch["cu_window_seqlens"], features.device)
    for number, layer in enumerate(model.blocks):
        hidden = block(layer, hidden, angles, frames if number in model.fullatt_block_indexes else windows)
    merger = model.merger
    merged = merger.mlp(_norm(merger.ln_q, hidden).reshape(len(order), -1))
    return {"embeddings": torch.empty_like(merged).index_copy_(0, order, merged)}


FAMILY = Family(
    adapter="qwen2.5-vl",
    vision=Qwen25Vision,
    tower=Qwen2_5_VisionTransformerPretrainedModel,
    # Of Qwen2.5-VL-7B's config.json; the rest of its vision_config is Qwen2_5_VLVisionConfig's defaults: 32 layers,
    # windows of 112 pixels, whole frames in layers 7, 15, 23 and 31. 3B and 72B have another out_hidden_size.
    architecture={"hidden_size": 1280},
    tiny={
        "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
        "fullatt_block_indexes": (1,),
    },
    tables=_tables,
    outputs=lambda result: {"embeddings": result.pooler_output},
    packing=Packing(_run, _block),
    settle=make_rotary,
    prefixes=QWEN_PREFIXES,
)  # fmt: skip


class Qwen25VL:
    """Output of an item: `embeddings`, (rows, out_hidden_size) in the configured dtype, rows = patches / 4."""

    supports_cuda_vmm_feature_transport: bool = False

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        """See `Tower`."""
        self.tower = Tower(FAMILY, spec, threads)

    def warm_up(self, device: int | None) -> None:
        """See `Tower.warm_up`."""
        self.tower.warm_up(device)

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        """See `Tower.encode`."""
        return self.tower.encode(items, load, out)
