"""What settings a running process has: it leaves them in the runtime folder, and who attaches compares its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.runtime_dir import Runtime

log = structlog.get_logger()

#: What may differ. The folder was found already; what a process logs, records and exports is its own affair.
OWN = ("runtime_dir", "telemetry")
NOT_SET = "not set"


class Settings:
    """The file in which one process says its settings: `encoder-3.settings`, for the user alone (0600).

    Whoever owns the process's lock removes it with the lock; see `Runtime.own`.
    """

    def __init__(self, deployment: Deployment, runtime: Runtime, stage: str, rank: int) -> None:
        """Written now. A full disk is logged: nobody can compare then, and all else works."""
        self._path = runtime.settings(stage, rank)
        self._said = msgspec.json.encode(deployment)
        try:
            self._write()
        except OSError as problem:
            log.warning("settings_not_written", file=str(self._path), problem=problem.strerror)

    def mend(self) -> bool:
        """Write the file again that somebody has removed; whether it was removed. Raises OSError."""
        if self._path.exists():
            return False
        self._write()
        return True

    def _write(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(self._said)


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that a running process has another value of."""

    key: str  #: dotted
    ours: object
    process: str  #: such as tokenizer-0
    theirs: object

    def __str__(self) -> str:
        theirs = "without it" if self.theirs is NOT_SET else f"with {_text(self.theirs)}"
        return f"{_text(self.ours)} here, but {self.process} runs {theirs}"


def told(runtime: Runtime) -> dict[str, Mapping[str, Any]]:
    """The settings of every process of the folder that lives and has left them, by its name.

    Empty where none runs on this machine. Raises DeploymentError for a folder that is not ours alone.
    """
    if not runtime.directory.exists():
        return {}
    runtime.prepare()
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted(runtime.directory.glob("*.settings")):
        stage, _, rank = path.stem.rpartition("-")
        if not rank.isdecimal() or not runtime.is_held(stage, int(rank)):
            continue
        try:
            found[path.stem] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):  # it has ended, or the disk was full
            continue
    return found


def differences(deployment: Deployment, running: Mapping[str, Mapping[str, Any]]) -> list[Difference]:
    """Where running processes have other settings than `deployment`: each key once, in the order of the file.

    What the one who started them has decided (`transport: auto`, `gpus`) is no difference.
    """
    ours = dict(_flat(msgspec.json.decode(msgspec.json.encode(deployment))))
    found: dict[str, Difference] = {}
    for process, settings in running.items():
        theirs = dict(_flat(settings))
        for key in (*ours, *(theirs.keys() - ours.keys())):
            mine, other = ours.get(key, NOT_SET), theirs.get(key, NOT_SET)
            if key not in found and mine != other and not _decided(key, mine):
                found[key] = Difference(key, mine, process, other)
    return list(found.values())


def _decided(key: str, ours: object) -> bool:
    return (key, ours) in (("transport", "auto"), ("gpus", True)) or key.split(".")[0] in OWN


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every setting by its dotted key."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: object) -> str:
    """As a deployment file has it."""
    return NOT_SET if value is NOT_SET else msgspec.json.encode(value).decode()
