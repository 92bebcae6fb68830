"""The line of an elastic pool: the descriptors of its chunks, on their way from the producer to one consumer.

A UNIX SEQPACKET socket pair that the consumer makes when it attaches; the producer gets one end with the ack page. Each
packet is (serial, position), two little-endian uint32, with one descriptor. Nothing goes the other way: the
consumer answers in its ack page. Neither end ever waits.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import NamedTuple

from tensorferry.codecs.errors import AttachRefused
from tensorferry.codecs.memory.memory import Handle

_PACKET = struct.Struct("<II")
_SEND = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_TAKE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


class Arrived(NamedTuple):
    serial: int
    position: int
    handle: Handle | None  #: a descriptor is the receiver's to close; None: this process could not take another one


class Sender:
    """The producer's end."""

    def __init__(self, descriptor: int) -> None:
        """Takes the descriptor over. Raises AttachRefused, having closed it, for one that is no such socket."""
        try:
            self._socket = socket.socket(fileno=descriptor)
        except OSError as problem:
            os.close(descriptor)
            raise AttachRefused(f"the last descriptor is not a line: {problem.strerror}") from None
        if (self._socket.family, self._socket.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            self._socket.close()
            raise AttachRefused("the last descriptor is not a line: no UNIX SEQPACKET socket")
        self.is_shut = False  #: whether the other end takes nothing any more, for good

    def send(self, serial: int, position: int, handle: Handle) -> bool:
        """Pass a chunk on; its descriptor stays the caller's. False: it did not go: the line is shut, or so full of
        what the other end has not taken that there is no room."""
        assert isinstance(handle, int), "a line is for descriptors"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))]
        try:
            self._socket.sendmsg([_PACKET.pack(serial, position)], rights, _SEND)
        except ConnectionError:  # EPIPE, ECONNRESET
            self.is_shut = True
            return False
        except OSError:  # EAGAIN, or ETOOMANYREFS: too many descriptors of this user are under way
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class Receiver:
    """The consumer's end."""

    def __init__(self) -> None:
        """Makes both; `descriptor` is the producer's, to be sent and then closed by the caller."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptor = theirs.detach()

    def receive(self) -> Arrived | None:
        """The next chunk; None: there is none now. Packets that do not follow the protocol are ignored."""
        while True:
            try:  # not recv_fds, which ignores its flags in Python 3.11
                data, extras, _, _ = self._socket.recvmsg(_PACKET.size + 1, socket.CMSG_LEN(4), _TAKE)
            except OSError:  # nothing there, or the producer is gone and nothing more will be
                return None
            fds = array.array("i")
            for _, _, rights in extras:
                fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
            if len(data) == _PACKET.size:
                serial, position = _PACKET.unpack(data)
                return Arrived(serial, position, fds[0] if fds else None)
            for fd in fds:
                os.close(fd)
            if not data:
                return None

    def shut(self) -> None:
        """Take no more: from now on a send fails, and what went before can still be received.

        Source: Linux, unix_dgram_sendmsg, which looks at the receiver's shutdown under its lock.
        """
        self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        self._socket.close()
