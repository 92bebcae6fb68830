"""The configuration of a vision tower: one struct a family, with limits for every key.

This module imports no torch, so checking a deployment file finds a checkpoint that cannot work. Defaults are those of
transformers 5.17 in Qwen2_5_VLVisionConfig and Qwen3VLVisionConfig, and for Kimi-K2.5 the values of its config.json; a
test compares them. Other keys decide nothing and are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tensorferry.stages.checkpoint import CONFIG, read_config
from tensorferry.stages.plugin import bad_config

Extent = Annotated[int, Meta(ge=1, le=1 << 16)]
Depth = Annotated[int, Meta(ge=1, le=256)]
Side = Annotated[int, Meta(ge=1, le=256)]
Layers = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=256)]
Epsilon = Annotated[float, Meta(gt=0, le=1)]
#: The entries of transformers' ACT2FN that have no weights of their own and are no alias of another.
Activation = Literal[
    "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "hardswish", "mish", "quick_gelu", "relu", "silu"
]  # fmt: skip


class Vision(msgspec.Struct, kw_only=True, dict=True):
    """The interface of all families: `contradictions`, and the properties of a tower that adapters need.

    Every family overrides all of it, except `deepstack`. Bodies that raise never run; the class is not abstract because
    a Struct has a metaclass of its own.
    """

    model_types: ClassVar[tuple[str, ...]]  #: accepted values of `model_type` in config.json

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Keys whose values contradict those of other keys, each with the reason."""
        raise NotImplementedError  # see the class

    @property
    def features(self) -> int:
        """Numbers in a patch."""
        raise NotImplementedError  # see the class

    @property
    def merge(self) -> int:
        """Patches a side of the block that becomes one embedding."""
        raise NotImplementedError  # see the class

    @property
    def width(self) -> int:
        """Width of an embedding."""
        raise NotImplementedError  # see the class

    @property
    def deepstack(self) -> int:
        """Layers in the output `deepstack`; 0: there is no such output."""
        return 0


class Rotary(msgspec.Struct):
    rope_type: Literal["axial"] = "axial"
    rope_theta: Annotated[float, Meta(gt=0, le=1e12)] = 1e4


