"""Channels between real processes: nothing is lost, nothing is silent, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import pickle  # noqa: TID251  (the attack, not the code)
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import zmq

from tensorferry.codecs.errors import BadMessage, ChannelClosed, DeploymentError, PeerBusy, PeerGone
from tensorferry.codecs.frames import Limits, encode
from tensorferry.codecs.messages import Cancel, Drain, Heartbeat, Message, Origin
from tensorferry.pipeline.channels.channels import (
    Context,
    Dealer,
    FrontDoor,
    Inbox,
    Outbox,
    Received,
    check_address,
    open_context,
)
from tensorferry.pipeline.channels.intake import BATCH
from tensorferry.pipeline.channels.zmq_link import Link, open_socket

ME = Origin("encoder", 0, 7)
LIMITS = Limits(frames=8, header_nbytes=1 << 16, inline_nbytes=64 << 20)
DEADLINE_S = 6.0

PRELUDE = """
import asyncio, hashlib, os, sys, time, zmq
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.messages import Heartbeat, Origin
from tensorferry.codecs.errors import PeerBusy
from tensorferry.pipeline.channels.channels import *
ME = Origin("tokenizer", 0, 8)
LIMITS = Limits(frames=8, header_nbytes=1 << 16, inline_nbytes=64 << 20)
address = sys.argv[1]
"""

#: Receives until a Drain, then prints the numbers of all beats.
READER = """
async def main():
    def refuse(problem): raise problem
    with open_context() as context:
        inbox = Inbox(context, address, LIMITS, refuse)
        print("up", flush=True)
        beats = []
        async for received in inbox:
            if not isinstance(received.message, Heartbeat):
                break
            beats.append(received.message.in_flight)
        print(*beats)
        inbox.close()
asyncio.run(main())
"""


def beat(number: int) -> Heartbeat:
    return Heartbeat(ME, number)


@pytest.fixture(scope="module", autouse=True)
def what_libraries_keep() -> None:
    """Before anything is counted: pyzmq keeps a thread for uncopied frames, with its sockets, and uvloop a pipe."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://one")
        other.connect("inproc://one")
        one.send(bytes(1 << 20), copy=False)
        other.recv()
    uvloop.new_event_loop().close()


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder whose path is short enough for any socket."""
    with tempfile.TemporaryDirectory(prefix="tf-") as made:
        yield Path(made)


@pytest.fixture
def address(home: Path) -> str:
    return f"ipc://{home}/it"


@pytest.fixture
def context() -> Iterator[Context]:
    with open_context() as context:
        yield context


@pytest.fixture
def dropped() -> list[BadMessage]:
    return []


@pytest.fixture
def child(may_start_processes: None) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """child(code, *arguments): a new Python process that knows the channels; killed at the end."""
    running: list[subprocess.Popen[bytes]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *arguments]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


async def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110  (what is waited for happens in ZeroMQ's threads)
            await asyncio.sleep(0)


async def receive_all(channel: Any, count: int) -> list[Received]:
    async with asyncio.timeout(DEADLINE_S):
        return [await channel.receive() for _ in range(count)]


def numbers(received: list[Received]) -> list[int]:
    return [it.message.in_flight for it in received if isinstance(it.message, Heartbeat)]


def descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(found)


# --- delivery -------------------------------------------------------------------------------------------


async def test_another_process_is_heard_in_order(context, address, dropped, child):
    with contextlib.closing(Inbox(context, address, LIMITS, dropped.append)) as inbox:
        process = child(
            """
            async def main():
                with open_context() as context:
                    outbox = Outbox(context, address, "parent")
                    for number in range(5000):
                        while True:
                            try:
                                outbox.send_nowait(Heartbeat(ME, number), [b"%d" % number])
                                break
                            except PeerBusy:
                                await outbox.writable()
                    assert await outbox.flush(10.0)
            asyncio.run(main())
            """,
            address,
        )
        got = await receive_all(inbox, 5000)
        assert numbers(got) == list(range(5000))
        assert [bytes(it.frames[0]) for it in got] == [b"%d" % number for number in range(5000)]
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
    assert not dropped


async def test_a_peer_that_comes_later_gets_everything_in_order(context, address, dropped):
    outbox = Outbox(context, address, "later")
    for number in range(100):
        outbox.send_nowait(beat(number))
    with contextlib.closing(Inbox(context, address, LIMITS, dropped.append)) as inbox:
        assert numbers(await receive_all(inbox, 100)) == list(range(100))
    outbox.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_b19_a_cancelled_receive_loses_nothing(context, address, dropped, seed):
    count, dice = 10_000, random.Random(seed)
    inbox = Inbox(context, address, LIMITS, dropped.append)
    outbox = Outbox(context, address, "self", high_water=500)
    got: list[Received] = []
    cancelled = 0

    async def send() -> None:
        for number in range(count):
            while True:
                try:
                    outbox.send_nowait(beat(number))
                    break
                except PeerBusy:
                    await outbox.writable()
            if dice.random() < 0.3:
                await asyncio.sleep(0)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        while len(got) < count:
            receiver = asyncio.create_task(inbox.receive())
            for _ in range(dice.choice([0, 1, 1, 2, 3, 5])):
                await asyncio.sleep(0)
            if dice.random() < 0.8:
                receiver.cancel()
            try:
                got.append(await receiver)
            except asyncio.CancelledError:
                cancelled += 1
    assert cancelled > 1000
    assert numbers(got) == list(range(count))
    inbox.close()
    outbox.close()


async def test_a_timed_out_receive_loses_nothing(context, address, dropped, child):
    with contextlib.closing(Inbox(context, address, LIMITS, dropped.append)) as inbox:
        child(
            """
            async def main():
                with open_context() as context:
                    outbox = Outbox(context, address, "parent")
                    for number in range(2000):
                        outbox.send_nowait(Heartbeat(ME, number))
                        if number % 10 == 0:
                            await asyncio.sleep(0.001)
                    assert await outbox.flush(10.0)
            asyncio.run(main())
            """,
            address,
        )
        got: list[Received] = []
        late = 0
        async with asyncio.timeout(DEADLINE_S):
            while len(got) < 2000:
                try:
                    got.append(await asyncio.wait_for(inbox.receive(), 0.0002))
                except TimeoutError:
                    late += 1
    assert late > 10
    assert numbers(got) == list(range(2000))


async def test_what_was_flushed_is_there_when_the_sender_is_not(context, address, dropped, child):
    """libzmq#4660: a receiver at its high-water mark loses what a closing peer had handed over."""
    with contextlib.closing(Inbox(context, address, LIMITS, dropped.append)) as inbox:
        process = child(
            """
            async def main():
                with open_context() as context:
                    outbox = Outbox(context, address, "parent", high_water=0)
                    for number in range(5000):
                        outbox.send_nowait(Heartbeat(ME, number), [bytes(100)])
                    assert await outbox.flush(10.0)
            asyncio.run(main())
            """,
            address,
        )
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
        assert numbers(await receive_all(inbox, 5000)) == list(range(5000))


