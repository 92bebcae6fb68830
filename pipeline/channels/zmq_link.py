"""One ZeroMQ socket on one event loop, driven by its file descriptor.

`channels.py` uses it instead of zmq.asyncio. A zmq.asyncio socket costs five times the CPU a message, loses the
message when its `recv()` is cancelled, and queues a non-blocking send behind waiting ones. Here a message leaves the
socket only in a statement that hands it over without awaiting, so a cancelled receive has taken nothing.
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
from typing import Any

import zmq

from tensorferry.codecs.errors import ChannelClosed, DeploymentError, PeerBusy
from tensorferry.codecs.frames import Buffer, Limits
from tensorferry.pipeline.channels.addresses import TCP, host_and_port
from tensorferry.pipeline.channels.curve_keys import CurveClient, CurveServer
from tensorferry.pipeline.channels.interface import Channel, Denial
from tensorferry.pipeline.channels.socket_file import is_file, unlink_file

Context = zmq.Context[zmq.Socket[bytes]]

COPY_BELOW_NBYTES = 64 << 10  #: smaller frames are copied at the send, larger ones are sent from where they are
MAX_SOCKETS = 16384  #: of a context; ZeroMQ's own 1023 is fewer than a large deployment has processes
RECONNECT_MS = 20  #: first wait after a refused connection: stages start in any order
#: TCP: a connection is closed when its peer is silent for so long, in the handshake and afterwards.
HANDSHAKE_MS, PING_MS, SILENCE_MS = 10_000, 5_000, 20_000
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENT = struct.Struct("=HI")  #: number and value, as the machine orders bytes. Source: zmq_socket_monitor(3)


def open_context() -> Context:
    """The process's ZeroMQ context: a context manager that ends promptly once its channels are closed."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


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

    curve: its keys, if it has some. Raises DeploymentError when no socket can be opened.
    """
    try:
        made = context.socket(kind)
    except zmq.ZMQError as problem:
        raise DeploymentError(f"cannot open one more channel: {problem}; raise the limit on open files") from None
    made.linger = 0  # with ZeroMQ's default, closing waits forever for a peer that is gone
    made.sndhwm = high_water
    # Receivers take all messages. At a high-water mark ZeroMQ stops reading, and when the sender then closes, ZeroMQ
    # drops what the kernel still holds (libzmq#4660; seen: 1,300 of 5,000 messages after a clean flush).
    made.rcvhwm = receive_water
    made.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    made.set(zmq.RECONNECT_IVL_MAX, 1000)
    if limits is not None:
        made.set(zmq.MAXMSGSIZE, max(limits.header_nbytes, limits.inline_nbytes))
    if curve is not None:
        curve.secure(made)
    return made


def denial(event: int, value: int) -> Denial:
    """The reason that an event of HANDSHAKE_FAILURES gives."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Denial("its deployment does not know this key", True)
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return Denial("one side has keys and the other has none", True)
    return Denial("it hung up in the handshake, as one does whose key is another, or who has none", False)


