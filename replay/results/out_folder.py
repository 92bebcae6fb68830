"""The folder of `--out`, which is made and replaced as a whole, and never replaces anything but results.

A folder is written beside its place and renamed into it, so an old page is never beside new numbers.
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

#: The file that marks a folder as a run's or a sweep's. It names the version of tensorferry.
Proof = Literal["summary.json", "sweep.json"]

#: The files that `replay` and `report` write into the folder of a run.
RUN_FILES = frozenset({"summary.json", "results.jsonl", "gauges.jsonl", "perfetto.json", "report.html"})
_SWEEP_FILES = frozenset({"sweep.json", "compare.html"})
_LEFT = re.compile(r"\.tensorferry-[0-9a-f]{12}")  #: left by a process that was killed while it wrote
#: Constants of renameat2. Source: Linux, include/uapi/linux/fs.h and fcntl.h.
_EXCHANGE, _AT_FDCWD = 2, -100
#: Errors of renameat2 on file systems and kernels that cannot exchange. Source: rename(2), ERRORS.
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EXDEV})


class _Made(msgspec.Struct):
    tensorferry: str


def require_free(folder: Path, proof: Proof, *, overwrite: bool) -> None:
    """Raise OutputError, with the remedy, if `filled` could not put a folder at this path.

    overwrite: an earlier folder of the same kind may be replaced, but never one that holds anything else.
    """
    with blamed(folder):
        place = _resolved(folder)
        try:
            empty = not os.listdir(place)
        except FileNotFoundError:
            return
        inside = f"name a folder in it, such as {folder / 'run'}"
        if os.path.ismount(place):
            raise OutputError(
                str(folder), f"a file system is mounted there, so the folder cannot be replaced; {inside}"
            )
        if Path.cwd().is_relative_to(place):
            raise OutputError(str(folder), f"this command runs in it, so it cannot be replaced; {inside}")
        if not os.access(place.parent, os.W_OK | os.X_OK):
            problem = f"its parent {place.parent} is not writable (permission denied, or read-only)"
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
    """Lock a folder against replacement until the block and every process that inherits the descriptor have ended.

    Raises OutputError if another process holds the lock.
    """
    with (folder / proof).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = "another command still writes to it; wait until that command has ended, or name another folder"
            raise OutputError(str(folder), said) from None
        except OSError as problem:  # a file system without locks: nothing is locked
            if problem.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        yield file.fileno()


@contextmanager
def filled(folder: Path, proof: Proof, *, overwrite: bool) -> Iterator[Path]:
    """Give a new folder to fill, which is at `folder` once the block has ended.

    The block writes `proof` as the last required file. Without it the new folder is removed; with it the new folder
    gets its place even if the block then fails. Parent folders are made. Raises OutputError for the reasons of
    `require_free`. If the place was taken after the block began, the new folder is kept, and the error names it.
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
    """Make an empty folder that can be renamed to `folder`, and the parents of `folder`. Raises OutputError."""
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
                made.rename(place)  # the kernel refuses this if the place is no longer empty
    except OutputError as problem:
        raise OutputError(str(folder), f"{problem.problem}. The new results are in {made}") from None
    if occupied:
        _remove(made, folder, proof)


def _remove(former: Path, folder: Path, proof: Proof) -> None:
    """Remove the replaced folder. It is checked once more, since others could write into it until now."""
    if why := _not_ours(former, proof):
        raise OutputError(str(folder), f"replaced, but {why}; so the old folder is kept in {former}")
    try:
        shutil.rmtree(former)
    except OSError as problem:
        text = f"replaced, but the old folder {former} cannot be removed: {problem.strerror or problem}"
        raise OutputError(str(folder), text) from problem


def _exchange(made: Path, place: Path) -> None:
    """Exchange the names of two folders, atomically if the file system can."""
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
    """Call renameat2, for which Python has no function. Returns 0 or the errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.renameat2(_AT_FDCWD, os.fsencode(made), _AT_FDCWD, os.fsencode(place), _EXCHANGE)
    return ctypes.get_errno() if failed else 0


def _not_ours(folder: Path, proof: Proof) -> str:
    """Return why this is not a folder that holds a run or a sweep alone; empty if it is one."""
    try:
        msgspec.json.decode((folder / proof).read_bytes(), type=_Made)
    except FileNotFoundError:
        return f"it has no {proof}"
    except (OSError, msgspec.MsgspecError) as problem:
        return f"its {proof} is not one of tensorferry's: {problem}"
    foreign = next(_foreign_files(folder, 2 if proof == "summary.json" else 0), None)
    return "" if foreign is None else f"it has {foreign.relative_to(folder)}, which tensorferry did not write"


def _foreign_files(folder: Path, depth: int) -> Iterator[Path]:
    """Return what does not belong to a sweep (depth 0), one of its versions (1) or a run (2)."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry)
        left = _LEFT.fullmatch(entry.name) is not None
        if entry.is_dir(follow_symlinks=False):
            if left or (depth < 2 and entry.name.isdecimal()):
                yield from _foreign_files(path, 2 if left else depth + 1)
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
