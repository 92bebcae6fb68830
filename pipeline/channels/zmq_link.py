"""One ZeroMQ socket on one event loop: driven by its file descriptor, read in bounded batches.

What `channels.py` is made of. Plain sockets, because a zmq.asyncio socket costs five times the CPU a message,
loses the message when its `recv()` is cancelled, and queues a non-blocking send behind waiting ones. Here a
message leaves the socket only in a statement that hands it over without awaiting, so a cancelled receive has
taken nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import zmq

from tensorferry.codecs.errors import BadMessage, ChannelClosed, DeploymentError, PeerBusy
from tensorferry.codecs.frames import Buffer, Limits, decode
from tensorferry.codecs.messages import Message
from tensorferry.pipeline.channels.addresses import TCP, host_and_port, is_loopback, listening_host, reachable_host
from tensorferry.pipeline.channels.curve_keys import CurveClient, CurveServer

Context = zmq.Context[zmq.Socket[bytes]]

COPY_BELOW_NBYTES = 64 << 10  #: smaller frames are copied at the send, larger ones travel from where they lie
BATCH = 64  #: messages taken in a row before other tasks have a turn
PATH_NBYTES = 107  #: of a UNIX socket's path. Source: unix(7), sun_path is 108 bytes with its final NUL
MAX_SOCKETS = 16384  #: of a context; ZeroMQ's own 1023 is fewer than a large deployment has processes
RECONNECT_MS = 20  #: first wait after a refused connection: stages start in any order
#: Of TCP: a peer that says nothing of itself for so long is hung up on, be it still in its handshake or long connected.
HANDSHAKE_MS, PING_MS, SILENCE_MS = 10_000, 5_000, 20_000
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENT = struct.Struct("=HI")  #: number and value, as the machine orders bytes. Source: zmq_socket_monitor(3)


class Received(NamedTuple):
    """A message and its inline frames (memoryviews, valid as long as they are referred to)."""

    message: Message
    frames: Sequence[Buffer]
    peer: bytes = b""  #: which client: what `FrontDoor.send_nowait` takes
    client: str = ""  #: the name that the gate knows its key by; empty where there are no keys


class Denial(NamedTuple):
    """A connection that was refused in its handshake."""

    reason: str  #: a sentence's end
    final: bool  #: it is not tried again


def open_context() -> Context:
    """The process's ZeroMQ context: a context manager that ends promptly once its channels are closed."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def check_address(address: str, *, bound: bool = False, curve: bool = False) -> str | None:
    """The path of an ipc address; None for one of TCP. Raises DeploymentError, with the reason, for whatever else.

    bound: to listen there. curve: with keys, without which only loopback is listened at.
    An ipc address is guarded by the permissions of its folder. An abstract name (`ipc://@name`) has no folder, and
    a relative path or a wildcard means something else to every process.
    """
    if address.startswith(TCP):
        _check_tcp(address, bound, curve)
        return None
    path = address.removeprefix("ipc://")
    if path == address:
        raise DeploymentError(
            f"{address}: refused: only ipc:// addresses in the runtime directory and tcp:// are served"
        )
    if not path.startswith("/") or "\0" in path:
        raise DeploymentError(f"{address}: refused: an ipc address is the absolute path of a socket file")
    if (nbytes := len(os.fsencode(path))) > PATH_NBYTES:
        raise DeploymentError(f"{address}: refused: its path has {nbytes} bytes; a UNIX socket takes {PATH_NBYTES}")
    return path


def _check_tcp(address: str, bound: bool, curve: bool) -> None:
    try:
        host, _ = host_and_port(address)
        if not bound:
            reachable_host(host)
            return
        wide = not is_loopback(listening_host(host))
    except ValueError as problem:
        raise DeploymentError(f"{address}: refused: {problem}") from None
    if wide and not curve:
        raise DeploymentError(f"{address}: refused: it can be reached from other machines; set security.keys")


def open_socket(
    context: Context,
    kind: int,
    *,
    high_water: int = 1,
    receive_water: int = 0,
    limits: Limits | None = None,
    curve: CurveServer | CurveClient | None = None,
) -> zmq.Socket[bytes]:
    """high_water: messages that may wait for a peer to take them. receive_water: those of each peer that are read
    before they are taken; 0: all that come. limits: a frame over them is not even read.

    curve: its keys, if it is to have some.
    """
    try:
        made = context.socket(kind)
    except zmq.ZMQError as problem:
        raise DeploymentError(f"cannot open one more channel: {problem}; raise the limit on open files") from None
    made.linger = 0  # ZeroMQ's own default waits for ever for a peer that is gone
    made.sndhwm = high_water
    # Receivers take whatever comes. At a mark of its own ZeroMQ stops reading, and when the sender then closes
    # it drops what the kernel still holds (libzmq#4660; seen: 1,300 of 5,000 messages after a clean flush).
    made.rcvhwm = receive_water
    made.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    made.set(zmq.RECONNECT_IVL_MAX, 1000)
    if limits is not None:
        made.set(zmq.MAXMSGSIZE, max(limits.header_nbytes, limits.inline_nbytes))
    if curve is not None:
        curve.secure(made)
    return made


