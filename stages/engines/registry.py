"""From `scheduler.engine` to an engine. Imports no plug-in before it is asked for."""

from __future__ import annotations

from tensorferry.pipeline.config import SchedulerSpec
from tensorferry.stages.engines.base import Engine
from tensorferry.stages.engines.discard import Discard, DiscardOptions
from tensorferry.stages.plugin import bad_config, check_reference, import_class, read_options

BUILT_IN = {"discard": DiscardOptions}


def check_engine(spec: SchedulerSpec) -> None:
    """Find mistakes in `scheduler` without importing a plug-in: a name or an option that does not exist.

    A plug-in's options are its own to check, when it is built. Raises ConfigError.
    """
    check_reference("scheduler.engine", spec.engine, BUILT_IN)
    if spec.engine in BUILT_IN:
        read_options("scheduler.options", spec.engine, BUILT_IN[spec.engine], spec.options)


def make_engine(spec: SchedulerSpec) -> Engine:
    """The engine of `spec`: a name of BUILT_IN, or a user's own class, `package.module:Class`, built as
    `Class(spec)`. Raises ConfigError, and whatever a plug-in raises."""
    check_reference("scheduler.engine", spec.engine, BUILT_IN)
    if spec.engine == "discard":
        return Discard(spec.options)
    found = import_class("scheduler.engine", spec.engine)
    if not callable(getattr(found, "run", None)):
        raise bad_config("scheduler.engine", f"{spec.engine!r} is not an engine: it has no method run")
    engine: Engine = found(spec)
    return engine