async def test_b21_a_full_queue_is_seen_and_nothing_vanishes(context, address, child):
    reader = child(READER, address)
    await asyncio.to_thread(reader.stdout.readline)
    reader.send_signal(signal.SIGSTOP)
    outbox = Outbox(context, address, "stopped", high_water=10)
    sent: list[int] = []
    await until(lambda: not offer(outbox, sent))
    assert 10 <= len(sent) < 2000
    with pytest.raises(PeerBusy, match="stopped does not keep up"):
        outbox.send_nowait(beat(0))

    waiting = asyncio.create_task(outbox.writable())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    waiting = asyncio.create_task(outbox.writable())
    reader.send_signal(signal.SIGCONT)
    await asyncio.wait_for(waiting, DEADLINE_S)
    assert offer(outbox, sent)
    outbox.send_nowait(Drain(ME))
    assert await heard(reader) == sent
    outbox.close()


async def test_there_is_room_in_a_quiet_outbox(context, address, dropped):
    """Nothing happens to it, so its descriptor is silent, and whoever asks must be told all the same."""
    inbox = Inbox(context, address, LIMITS, dropped.append)
    outbox = Outbox(context, address, "self")
    for number in range(3):
        outbox.send_nowait(beat(number))
        await receive_all(inbox, 1)
        await asyncio.wait_for(outbox.writable(), DEADLINE_S)
    inbox.close()
    outbox.close()


def offer(outbox: Outbox, sent: list[int]) -> bool:
    """Send one more beat, of 20 kB; False: the queue is full."""
    try:
        outbox.send_nowait(beat(len(sent)), [b"x" * 20_000])
    except PeerBusy:
        return False
    sent.append(len(sent))
    return True


async def heard(reader: subprocess.Popen[bytes]) -> list[int]:
    """What a READER heard, once it has ended."""
    output, _ = await asyncio.to_thread(reader.communicate, timeout=DEADLINE_S)
    return [int(number) for number in output.split()]


