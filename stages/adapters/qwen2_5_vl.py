"""Qwen2.5-VL's vision tower: most layers attend within windows of 8 x 8 patches, a few within a whole frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from tensorferry.pipeline.config import ModelSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.tables import Tables
from tensorferry.stages.adapters.tower import Family, Tower


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


FAMILY = Family(
    adapter="qwen2.5-vl",
    model_types=("qwen2_5_vl",),
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
)  # fmt: skip


class Qwen25VL:
    """Output of an item: `embeddings`, (rows, out_hidden_size) in the configured dtype, rows = patches / 4."""

    supports_cuda_vmm_feature_transport: bool = False

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        """See `Tower`."""
        self.tower = Tower(FAMILY, spec, threads)

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        """See `Tower.encode`."""
        self.tower.encode(items, load, out)
