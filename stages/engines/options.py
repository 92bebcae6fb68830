"""Options of engines that import torch. They stand apart so that a deployment file is checked without that import."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tensorferry.pipeline.deployment.spec import Spec

Extent = Annotated[int, Meta(ge=1, le=1 << 20)]


class HfCausalOptions(Spec, frozen=True):
    path: str | None = None  #: a local directory of a causal language model; None: a small one with seeded weights
    dtype: Literal["float32", "bfloat16"] = "float32"  #: of weights and arithmetic
    seed: Annotated[int, Meta(ge=0)] = 0  #: of the seeded weights, and so are the sizes that follow
    width: Extent = 256  #: of an embedding; an even multiple of heads
    depth: Annotated[int, Meta(ge=1, le=256)] = 2
    heads: Extent = 4
    vocabulary: Extent = 512  #: token ids; the bundled vocabulary of bytes has 259

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be an even multiple of heads, {self.heads}")
