"""The options of the built-in processors, apart from them so that checking a deployment file imports no Pillow."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tensorferry.pipeline.config import Spec

Extent = Annotated[int, Meta(ge=1, le=256)]
Pixels = Annotated[int, Meta(ge=1, le=1 << 32)]


#: What the `qwen3-vl` processor has for defaults: those of Qwen3-VL's preprocessor_config.json.
QWEN3_VL = {"patch_size": 16, "min_pixels": 65_536, "max_pixels": 16_777_216, "normalisation": "half"}


class Qwen2VLOptions(Spec, frozen=True):
    """Defaults are those of transformers 5.24's Qwen2VLImageProcessor: 56 x 56 and 28 x 28 x 1280 pixels, patches
    of 14, and the last is what the model's README advises too. (Qwen2-VL's own preprocessor_config.json
    allows 12,845,056 pixels, 12 times as many tokens for one large photo.)
    """

    patch_size: Extent = 14  #: pixels of a patch's side
    merge_size: Extent = 2  #: patches of a side that become one token
    temporal_patch_size: Extent = 2  #: frames of a patch; a still image's frame is repeated
    min_pixels: Pixels = 56 * 56  #: smaller images are enlarged
    max_pixels: Pixels = 28 * 28 * 1280  #: larger images are reduced
    normalisation: Literal["clip", "half"] = "clip"  #: by CLIP's mean and deviation of each colour, or by 0.5 and 0.5
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        token_pixels = (self.patch_size * self.merge_size) ** 2
        if self.max_pixels // token_pixels < -(-self.min_pixels // token_pixels):
            raise ValueError(
                f"no whole number of tokens, of {token_pixels} pixels each (patch_size x merge_size squared), "
                f"lies between min_pixels {self.min_pixels} and max_pixels {self.max_pixels}"
            )
