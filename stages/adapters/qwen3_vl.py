"""Qwen3-VL's vision tower, whose language model also wants what some of its inner layers saw (*deepstack*)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from tensorferry.pipeline.config import ModelSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.tables import Tables
from tensorferry.stages.adapters.tower import Family, Tower


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


def _outputs(result: Any) -> dict[str, torch.Tensor]:
    outputs = {"embeddings": result.pooler_output}
    if result.deepstack_features:
        outputs["deepstack"] = torch.stack(result.deepstack_features)
    return outputs


FAMILY = Family(
    adapter="qwen3-vl",
    model_types=("qwen3_vl", "qwen3_vl_moe"),  # their towers are the same
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
)  # fmt: skip


class Qwen3VL:
    """Outputs of an item, in the configured dtype: `embeddings`, (rows, out_hidden_size), rows = patches / 4; and
    `deepstack`, (layers, rows, out_hidden_size), all layers in one lease."""

    supports_cuda_vmm_feature_transport: bool = True

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        """See `Tower`."""
        self.tower = Tower(FAMILY, spec, threads)

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        """See `Tower.encode`."""
        self.tower.encode(items, load, out)
