"""Messages between processes: ZeroMQ sockets that belong to one event loop.

| channel     | socket                   | between                           | full: `PeerBusy`; and nobody there |
|-------------|--------------------------|-----------------------------------|------------------------------------|
| `Inbox`     | PULL, bound              | everybody -> this process         |                                    |
| `Outbox`    | PUSH, connected          | this process -> one inbox         | queued, delivered when it comes    |
| `FrontDoor` | ROUTER, bound, mandatory | one tokenizer <-> all its clients | `PeerGone`                         |
| `Dealer`    | DEALER, connected        | one client <-> one tokenizer      | queued, delivered when it comes    |

What bounds memory: a sender queues up to its `high_water`; a receiver takes all that comes, since with a mark of
its own ZeroMQ loses messages (see `sockets.py`), so the limits on requests in flight must bound what peers send. A door
on a network trusts nobody to keep to these, and has a mark: of a client that leaves the last words may be lost, and its
requests then end for want of somebody who hears the answer.
A queue is full, then, where a peer is stopped, dead or not there yet, or for the moment after a long burst.
Addresses are ipc, or TCP: that of another interface than loopback with keys alone (`curve`). Make, use and close a
channel in its loop's thread, before its context ends.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Self

import zmq

from tensorferry.codecs.errors import BadMessage, PeerGone
from tensorferry.codecs.frames import Buffer, Limits, encode
from tensorferry.codecs.messages import Message
from tensorferry.pipeline.channels.addresses import TCP
from tensorferry.pipeline.channels.curve_keys import CurveClient, CurveServer
from tensorferry.pipeline.channels.zmq_link import (
    HANDSHAKE_FAILURES,
    Context,
    Denial,
    Intake,
    Link,
    Received,
    check_address,
    denial,
    open_context,
    open_socket,
)

__all__ = ["Dealer", "FrontDoor", "Inbox", "Outbox", "Received", "check_address", "open_context"]

HIGH_WATER = 1000  #: messages that may wait for one peer, beside what the kernel holds
UNREAD = 64  #: messages of one client on a network that are held before they are taken


class Inbox:
    """Where a process takes its messages: `async for received in inbox`."""

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
        on_refused: called for each dropped message. curve: only who has a key that the context's `Gate` knows comes in.
        on_denied: called on the running loop for each connection by TCP that failed before the gate was asked.
        """
        self.address, path = address, check_address(address, bound=True, curve=curve is not None)
        self._link = Link(open_socket(context, zmq.PULL, limits=limits, curve=curve), address)
        _tell_of_denials(self._link, on_denied)
        self._link.bind(path)
        self._intake = Intake(self._link, limits, on_refused)

    def receive_nowait(self) -> Received | None:
        """The next message; None: nothing is there (or a batch of refused messages was all there was)."""
        return self._intake.receive_nowait()

    async def receive(self) -> Received:
        """The next message. Cancelled, it has taken none. Raises ChannelClosed."""
        return await self._intake.receive()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        return await self._intake.next()

    def mend(self) -> bool:
        """Bind anew where the socket file has been removed; False: it is there. Raises OSError, ZMQError."""
        return self._link.mend()

    def close(self) -> None:
        """Unbind and close. What was not received is lost."""
        self._link.close()


class Outbox:
    """The way to one peer's inbox. Messages arrive in order, whether or not the peer is there yet."""

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
        self.address, self.peer = address, peer
        self._link = Link(open_socket(context, zmq.PUSH, high_water=high_water, curve=curve), address)
        if on_break is not None:
            self._link.on_break(on_break)
        self._link.connect()

    def send_nowait(self, message: Message, inline: Sequence[Buffer] = ()) -> None:
        """Queue a message, whole or not at all. Raises PeerBusy when the queue is full, ChannelClosed.

        inline: contiguous buffers. Those of 64 KiB or more are not copied: they must not change until the peer
        has them, so hand over what nobody writes to any more. ZeroMQ frees them when they are sent.
        """
        self._link.send(encode(message, inline), self.peer)

    async def writable(self) -> None:
        """Until the queue has room. Raises ChannelClosed."""
        await self._link.wait(zmq.POLLOUT)

    async def flush(self, deadline_s: float) -> bool:
        """Close, and wait until what was queued is with the peer's kernel; False: not all of it within the deadline.

        The last thing to do with a channel: ZeroMQ tells when a closed socket has let go, and of an open one nothing.
        """
        return await self._link.flush(deadline_s)

    def close(self, linger_s: float = 0.0) -> None:
        """Close. What is still queued is dropped, or sent behind our back for at most `linger_s`.

        The context's end waits that long too. By default nothing lingers: an unsent proxy is worthless once
        its pool is gone.
        """
        self._link.close(linger_s)


