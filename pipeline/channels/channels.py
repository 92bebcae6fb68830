"""Channels between processes: ZeroMQ sockets that belong to one event loop.

| channel     | socket                   | between                           | full: `PeerBusy`; no peer there yet     |
|-------------|--------------------------|-----------------------------------|-----------------------------------------|
| `Inbox`     | PULL, bound              | all peers -> this process         |                                         |
| `Outbox`    | PUSH, connected          | this process -> one inbox         | queued, delivered when the peer has come|
| `FrontDoor` | ROUTER, bound, mandatory | one tokenizer <-> all its clients | `PeerGone`                              |
| `Dealer`    | DEALER, connected        | one client <-> one tokenizer      | queued, delivered when the peer has come|

What bounds memory: a sender queues up to its `high_water`. A receiver takes all messages that arrive, because ZeroMQ
loses messages of a receiver with a high-water mark (see `zmq_link.open_socket`), so the limits on requests in flight
must bound what peers send. A front door on a network cannot trust clients to keep these limits, so it has a mark: the
last messages of a client that leaves may be lost, and its requests then end because the client is gone.
A queue is full where a peer is stopped, dead or not there yet, or for a moment after a long burst.
Addresses are ipc or TCP. A TCP address of an interface other than loopback needs keys (`curve`). Make, use and close a
channel in its loop's thread, before its context ends.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

import zmq

from tensorferry.codecs.errors import BadMessage, PeerGone
from tensorferry.codecs.frames import Buffer, Limits, encode
from tensorferry.codecs.messages import Message
from tensorferry.pipeline.channels.addresses import TCP, check_address
from tensorferry.pipeline.channels.curve_keys import DOOR, INBOX, CurveClient, CurveServer, ServerKeys
from tensorferry.pipeline.channels.intake import Intake
from tensorferry.pipeline.channels.interface import HIGH_WATER, Denial, Door, Received, Sender
from tensorferry.pipeline.channels.zap_gate import Gate
from tensorferry.pipeline.channels.zmq_link import (
    HANDSHAKE_FAILURES,
    Context,
    Link,
    LinkChannel,
    denial,
    open_context,
    open_socket,
)

__all__ = ["Dealer", "FrontDoor", "Inbox", "Outbox", "Received", "ZmqNetwork", "check_address", "open_context"]

UNREAD = 64  #: messages of one client on a network that are held before they are taken


class Inbox(Intake):
    """Where a process takes its messages."""

    def __init__(
        self,
        context: Context,
        address: str,
        limits: Limits,
        on_refused: Callable[[BadMessage], None],
        *,
        curve: CurveServer | None = None,
        on_denied: Callable[[Denial], None] | None = None,
    ) -> None:
        """Bind. Raises DeploymentError when the address is refused or taken.

        limits: a frame over them is not even read (its sender is disconnected); a message over them is dropped.
        on_refused: called for each dropped message. curve: only a peer with a key that the context's `Gate` knows can
        connect. on_denied: called on the running loop for each TCP connection that failed before the gate was asked.
        """
        path = check_address(address, bound=True, curve=curve is not None)
        link = Link(open_socket(context, zmq.PULL, limits=limits, curve=curve), address)
        _report_denials(link, on_denied)
        link.bind(path)
        super().__init__(link, limits, on_refused)


class _LinkSender(LinkChannel, Sender):
    """A `Sender` over a link."""

    def __init__(self, link: Link, peer: str) -> None:
        LinkChannel.__init__(self, link)
        self.peer = peer

    def send_nowait(self, message: Message, inline: Sequence[Buffer] = ()) -> None:
        self._link.send(encode(message, inline), self.peer)

    async def writable(self) -> None:
        await self._link.wait(zmq.POLLOUT)


class Outbox(_LinkSender):
    """The way to one peer's inbox."""

    def __init__(
        self,
        context: Context,
        address: str,
        peer: str,
        high_water: int = HIGH_WATER,
        on_break: Callable[[], None] | None = None,
        *,
        curve: CurveClient | None = None,
    ) -> None:
        """peer: its name, for errors. high_water: messages that may wait here for the peer to take them.

        on_break: called on the running loop whenever the connection breaks; most often the peer has died. curve: the
        keys, for an inbox that has some.
        """
        check_address(address)
        link = Link(open_socket(context, zmq.PUSH, high_water=high_water, curve=curve), address)
        if on_break is not None:
            link.on_break(on_break)
        link.connect()
        super().__init__(link, peer)


