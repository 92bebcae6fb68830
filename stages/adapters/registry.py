"""From `model.adapter` to a model adapter. Imports no adapter, and so no torch, before one is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorferry.pipeline.config import ModelSpec, Spec
from tensorferry.stages.adapters.base import ModelAdapter
from tensorferry.stages.adapters.options import FingerprintOptions, PatchVitOptions, TextOnlyOptions
from tensorferry.stages.plugin import bad_config, check_reference, import_class, read_options


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """What is known of an adapter without importing it; a test compares it with the class."""

    reference: str
    options: type[Spec]
    supports_cuda_vmm_feature_transport: bool
    multimodal: bool = True


BUILT_IN = {
    "fingerprint": BuiltIn("tensorferry.stages.adapters.fingerprint:Fingerprint", FingerprintOptions, True),
    "patch-vit": BuiltIn("tensorferry.stages.adapters.patch_vit:PatchVit", PatchVitOptions, True),
    "text-only": BuiltIn("tensorferry.stages.adapters.text_only:TextOnly", TextOnlyOptions, False, multimodal=False),
}


def check_model(spec: ModelSpec) -> None:
    """Find mistakes in `model` without importing the adapter: a name or an option that does not exist.

    A plug-in's options are its own to check, when it is built. Raises ConfigError.
    """
    check_reference("model.adapter", spec.adapter, BUILT_IN)
    if spec.adapter in BUILT_IN:
        read_options("model.options", spec.adapter, BUILT_IN[spec.adapter].options, spec.options)


def make_adapter(spec: ModelSpec, threads: int) -> ModelAdapter:
    """Import and build the adapter of `spec`, weights and all; a second or more where it needs torch.

    threads: compute threads it may use. `spec.adapter` is a name of BUILT_IN or a user's own class,
    `package.module:Class`, built as `Class(spec, threads)`. Raises ConfigError, and what a plug-in raises.
    """
    check_model(spec)
    adapter: ModelAdapter = _class_of(spec.adapter)(spec, threads)
    return adapter


def takes_media(name: str) -> bool:
    """Whether requests to this adapter may have images or other media: all but `text-only`; imports nothing."""
    return name not in BUILT_IN or BUILT_IN[name].multimodal


def supports_cuda_vmm_feature_transport(name: str) -> bool:
    """Whether this adapter has opted in to the cuda_vmm feature transport (promise P7); the default is no.

    Built-in names are answered without an import; a plug-in is imported, as its class attribute is the
    answer. Raises ConfigError for a name that is neither.
    """
    check_reference("model.adapter", name, BUILT_IN)
    if name in BUILT_IN:
        return BUILT_IN[name].supports_cuda_vmm_feature_transport
    # A plug-in need not inherit from the protocol, so the attribute may be absent; only a plain True opts in.
    return getattr(_class_of(name), "supports_cuda_vmm_feature_transport", False) is True


def _class_of(name: str) -> type[Any]:
    """The class behind a checked name. Raises ConfigError."""
    found = import_class("model.adapter", BUILT_IN[name].reference if name in BUILT_IN else name)
    if not callable(getattr(found, "encode", None)):
        raise bad_config("model.adapter", f"{name!r} is not a model adapter: it has no method encode")
    return found
