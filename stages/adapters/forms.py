"""What an adapter's embeddings look like, known without importing it: those that come with a request must match."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tensorferry.pipeline.config import ModelSpec
from tensorferry.stages.adapters.options import FingerprintOptions, PackedOptions, PatchVitOptions, TowerOptions
from tensorferry.stages.plugin import bad_config, read_options

TINY_WIDTH = 64  #: of a tower made with the option `tiny`


class Form(NamedTuple):
    dtype: str
    width: int


class _Config(msgspec.Struct):
    vision_config: dict[str, object]


def fingerprint_form(spec: ModelSpec) -> Form:
    read_options("model.options", "fingerprint", FingerprintOptions, spec.options)
    return Form("uint8", 32)


def patch_vit_form(spec: ModelSpec) -> Form:
    options = read_options("model.options", "patch-vit", PatchVitOptions, spec.options)
    return Form(options.dtype, options.out_width)


def tower_form(
    adapter: str, width: int, form: type[PackedOptions] = TowerOptions, key: str = "out_hidden_size"
) -> Callable[[ModelSpec], Form]:
    """width: without `model.path`; with it, config.json there has it, as `key` of its vision_config, or ConfigError
    says that it cannot be read."""

    def tower(spec: ModelSpec) -> Form:
        options = read_options("model.options", adapter, form, spec.options)
        if spec.path is None:
            return Form(options.dtype, TINY_WIDTH if options.tiny else width)
        file = Path(spec.path) / "config.json"
        try:
            vision = msgspec.json.decode(file.read_bytes(), type=_Config).vision_config
            return Form(options.dtype, msgspec.convert(vision.get(key), int))
        except (OSError, msgspec.MsgspecError) as problem:
            raise bad_config("model.path", f"cannot read {file}: {problem}") from problem

    return tower
