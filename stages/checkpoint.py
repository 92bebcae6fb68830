"""The files of a checkpoint directory that say what is in it, before anything heavier is imported to read it."""

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
    """Raise ConfigError naming `key` unless this is a regular file, or a link to one: opening a FIFO would wait for
    whoever writes into it, and a device may have no end."""
    try:
        regular = stat.S_ISREG(os.stat(file).st_mode)
    except (OSError, ValueError) as problem:
        raise bad_config(key, f"cannot read {file}: {problem}") from problem
    if not regular:
        raise bad_config(key, f"{file} is not a regular file; name a checkpoint directory, or a file of weights")


def read_config(key: str, folder: Path) -> Mapping[str, Any]:
    """The config.json of a checkpoint directory. Raises ConfigError naming `key` and the file where there is none."""
    file = folder / CONFIG
    check_regular(key, file)
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as problem:
        raise bad_config(key, f"cannot read {file}: {problem}") from problem
