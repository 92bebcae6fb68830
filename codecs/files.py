"""Files that somebody names: read whole, if they are files at all and no longer than expected."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, most_nbytes: int) -> bytes:
    """All of a regular file. Never waits, as for the writer of a pipe, and never reads more than most_nbytes + 1.

    Raises OSError, whose strerror is a sentence's end, also for what is no regular file (EINVAL) and for what is longer
    (EFBIG); ValueError for a path with a null byte.
    """
    with open(path, "rb", opener=_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > most_nbytes:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes; at most {most_nbytes} are read", str(path))
        # It may have grown since, and a file of /proc says that it has no bytes.
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise OSError(errno.EFBIG, f"more than {most_nbytes} bytes", str(path))
    return data


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
