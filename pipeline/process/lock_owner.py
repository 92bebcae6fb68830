"""The owner of a lock file: what the file says of it, and whether a process has the file open."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec


class Owner(msgspec.Struct, frozen=True):
    """What a lock file says of its owner."""

    pid: int
    host: str
    started_at: str  #: UTC, ISO 8601
    config: str = ""  #: the deployment file, where known

    def __str__(self) -> str:
        config = f" with {self.config}" if self.config else ""
        return f"process {self.pid} on {self.host}, since {self.started_at}{config}"


def this_process(config: str) -> Owner:
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    said = os.fsencode(config).decode(errors="replace")  # a path may have any bytes
    return Owner(os.getpid(), socket.gethostname(), started_at, said)


def sign(descriptor: int, owner: Owner) -> None:
    """Raises OSError where the disk is full."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(owner), 0)


def has_open(pid: int, path: Path) -> bool:
    """Whether a process of ours has a file open. Source: proc(5), /proc/pid/fd."""
    with suppress(OSError):  # it has ended, or closes them just now
        wanted = path.stat()
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found = os.stat(f"/proc/{pid}/fd/{name}")
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
    return False
