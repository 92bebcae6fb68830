"""Reads files whose path comes from outside: regular files of a bounded size, in allowed folders."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

_NO_FILES = (Path("/proc"), Path("/sys"), Path("/dev"))  #: what the kernel makes up, be the whole of `/` allowed


class OutsideRoots(OSError):
    """A file lies where none may be read from; its strerror is a sentence's end."""


class Roots:
    """The folders below which files may be read whose path comes from a client, which may not read them itself."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders = tuple(Path(os.path.realpath(folder)) for folder in folders)

    def read(self, path: Path, most_nbytes: int) -> bytes:
        """All of a regular file below one of the folders, wherever its links lead. Raises as `read_regular`, and
        OutsideRoots.

        The file is looked for before it is opened, since opening a device does something, and once more where it was
        really opened, since a link may have been changed meanwhile. Source: proc(5), /proc/self/fd.
        """
        self._check(Path(os.path.realpath(path, strict=True)))
        return read_regular(path, most_nbytes, self._check_opened)

    def _check_opened(self, descriptor: int) -> None:
        self._check(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def _check(self, found: Path) -> None:
        if any(found.is_relative_to(place) for place in _NO_FILES):
            raise OutsideRoots(errno.EACCES, "not a file on a disk", str(found))
        if not any(found.is_relative_to(folder) for folder in self.folders):
            allowed = ", ".join(map(str, self.folders)) or "nothing"
            raise OutsideRoots(errno.EACCES, f"outside of what may be read, {allowed}", str(found))


def _anywhere(descriptor: int) -> None:
    pass


def read_regular(path: Path, most_nbytes: int, check: Callable[[int], None] = _anywhere) -> bytes:
    """All of a regular file. Never waits, as for the writer of a pipe, and never reads more than most_nbytes + 1.

    check: raises for a file, by its descriptor, that is not to be read. Raises OSError, whose strerror is a sentence's
    end, also for what is no regular file (EINVAL) and for what is longer (EFBIG); ValueError for a path with a null
    byte.
    """
    with open(path, "rb", opener=_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        check(file.fileno())
        if status.st_size > most_nbytes:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes; at most {most_nbytes} are read", str(path))
        # It may have grown since, and a file of /proc says that it has no bytes.
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise OSError(errno.EFBIG, f"more than {most_nbytes} bytes", str(path))
    return data


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