async def test_50_mb_arrive_intact_without_being_copied_here(context, address, dropped, child):
    source = bytearray(random.Random(5).randbytes(50_000_000))
    digest = hashlib.sha256(source).digest()
    small = b"small"
    with contextlib.closing(Inbox(context, address, LIMITS, dropped.append)) as answers:
        process = child(
            """
            async def main():
                def refuse(problem): raise problem
                with open_context() as context:
                    inbox = Inbox(context, sys.argv[2], LIMITS, refuse)
                    print(flush=True)
                    sys.stdin.readline()  # slow: not before the parent has sent everything
                    got = await inbox.receive()
                    inbox.close()
                    outbox = Outbox(context, address, "parent")
                    outbox.send_nowait(got.message, [hashlib.sha256(frame).digest() for frame in got.frames])
                    assert await outbox.flush(10.0)
            asyncio.run(main())
            """,
            address,
            address + "2",
        )
        process.stdout.readline()
        outbox = Outbox(context, address + "2", "child")
        before = _resident()
        outbox.send_nowait(beat(1), [small, source, memoryview(source)[:0]])
        assert _resident() - before < 20 << 20  # it travels from where it lies
        with pytest.raises(BufferError):
            source.extend(b"!")  # and ZeroMQ holds on to it
        process.stdin.write(b"\n")
        process.stdin.flush()
        [answer] = await receive_all(answers, 1)
        assert answer.message == beat(1)
        expected = [hashlib.sha256(part).digest() for part in (small, source, b"")]
        assert [bytes(frame) for frame in answer.frames] == expected
        assert expected[1] == digest
        outbox.close()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_what_cannot_be_sent_whole_is_not_begun(context, address, dropped):
    inbox = Inbox(context, address, LIMITS, dropped.append)
    outbox = Outbox(context, address, "self")
    strided = memoryview(bytes(100_000))[::2]
    for unsendable in (strided, "text", 7):
        with pytest.raises((TypeError, BufferError)):
            outbox.send_nowait(beat(0), [b"fine", unsendable])  # type: ignore[list-item]
    outbox.send_nowait(beat(1))
    assert numbers(await receive_all(inbox, 1)) == [1]
    assert not dropped
    inbox.close()
    outbox.close()


def test_a_message_torn_by_a_vanished_peer_does_not_swallow_the_next():
    """As libzmq's lb.cpp does it: EAGAIN in the middle, then whatever follows is swallowed up to a last frame."""

    class Lossy:
        closed = False

        def __init__(self) -> None:
            self.delivered: list[bytes] = []
            self.refusals = [2]
            self.count = 0
            self.swallowing = False

        def fileno(self) -> int:
            return -1

        def get(self, option: int) -> int:
            return 0

        def send(self, frame: bytes, flags: int, copy: bool) -> None:
            more = bool(flags & zmq.SNDMORE)
            self.count += 1
            if self.swallowing:
                self.swallowing = more
                return
            if self.count in self.refusals:
                self.swallowing = more
                raise zmq.Again
            self.delivered.append(frame)

    lossy = Lossy()
    link = Link(lossy, "ipc:///nowhere")  # type: ignore[arg-type]
    link.send([b"a", b"b", b"c"], "peer")  # dropped once, then sent whole
    assert lossy.delivered == [b"a", b"a", b"b", b"c"]


@pytest.mark.parametrize("flood", ["messages", "garbage"])
async def test_a_flooded_channel_leaves_others_their_turn(context, address, dropped, flood):
    inbox = Inbox(context, address, LIMITS, dropped.append)
    sender = open_socket(context, zmq.PUSH, high_water=0)
    sender.connect(address)
    count = BATCH * 50
    for number in range(count):
        sender.send_multipart(encode(beat(number)) if flood == "messages" else [b"\xc1"])
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def last() -> None:
        sender.send_multipart(encode(beat(count)))
        async for received in inbox:
            if received.message == beat(count):
                return

    ticking = asyncio.create_task(other())
    await asyncio.wait_for(last(), DEADLINE_S)
    ticking.cancel()
    assert turns >= 49
    assert len(dropped) == (count if flood == "garbage" else 0)
    inbox.close()
    sender.close()


# --- clients --------------------------------------------------------------------------------------------


async def test_each_client_gets_its_own_answers(context, address, dropped):
    door = FrontDoor(context, address, LIMITS, dropped.append)
    clients = [Dealer(context, address, "tokenizer-0", LIMITS, dropped.append) for _ in range(5)]
    for number, client in enumerate(clients):
        client.send_nowait(beat(number), [b"image"])
    asked = await receive_all(door, 5)
    assert len({it.peer for it in asked}) == 5
    assert [bytes(it.frames[0]) for it in asked] == [b"image"] * 5
    for it in reversed(asked):
        door.send_nowait(it.peer, it.message, [b"answer"])
    for number, client in enumerate(clients):
        [answer] = await receive_all(client, 1)
        assert (answer.message, bytes(answer.frames[0])) == (beat(number), b"answer")
    for channel in (door, *clients):
        channel.close()


