"""The options of the built-in adapters. They stand here so that checking them imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tensorferry.pipeline.deployment.spec import Spec

Extent = Annotated[int, Meta(ge=1, le=1 << 16)]


class FingerprintOptions(Spec, frozen=True):
    load_each: bool = False  #: load items one by one, not all of a request's in one batch


class TextOnlyOptions(Spec, frozen=True):
    """There are no options."""


class PackedOptions(Spec, frozen=True):
    """The options of the adapter kimi-k25, which qwen2.5-vl and qwen3-vl have too."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"  #: of weights, arithmetic and embeddings
    tiny: bool = False  #: without `model.path`: a small size for tests, with embeddings 64 wide
    random_weights: bool = False  #: with `model.path`: read only config.json, and seed the weights
    compile: bool = False  #: compile the layers by torch.compile, when the rank starts


class TowerOptions(PackedOptions, frozen=True):
    """The options of qwen2.5-vl and qwen3-vl, whose towers transformers can run too."""

    attention: Literal["packed", "eager"] = "packed"  #: our own forward pass, or transformers' own, item by item

    def __post_init__(self) -> None:
        if self.compile and self.attention == "eager":
            raise ValueError("compile: true needs attention: packed; transformers' own pass is not compiled")


class PatchVitOptions(Spec, frozen=True):
    width: Extent = 192  #: of the transformer; a multiple of 4 and of `heads`
    depth: Annotated[int, Meta(ge=0, le=256)] = 2  #: transformer blocks
    heads: Extent = 3
    out_width: Extent = 256  #: of an embedding: the language model's hidden size
    patch_features: Extent = 1176  #: 3 channels x 2 frames x 14 x 14 pixels, as the qwen2-vl processor makes them
    dtype: Literal["float32", "bfloat16"] = "float32"  #: of weights, arithmetic and embeddings

    def __post_init__(self) -> None:
        if self.width % 4 or self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of 4 and of heads, {self.heads}")
