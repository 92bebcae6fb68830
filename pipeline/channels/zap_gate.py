"""Who may connect to the sockets of a process that have keys: ZeroMQ asks for each, and this answers.

Source: https://rfc.zeromq.org/spec/27/ (ZAP): a REP socket at one address of the context, a request and an answer for
each handshake. A connection is let in or refused before any message of it is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

import structlog
import zmq
from zmq.utils import z85

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.channels.curve_keys import ServerKeys
from tensorferry.pipeline.channels.zmq_link import Context, open_socket

log = structlog.get_logger()

ADDRESS = "inproc://zeromq.zap.01"
VERSION = b"1.0"
SHOWN = 8  #: characters of a key that are logged: enough to find it in a folder
_CURVE_FRAMES = 7  #: version, request, domain, address, identity, mechanism, key


class Gate:
    """Answers on the running loop until it is closed. Make it before the sockets that it guards."""

    def __init__(self, context: Context, keys: ServerKeys, on_denied: Callable[[], None]) -> None:
        """on_denied: called for every connection that is refused."""
        self._keys, self._on_denied = keys, on_denied
        self._socket = open_socket(context, zmq.REP)
        try:
            self._socket.bind(ADDRESS)
        except zmq.ZMQError as problem:
            self._socket.close()
            raise DeploymentError(f"this context has a gate already: {problem.strerror}") from None
        self._loop, self._fd = asyncio.get_running_loop(), self._socket.fileno()
        self._loop.add_reader(self._fd, self._look)
        self._look()

    def close(self) -> None:
        """From now on nobody is let in."""
        self._loop.remove_reader(self._fd)
        self._socket.close()

    def _look(self) -> None:
        with suppress(zmq.Again):
            while True:  # all of them: the descriptor tells of changes alone
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                self._socket.send_multipart(self._answer(frames), zmq.NOBLOCK)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """What ZeroMQ is told: 200 and the name of the client, or 400."""
        request = frames[1] if len(frames) > 1 else b""
        name = self._name(frames)
        if name is not None:
            return [VERSION, request, b"200", b"", name.encode(), b""]
        self._on_denied()
        return [VERSION, request, b"400", b"unknown key", b"", b""]

    def _name(self, frames: list[bytes]) -> str | None:
        if len(frames) != _CURVE_FRAMES or frames[0] != VERSION or frames[5] != b"CURVE":
            log.warning("connection_denied", reason="it has no key")
            return None
        domain, key = frames[2].decode("ascii", "replace"), z85.encode(frames[6])
        name = self._keys.admitted(domain).get(key)
        if name is None:
            shown = {"socket": domain, "address": _shown(frames[3]), "key": key[:SHOWN].decode()}
            log.warning("connection_denied", reason="its key is unknown", **shown)
        return name


def _shown(address: bytes) -> str:
    with suppress(ValueError):
        found = ip_address(address.decode("ascii", "replace"))
        return str(getattr(found, "ipv4_mapped", None) or found)
    return "a UNIX socket"
