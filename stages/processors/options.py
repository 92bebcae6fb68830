"""The options of the built-in processors. They stand here so that checking a deployment file imports no Pillow."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tensorferry.pipeline.deployment.spec import Spec
from tensorferry.stages.patch_layout import Patches

Extent = Annotated[int, Meta(ge=1, le=256)]
Frames = Annotated[int, Meta(ge=1, le=4096)]
Pixels = Annotated[int, Meta(ge=1, le=1 << 32)]


#: What the `qwen3-vl` processor has for defaults: those of preprocessor_config.json and video_preprocessor_config.json
#: in Qwen3-VL's checkpoints, which for videos differ from the `size` of transformers' Qwen3VLVideoProcessor.
QWEN3_VL = {
    "patch_size": 16, "min_pixels": 65_536, "max_pixels": 16_777_216, "normalisation": "half",
    "video_rule": "qwen3-vl", "video_min_pixels": 4096, "video_max_pixels": 25_165_824,
}  # fmt: skip


class Qwen2VLOptions(Spec, frozen=True):
    """Defaults are those of transformers' Qwen2VLImageProcessor (56 x 56 and 28 x 28 x 1280 pixels, patches of 14) and
    Qwen2VLVideoProcessor; a test compares them. The model's README advises the same max_pixels. (Qwen2-VL's own
    preprocessor_config.json allows 12,845,056 pixels, 12 times as many tokens for one large photo.)
    """

    patch_size: Extent = 14  #: pixels of a patch's side
    merge_size: Extent = 2  #: patches of a side that become one token
    temporal_patch_size: Extent = 2  #: frames of a patch; a still image's frame is repeated
    min_pixels: Pixels = 56 * 56  #: smaller images are enlarged
    max_pixels: Pixels = 28 * 28 * 1280  #: larger images are reduced
    normalisation: Literal["clip", "half"] = "clip"  #: by CLIP's mean and deviation of each colour, or by 0.5 and 0.5
    dtype: Literal["float32", "bfloat16"] = "float32"
    video_rule: Literal["qwen2-vl", "qwen3-vl"] = "qwen2-vl"  #: whose rule samples frames
    video_fps: Annotated[float, Meta(gt=0, le=1000)] = 2.0  #: frames that are sampled from each second
    video_min_frames: Frames = 4
    video_max_frames: Frames = 768
    video_min_pixels: Pixels = 128 * 28 * 28  #: of a frame; with the rule of Qwen3-VL, of all frames together
    video_max_pixels: Pixels = 768 * 28 * 28

    def __post_init__(self) -> None:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        if self.video_min_pixels > self.video_max_pixels or self.video_min_frames > self.video_max_frames:
            raise ValueError(
                f"video_min_pixels {self.video_min_pixels} or video_min_frames {self.video_min_frames} is above its "
                f"maximum, {self.video_max_pixels} or {self.video_max_frames}"
            )
        token_pixels = (self.patch_size * self.merge_size) ** 2
        if self.max_pixels // token_pixels < -(-self.min_pixels // token_pixels):
            raise ValueError(
                f"no whole number of tokens, of {token_pixels} pixels each (patch_size x merge_size squared), "
                f"lies between min_pixels {self.min_pixels} and max_pixels {self.max_pixels}"
            )

    @property
    def patches(self) -> Patches:
        """How an image is cut into patches."""
        return Patches(3 * self.temporal_patch_size * self.patch_size**2, self.merge_size)


KIMI_PATCH = 14  #: pixels of a patch's side, of Kimi-K2.5; and
KIMI_MERGE = 2  #: patches of a side that become one token


class KimiK25Options(Spec, frozen=True):
    """Defaults are those of transformers' Kimi_K25ImageProcessor; a test compares them."""

    max_patches: Annotated[int, Meta(ge=KIMI_MERGE**2, le=1 << 24)] = 16_384  #: larger images are reduced
    max_side_patches: Annotated[int, Meta(ge=KIMI_MERGE, le=1 << 16)] = 512  #: of one side; an even number
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.max_side_patches % KIMI_MERGE:
            raise ValueError(f"max_side_patches {self.max_side_patches} must be a multiple of {KIMI_MERGE}")

    @property
    def patches(self) -> Patches:
        return Patches(3 * KIMI_PATCH**2, KIMI_MERGE, blocks=False)
