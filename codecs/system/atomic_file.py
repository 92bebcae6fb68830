"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tensorferry.codecs.errors import OutputError

#: What O_TMPFILE gets from file systems, and kernels, that know no files without a name. Source: open(2), ERRORS.
_ALL_ARE_NAMED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


def destination(path: Path) -> Path:
    """The path that a file written to `path` gets: a symbolic link stays one, and its target is replaced.

    Raises OutputError for what no file can replace, or be made at: a device, a pipe, a folder that is not there or not
    to be written to, a name that is too long.
    """
    with blamed(path):
        try:
            place = path.resolve()
        except RuntimeError:  # before Python 3.13
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        folder = place.parent.stat()
        if not stat.S_ISDIR(folder.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(place.parent, os.W_OK | os.X_OK):
            raise OutputError(str(path), f"no file can be made in {place.parent}: permission denied, or read-only")
        with suppress(FileNotFoundError):
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(mode):
                raise OutputError(str(path), "not a regular file, so it cannot be replaced by one; name a file")
            if not place.exists():  # resolved through /proc/self/fd
                raise OutputError(str(path), "a file that has no name any more; name a file")
    return place


def write_whole(path: Path, chunks: Iterable[bytes], mode: int = 0o666) -> None:
    """Written without a name, then put in its place: no process reads half a file, and the old one stays until then.

    mode: who may read and write the new file, less the umask.
    A process that is killed meanwhile leaves nothing behind, except where a file system knows no files without a name.
    Raises OutputError: for `destination`'s reasons, and for what goes wrong on the way, as on a full disk.
    """
    place = destination(path)
    beside = f".tensorferry-{secrets.token_hex(6)}"  # short: a name may be as long as names can be
    with blamed(path), ExitStack() as undo:
        folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)
        undo.callback(os.close, folder)
        undo.callback(_unlink, beside, folder)
        descriptor, named = _opened(beside, folder, mode)
        with open(descriptor, "wb") as file:
            file.writelines(chunks)
            file.flush()
            if not named:
                # linkat follows this link to the file; it cannot replace one, so the rename does. Source: open(2).
                os.link(f"/proc/self/fd/{descriptor}", beside, src_dir_fd=folder, dst_dir_fd=folder)
        os.replace(beside, place.name, src_dir_fd=folder, dst_dir_fd=folder)


def _opened(beside: str, folder: int, mode: int) -> tuple[int, bool]:
    """A new file of a folder, open for writing, and whether it has its name already."""
    try:
        return os.open(".", os.O_TMPFILE | os.O_WRONLY, mode, dir_fd=folder), False
    except OSError as problem:
        if problem.errno not in _ALL_ARE_NAMED:
            raise
    return os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode, dir_fd=folder), True


def _unlink(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Raise OutputError of this path for an OSError in the block."""
    try:
        yield
    except OSError as problem:
        raise OutputError(str(path), problem.strerror or str(problem)) from problem