async def test_a_client_that_left_is_gone(context, address, dropped):
    door = FrontDoor(context, address, LIMITS, dropped.append)
    client = Dealer(context, address, "tokenizer-0", LIMITS, dropped.append)
    client.send_nowait(beat(0))
    [asked] = await receive_all(door, 1)
    with pytest.raises(PeerGone, match="client 6e6f626f6479: has disconnected"):
        door.send_nowait(b"nobody", beat(0))
    door.send_nowait(asked.peer, beat(1))
    client.close()

    def has_left() -> bool:
        try:
            door.send_nowait(asked.peer, beat(1))
        except PeerGone:
            return True
        return False

    await until(has_left)
    door.close()


async def test_b07_a_stopped_client_is_busy_and_keeps_nobody(context, address, dropped, child):
    door = FrontDoor(context, address, LIMITS, dropped.append, high_water=5)
    sleeper = child(
        """
        async def main():
            def refuse(problem): raise problem
            with open_context() as context:
                client = Dealer(context, address, "tokenizer-0", LIMITS, refuse)
                client.send_nowait(Heartbeat(ME, 0))
                beats = []
                async for received in client:
                    if not isinstance(received.message, Heartbeat):
                        break
                    beats.append(received.message.in_flight)
                print(*beats)
                client.close()
        asyncio.run(main())
        """,
        address,
    )
    [asked] = await receive_all(door, 1)
    sleeper.send_signal(signal.SIGSTOP)
    good = Dealer(context, address, "tokenizer-0", LIMITS, dropped.append)
    good.send_nowait(beat(0))
    [other] = await receive_all(door, 1)
    assert other.peer != asked.peer

    answers: list[int] = []

    def busy() -> bool:
        try:
            door.send_nowait(asked.peer, beat(len(answers)), [b"x" * 20_000])
        except PeerBusy:
            return True
        answers.append(len(answers))
        return False

    await until(busy)
    for number in range(100):
        door.send_nowait(other.peer, beat(number))
        assert numbers(await receive_all(good, 1)) == [number]
    sleeper.send_signal(signal.SIGCONT)

    def sent_drain() -> bool:
        with contextlib.suppress(PeerBusy):
            door.send_nowait(asked.peer, Drain(ME))
            return True
        return False

    await until(sent_drain)
    assert await heard(sleeper) == answers
    good.close()
    door.close()


async def test_a_send_does_not_put_a_waiting_receiver_to_sleep(context, address, dropped):
    """Sends read the descriptor's news too; a receiver that waits for it must be told all the same."""
    door = FrontDoor(context, address, LIMITS, dropped.append)
    client = Dealer(context, address, "tokenizer-0", LIMITS, dropped.append)
    client.send_nowait(beat(0))
    [asked] = await receive_all(door, 1)
    for number in range(300):
        waiting = asyncio.create_task(client.receive())
        await asyncio.sleep(0)
        door.send_nowait(asked.peer, beat(number))
        for _ in range(number % 7):
            client.send_nowait(beat(number))
        assert (await asyncio.wait_for(waiting, DEADLINE_S)).message == beat(number)
        while door.receive_nowait() is not None:
            pass
    door.close()
    client.close()


async def test_a_socket_file_that_was_removed_is_made_again(context, address, home, dropped):
    """As by a cleaner of /tmp: whoever is connected stays so, and whoever comes later finds the way."""
    path = address.removeprefix("ipc://")
    with contextlib.closing(Inbox(context, address, LIMITS, dropped.append)) as inbox:
        assert not inbox.mend()
        with contextlib.closing(Outbox(context, address, "inbox")) as early:
            early.send_nowait(beat(1))
            assert numbers(await receive_all(inbox, 1)) == [1]
            os.unlink(path)
            assert inbox.mend()
            assert not inbox.mend()
            early.send_nowait(beat(2))
            with contextlib.closing(Outbox(context, address, "inbox")) as late:
                late.send_nowait(beat(3))
                assert sorted(numbers(await receive_all(inbox, 2))) == [2, 3]
    assert os.listdir(home) == []


