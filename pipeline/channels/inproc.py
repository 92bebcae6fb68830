"""Channels within one process: the `Receiver` and `Sender` of `interface.py` over queues, without sockets.

Tests of stages use them where sockets are not the subject. A message is encoded when it is sent and decoded when it is
taken, as between processes: it shares no memory with what the sender passed, and the receiver's limits hold. A message
to an address where nobody receives yet waits at the sender, up to its high-water mark.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from tensorferry.codecs.errors import BadMessage, ChannelClosed, DeploymentError, PeerBusy, PeerGone
from tensorferry.codecs.frames import Buffer, Limits, decode, encode
from tensorferry.codecs.messages import Message
from tensorferry.pipeline.channels.interface import HIGH_WATER, Channel, Door, Received, Receiver, Sender

Refused = Callable[[BadMessage], None]


def _unheard() -> None:
    pass


class InprocNetwork:
    """The `Network` of all processes that a test plays: those who use one object reach each other's addresses."""

    def __init__(self) -> None:
        self._receivers: dict[str, _Queue] = {}  # by address, as the senders
        self._senders: dict[str, list[_Sender]] = {}
        self._clients = count(1)

    def inbox(self, address: str, limits: Limits, on_refused: Refused, on_denied: object = None) -> Receiver:
        return _Queue(self, address, limits, on_refused)

    def outbox(
        self, address: str, peer: str, on_break: Callable[[], None] = _unheard, high_water: int = HIGH_WATER
    ) -> Sender:
        return _Sender(self, address, peer, on_break, high_water)

    def front_door(self, address: str, limits: Limits, on_refused: Refused, on_denied: object = None) -> Door:
        return _Door(self, address, limits, on_refused)

    def client(self, door: str, peer: str, limits: Limits, on_refused: Refused) -> tuple[Sender, Receiver]:
        """A client's way to a front door, and the way back."""
        client = next(self._clients).to_bytes(5, "big")
        answers = _Queue(self, _answers_to(client), limits, on_refused)
        return _Sender(self, door, peer, _unheard, HIGH_WATER, client), answers

    def receiver(self, address: str) -> _Queue | None:
        return self._receivers.get(address)

    def bind(self, address: str, receiver: _Queue) -> None:
        """Raises DeploymentError when the address is in use."""
        if address in self._receivers:
            raise DeploymentError(f"cannot listen at {address}: Address already in use")
        self._receivers[address] = receiver
        for sender in self._senders.get(address, []):
            sender.deliver()

    def unbind(self, address: str, receiver: _Queue) -> None:
        if self._receivers.get(address) is receiver:
            del self._receivers[address]
            for sender in self._senders.get(address, []):
                asyncio.get_running_loop().call_soon(sender.on_break)

    def connect(self, address: str, sender: _Sender) -> None:
        self._senders.setdefault(address, []).append(sender)

    def disconnect(self, address: str, sender: _Sender) -> None:
        self._senders[address].remove(sender)


class _Inproc(Channel):
    """What these channels have in common."""

    def __init__(self, address: str) -> None:
        self.address, self.closed = address, False
        self._changed = asyncio.Event()

    def check_open(self) -> None:
        if self.closed:
            raise ChannelClosed(self.address)

    async def wait(self) -> None:
        """Wait for the next change. Raises ChannelClosed."""
        self._changed.clear()
        await self._changed.wait()
        self.check_open()

    def changed(self) -> None:
        self._changed.set()

    def close(self, linger_s: float = 0.0) -> None:
        self.closed = True
        self.changed()

    async def flush(self, deadline_s: float) -> bool:
        self.check_open()
        self.close()
        return True

    def mend(self) -> bool:
        return False


class _Queue(_Inproc, Receiver):
    """A receiver. address: where it is bound; empty: nowhere."""

    def __init__(self, network: InprocNetwork, address: str, limits: Limits, on_refused: Refused) -> None:
        _Inproc.__init__(self, address)
        self._network, self._limits, self._on_refused = network, limits, on_refused
        self._messages: deque[tuple[bytes, list[bytes]]] = deque()
        network.bind(address, self)

    def put(self, peer: bytes, frames: list[bytes]) -> None:
        self._messages.append((peer, frames))
        self.changed()

    def receive_nowait(self) -> Received | None:
        self.check_open()
        while self._messages:
            peer, frames = self._messages.popleft()
            try:
                message, inline = decode(frames, self._limits)
            except BadMessage as problem:
                self._on_refused(problem)
                continue
            return Received(message, [memoryview(frame) for frame in inline], peer)
        return None

    async def receive(self) -> Received:
        while (received := self.receive_nowait()) is None:
            await self.wait()
        return received

    def close(self, linger_s: float = 0.0) -> None:
        if not self.closed:
            self._network.unbind(self.address, self)
        _Inproc.close(self, linger_s)


class _Sender(_Inproc, Sender):
    def __init__(
        self,
        network: InprocNetwork,
        address: str,
        peer: str,
        on_break: Callable[[], None],
        high_water: int,
        client: bytes = b"",
    ) -> None:
        _Inproc.__init__(self, address)
        self.peer, self.on_break = peer, on_break
        self._network, self._high_water, self._client = network, high_water, client
        self._waiting: deque[list[bytes]] = deque()
        network.connect(address, self)

    def send_nowait(self, message: Message, inline: Sequence[Buffer] = ()) -> None:
        self.check_open()
        frames = [bytes(frame) for frame in encode(message, inline)]
        if self._network.receiver(self.address) is None and len(self._waiting) >= self._high_water:
            raise PeerBusy(self.peer)
        self._waiting.append(frames)
        self.deliver()

    def deliver(self) -> None:
        """Hand over what waits, if somebody receives at the address."""
        receiver = self._network.receiver(self.address)
        while receiver is not None and self._waiting:
            receiver.put(self._client, self._waiting.popleft())
            self.changed()

    async def writable(self) -> None:
        self.check_open()
        while len(self._waiting) >= self._high_water:
            await self.wait()

    async def flush(self, deadline_s: float) -> bool:
        self.check_open()
        try:
            async with asyncio.timeout(deadline_s):
                while self._waiting:
                    await self.wait()
        except TimeoutError:
            pass
        self.close()
        return not self._waiting

    def close(self, linger_s: float = 0.0) -> None:
        if not self.closed:
            self._network.disconnect(self.address, self)
        _Inproc.close(self, linger_s)


class _Door(_Queue, Door):
    def send_nowait(self, peer: bytes, message: Message, inline: Sequence[Buffer] = ()) -> None:
        self.check_open()
        client = self._network.receiver(_answers_to(peer))
        if client is None:
            raise PeerGone(f"client {peer.hex()}", "has disconnected")
        client.put(b"", [bytes(frame) for frame in encode(message, inline)])


def _answers_to(client: bytes) -> str:
    return f"client {client.hex()}"
