"""Channels between real processes: nothing is lost, nothing is silent, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import uvloop
import zmq
from tests.pipeline.channels.processes import (
    DEADLINE_S,
    LIMITS,
    ME,
    READER,
    beat,
    descriptors,
    heard,
    numbers,
    receive_all,
    until,
)

from tensorferry.codecs.errors import ChannelClosed, PeerBusy
from tensorferry.codecs.frames import encode
from tensorferry.codecs.messages import Cancel, Drain, Message
from tensorferry.pipeline.channels.channels import (
    Dealer,
    FrontDoor,
    Inbox,
    Outbox,
    Received,
    open_context,
)
from tensorferry.pipeline.channels.intake import BATCH
from tensorferry.pipeline.channels.zmq_link import Link, open_socket


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