async def test_a_client_is_told_when_its_connection_breaks(context, address, dropped):
    broken = []
    with contextlib.closing(FrontDoor(context, address, LIMITS, dropped.append)) as door:
        told = partial(broken.append, 1)
        with contextlib.closing(Dealer(context, address, "door", LIMITS, dropped.append, on_break=told)) as dealer:
            dealer.send_nowait(beat(1))
            await receive_all(door, 1)
            assert not broken
            door.close()
            await until(lambda: bool(broken))


async def test_b22_1500_short_lived_clients_leave_no_descriptor(context, address, dropped):
    door = FrontDoor(context, address, LIMITS, dropped.append)

    async def serve() -> None:
        async for received in door:
            with contextlib.suppress(PeerGone):
                door.send_nowait(received.peer, received.message)

    async def visit(number: int) -> None:
        with contextlib.closing(Dealer(context, address, "tokenizer-0", LIMITS, dropped.append)) as client:
            client.send_nowait(beat(number))
            assert (await client.receive()).message == beat(number)

    server = asyncio.create_task(serve())
    async with asyncio.timeout(60):
        await visit(0)
        before = len(descriptors())
        for first in range(0, 1500, 50):
            await asyncio.gather(*(visit(number) for number in range(first, first + 50)))
        await until(lambda: len(descriptors()) <= before + 10)
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)
    door.close()


async def test_b22_when_sockets_run_out_only_that_one_fails(address, dropped):
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 4)
        inbox = Inbox(context, address, LIMITS, dropped.append)
        opened: list[Outbox] = []

        def open_one() -> None:
            opened.append(Outbox(context, address, "self"))

        with pytest.raises(DeploymentError, match="one more channel"):
            [open_one() for _ in range(4)]
        opened.pop().close()
        outbox: list[Outbox] = []

        def reopened() -> bool:  # ZeroMQ frees the place in another thread
            with contextlib.suppress(DeploymentError):
                outbox.append(Outbox(context, address, "self"))
            return bool(outbox)

        await until(reopened)
        outbox[0].send_nowait(beat(3))
        assert numbers(await receive_all(inbox, 1)) == [3]
        for channel in (inbox, *opened, *outbox):
            channel.close()


# --- what is not a message ------------------------------------------------------------------------------


class Exploit:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def malformed(sentinel: Path) -> list[list[bytes]]:
    """Multipart messages that are none of ours, one for each way to be wrong."""
    dice = random.Random(11)
    good = bytes(encode(beat(1))[0])
    crafted = pickle.dumps(Exploit(sentinel))  # would leave its mark if anybody unpickled it
    one = [
        b"",
        b"\x00",
        b"\xc1",
        b"\xff" * 100,
        b"[" * 5000,
        b"\x91" * 60_000,
        crafted,
        pickle.dumps(beat(1)),
        good[:-1],
        good + b"\x00",
        msgspec.msgpack.encode([9999, 1]),
        msgspec.msgpack.encode({"type": "hello"}),
        msgspec.msgpack.encode([14, ["encoder", 0, 7], -1]),
        msgspec.msgpack.encode([14, ["encoder", 0, 7], 1 << 63]),
        msgspec.msgpack.encode([14, msgspec.msgpack.Ext(42, crafted), 1]),
        msgspec.msgpack.encode([14, ["\ud7ff" * 100, 0, 7], 1]),
        b"\x93\x0e\x93\xa3\xff\xfe\xfd\x00\x07\x01",  # not UTF-8
        b"x" * (LIMITS.header_nbytes + 1),
        *(dice.randbytes(dice.randrange(1, 400)) for _ in range(100)),
    ]
    return [*([it] for it in one), [good, *[b""] * (LIMITS.frames + 50)], [b"", good]]


@pytest.mark.parametrize("kind", [Inbox, FrontDoor, Dealer])
async def test_b27_b28_what_is_not_a_message_is_refused_and_counted(context, address, dropped, home, kind):
    """On every socket that takes messages; the next good one is served."""
    if kind is Dealer:
        raw = open_socket(context, zmq.ROUTER, high_water=1000)
        raw.bind(address)
        channel: Any = Dealer(context, address, "evil", LIMITS, dropped.append)
        channel.send_nowait(beat(0))
        assert await asyncio.to_thread(raw.poll, 10_000)
        prefix = [raw.recv_multipart()[0]]
    else:
        channel = kind(context, address, LIMITS, dropped.append)
        raw = open_socket(context, zmq.PUSH if kind is Inbox else zmq.DEALER, high_water=1000)
        raw.connect(address)
        prefix = []
    bad = malformed(home / "exploited")
    for frames in bad:
        raw.send_multipart([*prefix, *frames])
    raw.send_multipart([*prefix, *encode(Drain(ME), [b"good"])])
    [received] = await receive_all(channel, 1)
    assert (received.message, [bytes(it) for it in received.frames]) == (Drain(ME), [b"good"])
    assert len(dropped) == len(bad)
    assert all(isinstance(problem, BadMessage) and str(problem) for problem in dropped)
    assert not (home / "exploited").exists()
    raw.close()
    channel.close()


