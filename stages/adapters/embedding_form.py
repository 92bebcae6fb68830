"""What an adapter's embeddings look like, known without importing it: those that come with a request must match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tensorferry.pipeline.deployment.spec import ModelSpec
from tensorferry.stages.adapters.architecture import Vision, read_vision
from tensorferry.stages.adapters.options import FingerprintOptions, PackedOptions, PatchVitOptions, TowerOptions
from tensorferry.stages.patch_layout import Patches
from tensorferry.stages.plugin import read_options

TINY_WIDTH = 64  #: of a tower made with the option `tiny`
TINY_DEEPSTACK = 2  #: layers at most, of one
Extents = tuple[int | None, ...]  #: a shape; None: a row for each placeholder


class Form(NamedTuple):
    dtype: str  #: of all outputs
    width: int
    #: By name, the outputs beside `embeddings`.
    others: Mapping[str, Extents] = MappingProxyType({})


def fingerprint_form(spec: ModelSpec) -> Form:
    read_options("model.options", "fingerprint", FingerprintOptions, spec.options)
    return Form("uint8", 32, {"digest": (32,)})


def patch_vit_form(spec: ModelSpec) -> Form:
    options = read_options("model.options", "patch-vit", PatchVitOptions, spec.options)
    return Form(options.dtype, options.out_width)


def patch_vit_patches(spec: ModelSpec) -> Patches:
    options = read_options("model.options", "patch-vit", PatchVitOptions, spec.options)
    return Patches(options.patch_features, 2)


def tower_patches(adapter: str, vision: type[Vision], *, blocks: bool = True) -> Callable[[ModelSpec], Patches]:
    """As `tower_form`. blocks: see `Patches`."""

    def patches(spec: ModelSpec) -> Patches:
        found = vision() if spec.path is None else read_vision(adapter, vision, spec.path)[0]
        return Patches(found.features, found.merge, blocks)

    return patches


def tower_form(
    adapter: str, width: int, vision: type[Vision], form: type[PackedOptions] = TowerOptions
) -> Callable[[ModelSpec], Form]:
    """width: without `model.path`; with it, config.json there has it, or ConfigError says what is wrong with that."""

    def tower(spec: ModelSpec) -> Form:
        options = read_options("model.options", adapter, form, spec.options)
        if spec.path is None:
            layers = vision().deepstack
            if options.tiny:
                return _form(options.dtype, TINY_WIDTH, min(layers, TINY_DEEPSTACK))
            return _form(options.dtype, width, layers)
        found = read_vision(adapter, vision, spec.path)[0]
        return _form(options.dtype, found.width, found.deepstack)

    return tower


def _form(dtype: str, width: int, deepstack: int) -> Form:
    return Form(dtype, width, {"deepstack": (deepstack, None, width)} if deepstack else {})