class QwenVision(Vision):
    depth: Depth = 32
    hidden_size: Extent = 3584
    hidden_act: Activation = "silu"
    intermediate_size: Extent = 3420
    num_heads: Extent = 16
    in_channels: Side = 3
    patch_size: Side = 14
    spatial_merge_size: Side = 2
    temporal_patch_size: Side = 2
    out_hidden_size: Extent = 3584
    rope_parameters: Rotary | None = None

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from _heads("hidden_size", self.hidden_size, "num_heads", self.num_heads)

    @property
    def features(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge(self) -> int:
        return self.spatial_merge_size

    @property
    def width(self) -> int:
        return self.out_hidden_size


class Qwen25Vision(QwenVision):
    model_types = ("qwen2_5_vl",)

    window_size: Extent = 112  #: pixels of a side
    fullatt_block_indexes: Layers = (7, 15, 23, 31)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super().contradictions()
        yield from _layers("fullatt_block_indexes", self.fullatt_block_indexes, self.depth)
        if self.window_size < (block := self.patch_size * self.spatial_merge_size):
            yield "window_size", f"{self.window_size} must be {block} at least, patch_size x spatial_merge_size"


class Qwen3Vision(QwenVision):
    model_types = ("qwen3_vl", "qwen3_vl_moe")  # their towers are the same

    depth: Depth = 27
    hidden_size: Extent = 1152
    hidden_act: Activation = "gelu_pytorch_tanh"
    intermediate_size: Extent = 4304
    patch_size: Side = 16
    num_position_embeddings: Annotated[int, Meta(ge=1, le=1 << 20)] = 2304
    deepstack_visual_indexes: Layers = (8, 16, 24)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super().contradictions()
        yield from _layers("deepstack_visual_indexes", self.deepstack_visual_indexes, self.depth)
        if isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            yield "num_position_embeddings", f"{self.num_position_embeddings} must be a square: they are a square grid"

    @property
    def deepstack(self) -> int:
        return len(self.deepstack_visual_indexes)


class KimiVision(Vision):
    model_types = ("kimi_k25",)

    vt_hidden_size: Extent = 1152
    vt_intermediate_size: Extent = 4304
    vt_num_hidden_layers: Depth = 27
    vt_num_attention_heads: Extent = 16
    patch_size: Side = 14
    merge_kernel_size: tuple[Side, Side] = (2, 2)
    init_pos_emb_height: Annotated[int, Meta(ge=1, le=1 << 10)] = 64
    init_pos_emb_width: Annotated[int, Meta(ge=1, le=1 << 10)] = 64
    init_pos_emb_time: Side = 4
    text_hidden_size: Extent = 7168
    projector_ln_eps: Epsilon = 1e-5
    merge_type: Literal["sd2_tpool"] = "sd2_tpool"
    mm_projector_type: Literal["patchmerger"] = "patchmerger"
    projector_hidden_act: Literal["gelu"] = "gelu"
    pos_emb_type: Literal["divided_fixed"] = "divided_fixed"
    video_attn_type: Literal["spatial_temporal"] = "spatial_temporal"

    in_channels: ClassVar[int] = 3
    temporal_patch_size: ClassVar[int] = 1

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from _heads("vt_hidden_size", self.vt_hidden_size, "vt_num_attention_heads", self.vt_num_attention_heads)
        if len(set(self.merge_kernel_size)) != 1:
            yield "merge_kernel_size", f"{self.merge_kernel_size}: blocks must be square"
        if self.init_pos_emb_height != self.init_pos_emb_width:
            yield "init_pos_emb_height", f"{self.init_pos_emb_height} must be init_pos_emb_width"

    @property
    def features(self) -> int:
        return self.in_channels * self.patch_size**2

    @property
    def merge(self) -> int:
        return self.merge_kernel_size[0]

    @property
    def width(self) -> int:
        return self.text_hidden_size

    @property
    def hidden_size(self) -> int:
        return self.vt_hidden_size

    @property
    def num_attention_heads(self) -> int:
        return self.vt_num_attention_heads

    @property
    def spatial_merge_size(self) -> int:
        return self.merge


def read_vision(adapter: str, form: type[Vision], path: str) -> tuple[Vision, Mapping[str, Any]]:
    """Read and check the vision tower's configuration in a checkpoint's config.json. Returns it, and the given keys.

    Raises ConfigError that names `model.path`, the file, and model_type or the key of vision_config: it has another
    type, is out of range, or contradicts another key.
    """
    file, config = Path(path) / CONFIG, read_config("model.path", Path(path))
    if (model_type := config.get("model_type")) not in form.model_types:
        wanted = ", ".join(form.model_types)
        raise bad_config("model.path", f"{file}: model_type is {model_type!r}; {adapter} takes {wanted}")
    if not isinstance(given := config.get("vision_config"), dict):
        found = f"vision_config is {given!r:.80}" if "vision_config" in config else "there is no vision_config"
        raise bad_config("model.path", f"{file}: {found}; it must be an object with the tower's sizes, so {_REMEDY}")
    known = {field.name: field for field in msgspec.structs.fields(form)}
    fields = {key: value for key, value in given.items() if key in known}
    where = f"{file}: vision_config"
    for key, value in fields.items():
        try:
            msgspec.convert(value, known[key].type)
        except msgspec.ValidationError as problem:
            raise bad_config("model.path", f"{where}.{key}: {problem}, not {value!r:.80}; {_REMEDY}") from None
    vision = msgspec.convert(fields, form)
    for key, contradiction in vision.contradictions():
        raise bad_config("model.path", f"{where}.{key}: {contradiction}; {_REMEDY}")
    return vision, fields


_REMEDY = "restore the config.json that the checkpoint came with"


def _heads(width_key: str, width: int, heads_key: str, heads: int) -> Iterator[tuple[str, str]]:
    """Rotation takes the components of a head in pairs, half of them for the row and half for the column."""
    if width % (4 * heads):
        yield width_key, f"{width} must be a multiple of 4 x {heads_key}, 4 x {heads}"


def _layers(key: str, numbers: tuple[int, ...], depth: int) -> Iterator[tuple[str, str]]:
    if list(numbers) != sorted(set(numbers)) or (numbers and numbers[-1] >= depth):
        yield key, f"{list(numbers)} must be layers in ascending order, each once, from 0 to {depth - 1}"