@pytest.mark.parametrize("kind", [Inbox, FrontDoor])
async def test_b28_bytes_that_are_not_even_zeromq_harm_nobody(context, address, dropped, home, kind):
    channel = kind(context, address, LIMITS, dropped.append)
    dice = random.Random(3)
    path = check_address(address)
    crafted = pickle.dumps(Exploit(home / "exploited"))  # the same
    for junk in (b"GET / HTTP/1.1\r\n\r\n", crafted, b"\xff" * 1000, *(dice.randbytes(300) for _ in range(30))):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(DEADLINE_S)
            stranger.connect(path)
            with contextlib.suppress(OSError):  # it hangs up on us
                stranger.sendall(junk)
                stranger.shutdown(socket.SHUT_WR)
                while await asyncio.to_thread(stranger.recv, 4096):
                    pass
    peer = (Outbox if kind is Inbox else _dealer)(context, address, "good")
    peer.send_nowait(beat(4))
    assert numbers(await receive_all(channel, 1)) == [4]
    assert not (home / "exploited").exists()
    peer.close()
    channel.close()


def _dealer(context: Context, address: str, peer: str) -> Dealer:
    return Dealer(context, address, peer, LIMITS, lambda problem: None)


async def test_a_peer_that_lies_about_its_size_costs_no_memory(context, address, dropped):
    """The length of a frame comes before its bytes; over the limit, nothing is allocated and the peer is cut off."""
    inbox = Inbox(context, address, LIMITS, dropped.append)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 16 + b"\0" + b"\0" * 31
    ready = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
    with socket.socket(socket.AF_UNIX) as liar:
        liar.settimeout(DEADLINE_S)
        liar.connect(check_address(address))
        liar.sendall(greeting + ready)
        before = _virtual()
        liar.sendall(b"\x02" + (1 << 31).to_bytes(8, "big") + b"x" * 100)  # 2 GiB, says the header
        while await asyncio.to_thread(liar.recv, 4096):
            pass
        assert _virtual() - before < 1 << 30
    outbox = Outbox(context, address, "good")
    outbox.send_nowait(beat(1))
    assert numbers(await receive_all(inbox, 1)) == [1]
    inbox.close()
    outbox.close()


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# --- addresses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:*", "tcp://*:5555", "tcp://::1:5555", "tcp://[127.0.0.1]:5555", "tcp://0.0.0.0:1", "tcp://[::]:1",
        "tcp://[::ffff:0.0.0.0]:5555", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:*", "tcp://:5555", "tcp://127.0.0.1:1;127.0.0.1:2", "tcp://",
        "inproc://it", "pgm://eth0;239.1.1.1:5555", "udp://127.0.0.1:5", "ipc://*", "ipc://@abstract",
        "ipc://relative/path", "ipc://", "", "*", "localhost:5555", "/a/path", "ipc:///a\0b",
        "ipc:///" + "x" * 107, "ipc:///" + "ä" * 54,
    ],
)  # fmt: skip
async def test_b28_an_address_that_is_wider_or_unclear_is_refused(context, dropped, address):
    for make in (
        lambda: Inbox(context, address, LIMITS, dropped.append),
        lambda: FrontDoor(context, address, LIMITS, dropped.append),
        lambda: Outbox(context, address, "peer"),
        lambda: Dealer(context, address, "peer", LIMITS, dropped.append),
    ):
        with pytest.raises(DeploymentError, match="refused"):
            make()


@pytest.mark.parametrize("address", ["tcp://192.0.2.7:5555", "tcp://[2001:db8::7]:5555", "tcp://[fe80::1%lo]:5555"])
async def test_b28_nobody_listens_beyond_loopback_without_keys(context, dropped, address):
    for kind in (Inbox, FrontDoor):
        with pytest.raises(
            DeploymentError, match=r"refused: it can be reached from other machines; set security\.keys"
        ):
            kind(context, address, LIMITS, dropped.append)


