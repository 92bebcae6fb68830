"""The clients that a tokenizer knows: who has left, and what is said of that."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from structlog.testing import capture_logs

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import PeerBusy
from tensorferry.codecs.frames import Limits, decode, encode
from tensorferry.pipeline.channels.channels import Dealer, FrontDoor, open_context
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.tokenizer.clients import Clients

DEADLINE_S = 10.0
ORIGIN = wire.Origin("tokenizer", 0, 1)
MEMBERS = wire.Members(ORIGIN, True, ())
FILL = wire.Delta(bytes(16), 0, 0, ORIGIN, 0, bytes(4), (1,), "x" * 4096)
HELLO = wire.Hello(wire.PROTOCOL_VERSION, wire.Origin("client", 0, 7), "client")


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        yield f"ipc://{folder}/door"


async def test_who_only_looked_and_has_left_is_no_warning_and_one_whose_answer_is_lost_is(address: str) -> None:
    counters = Counters()
    with open_context() as context, closing(FrontDoor(context, address, Limits(), lambda problem: None)) as door:
        clients = Clients(door, lambda: MEMBERS, 5.0, counters)
        with capture_logs() as logs:
            assert not clients.answer(b"nobody", MEMBERS)
        assert ([log["log_level"] for log in logs], counters.value("answers_undeliverable")) == (["debug"], 0)
        with capture_logs() as logs:
            assert not clients.answer(b"nobody", wire.Busy(bytes(16), 0, 1, "full"))
        assert ([log["log_level"] for log in logs], counters.value("answers_undeliverable")) == (["warning"], 1)


async def test_a_client_is_gone_once_its_connection_has_ended(address: str) -> None:
    with open_context() as context:
        with closing(FrontDoor(context, address, Limits(), lambda problem: None)) as door:
            clients = Clients(door, lambda: MEMBERS, 5.0, Counters())
            with closing(Dealer(context, address, "door", Limits(), lambda problem: None)) as dealer:
                dealer.send_nowait(HELLO)
                async with asyncio.timeout(DEADLINE_S):
                    peer = (await door.receive()).peer
                clients.greeted(peer)
                assert not clients.is_gone(peer, 0.0)
            async with asyncio.timeout(DEADLINE_S):
                while not clients.is_gone(peer, 0.0):  # noqa: ASYNC110  (ZeroMQ's thread sees to the end)
                    await asyncio.sleep(0.005)
            assert clients.is_gone(peer, 0.0)


def test_a_client_that_reads_nothing_is_there() -> None:
    def full(peer: bytes, message: wire.Message) -> None:
        raise PeerBusy("client")

    door: Any = SimpleNamespace(send_nowait=full)
    assert not Clients(door, lambda: MEMBERS, 5.0, Counters()).is_gone(b"stopped", 0.0)


async def test_a_client_that_was_just_heard_is_not_asked(address: str) -> None:
    with open_context() as context:
        with closing(FrontDoor(context, address, Limits(), lambda problem: None)) as door:
            clients = Clients(door, lambda: MEMBERS, 5.0, Counters())
            with closing(Dealer(context, address, "door", Limits(), lambda problem: None)) as dealer:
                dealer.send_nowait(HELLO)
                async with asyncio.timeout(DEADLINE_S):
                    peer = (await door.receive()).peer
                    clients.greeted(peer)
                    await dealer.receive()
                    assert not clients.is_gone(peer, 60.0)
                    assert not clients.is_gone(peer, 0.0)
                    await dealer.receive()
                assert dealer.receive_nowait() is None


async def test_an_outcome_that_found_no_room_is_sent_when_there_is_some(address: str) -> None:
    """The client reads nothing at first, and neither does ZeroMQ for it, which holds one message."""
    counters, outcome = Counters(), wire.Busy(bytes(16), 0, 1, "full")
    with open_context() as context:
        with closing(FrontDoor(context, address, Limits(), lambda problem: None, high_water=1)) as door:
            clients = Clients(door, lambda: MEMBERS, 5.0, counters)
            with closing(context.socket(zmq.DEALER)) as client:
                client.set(zmq.LINGER, 0)
                client.set(zmq.RCVHWM, 1)
                client.connect(address)
                client.send(encode(HELLO)[0])
                async with asyncio.timeout(DEADLINE_S):
                    peer = (await door.receive()).peer
                refused = 0
                while refused < 100:  # ZeroMQ's threads may still make room
                    refused = 0 if clients.offer(peer, FILL) else refused + 1
                    await asyncio.sleep(0.001)
                assert clients.answer(peer, outcome)
                clients.pay()  # there is no room yet
                client.set(zmq.RCVTIMEO, 1000)
                found = False
                async with asyncio.timeout(DEADLINE_S):
                    while not found:
                        message, _ = decode([client.recv()], Limits())
                        found = message == outcome
                        clients.pay()
                        await asyncio.sleep(0)
    assert counters.value("answers_undeliverable") == 0
