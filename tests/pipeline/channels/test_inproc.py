"""Channels do the same over sockets and within one process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from tensorferry.codecs.errors import BadMessage, ChannelClosed, DeploymentError, PeerBusy, PeerGone
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.messages import Heartbeat, Origin
from tensorferry.pipeline.channels.channels import ZmqNetwork
from tensorferry.pipeline.channels.inproc import InprocNetwork
from tensorferry.pipeline.channels.interface import HIGH_WATER, Denial, Network, Receiver

ME = Origin("encoder", 0, 7)
LIMITS = Limits(frames=8, header_nbytes=1 << 16, inline_nbytes=1 << 16)
DEADLINE_S = 10.0


@pytest.fixture(params=["sockets", "in process"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    if request.param == "in process":
        yield InprocNetwork()
        return
    with ZmqNetwork(None, False, lambda: None) as sockets:
        yield sockets


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        yield f"ipc://{folder}/it"


def no_denial(denial: Denial) -> None:
    raise AssertionError(denial)


def receiver(network: Network, address: str, refused: list[BadMessage] | None = None) -> Receiver:
    return network.inbox(address, LIMITS, [].append if refused is None else refused.append, no_denial)


async def numbers(receiver: Receiver, count: int) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        received = [await receiver.receive() for _ in range(count)]
    return [one.message.in_flight for one in received if isinstance(one.message, Heartbeat)]


async def test_messages_arrive_in_order_also_those_sent_before_the_receiver_was_there(
    network: Network, address: str
) -> None:
    outbox = network.outbox(address, "encoder-1", lambda: None)
    for number in range(3):
        outbox.send_nowait(Heartbeat(ME, number))
    inbox = receiver(network, address)
    outbox.send_nowait(Heartbeat(ME, 3))
    assert await numbers(inbox, 4) == [0, 1, 2, 3]
    outbox.close()
    inbox.close()


async def test_a_frame_is_a_copy_of_what_was_sent(network: Network, address: str) -> None:
    inbox, outbox = receiver(network, address), network.outbox(address, "encoder-1", lambda: None)
    sent = np.arange(8, dtype=np.uint8)
    outbox.send_nowait(Heartbeat(ME, 0), [sent])
    sent[:] = 0
    async with asyncio.timeout(DEADLINE_S):
        received = await inbox.receive()
    assert bytes(received.frames[0]) == bytes(range(8))
    outbox.close()
    inbox.close()


async def test_a_receive_that_is_cancelled_takes_no_message(network: Network, address: str) -> None:
    inbox, outbox = receiver(network, address), network.outbox(address, "encoder-1", lambda: None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await inbox.receive()
    outbox.send_nowait(Heartbeat(ME, 5))
    assert await numbers(inbox, 1) == [5]
    assert inbox.receive_nowait() is None
    outbox.close()
    inbox.close()


async def test_a_full_queue_raises_and_is_writable_once_it_is_taken(network: Network, address: str) -> None:
    outbox = network.outbox(address, "encoder-1", lambda: None)
    for sent in range(HIGH_WATER):
        outbox.send_nowait(Heartbeat(ME, sent))
    with pytest.raises(PeerBusy):
        outbox.send_nowait(Heartbeat(ME, HIGH_WATER))
    inbox = receiver(network, address)
    async with asyncio.timeout(DEADLINE_S):
        await outbox.writable()
    outbox.send_nowait(Heartbeat(ME, HIGH_WATER))
    assert await numbers(inbox, HIGH_WATER + 1) == list(range(HIGH_WATER + 1))
    outbox.close()
    inbox.close()


async def test_closing_ends_those_who_wait_and_breaks_the_connection(network: Network, address: str) -> None:
    broken = asyncio.Event()
    inbox, outbox = receiver(network, address), network.outbox(address, "encoder-1", broken.set)
    outbox.send_nowait(Heartbeat(ME, 0))
    assert await numbers(inbox, 1) == [0]
    waiting = asyncio.create_task(inbox.receive())
    await asyncio.sleep(0)
    inbox.close()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ChannelClosed):
            await waiting
        await broken.wait()
        assert [received async for received in inbox] == []
    outbox.close()
    with pytest.raises(ChannelClosed):
        outbox.send_nowait(Heartbeat(ME, 0))


async def test_what_was_flushed_is_received_when_the_sender_is_closed(network: Network, address: str) -> None:
    inbox, outbox = receiver(network, address), network.outbox(address, "encoder-1", lambda: None)
    outbox.send_nowait(Heartbeat(ME, 1))
    assert await outbox.flush(DEADLINE_S)
    assert await numbers(inbox, 1) == [1]
    inbox.close()


async def test_a_message_over_the_limit_is_refused_and_the_next_is_taken(network: Network, address: str) -> None:
    refused: list[BadMessage] = []
    inbox, outbox = receiver(network, address, refused), network.outbox(address, "encoder-1", lambda: None)
    outbox.send_nowait(Heartbeat(ME, 1), [b""] * LIMITS.frames)
    outbox.send_nowait(Heartbeat(ME, 2))
    assert await numbers(inbox, 1) == [2]
    assert [str(problem) for problem in refused] == ["9 frames; the limit is 8"]
    outbox.close()
    inbox.close()


async def test_an_address_in_use_is_refused_and_free_once_it_is_closed(network: Network, address: str) -> None:
    inbox = receiver(network, address)
    with pytest.raises(DeploymentError, match="Address already in use"):
        receiver(network, address)
    inbox.close()
    receiver(network, address).close()


async def test_clients_in_process_get_their_own_answers_and_one_that_left_is_gone() -> None:
    network = InprocNetwork()
    door = network.front_door("door", LIMITS, [].append)
    clients = [network.client("door", "tokenizer-0", LIMITS, [].append) for _ in range(2)]
    for number, (sender, _) in enumerate(clients):
        sender.send_nowait(Heartbeat(ME, number))
    peers = []
    for number in range(2):
        received = await door.receive()
        peers.append(received.peer)
        door.send_nowait(received.peer, Heartbeat(ME, 10 + number))
    assert [await numbers(answers, 1) for _, answers in clients] == [[10], [11]]
    clients[0][1].close()
    with pytest.raises(PeerGone):
        door.send_nowait(peers[0], Heartbeat(ME, 0))
    door.send_nowait(peers[1], Heartbeat(ME, 0))
