"""Qwen3-VL's vision tower, whose language model also takes the outputs of some inner layers (*deepstack*)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.architecture import Qwen3Vision
from tensorferry.stages.adapters.attention import Stretches, attend, stretches_of
from tensorferry.stages.adapters.base import Finish, ItemInfo, Load, Out
from tensorferry.stages.adapters.grid_tables import Tables
from tensorferry.stages.adapters.packed_forward import Block, Packing
from tensorferry.stages.adapters.rotary import Angles, angles_of, turned
from tensorferry.stages.adapters.tower import QWEN_PREFIXES, Family, Tower, make_rotary


def _tables(tower: Any, grid: torch.Tensor) -> Tables:
    """Source of names and meaning: transformers 5.17, `Qwen3VLVisionModel.forward`."""
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    return Tables(
        {
            "interp_indices": indices,
            "interp_weights": weights,
            "position_ids": get_vision_position_ids(grid, tower.spatial_merge_size),
        },
        {"cu_seqlens": get_vision_cu_seqlens(grid).diff().tolist()},
    )


def _block(layer: Any, hidden: torch.Tensor, angles: Angles, stretches: Stretches) -> torch.Tensor:
    """Source of the arithmetic here and below: transformers 5.17, `Qwen3VLVisionBlock` and `Qwen3VLVisionModel`."""
    qkv = layer.attn.qkv(layer.norm1(hidden)).unflatten(-1, (3, layer.attn.num_heads, -1))
    hidden = hidden + layer.attn.proj(attend(*turned(qkv, angles), stretches))
    out: torch.Tensor = hidden + layer.mlp(layer.norm2(hidden))
    return out


def _run(
    model: Any, block: Block, features: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    patch = model.patch_embed.proj  # a convolution whose windows do not overlap is a matrix product, and a faster one
    hidden = functional.linear(features, patch.weight.flatten(1), patch.bias)
    positions = functional.embedding_bag(
        batch["interp_indices"],
        model.pos_embed.weight.float(),
        per_sample_weights=batch["interp_weights"],
        mode="sum",
    )
    hidden = hidden + positions.to(hidden.dtype)
    angles = angles_of((batch["position_ids"][..., None] * model.rotary_pos_emb.inv_freq).flatten(1))
    stretches = stretches_of(batch["cu_seqlens"], features.device)
    deepstack: list[torch.Tensor] = []
    for number, layer in enumerate(model.blocks):
        hidden = block(layer, hidden, angles, stretches)
        if number in model.deepstack_visual_indexes:
            deepstack.append(model.deepstack_merger_list[len(deepstack)](hidden))
    outputs = {"embeddings": model.merger(hidden)}
    if deepstack:
        outputs["deepstack"] = torch.stack(deepstack)
    return outputs


def _outputs(result: Any) -> dict[str, torch.Tensor]:
    outputs = {"embeddings": result.pooler_output}
    if result.deepstack_features:
        outputs["deepstack"] = torch.stack(result.deepstack_features)
    return outputs


FAMILY = Family(
    adapter="qwen3-vl",
    vision=Qwen3Vision,
    tower=Qwen3VLVisionModel,
    # Of Qwen3-VL-8B's config.json; the rest of its vision_config is Qwen3VLVisionConfig's defaults: 27 layers, 1152
    # wide, deepstack of layers 8, 16 and 24. Smaller models have fewer and narrower layers.
    architecture={"out_hidden_size": 4096},
    tiny={
        "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
        "num_position_embeddings": 36, "deepstack_visual_indexes": (0, 1),
    },
    tables=_tables,
    outputs=_outputs,
    packing=Packing(_run, _block),
    settle=make_rotary,
    prefixes=QWEN_PREFIXES,
)  # fmt: skip


class Qwen3VL:
    """Outputs of an item, in the configured dtype: `embeddings`, (rows, out_hidden_size), rows = patches / 4; and
    `deepstack`, (layers, rows, out_hidden_size), all layers in one lease."""

    supports_cuda_vmm_feature_transport: bool = True

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        """See `Tower`."""
        self.tower = Tower(FAMILY, spec, threads)

    def warm_up(self, device: int | None) -> None:
        """See `Tower.warm_up`."""
        self.tower.warm_up(device)

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        """See `Tower.encode`."""
        return self.tower.encode(items, load, out)