class Link:
    """A socket, and the tasks that wait for it.

    ZeroMQ's descriptor is readable when the state of the socket may have changed, until its EVENTS are read. A send or
    receive may read the change first, and then the descriptor stays silent. So the waiting tasks are checked whenever
    the descriptor is readable, and after every send.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self._socket, self.address = socket, address
        self._fd = socket.fileno()
        self._loop: asyncio.AbstractEventLoop | None = None  # set once the descriptor is watched
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._file: tuple[str, int, int] | None = None  # path, device and inode that we bound
        self._watches: list[tuple[int, Callable[[int, int], None]]] = []  # events, and the callback for them
        self._stop_watching: Callable[[], None] | None = None  # for events
        if address.startswith(TCP):
            # Off by default, and then `[::1]` fails. With it on, a name is resolved to IPv4 addresses as well.
            socket.ipv6 = not re.fullmatch(r"[0-9.]+", host_and_port(address)[0])
            # The kernel reports the death of an ipc peer. A TCP peer may vanish unreported, so ZeroMQ pings it.
            socket.handshake_ivl = HANDSHAKE_MS
            socket.heartbeat_ivl, socket.heartbeat_timeout = PING_MS, SILENCE_MS

    def connect(self) -> None:
        self._watch()
        self._socket.connect(self.address)

    def on_break(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the running loop whenever the connection breaks; ZeroMQ reconnects by itself.

        The kernel breaks a connection when the process at the other end dies. ZeroMQ breaks it over a frame that is
        too large.
        """
        self.on_events(zmq.EVENT_DISCONNECTED, lambda event, value: callback())

    def on_events(self, wanted: int, callback: Callable[[int, int], None]) -> None:
        """Call `callback` with the number and value of each of these events, on the running loop.

        Call it before `connect` or `bind`.
        """
        self._watches.append((wanted, callback))

    def _watch(self) -> None:
        """Start the socket's monitor, of which it has one for all callbacks."""
        if not self._watches or self._stop_watching is not None:
            return
        loop, events = asyncio.get_running_loop(), open_socket(self._socket.context, zmq.PAIR)

        def look() -> None:
            found: list[tuple[int, int]] = []
            with suppress(zmq.Again):
                while True:  # until none is left: the descriptor reports changes only
                    found.append(_EVENT.unpack(events.recv_multipart(zmq.NOBLOCK)[0]))
            for event, value in found:
                for wanted, callback in self._watches:
                    if event & wanted:
                        callback(event, value)

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
        """Listen at a path and hand ZeroMQ the descriptor; None: ZeroMQ listens at its TCP address.
        Closes the socket and raises DeploymentError when that fails.

        ZeroMQ's own bind to a path steals an address in use. Its close unlinks the file late, in another thread, when
        the path may have another process's file already.
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
        """See `Channel.mend`. Connections stay. So does the old listener, which nobody can reach: if ZeroMQ closed it,
        it would close its connections too."""
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
        """Wait until one of the events (POLLIN, POLLOUT) may have come. Raises ChannelClosed."""
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
        """The first `most_frames` frames of the next message; empty: nothing is there."""
        self.check_open()
        frames: list[zmq.Frame] = []
        more = True
        while more:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:  # only before the first frame: a message has arrived whole or not at all
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
            self._look()  # a send checks for free room at most once a millisecond; this always does
            try:
                self._put(ready)
            except zmq.Again:
                raise PeerBusy(peer) from None
        finally:
            if self._waiters:
                self._look()

    def _put(self, frames: Sequence[Buffer]) -> None:
        """Send the frames of one message. Raises Again when nothing was sent.

        When a peer vanishes between two frames, ZeroMQ takes the first back, refuses the next, and drops all that
        follow up to the last. So the rest is sent all the same: otherwise ZeroMQ would drop the next message.
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
            unlink_file(*self._file)
        self._socket.close(linger=int(linger_s * 1000))
        self._wake(zmq.POLLIN | zmq.POLLOUT)  # the waiting tasks find the socket closed

    def _look(self) -> None:
        if not self._socket.closed:
            self._wake(int(self._socket.get(zmq.EVENTS)))

    def _wake(self, events: int) -> None:
        for wanted, waiter in self._waiters:
            if wanted & events and not waiter.done():
                waiter.set_result(None)


class LinkChannel(Channel):
    """What the channels over a link have in common."""

    def __init__(self, link: Link) -> None:
        self._link, self.address = link, link.address

    def close(self, linger_s: float = 0.0) -> None:
        self._link.close(linger_s)

    async def flush(self, deadline_s: float) -> bool:
        return await self._link.flush(deadline_s)

    def mend(self) -> bool:
        return self._link.mend()


def _bytes_of(buffer: Buffer) -> Any:
    """A buffer as bytes or a view of bytes, so that its length is what will be sent. Raises TypeError if it is none."""
    if isinstance(buffer, bytes):
        return buffer
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else b""