def denial(event: int, value: int) -> Denial:
    """What an event of HANDSHAKE_FAILURES says."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Denial("its deployment does not know this key", True)
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return Denial("one side has keys and the other has none", True)
    return Denial("it hung up in the handshake, as one does whose key is another, or who has none", False)


class Link:
    """A socket with what it takes to wait for it.

    ZeroMQ's descriptor is readable when the state of the socket may have changed, until its EVENTS are read;
    a send or receive may see to the change first, and then the descriptor is silent. So whoever waits is
    looked after at every readiness, and after every send.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self._socket, self.address = socket, address
        self._fd = socket.fileno()
        self._loop: asyncio.AbstractEventLoop | None = None  # set once the descriptor is watched
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._file: tuple[str, int, int] | None = None  # path, device and inode that we bound
        self._watches: list[tuple[int, Callable[[int, int], None]]] = []  # events, and who is told of them
        self._stop_watching: Callable[[], None] | None = None  # for events
        if address.startswith(TCP):
            # Off by default, and then `[::1]` is no such device. Of a name IPv4 addresses are found as well.
            socket.ipv6 = not re.fullmatch(r"[0-9.]+", host_and_port(address)[0])
            # Nobody tells of a peer that vanishes without a word, as the kernel does of one by ipc.
            socket.handshake_ivl = HANDSHAKE_MS
            socket.heartbeat_ivl, socket.heartbeat_timeout = PING_MS, SILENCE_MS

    def connect(self) -> None:
        self._watch()
        self._socket.connect(self.address)

    def on_break(self, told: Callable[[], None]) -> None:
        """Call `told` on the running loop whenever the connection breaks; ZeroMQ makes it again by itself.

        The kernel breaks it when the process at the other end has died; ZeroMQ does over a frame that is too large.
        """
        self.on_events(zmq.EVENT_DISCONNECTED, lambda event, value: told())

    def on_events(self, wanted: int, told: Callable[[int, int], None]) -> None:
        """Call `told` with the number and value of such events, on the running loop. Before `connect` or `bind`."""
        self._watches.append((wanted, told))

    def _watch(self) -> None:
        """A socket has one monitor, for all that want to be told."""
        if not self._watches or self._stop_watching is not None:
            return
        loop, events = asyncio.get_running_loop(), open_socket(self._socket.context, zmq.PAIR)

        def look() -> None:
            found: list[tuple[int, int]] = []
            with suppress(zmq.Again):
                while True:  # all of them: the descriptor tells of changes alone
                    found.append(_EVENT.unpack(events.recv_multipart(zmq.NOBLOCK)[0]))
            for event, value in found:
                for wanted, told in self._watches:
                    if event & wanted:
                        told(event, value)

        address = f"inproc://events-{secrets.token_hex(8)}"
        self._socket.monitor(address, reduce(or_, (wanted for wanted, _ in self._watches)))
        events.connect(address)
        fd = events.fileno()
        loop.add_reader(fd, look)
        look()

        def stop() -> None:
            loop.remove_reader(fd)
            events.close()

        self._stop_watching = stop

    def bind(self, path: str | None) -> None:
        """Listen at a path ourselves and hand ZeroMQ the descriptor; None: let it listen at its TCP address.
        Raises DeploymentError, having closed the socket.

        On a path its own bind steals an address in use, and its close unlinks the file late, in another thread, when
        the file may be a successor's already.
        """
        try:
            self._watch()
            if path is None:
                self._socket.bind(self.address)  # refuses an address in use, as the kernel does
            else:
                self._bind(path)
        except (OSError, zmq.ZMQError) as problem:
            self.close()
            raise DeploymentError(f"cannot listen at {self.address}: {problem.strerror}") from None

    def mend(self) -> bool:
        """Bind anew where the socket file has been removed; False: it is there. Raises OSError, ZMQError.

        Connections stay. So does the old listener, which nobody can reach: with it ZeroMQ would end them.
        """
        if self._file is None or self._socket.closed or is_file(*self._file):
            return False
        self._bind(self._file[0])
        return True

    def _bind(self, path: str) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            found = os.stat(path)
            self._file = path, found.st_dev, found.st_ino
            listener.listen(4096)
            listener.setblocking(False)
            self._socket.set(zmq.USE_FD, listener.fileno())
            self._socket.bind(self.address)
            listener.detach()  # ZeroMQ closes it

    def check_open(self) -> None:
        if self._socket.closed:
            raise ChannelClosed(self.address)

    async def wait(self, events: int) -> None:
        """Until one of the events (POLLIN, POLLOUT) may have come. Raises ChannelClosed."""
        self.check_open()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._look)
        waiter = events, asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            self._look()
            await waiter[1]
        finally:
            self._waiters.remove(waiter)
        self.check_open()

    def receive(self, most_frames: int) -> list[zmq.Frame]:
        """The frames of the next message, at most so many of them; empty: nothing is there."""
        self.check_open()
        frames: list[zmq.Frame] = []
        more = True
        while more:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:  # only before the first: a message is there whole or not at all
                break
            if len(frames) < most_frames:
                frames.append(frame)
            more = frame.more
        return frames

    def send(self, frames: Sequence[Buffer], peer: str) -> None:
        self.check_open()
        ready = [_bytes_of(frame) for frame in frames]  # raises before the first is sent, if at all
        try:
            self._put(ready)
        except zmq.Again:
            self._look()  # a send looks for news of free room at most once a millisecond; this always does
            try:
                self._put(ready)
            except zmq.Again:
                raise PeerBusy(peer) from None
        finally:
            if self._waiters:
                self._look()

    def _put(self, frames: Sequence[Buffer]) -> None:
        """Raises Again when nothing was sent.

        When a peer vanishes between two frames, ZeroMQ takes the first back, refuses the next, and swallows
        all that follow up to the last. So the rest is offered to it: else it would swallow the next message.
        """
        refused: zmq.Again | None = None
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            flags = zmq.NOBLOCK if index == last else zmq.NOBLOCK | zmq.SNDMORE
            try:
                self._socket.send(frame, flags, copy=len(frame) < COPY_BELOW_NBYTES)
            except zmq.Again as problem:
                if index == 0:
                    raise
                refused = problem
        if refused is not None:
            raise refused

    async def flush(self, deadline_s: float) -> bool:
        self.check_open()
        monitor = open_socket(self._socket.context, zmq.PAIR)
        watch = Link(monitor, f"inproc://flush-{secrets.token_hex(8)}")
        try:
            self._socket.monitor(watch.address, zmq.EVENT_MONITOR_STOPPED)
            monitor.connect(watch.address)
            loop = asyncio.get_running_loop()
            started = loop.time()
            self.close(deadline_s)
            try:
                async with asyncio.timeout(deadline_s + 1.0):
                    await watch.wait(zmq.POLLIN)
            except TimeoutError:
                return False
            return loop.time() - started < deadline_s - 0.005  # ZeroMQ counts milliseconds, with a coarse clock
        finally:
            watch.close()

    def close(self, linger_s: float = 0.0) -> None:
        if self._socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        if self._stop_watching is not None:
            self._stop_watching()
        if self._file is not None:
            _unlink(*self._file)
        self._socket.close(linger=int(linger_s * 1000))
        self._wake(zmq.POLLIN | zmq.POLLOUT)  # to find it closed

    def _look(self) -> None:
        if not self._socket.closed:
            self._wake(int(self._socket.get(zmq.EVENTS)))

    def _wake(self, events: int) -> None:
        for wanted, waiter in self._waiters:
            if wanted & events and not waiter.done():
                waiter.set_result(None)


