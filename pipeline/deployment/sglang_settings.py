"""Settings of other systems that a deployment may still come with, turned into ours (promise P6).

A key of the file, `keep_mm_feature_on_device`, and environment variables. Whatever the deployment file or `--set` says
itself wins over them, and each is told of: the caller logs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tensorferry.codecs.errors import ConfigError
from tensorferry.pipeline.deployment.document import Document, Keys, Place, dotted, short

KEEP = "keep_mm_feature_on_device"
ENVIRONMENT = "environment"  #: stands where a file's name would

#: How the variables' own system spells yes and no.
_YES, _NO = frozenset({"1", "true", "yes", "y"}), frozenset({"0", "false", "no", "n"})


@dataclass(frozen=True, slots=True)
class Deprecation:
    """An old setting that was found, what to write instead, and what has become of it."""

    old: str  #: "SGLANG_MM_FEATURE_CACHE_MB=512"
    new: str  #: "pool.budget_mb: 512"
    outcome: str  #: "taken", or why not

    def __str__(self) -> str:
        return f"{self.old} is deprecated, write {self.new} in the deployment file ({self.outcome})"


Tell = Callable[[Deprecation], object]


def migrated(document: Document, environ: Mapping[str, str], tell: Tell) -> Document:
    """The document with old settings in their new places, where nothing is said there yet.

    environ: only the variables of `ALIASES` are looked at. A value that is none, and `keep_mm_feature_on_device` beside
    an explicit cuda_vmm, are noted as mistakes in the document.
    """
    document = _without_keep(document, tell)
    for name, (keys, read) in ALIASES.items():
        if text := environ.get(name, "").strip():
            try:
                document = _with_alias(document, name, text, keys, read(name, text), tell)
            except ConfigError as mistake:
                document.blame(mistake, keys)
    return document


def _without_keep(document: Document, tell: Tell) -> Document:
    """`keep_mm_feature_on_device: true` names a GPU transport: that of one node, or that of several."""
    if KEEP not in document.data:
        return document
    place = document.places.get((KEEP,), Place(document.file, None))
    data = {key: value for key, value in document.data.items() if key != KEEP}
    keep, transport = document.data[KEEP], data.get("transport")
    without = replace(document, data=data, places={k: at for k, at in document.places.items() if k != (KEEP,)})
    if not isinstance(keep, bool):
        problem = f"expected true or false, got {document.shown((KEEP,), keep)}; or leave it out, it is deprecated"
        document.blame(document.error(problem, (KEEP,)))
        return without
    if not keep:
        tell(Deprecation(f"{KEEP}: false", "transport: cpu or shm", "without effect"))
        return without
    if transport == "cuda_vmm":
        problem = "is deprecated, and means nothing beside transport: cuda_vmm; remove it"
        document.blame(document.error(problem, (KEEP,)))
        return without
    if transport is not None:
        outcome = "without effect" if transport == "cuda_ipc" else f"overruled by transport: {short(str(transport))}"
        tell(Deprecation(f"{KEEP}: true", "transport: cuda_ipc", outcome))
        return without
    nodes = data.get("nodes", 1)
    chosen = "cuda_vmm" if isinstance(nodes, int) and nodes > 1 else "cuda_ipc"
    tell(Deprecation(f"{KEEP}: true", f"transport: {chosen}", "taken"))
    return _with(without, ("transport",), chosen, place)


def _with_alias(document: Document, name: str, text: str, keys: Keys, value: Any, tell: Tell) -> Document:
    old = f"{name}={short(text)}"
    if value is None:
        tell(Deprecation(old, f"{dotted(keys)}: cpu or shm", "without effect"))
        return document
    spelling = str(value).lower() if isinstance(value, bool) else str(value)
    new = f"{dotted(keys)}: {spelling}"
    section: Any = document.data
    for depth, key in enumerate(keys, 1):
        if not isinstance(section, dict):  # something that is about to be refused
            return document
        if key not in section:
            tell(Deprecation(old, new, "taken"))
            return _with(document, keys, value, Place(f"{ENVIRONMENT} variable {name}", None, text))
        section = section[key]
        if depth == len(keys):
            outcome = "without effect" if section == value else f"overruled by {dotted(keys)}: {short(str(section))}"
            tell(Deprecation(old, new, outcome))
    return document


def _with(document: Document, keys: Keys, value: Any, place: Place) -> Document:
    """The document with a value more; sections on the way are made."""
    data, places = dict(document.data), dict(document.places)
    section = data
    for depth, key in enumerate(keys[:-1], 1):
        section[str(key)] = dict(section.get(str(key), {}))
        places.setdefault(keys[:depth], place)
        section = section[str(key)]
    section[str(keys[-1])] = value
    return replace(document, data=data, places=places | {keys: place})


# --- the environment


def _switch(name: str, text: str) -> bool:
    if text.lower() not in _YES | _NO:
        raise ConfigError(ENVIRONMENT, None, name, f"expected 1 or 0, got {short(text)}; unset it, it is deprecated")
    return text.lower() in _YES


def _transport(name: str, text: str) -> str | None:
    return "cuda_ipc" if _switch(name, text) else None


def _megabytes(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        problem = f"expected a whole number of MiB, got {short(text)}; unset it, it is deprecated"
        raise ConfigError(ENVIRONMENT, None, name, problem)
    return int(text)


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        problem = f"expected seconds, got {short(text)}; unset it, it is deprecated"
        raise ConfigError(ENVIRONMENT, None, name, problem)
    return seconds


#: Where the value of each variable goes, and how it is read.
ALIASES: dict[str, tuple[Keys, Callable[[str, str], Any]]] = {
    "SGLANG_USE_CUDA_IPC_TRANSPORT": (("transport",), _transport),
    "SGLANG_MM_FEATURE_CACHE_MB": (("pool", "budget_mb"), _megabytes),
    "SGLANG_USE_IPC_POOL_HANDLE_CACHE": (("pool", "handle_cache"), _switch),
    "SGLANG_MM_ITEM_MEM_POOL_RECYCLE_INTERVAL_SEC": (("pool", "recycle_s"), _seconds),
}
