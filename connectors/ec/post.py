"""A ZeroMQ socket that carries the messages of `messages.py`, whole or not at all, and never waits to send."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import structlog
import zmq

from tensorferry.codecs.errors import BadMessage, PeerGone
from tensorferry.codecs.frames import Buffer, Limits
from tensorferry.connectors.ec.messages import HEADER_NBYTES, MOST_FRAMES, Message, decode, encode
from tensorferry.pipeline.channels.addresses import check_address
from tensorferry.pipeline.channels.curve_keys import CurveClient, CurveServer
from tensorferry.pipeline.channels.zmq_link import Context, Link, open_socket

log = structlog.get_logger()

HIGH_WATER = 1000  #: messages that may wait for one peer
LIMITS = Limits(frames=MOST_FRAMES, header_nbytes=HEADER_NBYTES)


class Mail(NamedTuple):
    """A message and its inline frames."""

    message: Message
    frames: Sequence[Buffer]
    peer: bytes = b""  #: whom a door's answer goes to


class _Post:
    def __init__(self, link: Link, peer: str, *, routed: bool) -> None:
        self.peer, self._link, self._routed = peer, link, routed
        self.refused = 0  #: what came and was no message

    def take(self) -> Mail | None:
        """What has come; None: nothing."""
        while frames := self._link.receive(MOST_FRAMES + 1 + self._routed):
            peer = frames.pop(0).bytes if self._routed else b""
            try:
                message, inline = decode([frame.buffer for frame in frames])
            except BadMessage as problem:
                self.refused += 1
                log.warning("message_refused", peer=self.peer, problem=problem.problem)
                continue
            return Mail(message, inline, peer)
        return None

    async def receive(self) -> Mail:
        """The next message. Cancelled, it has taken none. Raises ChannelClosed."""
        while True:
            mail = self.take()
            if mail is not None:
                return mail
            await self._link.wait(zmq.POLLIN)

    def mend(self) -> bool:
        """Listen anew where the socket file has been removed; False: it is there. Raises OSError, ZMQError."""
        return self._link.mend()

    def close(self) -> None:
        self._link.close()


class Door(_Post):
    """Where peers come in, and the way back to each."""

    @classmethod
    def open(
        cls, context: Context, address: str, curve: CurveServer | None = None, *, high_water: int = HIGH_WATER
    ) -> Self:
        """high_water: messages that may wait for each peer. Raises DeploymentError for an address refused or taken."""
        path = check_address(address, bound=True, curve=curve is not None)
        router = open_socket(context, zmq.ROUTER, high_water=high_water, limits=LIMITS, curve=curve)
        router.set(zmq.ROUTER_MANDATORY, 1)  # else what cannot be delivered vanishes without a word
        link = Link(router, address)
        link.bind(path)
        return cls(link, address, routed=True)

    def send(self, peer: bytes, message: Message, inline: Sequence[Buffer] = ()) -> None:
        """Raises PeerGone when the peer has left, PeerBusy when its queue is full: then nothing was sent."""
        try:
            self._link.send([peer, *encode(message, inline)], f"peer {peer.hex()}")
        except zmq.ZMQError as problem:
            if problem.errno != errno.EHOSTUNREACH:
                raise
            raise PeerGone(f"peer {peer.hex()}", "has disconnected") from None


class Dealer(_Post):
    """The way to one door, whether or not somebody is there yet."""

    @classmethod
    def open(
        cls,
        context: Context,
        address: str,
        on_break: Callable[[], None] | None = None,
        curve: CurveClient | None = None,
        *,
        high_water: int = HIGH_WATER,
    ) -> Self:
        """on_break: called on the running loop whenever the connection breaks; ZeroMQ makes it again."""
        check_address(address)
        link = Link(open_socket(context, zmq.DEALER, high_water=high_water, limits=LIMITS, curve=curve), address)
        if on_break is not None:
            link.on_break(on_break)
        link.connect()
        return cls(link, address, routed=False)

    def send(self, message: Message) -> None:
        """Raises PeerBusy when the queue is full."""
        self._link.send(encode(message), self.peer)