@pytest.mark.parametrize("letter", ["x", "ä"])
async def test_b23_a_path_of_107_bytes_is_served(context, home, dropped, letter):
    room = 107 - len(os.fsencode(home)) - 1
    name = letter * (room // len(letter.encode())) + "y" * (room % len(letter.encode()))
    address = f"ipc://{home}/{name}"
    inbox = Inbox(context, address, LIMITS, dropped.append)
    outbox = Outbox(context, address, "self")
    outbox.send_nowait(beat(1))
    assert numbers(await receive_all(inbox, 1)) == [1]
    inbox.close()
    outbox.close()
    with pytest.raises(DeploymentError, match=r"has 10[89] bytes"):
        Inbox(context, f"ipc://{home}/{name}{letter}", LIMITS, dropped.append)


async def test_b24_an_address_in_use_is_refused_not_stolen(context, address, dropped):
    inbox = Inbox(context, address, LIMITS, dropped.append)
    for kind in (Inbox, FrontDoor):
        with pytest.raises(DeploymentError, match=f"cannot listen at {address}: Address already in use"):
            kind(context, address, LIMITS, dropped.append)
    outbox = Outbox(context, address, "first")
    outbox.send_nowait(beat(1))
    assert numbers(await receive_all(inbox, 1)) == [1]
    inbox.close()
    outbox.close()
    with pytest.raises(DeploymentError, match="No such file or directory"):
        Inbox(context, f"{address}/missing/folder", LIMITS, dropped.append)


async def test_a_closed_inbox_leaves_no_file_and_takes_nobody_elses(context, address, dropped):
    path = check_address(address)
    first = Inbox(context, address, LIMITS, dropped.append)
    os.unlink(path)  # what a successor does with a dead owner's file
    second = Inbox(context, address, LIMITS, dropped.append)
    first.close()
    assert os.access(path, os.F_OK)
    outbox = Outbox(context, address, "second")
    outbox.send_nowait(beat(1))
    assert numbers(await receive_all(second, 1)) == [1]
    second.close()
    assert not os.access(path, os.F_OK)
    outbox.close()


@pytest.mark.processes
async def test_children_inherit_no_descriptor_of_ours(context, address, dropped):
    inbox = Inbox(context, address, LIMITS, dropped.append)
    outbox = Outbox(context, address, "self")
    outbox.send_nowait(beat(1))
    await receive_all(inbox, 1)
    ours = {fd for fd in descriptors() if fd.startswith(("socket:", "anon_inode:[event"))}
    assert ours
    command = ["ls", "-l", "/proc/self/fd"]
    listing = (await asyncio.to_thread(subprocess.run, command, close_fds=False, capture_output=True)).stdout.decode()
    inherited = [fd for fd in ours if fd.startswith("socket:") and fd in listing]
    assert not inherited
    assert "anon_inode:[event" not in listing
    inbox.close()
    outbox.close()


# --- ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "SIGTERM", "forget"])
async def test_b20_a_process_with_unsent_messages_ends_at_once(address, child, end):
    process = child(
        """
        async def main():
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(15, stop.set)
            with open_context() as context:
                outbox = Outbox(context, address, "nobody")
                for number in range(100):
                    outbox.send_nowait(Heartbeat(ME, number), [bytes(200_000)])
                print(flush=True)
                if sys.argv[2] == "SIGTERM":
                    await stop.wait()
                if sys.argv[2] != "forget":
                    outbox.close()
        asyncio.run(main())
        """,
        address,
        end,
    )
    await asyncio.to_thread(process.stdout.readline)
    if end == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
    assert time.monotonic() - started < 2.0


async def test_a_killed_peer_keeps_nobody(address, child):
    reader = child(READER, address)
    await asyncio.to_thread(reader.stdout.readline)
    with open_context() as context:
        reader.send_signal(signal.SIGSTOP)
        outbox = Outbox(context, address, "reader", high_water=50)
        sent: list[int] = []
        await until(lambda: not offer(outbox, sent))
        reader.kill()
        await asyncio.to_thread(reader.wait, DEADLINE_S)
        started = time.monotonic()
        outbox.close()
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize("nbytes", [10, 40_000, 1_000_000])
async def test_flush_hands_over_everything_to_a_slow_peer(context, address, child, nbytes):
    reader = child(READER, address)
    await asyncio.to_thread(reader.stdout.readline)
    outbox = Outbox(context, address, "slow")
    outbox.send_nowait(beat(0))
    reader.send_signal(signal.SIGSTOP)
    for number in range(1, 200):
        outbox.send_nowait(beat(number), [bytes(nbytes)])
    outbox.send_nowait(Drain(ME))
    flushing = asyncio.create_task(outbox.flush(DEADLINE_S))
    await asyncio.sleep(0)
    with pytest.raises(ChannelClosed):
        outbox.send_nowait(beat(0))
    assert not flushing.done() or nbytes == 10  # so little fits into the kernel's buffer
    reader.send_signal(signal.SIGCONT)
    assert await flushing
    assert await heard(reader) == list(range(200))
    outbox.close()


async def test_flush_says_when_the_deadline_came_first(address, dropped):
    with open_context() as context:
        door = FrontDoor(context, address, LIMITS, dropped.append)
        client = Dealer(context, address, "tokenizer-0", LIMITS, dropped.append)
        client.send_nowait(beat(0))
        [asked] = await receive_all(door, 1)
        door.send_nowait(asked.peer, beat(1))
        assert await door.flush(DEADLINE_S)
        assert numbers(await receive_all(client, 1)) == [1]
        client.close()

        outbox = Outbox(context, address, "nobody")
        outbox.send_nowait(beat(1))
        started = time.monotonic()
        assert not await outbox.flush(0.2)
        assert 0.15 < time.monotonic() - started < 1.0
        idle = Outbox(context, address, "nobody")
        assert await idle.flush(5.0)
        with pytest.raises(ChannelClosed):
            await idle.flush(5.0)
        started = time.monotonic()
    assert time.monotonic() - started < 0.5


async def test_closing_ends_those_who_wait(context, address, dropped):
    inbox = Inbox(context, address, LIMITS, dropped.append)

    async def count() -> int:
        return len([received async for received in inbox])

    counting = asyncio.create_task(count())
    waiting = asyncio.create_task(inbox.receive())
    await asyncio.sleep(0)
    inbox.close()
    inbox.close()
    assert await asyncio.wait_for(counting, DEADLINE_S) == 0
    with pytest.raises(ChannelClosed, match="is closed"):
        await asyncio.wait_for(waiting, DEADLINE_S)
    with pytest.raises(ChannelClosed):
        inbox.receive_nowait()


async def test_no_descriptor_is_left(home, dropped):
    async def talk(number: int) -> None:
        with open_context() as context:
            inbox = Inbox(context, f"ipc://{home}/inbox-{number}", LIMITS, dropped.append)
            door = FrontDoor(context, f"ipc://{home}/door-{number}", LIMITS, dropped.append)
            outbox = Outbox(context, inbox.address, "inbox")
            client = Dealer(context, door.address, "door", LIMITS, dropped.append)
            for sender, receiver in ((outbox, inbox), (client, door)):
                sender.send_nowait(beat(1), [bytes(100_000)])
                await receive_all(receiver, 1)
            await outbox.flush(1.0)
            for channel in (inbox, door, client):
                channel.close()

    await talk(0)  # what pyzmq keeps for good is there now
    before = descriptors()
    for number in range(1, 20):
        await talk(number)
    assert len(descriptors()) == len(before)
    assert not os.listdir(home)


# --- loops and cost -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_cost_of_a_small_message(address, dropped, loop, capsys):
    """Printed, not asserted: one process, both ends, CPU time of all its threads."""
    count = 20_000
    message: Message = Cancel(bytes(16), 0)

    async def stream() -> float:
        with open_context() as context:
            inbox = Inbox(context, address, LIMITS, dropped.append)
            outbox = Outbox(context, address, "self")
            started = time.process_time()
            done = asyncio.create_task(receive_all(inbox, count))
            for _ in range(count):
                while True:
                    try:
                        outbox.send_nowait(message)
                        break
                    except PeerBusy:
                        await outbox.writable()
            await done
            spent = time.process_time() - started
            inbox.close()
            outbox.close()
        return spent

    async def ping_pong() -> float:
        with open_context() as context:
            door = FrontDoor(context, address, LIMITS, dropped.append)
            client = Dealer(context, address, "self", LIMITS, dropped.append)

            async def echo() -> None:
                async for received in door:
                    door.send_nowait(received.peer, received.message)

            echoing = asyncio.create_task(echo())
            started = time.process_time()
            for _ in range(2000):
                client.send_nowait(message)
                await client.receive()
            spent = time.process_time() - started
            door.close()
            client.close()
            await echoing
        return spent

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        streamed = runner.run(stream()) / count
        bounced = runner.run(ping_pong()) / 2000
    with capsys.disabled():
        print(f"\n{loop}: {streamed * 1e6:.1f} us CPU a message sent and received, {bounced * 1e6:.0f} us a round trip")


def test_errno_of_a_missing_client_is_the_documented_one():
    """zmq_setsockopt(3), ZMQ_ROUTER_MANDATORY: fails with EHOSTUNREACH."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.ROUTER_MANDATORY, 1)
        with pytest.raises(zmq.ZMQError) as caught:
            router.send_multipart([b"nobody", b""], zmq.NOBLOCK)
    assert caught.value.errno == errno.EHOSTUNREACH
