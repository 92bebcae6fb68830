"""Peers' pools that are mapped beside everything else, and again where that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import AttachRefused
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.channels.inproc import InprocNetwork
from tensorferry.pipeline.peers.handshake import Peers
from tensorferry.pipeline.pools import attach as module
from tensorferry.pipeline.pools.attach import Attaching

ME, PRODUCER = wire.Origin("scheduler", 0, 1), wire.Origin("encoder", 0, 10)
ANNOUNCED = wire.Pool(PRODUCER, wire.PoolDescription(5, "host", 1 << 20, 8), "/broker")
DEADLINE_S = 5.0


class Consumer:
    """A scheduler rank that has met a producer. attach: stands for the conversation with the producer's broker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reader: Reader, attach: Callable[[int], Any]) -> None:
        async def conversation(path: str, origin: wire.Origin, pool: int, reader: Reader, *, timeout_s: float) -> None:
            await attach(pool)

        monkeypatch.setattr(module.broker, "attach", conversation)
        monkeypatch.setattr(module, "AGAIN_S", 0.001)
        network = InprocNetwork()
        self._producer = network.inbox("producer", Limits(), [].append)
        self.peers = Peers(
            ME,
            "consumer",
            upstream={("encoder", 0): "producer"},
            connect=network.outbox,
            attach=lambda announcement: None,
            quarantine_s=DEADLINE_S,
        )
        self.peers.open()
        self.peers.hear(wire.Hello(wire.PROTOCOL_VERSION, PRODUCER, "producer", ("pool",)))
        self.reader = reader

    def refusals(self) -> list[str]:
        """What the producer was told of its pool: why it is not mapped, empty when it is."""
        messages = [received.message for received in iter(self._producer.receive_nowait, None)]
        return [message.refusal for message in messages if isinstance(message, wire.Ready)]


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader(ME.epoch) as reader:
        yield reader


async def test_a_pool_that_is_announced_again_while_it_is_being_attached_is_attached_once(
    monkeypatch: pytest.MonkeyPatch, reader: Reader
) -> None:
    """A peer that is silent at first, such as one that imports torch, is greeted again, and then announces again."""
    attached, go_on = [], asyncio.Event()

    async def attach(pool: int) -> None:
        attached.append(pool)
        await go_on.wait()

    consumer = Consumer(monkeypatch, reader, attach)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        attaching = Attaching(reader, tasks)
        for _ in range(3):
            attaching.begin(ANNOUNCED, consumer.peers)
            await asyncio.sleep(0)
        go_on.set()
    assert (attached, consumer.refusals()) == ([5], [""])


async def test_a_pool_that_cannot_be_mapped_is_tried_again_and_each_reason_is_told_once(
    monkeypatch: pytest.MonkeyPatch, reader: Reader
) -> None:
    """A process out of memory or descriptors is sent inline what it cannot map, but not for the rest of its life."""
    reasons = iter([AttachRefused("no memory"), AttachRefused("no memory"), OSError(24, "Too many open files"), None])

    async def attach(pool: int) -> None:
        if (reason := next(reasons)) is not None:
            raise reason

    consumer = Consumer(monkeypatch, reader, attach)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        Attaching(reader, tasks).begin(ANNOUNCED, consumer.peers)
    assert consumer.refusals() == ["no memory", "it cannot be reached: Too many open files", ""]


async def test_the_pool_of_one_that_has_died_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, reader: Reader
) -> None:
    tried: list[int] = []

    async def attach(pool: int) -> None:
        tried.append(pool)
        raise AttachRefused("no memory")

    consumer = Consumer(monkeypatch, reader, attach)
    consumer.peers.died(PRODUCER)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        Attaching(reader, tasks).begin(ANNOUNCED, consumer.peers)
    assert tried == [5]
