"""The file of a socket that a process has bound: whether it is still there, and its removal."""

from __future__ import annotations

import os
from contextlib import suppress


def is_file(path: str, device: int, inode: int) -> bool:
    """Whether the file with this device and inode is at this path."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (device, inode)


def unlink_file(path: str, device: int, inode: int) -> None:
    """Remove the file with this device and inode; another one that has been bound at the path since stays."""
    with suppress(FileNotFoundError):
        if is_file(path, device, inode):
            os.unlink(path)
