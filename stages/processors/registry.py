"""Find the processor that `tokenizer.processor` names. No processor, and so no Pillow, is imported before its use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.patch_layout import Patches
from tensorferry.stages.plugin import bad_config, blamed, check_reference, import_class, read_options
from tensorferry.stages.processors.base import Processor
from tensorferry.stages.processors.options import QWEN3_VL, KimiK25Options, Qwen2VLOptions


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """The properties of a built-in processor that need no import."""

    reference: str
    options: type[Qwen2VLOptions | KimiK25Options]
    preset: Mapping[str, object] = field(default_factory=dict)  #: defaults that differ from those of `options`


BUILT_IN = {
    "qwen2-vl": BuiltIn("tensorferry.stages.processors.qwen2_vl:Qwen2VLProcessor", Qwen2VLOptions),
    "qwen3-vl": BuiltIn("tensorferry.stages.processors.qwen2_vl:Qwen2VLProcessor", Qwen2VLOptions, QWEN3_VL),
    "kimi-k25": BuiltIn("tensorferry.stages.processors.kimi_k25:KimiK25Processor", KimiK25Options),
}


def check_processor_name(name: str) -> None:
    """Raise ConfigError unless `tokenizer.processor` is built in or may be a plug-in; imports nothing."""
    check_reference("tokenizer.processor", name, BUILT_IN)


def check_processor(name: str, options: Mapping[str, object]) -> None:
    """Raise ConfigError for an unknown `tokenizer.processor` or unknown options, without an import.

    A plug-in checks its own options when it is built.
    """
    check_processor_name(name)
    if name in BUILT_IN:
        read_options("tokenizer.options", name, BUILT_IN[name].options, {**BUILT_IN[name].preset, **options})


def patches_made(name: str, options: Mapping[str, object]) -> Patches | None:
    """How a processor cuts an image into patches, without an import. None: a plug-in. Raises ConfigError."""
    check_processor(name, options)
    if name not in BUILT_IN:
        return None
    built_in = BUILT_IN[name]
    chosen: Qwen2VLOptions | KimiK25Options = msgspec.convert({**built_in.preset, **options}, built_in.options)
    return chosen.patches


def make_processor(name: str, options: Mapping[str, object], limits: LimitsSpec) -> Processor:
    """Import and build a processor: a name of BUILT_IN, or a user's own class, `package.module:Class`.

    It is built as `Class(options, limits)`. Every exception of a plug-in becomes ConfigError.
    """
    check_processor(name, options)
    found = import_processor(name)
    if name in BUILT_IN:
        options = {**BUILT_IN[name].preset, **options}
    with blamed("tokenizer.processor", f"cannot make {name!r}", unless=name in BUILT_IN):
        processor: Processor = found(options, limits)
    return processor


def import_processor(name: str) -> type[Any]:
    """Import the class of a checked name. Raises ConfigError."""
    found = import_class("tokenizer.processor", BUILT_IN[name].reference if name in BUILT_IN else name)
    if not callable(getattr(found, "write", None)):
        raise bad_config("tokenizer.processor", f"{name!r} is not a processor: it has no method write")
    return found


def largest_item_nbytes(name: str, options: Mapping[str, object], limits: LimitsSpec) -> int:
    """Build a processor and ask for its `largest_item_nbytes`. Raises ConfigError."""
    processor = make_processor(name, options, limits)
    with blamed("tokenizer.processor", f"{name!r} cannot say how large an item can be", unless=name in BUILT_IN):
        return int(processor.largest_item_nbytes())
