"""One conversation over a UNIX socket: whole messages, with descriptors, between processes of one user.

What vouches for a peer is the kernel: SO_PEERCRED for its user, and SCM_CREDENTIALS of the very message that
carries a descriptor for the process that sent it, because SO_PEERCRED may name whoever once made the socket.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import msgspec

from tensorferry.codecs.errors import AttachRefused, FerryError, PeerGone
from tensorferry.codecs.messages import Index, Nonce, Origin, Text, Wire
from tensorferry.codecs.pool.export import Attachment, Export
from tensorferry.codecs.system.descriptors import close_all
from tensorferry.pipeline.channels.readable_fd import readable

REASON_LENGTH = 1024  #: characters of a refusal
MESSAGE_NBYTES = 8192  #: the longest message is a Refused
MOST_FDS = 16  #: that are taken from a message, to be closed if it has more than it should

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid. Source: unix(7)
_PIDFD_THREAD = os.O_EXCL  # Linux 6.9: this pidfd speaks of one thread, which may end before its process


class Attach(Wire, frozen=True, tag=1):
    """I am `origin`; let me read this pool."""

    version: Index
    origin: Origin
    pool: Nonce


class Exported(Wire, frozen=True, tag=2):
    """With the descriptors that `Pool.export` gave."""

    export: Export


class Attached(Wire, frozen=True, tag=3):
    """With the descriptors that `Reader.attach` gave."""

    attachment: Attachment


class Admitted(Wire, frozen=True, tag=4):
    column: Index


class Refused(Wire, frozen=True, tag=5):
    reason: Text


Said = Attach | Exported | Attached | Admitted | Refused
T = TypeVar("T", bound=Wire)

_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Said] = msgspec.msgpack.Decoder(Said).decode


@dataclass(slots=True)
class Letter(Generic[T]):
    """A message with its descriptors, which the block closes unless they are taken."""

    message: T
    fds: list[int]
    pid: int  #: of the sender; 0 without `ask_who`, and where it cannot be seen from this PID namespace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close_all(self.take())

    def take(self) -> list[int]:
        """The descriptors, which are the caller's from now on."""
        fds, self.fds = self.fds, []
        return fds


class Line:
    """One end of a conversation; takes over the connected socket."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """peer: what errors call the other end."""
        connection.setblocking(False)
        self._socket, self._peer = connection, peer

    def close(self) -> None:
        self._socket.close()

    def check_user(self) -> None:
        """Raises AttachRefused unless the other end is a process of ours."""
        _, uid = self._peer_process()
        if uid != os.geteuid():
            raise AttachRefused(f"a process of user {uid}; only those of user {os.geteuid()} share a pool")

    @property
    def pid(self) -> int:
        """The process that has made the other end; 0: it cannot be seen from this PID namespace."""
        return self._peer_process()[0]

    def _peer_process(self) -> tuple[int, int]:
        """Its pid and uid."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return pid, uid

    def ask_who(self) -> None:
        """From now on what is heard comes with the pid of its sender."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def say(self, message: Said, fds: Sequence[int] = ()) -> None:
        """Never waits: at most one small message is ever unread. The descriptors stay the caller's.

        Raises PeerGone, or AttachRefused with the reason that the other end gave before it hung up.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([_encode(message)], rights)
        except OSError as problem:
            raise self._hung_up(problem) from None

    async def hear(self, kind: type[T], fds: Sequence[int] = (0,)) -> Letter[T]:
        """The next message, which must be of this kind and have one of these numbers of descriptors.

        Raises AttachRefused for whatever else comes, PeerGone when nothing more does. A cancelled call has
        taken nothing.
        """
        while True:
            try:
                return self._hear(kind, fds)
            except BlockingIOError:
                await readable(self._socket.fileno())

    def shut_and_look(self, kind: type[T]) -> bool:
        """Take nothing more, and say whether this kind of message had come. If not, the peer cannot say it any more.

        Source: unix_dgram_sendmsg and unix_shutdown in Linux: both hold the receiver's lock.
        """
        try:
            self._socket.shutdown(socket.SHUT_RD)
            with self._hear(kind, (0,)):
                return True
        except (FerryError, OSError):
            return False

    def _hear(self, kind: type[T], fds: Sequence[int]) -> Letter[T]:
        """Raises BlockingIOError when nothing has come yet."""
        try:
            data, extras, flags, _ = self._socket.recvmsg(
                MESSAGE_NBYTES,
                socket.CMSG_SPACE(4 * MOST_FDS) + socket.CMSG_SPACE(_CREDENTIALS.size),
                socket.MSG_CMSG_CLOEXEC,
            )
        except ConnectionError as problem:
            raise self._hung_up(problem) from None
        came, pid = _unpacked(extras)
        with ExitStack() as undo:
            undo.callback(close_all, came)
            if not data:
                raise PeerGone(self._peer, "hung up")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise AttachRefused("a message too large, or with descriptors that cannot be taken")
            message = _decoded(data)
            if isinstance(message, Refused):
                raise AttachRefused(message.reason)
            if not isinstance(message, kind) or len(came) not in fds:
                said = f"{type(message).__name__} with {len(came)} descriptors"
                raise AttachRefused(f"{said} came; {kind.__name__} with {' or '.join(map(str, fds))} was due")
            undo.pop_all()
        return Letter(message, came, pid)

    def _hung_up(self, problem: OSError) -> FerryError:
        """What to raise: the last word, if there was one (the kernel reports a lost connection before it)."""
        with suppress(OSError, AttachRefused):
            message = _decoded(self._socket.recv(MESSAGE_NBYTES))
            if isinstance(message, Refused):
                return AttachRefused(message.reason)
        return PeerGone(self._peer, f"hung up: {problem.strerror}")


def _decoded(data: bytes) -> Said:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, FerryError, RecursionError, UnicodeDecodeError) as problem:
        raise AttachRefused(f"not a message of ours: {problem}") from None


def _unpacked(extras: list[tuple[int, int, bytes]]) -> tuple[list[int], int]:
    """The descriptors among a message's extras, ours from now on, and its sender's pid (0: none came)."""
    fds = array.array("i")
    pid = 0
    for level, kind, data in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, _, _ = _CREDENTIALS.unpack(data)
    return list(fds), pid


def check_process(pidfd: int, sender: int) -> None:
    """That `pidfd` is of the process with the pid `sender`. Raises AttachRefused.

    Source: proc_pid_fdinfo(5); Pid is 0 for a process outside the PID namespace of /proc, -1 for one that was reaped.
    """
    try:
        with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
            found = {key: value for key, _, value in (line.partition(":") for line in file)}
    except OSError as problem:
        raise AttachRefused(f"/proc does not say whose a pidfd is: {problem.strerror}") from None
    if "Pid" not in found or int(found["flags"], 8) & _PIDFD_THREAD:
        raise AttachRefused("the last descriptor is not the pidfd of a process")
    pid = int(found["Pid"])
    if pid == -1:
        raise AttachRefused("the pidfd is of a process that has ended")
    if pid == 0 or sender == 0:
        raise AttachRefused(
            "the consumer's PID namespace cannot be seen from here, so its death could not be proven; "
            "run both in one (docker: --pid, Kubernetes: shareProcessNamespace)"
        )
    if pid != sender:
        raise AttachRefused(f"process {sender} sent the pidfd of process {pid}")
