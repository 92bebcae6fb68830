"""The config.json of a checkpoint directory, which is read without an import of torch."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensorferry.stages.plugin import bad_config

CONFIG = "config.json"  #: of a checkpoint directory


def check_regular(key: str, file: Path) -> None:
    """Raise ConfigError that names `key` unless this is a regular file, or a link to one: to open a FIFO would wait for
    a writer, and a device may have no end."""
    try:
        regular = stat.S_ISREG(os.stat(file).st_mode)
    except (OSError, ValueError) as problem:
        raise bad_config(key, f"cannot read {file}: {problem}") from problem
    if not regular:
        raise bad_config(key, f"{file} is not a regular file; name a checkpoint directory, or a file of weights")


def read_config(key: str, folder: Path) -> Mapping[str, Any]:
    """The config.json of a checkpoint directory. Raises ConfigError that names `key` and the file if it
    cannot be read."""
    file = folder / CONFIG
    check_regular(key, file)
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as problem:
        raise bad_config(key, f"cannot read {file}: {problem}") from problem
