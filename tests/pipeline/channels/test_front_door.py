"""A front door and its clients: each gets its own answers, and one that left or is stopped harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from functools import partial

import pytest
import zmq
from tests.pipeline.channels.processes import (
    DEADLINE_S,
    LIMITS,
    ME,
    beat,
    descriptors,
    heard,
    numbers,
    receive_all,
    until,
)

from tensorferry.codecs.errors import DeploymentError, PeerBusy, PeerGone
from tensorferry.codecs.messages import Drain
from tensorferry.pipeline.channels.channels import (
    Dealer,
    FrontDoor,
    Inbox,
    Outbox,
)


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
