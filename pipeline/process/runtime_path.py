"""The path of a deployment's runtime folder, and whether the folders on it belong to this user alone."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.channels.addresses import PATH_NBYTES
from tensorferry.pipeline.deployment.spec import Deployment

LONGEST_NAME_NBYTES = len("scheduler-65535.in")  #: of all socket names: `tokenizer-255.door` is as long
HASH_NBYTES = 8  #: 16 hexadecimal digits
PREFIX_NBYTES = 24  #: of the name, to be readable; fewer where room is short
_LONGEST_BASE_NBYTES = PATH_NBYTES - LONGEST_NAME_NBYTES - 2 * HASH_NBYTES - len("//")


def folder_of(deployment: Deployment, environ: Mapping[str, str]) -> Path:
    """The folder, the same for every process of a deployment, and its clients, under one user.

    The base is `runtime_dir`; else $XDG_RUNTIME_DIR/tensorferry, or /run/user/<uid>/tensorferry where the
    variable is not set, if that is a folder of ours with a path short enough; else /tmp/tensorferry-<uid>.
    Raises DeploymentError when `runtime_dir` cannot be used.
    """
    if deployment.runtime_dir is not None:
        base = Path(deployment.runtime_dir)
        if not base.is_absolute():
            raise DeploymentError(f"runtime_dir: {base} is not an absolute path")
        if (nbytes := len(os.fsencode(base))) > _LONGEST_BASE_NBYTES:
            raise DeploymentError(
                f"runtime_dir: {base} has {nbytes} bytes; at most {_LONGEST_BASE_NBYTES} leave room for the "
                f"names of sockets, whose paths have {PATH_NBYTES} at most. Choose a shorter folder."
            )
    else:
        base = _default_base(environ)
    return base / _folder_name(deployment.name, len(os.fsencode(base)))


def _default_base(environ: Mapping[str, str]) -> Path:
    # A shell made by su, cron or a container lacks the variable, and must find the same deployment all the same.
    xdg = Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    fallback = Path(f"/tmp/tensorferry-{os.getuid()}")  # noqa: S108 - `prepare` checks whose it is
    base = xdg / "tensorferry"
    # XDG Base Directory Specification: relative paths are invalid. Under sudo it may be another user's.
    if not xdg.is_absolute() or len(os.fsencode(base)) > _LONGEST_BASE_NBYTES or not _is_text(base):
        return fallback
    try:
        found = xdg.stat()
    except OSError:
        return fallback
    return base if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() else fallback


def _is_text(path: Path) -> bool:
    """Whether a path can be said in a message, which is UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _folder_name(name: str, base_nbytes: int) -> str:
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=HASH_NBYTES).hexdigest()
    room = min(PREFIX_NBYTES, _LONGEST_BASE_NBYTES - base_nbytes - len("-"))
    prefix = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[: max(room, 0)]
    return f"{prefix}-{digest}" if prefix else digest


def check_ours(folder: Path, closed_to_others: int) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise DeploymentError(f"{folder} is not a folder (nor may it be a symbolic link to one); set runtime_dir")
    if found.st_uid != os.getuid():
        raise DeploymentError(f"{folder} belongs to uid {found.st_uid}, not to {os.getuid()}; set runtime_dir")
    if found.st_mode & closed_to_others:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        raise DeploymentError(f"{folder} is open to others (mode {mode}); chmod 700 it, or set runtime_dir")


def check_shared(folder: Path) -> None:
    """Nobody else may be able to rename what we make there."""
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise DeploymentError(f"{folder} can be written by anybody and has no sticky bit; set runtime_dir")
