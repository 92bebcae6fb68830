"""Find the adapter that `model.adapter` names. No adapter, and so no torch, is imported before its use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorferry.pipeline.deployment.spec import ModelSpec, Spec
from tensorferry.stages.adapters.architecture import KimiVision, Qwen3Vision, Qwen25Vision
from tensorferry.stages.adapters.base import ModelAdapter, WarmsUp
from tensorferry.stages.adapters.embedding_form import (
    Form,
    fingerprint_form,
    patch_vit_form,
    patch_vit_patches,
    tower_form,
    tower_patches,
)
from tensorferry.stages.adapters.options import (
    FingerprintOptions,
    PackedOptions,
    PatchVitOptions,
    TextOnlyOptions,
    TowerOptions,
)
from tensorferry.stages.patch_layout import Patches
from tensorferry.stages.plugin import bad_config, blamed, check_reference, import_class, read_options, require


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """The properties of a built-in adapter that need no import; a test compares them with the class."""

    reference: str
    options: type[Spec]
    supports_cuda_vmm_feature_transport: bool
    multimodal: bool = True
    needs: str | None = None  #: a package that the extra `hf` installs
    form: Callable[[ModelSpec], Form] | None = None  #: of its embeddings
    patches: Callable[[ModelSpec], Patches] | None = None  #: accepted patches; None: any


BUILT_IN = {
    "fingerprint": BuiltIn(
        "tensorferry.stages.adapters.fingerprint:Fingerprint", FingerprintOptions, True, form=fingerprint_form
    ),
    "kimi-k25": BuiltIn(
        "tensorferry.stages.adapters.kimi_k25:KimiK25",
        PackedOptions,
        True,
        needs="transformers",
        form=tower_form("kimi-k25", 7168, KimiVision, PackedOptions),
        patches=tower_patches("kimi-k25", KimiVision, blocks=False),
    ),
    "patch-vit": BuiltIn(
        "tensorferry.stages.adapters.patch_vit:PatchVit",
        PatchVitOptions,
        True,
        form=patch_vit_form,
        patches=patch_vit_patches,
    ),
    "qwen2.5-vl": BuiltIn(
        "tensorferry.stages.adapters.qwen2_5_vl:Qwen25VL",
        TowerOptions,
        False,
        needs="transformers",
        form=tower_form("qwen2.5-vl", 3584, Qwen25Vision),
        patches=tower_patches("qwen2.5-vl", Qwen25Vision),
    ),
    "qwen3-vl": BuiltIn(
        "tensorferry.stages.adapters.qwen3_vl:Qwen3VL",
        TowerOptions,
        True,
        needs="transformers",
        form=tower_form("qwen3-vl", 4096, Qwen3Vision),
        patches=tower_patches("qwen3-vl", Qwen3Vision),
    ),
    "text-only": BuiltIn("tensorferry.stages.adapters.text_only:TextOnly", TextOnlyOptions, False, multimodal=False),
}

#: Start of the names of a family's models -> whether the family has opted in (promise P7). Other models have not.
FAMILIES = {"kimi-k2.5": True, "kimi-k3": True, "qwen2-vl": False, "qwen2.5-vl": False, "qwen3-vl": True}


def check_model_name(adapter: str) -> None:
    """Raise ConfigError unless `model.adapter` is built in or may be a plug-in; imports nothing."""
    check_reference("model.adapter", adapter, BUILT_IN)


def check_model(spec: ModelSpec) -> None:
    """Raise ConfigError for an unknown `model.adapter` or an unknown option, without an import.

    A plug-in checks its own options when it is built.
    """
    check_model_name(spec.adapter)
    if spec.adapter in BUILT_IN:
        read_options("model.options", spec.adapter, BUILT_IN[spec.adapter].options, spec.options)


def make_adapter(spec: ModelSpec, threads: int, device: int | None = None) -> ModelAdapter:
    """Import, build and warm up the adapter of `spec`, weights included. It takes a second or more if it needs torch.

    threads: compute threads that it may use. device: the GPU of the features; None: they are in host memory.
    `spec.adapter` is a name of BUILT_IN or a user's own class, `package.module:Class`, built as
    `Class(spec, threads)`. Every exception of a plug-in becomes ConfigError.
    """
    check_model(spec)
    found = import_adapter(spec.adapter)
    with blamed("model.adapter", f"cannot make {spec.adapter!r}", unless=spec.adapter in BUILT_IN):
        adapter: ModelAdapter = found(spec, threads)
    if isinstance(adapter, WarmsUp):
        with blamed("model.adapter", f"{spec.adapter!r} cannot warm up", unless=spec.adapter in BUILT_IN):
            adapter.warm_up(device)
    return adapter


def embedding_form(spec: ModelSpec) -> Form | None:
    """The form of the model's embeddings, without an import. None: not known (a plug-in). Raises ConfigError."""
    check_model(spec)
    built_in = BUILT_IN.get(spec.adapter)
    return None if built_in is None or built_in.form is None else built_in.form(spec)


def patches_taken(spec: ModelSpec) -> Patches | None:
    """The patches that the model takes, without an import. None: not known (a plug-in), or any. Raises ConfigError."""
    check_model(spec)
    built_in = BUILT_IN.get(spec.adapter)
    return None if built_in is None or built_in.patches is None else built_in.patches(spec)


def takes_media(name: str) -> bool:
    """Whether requests to this adapter may have media (all but `text-only`); imports nothing."""
    return name not in BUILT_IN or BUILT_IN[name].multimodal


def supports_cuda_vmm_feature_transport(name: str) -> bool:
    """Whether a model has opted in to the cuda_vmm feature transport (promise P7); the default is no.

    name: of an adapter, or of a model of a known family, such as `Qwen/Qwen3-VL-8B-Instruct`. These need no import. A
    plug-in is imported, as its class attribute is the answer. Raises ConfigError for any other name.
    """
    if name in BUILT_IN:
        return BUILT_IN[name].supports_cuda_vmm_feature_transport
    model = name.rpartition("/")[2].lower()
    for family, opted_in in FAMILIES.items():
        if model == family or model.startswith(f"{family}-"):
            return opted_in
    check_reference("model.adapter", name, BUILT_IN)
    # A plug-in need not inherit from the protocol, so the attribute may be absent; only a plain True opts in.
    return getattr(import_adapter(name), "supports_cuda_vmm_feature_transport", False) is True


def import_adapter(name: str) -> type[Any]:
    """Import the class of a checked name. Raises ConfigError."""
    built_in = BUILT_IN.get(name)
    if built_in:
        require("model.adapter", name, built_in.needs)
    found = import_class("model.adapter", built_in.reference if built_in else name)
    if not callable(getattr(found, "encode", None)):
        raise bad_config("model.adapter", f"{name!r} is not a model adapter: it has no method encode")
    return found
