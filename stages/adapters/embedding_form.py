"""Names, dtypes and shapes of an adapter's embeddings, without its import. Ready embeddings must match them."""

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
TINY_DEEPSTACK = 2  #: most layers of such a tower
Extents = tuple[int | None, ...]  #: a shape; None: as many as the placeholders


class Form(NamedTuple):
    dtype: str  #: of all outputs
    width: int
    #: Name -> shape of the outputs beside `embeddings`.
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
    """Make the `patches` function of a tower; see `tower_form`. blocks: see `Patches`."""

    def patches(spec: ModelSpec) -> Patches:
        found = vision() if spec.path is None else read_vision(adapter, vision, spec.path)[0]
        return Patches(found.features, found.merge, blocks)

    return patches


def tower_form(
    adapter: str, width: int, vision: type[Vision], form: type[PackedOptions] = TowerOptions
) -> Callable[[ModelSpec], Form]:
    """Make the `form` function of a tower. width: used without `model.path`; otherwise config.json has the width."""

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