class Intake:
    """The receiving half of a channel: bounded batches, limits, and a home for what is not a message."""

    def __init__(
        self,
        link: Link,
        limits: Limits,
        on_refused: Callable[[BadMessage], None],
        *,
        routed: bool = False,
        named: bool = False,
    ) -> None:
        self._link, self._limits, self._on_refused = link, limits, on_refused
        self._routed = routed  # the first frame says which client
        self._named = named  # the gate has said who it is
        self._taken_in_a_row = 0

    def receive_nowait(self) -> Received | None:
        for _ in range(BATCH):
            try:
                return self._take()
            except BadMessage as problem:
                self._on_refused(problem)
        return None

    async def receive(self) -> Received:
        while True:
            if self._taken_in_a_row >= BATCH:
                self._taken_in_a_row = 0
                await asyncio.sleep(0)  # others' turn, before anything is taken
            self._taken_in_a_row += 1
            try:
                received = self._take()
            except BadMessage as problem:
                self._on_refused(problem)
                continue
            if received is not None:
                return received
            self._taken_in_a_row = 0
            await self._link.wait(zmq.POLLIN)

    async def next(self) -> Received:
        try:
            return await self.receive()
        except ChannelClosed:
            raise StopAsyncIteration from None

    def _take(self) -> Received | None:
        """The next message, None: nothing is there. Raises BadMessage for what was taken and is none."""
        # One frame over the limit is kept, so that decode sees that it is passed.
        taken = self._link.receive(self._limits.frames + 1 + self._routed)
        if not taken:
            return None
        client = str(taken[-1].get("User-Id")) if self._named else ""
        peer = taken.pop(0).bytes if self._routed else b""
        # Their lengths are enough to refuse what they are of: a thousand frames are a thousand views, for nothing.
        message, inline = decode([frame.buffer for frame in taken[:1]] + taken[1:], self._limits)
        return Received(message, [frame.buffer for frame in inline], peer, client)


def _bytes_of(buffer: Buffer) -> Any:
    """A buffer as bytes or a view of bytes, so that its length is what will be sent. Raises for what is not one."""
    if isinstance(buffer, bytes):
        return buffer
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else b""


def is_file(path: str, device: int, inode: int) -> bool:
    """Whether this very file is at this path."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (device, inode)


def _unlink(path: str, device: int, inode: int) -> None:
    """Remove the socket file that we bound, not one that somebody has bound there since."""
    with suppress(FileNotFoundError):
        if is_file(path, device, inode):
            os.unlink(path)
