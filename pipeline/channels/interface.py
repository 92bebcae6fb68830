"""What channels do, whatever carries their messages: a `Receiver`, a `Sender`, or both.

`channels.py` makes them of ZeroMQ sockets, `inproc.py` of queues in one process. A `Network` makes those of a stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

from tensorferry.codecs.errors import BadMessage, ChannelClosed
from tensorferry.codecs.frames import Buffer, Limits
from tensorferry.codecs.messages import Message

HIGH_WATER = 1000  #: messages that may wait for one peer, beside what the kernel holds


class Received(NamedTuple):
    """A message and its inline frames (memoryviews, valid as long as they are referred to)."""

    message: Message
    frames: Sequence[Buffer]
    peer: bytes = b""  #: which client: what `Door.send_nowait` takes
    client: str = ""  #: the name that the gate knows its key by; empty where there are no keys


class Denial(NamedTuple):
    """A connection that was refused in its handshake."""

    reason: str  #: a sentence's end
    final: bool  #: it is not tried again


class Channel(ABC):
    """Belongs to one event loop: make, use and close it in the loop's thread."""

    address: str

    @abstractmethod
    def close(self, linger_s: float = 0.0) -> None:
        """Close. Messages that were not received are lost. Messages that were not sent are dropped, or sent in the
        background for at most `linger_s`.

        The network's end waits that long too. By default nothing lingers: an unsent proxy is worthless once its pool is
        gone.
        """

    @abstractmethod
    async def flush(self, deadline_s: float) -> bool:
        """Close, and wait until what was queued is with the peers' kernel; False: not all of it within the deadline.

        It is the last call on a channel: ZeroMQ says when a closed socket has sent everything, and of an open one it
        says nothing.
        """

    @abstractmethod
    def mend(self) -> bool:
        """Bind again where the socket file has been removed; False: it is there, or none is needed.

        Raises OSError, ZMQError.
        """


class Receiver(Channel):
    """Gives messages: `async for received in receiver`."""

    @abstractmethod
    def receive_nowait(self) -> Received | None:
        """The next message; None: nothing is there (or a batch of refused messages was all there was)."""

    @abstractmethod
    async def receive(self) -> Received:
        """The next message. A call that is cancelled has taken none. Raises ChannelClosed."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        try:
            return await self.receive()
        except ChannelClosed:
            raise StopAsyncIteration from None


class Sender(Channel):
    """Takes messages to one peer. They arrive in order, whether or not the peer is there yet."""

    peer: str  #: its name, for errors

    @abstractmethod
    def send_nowait(self, message: Message, inline: Sequence[Buffer] = ()) -> None:
        """Queue a message, whole or not at all. Raises PeerBusy when the queue is full, ChannelClosed.

        inline: contiguous buffers. Those of 64 KiB or more are not copied, so nobody may change them until the peer has
        them. They are released once they are sent.
        """

    @abstractmethod
    async def writable(self) -> None:
        """Wait until the queue has room. Raises ChannelClosed."""


class Door(Receiver):
    """Where clients connect: it gives their messages, and takes messages to each of them by `Received.peer`."""

    @abstractmethod
    def send_nowait(self, peer: bytes, message: Message, inline: Sequence[Buffer] = ()) -> None:
        """Queue a message for a client, as `Sender.send_nowait`. Raises PeerGone when it has left, PeerBusy,
        ChannelClosed.

        If a client leaves while its message is being queued, only the next message to it raises.
        """


class Network(Protocol):
    """Makes the channels of one process.

    limits: a longer message is refused, and its sender may be disconnected before it is read. on_refused: called for
    each message that is not taken. on_denied: called for each connection that was refused before a message was read.
    """

    def inbox(
        self,
        address: str,
        limits: Limits,
        on_refused: Callable[[BadMessage], None],
        on_denied: Callable[[Denial], None],
    ) -> Receiver:
        """Where this process takes the messages of its peers. Raises DeploymentError if the address is in use."""
        ...

    def outbox(self, address: str, peer: str, on_break: Callable[[], None]) -> Sender:
        """The way to a peer's inbox. on_break: called on the loop whenever the connection breaks."""
        ...

    def front_door(
        self,
        address: str,
        limits: Limits,
        on_refused: Callable[[BadMessage], None],
        on_denied: Callable[[Denial], None],
    ) -> Door:
        """Where this process takes the messages of clients. Raises DeploymentError if the address is in use."""
        ...