class FrontDoor:
    """Where clients come in: `async for received in door`, and the way back to each by `received.peer`."""

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
        self.address, path = address, check_address(address, bound=True, curve=curve is not None)
        unread = UNREAD if path is None else 0
        router = open_socket(
            context, zmq.ROUTER, high_water=high_water, receive_water=unread, limits=limits, curve=curve
        )
        router.set(zmq.ROUTER_MANDATORY, 1)  # otherwise what cannot be delivered vanishes without a word
        self._link = Link(router, address)
        _tell_of_denials(self._link, on_denied)
        self._link.bind(path)
        self._intake = Intake(self._link, limits, on_refused, routed=True, named=curve is not None)

    def receive_nowait(self) -> Received | None:
        """As Inbox's."""
        return self._intake.receive_nowait()

    async def receive(self) -> Received:
        """As Inbox's."""
        return await self._intake.receive()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        return await self._intake.next()

    def send_nowait(self, peer: bytes, message: Message, inline: Sequence[Buffer] = ()) -> None:
        """Queue a message for a client, as Outbox's. Raises PeerGone when it has left, PeerBusy, ChannelClosed.

        A client that leaves while its message is being queued is noticed at the next one.
        """
        name = f"client {peer.hex()}"
        try:
            self._link.send([peer, *encode(message, inline)], name)
        except zmq.ZMQError as problem:
            if problem.errno != errno.EHOSTUNREACH:
                raise
            raise PeerGone(name, "has disconnected") from None

    def mend(self) -> bool:
        """Bind anew where the socket file has been removed; False: it is there. Raises OSError, ZMQError."""
        return self._link.mend()

    async def flush(self, deadline_s: float) -> bool:
        """Close, as Outbox's, and wait for every client."""
        return await self._link.flush(deadline_s)

    def close(self, linger_s: float = 0.0) -> None:
        """Unbind and close, as Outbox's."""
        self._link.close(linger_s)


class Dealer:
    """A client's way to one tokenizer, and back: `async for received in dealer`."""

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

        on_denied: called on the running loop for each handshake over TCP that failed, by the gate's word too.
        """
        check_address(address)
        self.address, self.peer = address, peer
        made = open_socket(context, zmq.DEALER, high_water=high_water, limits=limits, curve=curve)
        self._link = Link(made, address)
        if on_break is not None:
            self._link.on_break(on_break)
        _tell_of_denials(self._link, on_denied, also=zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._link.connect()
        self._intake = Intake(self._link, limits, on_refused)

    def receive_nowait(self) -> Received | None:
        """As Inbox's."""
        return self._intake.receive_nowait()

    async def receive(self) -> Received:
        """As Inbox's."""
        return await self._intake.receive()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        return await self._intake.next()

    def send_nowait(self, message: Message, inline: Sequence[Buffer] = ()) -> None:
        """As Outbox's."""
        self._link.send(encode(message, inline), self.peer)

    async def writable(self) -> None:
        """As Outbox's."""
        await self._link.wait(zmq.POLLOUT)

    async def flush(self, deadline_s: float) -> bool:
        """As Outbox's."""
        return await self._link.flush(deadline_s)

    def close(self, linger_s: float = 0.0) -> None:
        """As Outbox's."""
        self._link.close(linger_s)


def _tell_of_denials(link: Link, told: Callable[[Denial], None] | None, also: int = 0) -> None:
    """Of sockets on a network. Whom the gate turns away it has counted itself, so that events of that kind are left out
    but where asked for."""
    if told is not None and link.address.startswith(TCP):
        events = HANDSHAKE_FAILURES & ~zmq.EVENT_HANDSHAKE_FAILED_AUTH | also
        link.on_events(events, lambda event, value: told(denial(event, value)))
