"""The folder of `--out`: made whole, replaced whole, and never anything but results.

A folder is written beside its place and renamed into it, so nobody finds an old page beside new numbers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from tensorferry.codecs.errors import OutputError
from tensorferry.codecs.system.atomic_file import blamed

#: The file that says what a folder is, by the command that makes it. It names the version of tensorferry.
Proof = Literal["summary.json", "sweep.json"]

#: What `replay` and `report` write into the folder of a run.
RUN_FILES = frozenset({"summary.json", "results.jsonl", "gauges.jsonl", "perfetto.json", "report.html"})
_SWEEP_FILES = frozenset({"sweep.json", "compare.html"})
_LEFT = re.compile(r"\.tensorferry-[0-9a-f]{12}")  #: by a process that was killed while it wrote
#: Of renameat2. Source: Linux, include/uapi/linux/fs.h and fcntl.h.
_EXCHANGE, _AT_FDCWD = 2, -100
#: What renameat2 gets from file systems, and kernels, that exchange nothing. Source: rename(2), ERRORS.
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EXDEV})


class _Made(msgspec.Struct):
    tensorferry: str


def require_free(folder: Path, proof: Proof, *, overwrite: bool) -> None:
    """Raise OutputError, with the remedy, where `filled` could not put a folder at this path.

    overwrite: an earlier folder of the same kind may be replaced. One that holds anything else never is.
    """
    with blamed(folder):
        place = _resolved(folder)
        try:
            empty = not os.listdir(place)
        except FileNotFoundError:
            return
        inside = f"name a folder in it, such as {folder / 'run'}"
        if os.path.ismount(place):
            raise OutputError(str(folder), f"a file system is mounted there, so it cannot be replaced; {inside}")
        if Path.cwd().is_relative_to(place):
            raise OutputError(str(folder), f"this command runs in it, so it cannot be replaced; {inside}")
        if not os.access(place.parent, os.W_OK | os.X_OK):
            problem = f"nothing can be made in {place.parent}: permission denied, or read-only"
            raise OutputError(str(folder), f"{problem}; {inside}")
        if not empty and not overwrite:
            raise OutputError(str(folder), "it is not empty; name a new folder, or replace its results by --overwrite")
        if not empty and (why := _not_ours(place, proof)):
            raise OutputError(str(folder), f"{why}, so it is not replaced; name another folder")
        if not empty:
            with in_use(folder, proof):
                pass


@contextmanager
def in_use(folder: Path, proof: Proof) -> Iterator[int]:
    """Keeps others from replacing a folder until the block and every process that inherits the descriptor have ended.

    Raises OutputError where somebody else keeps it.
    """
    with (folder / proof).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = "what writes to it still runs; wait until it has ended, or name another folder"
            raise OutputError(str(folder), said) from None
        except OSError as problem:  # a file system without locks keeps nobody away
            if problem.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        yield file.fileno()


@contextmanager
def filled(folder: Path, proof: Proof, *, overwrite: bool) -> Iterator[Path]:
    """A new folder to fill, which is at `folder` once the block has ended.

    The block writes `proof` last of what must be there. Without it the new folder is removed; with it the new folder
    comes into its place even if the block then fails. Folders above are made. Raises OutputError for `require_free`'s
    reasons; where the place was taken since the block began, the new folder is kept, and the error says where.
    """
    made = new_folder_beside(folder)
    try:
        yield made
    finally:
        if (made / proof).exists():
            _put(made, folder, proof, overwrite=overwrite)
        else:
            shutil.rmtree(made, ignore_errors=True)


def new_folder_beside(folder: Path) -> Path:
    """An empty folder that can be renamed to `folder`; those above it are made. Raises OutputError."""
    with blamed(folder):
        place = _resolved(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        made = place.parent / f".tensorferry-{secrets.token_hex(6)}"
        made.mkdir()
    return made


def _put(made: Path, folder: Path, proof: Proof, *, overwrite: bool) -> None:
    try:
        require_free(folder, proof, overwrite=overwrite)
        with blamed(folder):
            place = _resolved(folder)
            occupied = place.is_dir() and any(place.iterdir())
            if place.is_dir():
                made.chmod(stat.S_IMODE(place.stat().st_mode))
            if occupied:
                _exchange(made, place)
            else:
                made.rename(place)  # refused by the kernel where something has come to be in it since
    except OutputError as problem:
        raise OutputError(str(folder), f"{problem.problem}. The new results are in {made}") from None
    if occupied:
        _remove(made, folder, proof)


def _remove(former: Path, folder: Path, proof: Proof) -> None:
    """What `folder` was replaced for; looked at once more, as others could write into it until now."""
    if why := _not_ours(former, proof):
        raise OutputError(str(folder), f"replaced, but {why}; so what was there is kept, in {former}")
    try:
        shutil.rmtree(former)
    except OSError as problem:
        text = f"replaced; what was there cannot be removed from {former}: {problem.strerror or problem}"
        raise OutputError(str(folder), text) from problem


def _exchange(made: Path, place: Path) -> None:
    """Either folder gets the other's name, at one instant where the file system can."""
    number = _renameat2(made, place)
    if not number:
        return
    if number not in _NO_EXCHANGE:
        raise OSError(number, os.strerror(number))
    aside = place.parent / f".tensorferry-{secrets.token_hex(6)}"
    place.rename(aside)
    try:
        made.rename(place)
    except OSError:
        aside.rename(place)
        raise
    aside.rename(made)


def _renameat2(made: Path, place: Path) -> int:
    """The system call, which Python has no name for; 0, or the errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.renameat2(_AT_FDCWD, os.fsencode(made), _AT_FDCWD, os.fsencode(place), _EXCHANGE)
    return ctypes.get_errno() if failed else 0


def _not_ours(folder: Path, proof: Proof) -> str:
    """Why this is no folder that a run, or a sweep, has filled alone; empty where it is."""
    try:
        msgspec.json.decode((folder / proof).read_bytes(), type=_Made)
    except FileNotFoundError:
        return f"it has no {proof}"
    except (OSError, msgspec.MsgspecError) as problem:
        return f"its {proof} is not one of tensorferry's: {problem}"
    strangers = _strangers(folder, 2) if proof == "summary.json" else _strangers(folder, 0)
    stranger = next(strangers, None)
    return "" if stranger is None else f"it has {stranger.relative_to(folder)}, which tensorferry has not written"


def _strangers(folder: Path, depth: int) -> Iterator[Path]:
    """What is not of a sweep (depth 0), of one of its versions (1) or of a run (2)."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry)
        left = _LEFT.fullmatch(entry.name) is not None
        if entry.is_dir(follow_symlinks=False):
            if left or (depth < 2 and entry.name.isdecimal()):
                yield from _strangers(path, 2 if left else depth + 1)
                continue
        elif entry.is_file(follow_symlinks=False):
            known = (_SWEEP_FILES, frozenset[str](), RUN_FILES)[depth]
            if left or entry.name in known or (depth == 1 and re.fullmatch(r"\d+\.log", entry.name)):
                continue
        yield path


def _resolved(folder: Path) -> Path:
    try:
        return folder.resolve()
    except RuntimeError:  # a loop of links, before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
