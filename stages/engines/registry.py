"""From `scheduler.engine` to an engine. Imports none that needs torch, and no plug-in, before it is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorferry.pipeline.deployment.spec import SchedulerSpec, Spec
from tensorferry.stages.checkpoint import read_config
from tensorferry.stages.engines.base import Engine, StreamingEngine
from tensorferry.stages.engines.discard import DiscardOptions
from tensorferry.stages.engines.options import HfCausalOptions
from tensorferry.stages.engines.paced import PacedOptions
from tensorferry.stages.plugin import bad_config, blamed, check_reference, import_class, read_options, require


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """What is known of a built-in engine without an import."""

    reference: str
    options: type[Spec]
    needs: str | None = None  #: a package that the extra `hf` installs


BUILT_IN = {
    "discard": BuiltIn("tensorferry.stages.engines.discard:Discard", DiscardOptions),
    "paced": BuiltIn("tensorferry.stages.engines.paced:Paced", PacedOptions),
    "hf-causal": BuiltIn("tensorferry.stages.engines.hf_causal:HfCausal", HfCausalOptions, needs="transformers"),
}


def check_engine_name(engine: str) -> None:
    """Raise ConfigError unless `scheduler.engine` is built in or may be a plug-in; imports nothing."""
    check_reference("scheduler.engine", engine, BUILT_IN)


def check_engine(spec: SchedulerSpec) -> None:
    """Raise ConfigError for a name or an option in `scheduler` that does not exist, without importing a plug-in.

    A plug-in checks its options itself when it is built.
    """
    check_engine_name(spec.engine)
    if spec.engine in BUILT_IN:
        read_options("scheduler.options", spec.engine, BUILT_IN[spec.engine].options, spec.options)
    embedding_width(spec)


def embedding_width(spec: SchedulerSpec) -> int | None:
    """The width of the embeddings that an engine takes, without an import; None: any, or not known (a plug-in).

    Raises ConfigError naming `scheduler.options.path` where that is no directory with a config.json."""
    if spec.engine != "hf-causal":
        return None
    options = read_options("scheduler.options", spec.engine, HfCausalOptions, spec.options)
    if options.path is None:
        return options.width
    key = "scheduler.options.path"
    if not os.path.isdir(options.path):
        raise bad_config(key, f"{options.path} is not a directory; name one with config.json and safetensors")
    width = read_config(key, Path(options.path)).get("hidden_size")
    return width if isinstance(width, int) else None  # models that call it otherwise are left to transformers


def make_engine(spec: SchedulerSpec) -> Engine | StreamingEngine:
    """The engine of `spec`: a name of BUILT_IN, or a user's own class, `package.module:Class`, built as
    `Class(spec)`. Raises ConfigError, whatever a plug-in raises."""
    check_reference("scheduler.engine", spec.engine, BUILT_IN)
    found = import_engine(spec.engine)
    with blamed("scheduler.engine", f"cannot make {spec.engine!r}", unless=spec.engine in BUILT_IN):
        engine: Engine | StreamingEngine = found(spec.options if spec.engine in BUILT_IN else spec)
    return engine


def import_engine(name: str) -> type[Any]:
    """The class behind a checked name. Raises ConfigError."""
    if built_in := BUILT_IN.get(name):
        require("scheduler.engine", name, built_in.needs)
    found = import_class("scheduler.engine", built_in.reference if built_in else name)
    if not any(callable(getattr(found, method, None)) for method in ("run", "submit")):
        raise bad_config("scheduler.engine", f"{name!r} is not an engine: it has no method run, nor submit")
    return found