class FrontDoor(Intake, Door):
    """Where clients connect to a tokenizer."""

    def __init__(
        self,
        context: Context,
        address: str,
        limits: Limits,
        on_refused: Callable[[BadMessage], None],
        high_water: int = HIGH_WATER,
        *,
        curve: CurveServer | None = None,
        on_denied: Callable[[Denial], None] | None = None,
    ) -> None:
        """As an Inbox. high_water: messages that may wait here for each client."""
        path = check_address(address, bound=True, curve=curve is not None)
        unread = UNREAD if path is None else 0
        router = open_socket(
            context, zmq.ROUTER, high_water=high_water, receive_water=unread, limits=limits, curve=curve
        )
        router.set(zmq.ROUTER_MANDATORY, 1)  # otherwise ZeroMQ drops what it cannot deliver, and reports nothing
        link = Link(router, address)
        _report_denials(link, on_denied)
        link.bind(path)
        super().__init__(link, limits, on_refused, routed=True, named=curve is not None)

    def send_nowait(self, peer: bytes, message: Message, inline: Sequence[Buffer] = ()) -> None:
        name = f"client {peer.hex()}"
        try:
            self._link.send([peer, *encode(message, inline)], name)
        except zmq.ZMQError as problem:
            if problem.errno != errno.EHOSTUNREACH:
                raise
            raise PeerGone(name, "has disconnected") from None


class Dealer(Intake, _LinkSender):
    """A client's way to one tokenizer, and back."""

    def __init__(
        self,
        context: Context,
        address: str,
        peer: str,
        limits: Limits,
        on_refused: Callable[[BadMessage], None],
        high_water: int = HIGH_WATER,
        on_break: Callable[[], None] | None = None,
        *,
        curve: CurveClient | None = None,
        on_denied: Callable[[Denial], None] | None = None,
    ) -> None:
        """As an Outbox and an Inbox; the tokenizer need not be there yet.

        on_denied: called on the running loop for each TCP handshake that failed, also where the gate refused it.
        """
        check_address(address)
        link = Link(open_socket(context, zmq.DEALER, high_water=high_water, limits=limits, curve=curve), address)
        if on_break is not None:
            link.on_break(on_break)
        _report_denials(link, on_denied, also=zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        link.connect()
        _LinkSender.__init__(self, link, peer)
        Intake.__init__(self, link, limits, on_refused)


class ZmqNetwork:
    """The `Network` of a process: its context, with the deployment's keys if it has some. Leave its block last."""

    def __init__(self, keys: ServerKeys | None, inboxes_have_keys: bool, on_denied: Callable[[], None]) -> None:
        """on_denied: called for each connection that the gate refuses."""
        self._keys = keys
        self._inbox_keys = keys if inboxes_have_keys else None
        with ExitStack() as undo:
            self.context = undo.enter_context(open_context())
            if keys is not None:
                undo.callback(Gate(self.context, keys, on_denied).close)
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def inbox(
        self,
        address: str,
        limits: Limits,
        on_refused: Callable[[BadMessage], None],
        on_denied: Callable[[Denial], None],
    ) -> Inbox:
        curve = None if self._inbox_keys is None else self._inbox_keys.bound(INBOX)
        return Inbox(self.context, address, limits, on_refused, curve=curve, on_denied=on_denied)

    def outbox(self, address: str, peer: str, on_break: Callable[[], None]) -> Outbox:
        curve = None if self._inbox_keys is None else self._inbox_keys.stage
        return Outbox(self.context, address, peer, on_break=on_break, curve=curve)

    def front_door(
        self,
        address: str,
        limits: Limits,
        on_refused: Callable[[BadMessage], None],
        on_denied: Callable[[Denial], None],
    ) -> FrontDoor:
        curve = None if self._keys is None else self._keys.bound(DOOR)
        return FrontDoor(self.context, address, limits, on_refused, curve=curve, on_denied=on_denied)


def _report_denials(link: Link, on_denied: Callable[[Denial], None] | None, also: int = 0) -> None:
    """Call `on_denied` for failed handshakes of a TCP socket. The gate counts its own refusals, so their events are
    left out unless `also` names them."""
    if on_denied is not None and link.address.startswith(TCP):
        events = HANDSHAKE_FAILURES & ~zmq.EVENT_HANDSHAKE_FAILED_AUTH | also
        link.on_events(events, lambda event, value: on_denied(denial(event, value)))
