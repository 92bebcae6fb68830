"""A name that one process of a user holds for as long as it lives, whatever becomes of files.

An abstract UNIX socket (unix(7)): it has no file, so nobody can remove it, and the kernel frees the name when its
holder ends, however it ends. Two processes contend for a name if they share a network namespace, a mount namespace and
a root folder. The last two must be equal too: containers on their host's network have other files at equal paths.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

import structlog

log = structlog.get_logger()

BACKLOG = 4096  #: of those who ask who holds a name: nobody answers them, the kernel does
TRIES, RETRY_S = 50, 0.002  #: where a holder has just ended, or has bound the name and does not listen yet
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid. Source: unix(7)


class Holder(NamedTuple):
    """A process that holds a name."""

    pid: int  #: 0: it cannot be seen from this PID namespace
    uid: int

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid else "a process of another PID namespace"


class Claimed(Exception):
    """Another process of this user holds the name."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


@contextmanager
def claimed(text: str) -> Iterator[None]:
    """Hold the name that stands for `text`, for the length of the block. Raises Claimed.

    Where the name cannot be had for another reason, the block runs without it, and the log says why: who is not this
    user's process is not what is looked for, and must not keep us from starting.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        _bind(listener, address(text))
        yield


def address(text: str) -> bytes:
    """The address of the name that stands for `text`, for this user, in this mount namespace."""
    root, uid = os.stat("/"), os.geteuid()
    try:
        namespace = os.stat("/proc/self/ns/mnt").st_ino
    except OSError:  # there is no /proc
        namespace = 0
    told = f"{uid} {namespace} {root.st_dev} {root.st_ino} {text}"
    digest = blake2b(told.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return f"\0tensorferry-{uid}-{digest}".encode()


def _bind(listener: socket.socket, name: bytes) -> None:
    problem, remedy = "", ""
    for _ in range(TRIES):
        try:
            listener.bind(name)
            listener.listen(BACKLOG)
            return
        except OSError as refusal:
            if refusal.errno != errno.EADDRINUSE:
                log.warning("name_not_claimed", problem=refusal.strerror)
                return
        try:
            holder = _holder(name)
        except ConnectionRefusedError:
            problem, remedy = "its holder does not listen, so it is not ours", _REMEDY
            time.sleep(RETRY_S)  # the kernel tells nobody when a name can be had; no event loop runs yet
            continue
        except OSError as refusal:
            log.warning("name_not_claimed", problem=f"its holder does not say who it is: {refusal.strerror}")
            return
        if holder.uid == os.geteuid():
            if _has_ended(holder.pid):  # the kernel is about to close its sockets, unless a child has them too
                problem = f"{holder} bound it and has ended, but a child of that process still holds it"
                remedy = f"end the children of that process, {_OR_ELSE}"
                time.sleep(RETRY_S)  # as above
                continue
            raise Claimed(holder)
        log.warning("name_not_claimed", problem=f"{holder} of user {holder.uid} holds it", remedy=_REMEDY)
        return
    log.warning("name_not_claimed", problem=problem, remedy=remedy)


def _holder(name: bytes) -> Holder:
    """Who listens at an address. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        asking.connect(name)
        pid, uid, _ = _CREDENTIALS.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Holder(pid, uid)


def _has_ended(pid: int) -> bool:
    try:
        if pid:
            os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


_OR_ELSE = "or set runtime_dir; until then only the lock file prevents a second start"
_REMEDY = f"ask that user to end it, {_OR_ELSE}"
