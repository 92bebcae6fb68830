"""A small vision transformer over packed patches.

Pre-norm blocks (layer norm, attention, layer norm, 4x MLP with exact GELU), fixed 2-D sine positions, and a
merger that makes one embedding of each 2 x 2 block of patches. Weights are seeded, or read from a
safetensors file whose tensors have the names and shapes of `weight_shapes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from tensorferry.codecs.errors import BadItem, BadTensor
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.base import ItemInfo, Load, Out
from tensorferry.stages.adapters.grid_checks import check_grid
from tensorferry.stages.adapters.options import PatchVitOptions
from tensorferry.stages.plugin import read_options
from tensorferry.stages.weights import read_weights, seeded_weights

MERGE = 2  #: patches on a side of the block that becomes one embedding, as in Qwen2-VL
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FEATURE_DTYPES = ("float32", "bfloat16", "float16", "float64")


def weight_shapes(options: PatchVitOptions) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model, by name; linear weights are (out, in), as in torch."""
    width, merged = options.width, options.width * MERGE * MERGE
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, wide_in: int, wide_out: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (wide_out, wide_in), (wide_out,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    linear("patch_embed", options.patch_features, width)
    for block in range(options.depth):
        norm(f"blocks.{block}.norm1")
        linear(f"blocks.{block}.qkv", width, 3 * width)
        linear(f"blocks.{block}.proj", width, width)
        norm(f"blocks.{block}.norm2")
        linear(f"blocks.{block}.fc1", width, 4 * width)
        linear(f"blocks.{block}.fc2", 4 * width, width)
    norm("merger.norm")
    linear("merger.fc1", merged, merged)
    linear("merger.fc2", merged, options.out_width)
    return shapes


def grid_positions(grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every patch of a (time, height, width) grid, int64 (patches,), in the order of patches.

    Qwen2-VL's order: frame by frame, in a frame the 2 x 2 blocks row by row, in a block its four patches row
    by row. (Source: transformers, Qwen2VLImageProcessor._preprocess, `transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)`.)
    """
    frames, height, width = grid
    rows = torch.arange(height).view(height // MERGE, 1, MERGE, 1)
    columns = torch.arange(width).view(1, width // MERGE, 1, MERGE)
    blocks = (height // MERGE, width // MERGE, MERGE, MERGE)
    return rows.expand(blocks).reshape(-1).repeat(frames), columns.expand(blocks).reshape(-1).repeat(frames)


def position_embedding(grid: tuple[int, int, int], width: int) -> torch.Tensor:
    """float32 (patches, width): sine and cosine of row, then of column, a quarter of the width each.

    The frames of a video share their positions. Wavelengths run from 2 pi to 10,000 x 2 pi patches.
    """
    quarter = width // 4
    frequencies = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float32) / quarter)
    angles = [position[:, None] * frequencies for position in grid_positions(grid)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)


class PatchVit:
    """Output of an item: `embeddings`, (rows, out_width) in the configured dtype, rows = patches / 4.

    An item attends only to itself, so its embeddings do not depend on the other items, but for rounding. All frames of
    a video attend to each other.
    """

    supports_cuda_vmm_feature_transport: bool = True

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        """Make or read the weights, and set the number of torch's threads in this whole process.

        Raises ConfigError for a wrong option or weights file.
        """
        self._options = read_options("model.options", "patch-vit", PatchVitOptions, spec.options)
        torch.set_num_threads(threads)
        shapes = weight_shapes(self._options)
        if spec.path is None:
            weights = seeded_weights(shapes, spec.seed)
        else:
            weights = read_weights(shapes, Path(spec.path))
        self._dtype = _DTYPES[self._options.dtype]
        self._weights = {name: tensor.to(self._dtype) for name, tensor in weights.items()}

    @torch.inference_mode()
    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> None:
        """See `ModelAdapter`. Raises BadItem for the first item whose grid, patches and rows disagree, or whose
        embeddings are not all finite (NaN or infinity among its pixels, or values beyond the dtype). Raises BadTensor
        for features other than (sum of patches, patch_features) of a floating dtype."""
        if not items:
            return
        for item in items:
            check_grid(item, MERGE)
        patches, counts = [item.patches for item in items], [item.rows for item in items]
        features = self._features(load([item.index for item in items]), sum(patches))
        self._follow(features.device)
        embeddings = self._embed(features.to(self._dtype), [item.grid for item in items], patches)
        outputs = list(zip(items, embeddings.split_with_sizes(counts), strict=True))
        if not embeddings.isfinite().all():
            for (item, rows), pixels in zip(outputs, features.split_with_sizes(patches), strict=True):
                if not pixels.isfinite().all():
                    raise BadItem(item.index, "its pixels hold NaN or infinity")
                if not rows.isfinite().all():
                    raise BadItem(item.index, f"its embeddings overflow {self._options.dtype}")
        for item, rows in outputs:
            shape = (item.rows, self._options.out_width)
            out(item.index, "embeddings", shape, self._options.dtype).torch().copy_(rows)

    def _follow(self, device: torch.device) -> None:
        """Move the weights to the device of the features, once."""
        if self._weights["patch_embed.weight"].device != device:
            self._weights = {name: tensor.to(device) for name, tensor in self._weights.items()}

    def _features(self, view: View, patches: int) -> torch.Tensor:
        expected = (patches, self._options.patch_features)
        if view.shape != expected or view.dtype not in _FEATURE_DTYPES:
            wanted = f"floating-point {expected}; see model.options.patch_features and the processor"
            raise BadTensor(f"features are {view.dtype} {view.shape}, patch-vit takes {wanted}")
        return view.torch()

    def _embed(
        self, features: torch.Tensor, grids: Sequence[tuple[int, int, int]], patches: Sequence[int]
    ) -> torch.Tensor:
        """(sum of patches, patch_features) -> (sum of patches / 4, out_width), items one after the other."""
        x = self._linear("patch_embed", features)
        x += torch.cat([position_embedding(grid, self._options.width) for grid in grids]).to(x.device, x.dtype)
        for block in range(self._options.depth):
            name = f"blocks.{block}"
            x += self._attend(name, self._norm(f"{name}.norm1", x), patches)
            hidden = functional.gelu(self._linear(f"{name}.fc1", self._norm(f"{name}.norm2", x)))
            x += self._linear(f"{name}.fc2", hidden)
        # Patches come block by block, so four rows in a row are the four corners of one block.
        blocks = self._norm("merger.norm", x).view(-1, MERGE * MERGE * self._options.width)
        return self._linear("merger.fc2", functional.gelu(self._linear("merger.fc1", blocks)))

    def _attend(self, name: str, x: torch.Tensor, patches: Sequence[int]) -> torch.Tensor:
        """Attention within each item."""
        mixed = []
        for qkv in self._linear(f"{name}.qkv", x).split_with_sizes(list(patches)):
            by_head = qkv.view(len(qkv), 3, self._options.heads, self._options.width // self._options.heads)
            q, k, v = by_head.permute(1, 2, 0, 3).unsqueeze(1)
            heads = functional.scaled_dot_product_attention(q, k, v)  # (1, heads, patches, width / heads)
            mixed.append(heads.squeeze(0).transpose(0, 1).reshape(len(qkv), -1))
        return self._linear(f"{name}.proj", torch.cat(mixed))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, eps=1e-6)
