"""A producer as a consumer's rank sees it: real sockets and pools, the rank played by the test where it misbehaves."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from tensorferry.codecs.errors import DeploymentError, PeerBusy, StaleLease
from tensorferry.codecs.messages import Inline, Origin, Proxy
from tensorferry.codecs.pool.reader import Reader
from tensorferry.connectors.ec import messages as wire
from tensorferry.connectors.ec.post import Dealer
from tensorferry.connectors.ec.producer import Producer, sweep
from tensorferry.connectors.ec.settings import PRODUCER, Settings
from tensorferry.pipeline.channels.curve_keys import CurveClient, client_keys, make_keys
from tensorferry.pipeline.channels.zmq_link import open_context
from tensorferry.pipeline.pools import broker

DEADLINE_S = 20.0
MODEL = wire.Model("m", "d", "float32", 8)
LARGE = np.arange(1 << 16, dtype=np.float32).reshape(-1, 8)
SMALL = LARGE[:512].copy()  #: inline, and copied into the message: pyzmq starts no thread for it
T = TypeVar("T")

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tf-") as place:
        yield Path(place) / "ec"


def settings_of(folder: Path, **more: Any) -> Settings:
    return Settings.of({"folder": str(folder), "budget_mb": 8} | more)


def door_of(folder: Path) -> str:
    [path] = folder.glob(f"*{PRODUCER}")
    return f"ipc://{path}"


class Rank:
    """A consumer's rank, as far as a test wants it to be one."""

    def __init__(self, dealer: Dealer, reader: Reader) -> None:
        self.dealer, self.reader = dealer, reader
        self.origin = Origin("ec_consumer", 0, reader.consumer)

    async def hear(self, kind: type[T]) -> tuple[T, Any]:
        mail = await asyncio.wait_for(self.dealer.receive(), DEADLINE_S)
        assert isinstance(mail.message, kind), mail.message
        return mail.message, mail.frames

    async def greet(self, model: wire.Model = MODEL, version: int = wire.EC_VERSION) -> wire.Welcome:
        self.dealer.send(wire.Hello(version, self.origin, model))
        return (await self.hear(wire.Welcome))[0]

    async def attach(self) -> wire.Welcome:
        welcome = await self.greet()
        assert welcome.pool is not None
        assert welcome.broker is not None
        await broker.attach(welcome.broker, self.origin, welcome.pool.pool, self.reader, DEADLINE_S)
        return welcome

    async def want(self, *names: str) -> list[tuple[wire.Item, Any]]:
        self.dealer.send(wire.Want(names, 10_000))
        return [await self.hear(wire.Item) for _ in names]


@asynccontextmanager
async def rank_at(address: str, curve: CurveClient | None = None, reader: Reader | None = None) -> AsyncIterator[Rank]:
    with open_context() as context, closing(Dealer.open(context, address, curve=curve)) as dealer:
        if reader is not None:
            yield Rank(dealer, reader)
            return
        with Reader() as own:
            yield Rank(dealer, own)


async def settle(producer: Producer, **wanted: int) -> None:
    """Until its statistics are these."""

    def found() -> dict[str, Any]:
        statistics = msgspec.to_builtins(producer.statistics())
        return {key: statistics[key] for key in wanted}

    async with asyncio.timeout(DEADLINE_S):
        while found() != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_output_is_sent_again_to_the_same_rank_by_another_lease(folder: Path) -> None:
    """A lease is dispatched to a column once; the bytes are the same."""
    with closing(Producer(settings_of(folder, keep_s=0.5), MODEL)) as producer:
        async with rank_at(door_of(folder)) as rank:
            await rank.attach()
            assert producer.put("x", LARGE)
            assert not producer.put("x", LARGE), "it is kept already"
            leases = []
            for _ in range(3):
                [(item, _)] = await rank.want("x")
                assert isinstance(item.payload, Proxy)
                leases.append((item.payload.slot, item.payload.generation))
                with rank.reader.open(item.payload) as view:
                    assert np.array_equal(view.numpy(), LARGE)
            assert len(set(leases)) == 3
            await settle(producer, kept=0, lent=0, sent=3)


async def test_what_was_lost_with_a_connection_is_withdrawn(folder: Path) -> None:
    """The proxy reached this process and nobody read it; the rank comes back and is told to acknowledge its lease."""
    with closing(Producer(settings_of(folder, keep_s=0.5), MODEL)) as producer, Reader() as reader:
        producer.put("x", LARGE)
        async with rank_at(door_of(folder), reader=reader) as rank:
            await rank.attach()
            [(item, _)] = await rank.want("x")
        assert isinstance(item.payload, Proxy)
        await settle(producer, kept=0, lent=1)
        async with rank_at(door_of(folder), reader=reader) as rank:
            await rank.greet()
            withdrawn, _ = await rank.hear(wire.Withdrawn)
            assert withdrawn.leases == ((item.payload.slot, item.payload.generation),)
            reader.withdraw(withdrawn.pool, withdrawn.leases)
            await settle(producer, lent=0)
        with pytest.raises(StaleLease), reader.open(item.payload):
            pass


async def test_a_wish_ends_with_its_time_and_when_it_is_taken_back(folder: Path) -> None:
    with closing(Producer(settings_of(folder), MODEL)) as producer:
        async with rank_at(door_of(folder)) as rank:
            await rank.greet()
            producer.put("here", SMALL)
            rank.dealer.send(wire.Want(("long", "dropped"), 60_000))
            await settle(producer, wanted=2)
            rank.dealer.send(wire.Want(("short",), 1))
            rank.dealer.send(wire.Enough(("dropped",)))
            await rank.want("here")  # it has read all of that
            await settle(producer, wanted=1)
            producer.put("short", SMALL)
            producer.put("long", SMALL)
            item, frames = await rank.hear(wire.Item)
            assert item.name == "long"
            assert isinstance(item.payload, Inline), "it reads no pool"
            assert bytes(frames[0]) == SMALL.tobytes()
            await settle(producer, wanted=0, sent_inline=2, lent=0)


@pytest.mark.parametrize(
    ("model", "version", "said"),
    [
        (wire.Model("m", "d", "bfloat16", 8), 1, "another model: dtype 'bfloat16', here 'float32'"),
        (wire.Model("n", "d", "float32", 16), 1, "another model: name 'n', here 'm'; width 16, here 8"),
        (MODEL, 2, "encoder outputs by version 2; version 1 is spoken here"),
    ],
)
async def test_a_consumer_of_another_kind_is_refused_by_name(
    folder: Path, model: wire.Model, version: int, said: str
) -> None:
    with closing(Producer(settings_of(folder), MODEL)) as producer:
        async with rank_at(door_of(folder)) as rank:
            assert (await rank.greet(model, version)).refusal == said
            rank.dealer.send(wire.Want(("x",), 60_000))
            producer.put("x", LARGE)
            assert (await rank.greet()).refusal == ""
            assert producer.statistics().sent_inline == 0


async def test_over_a_network_only_who_has_a_key_is_served(folder: Path) -> None:
    keys, others = settings_of(folder).prepare() / "keys", folder / "others"
    make_keys(keys)
    make_keys(others)
    port = unused_port()
    address = f"tcp://127.0.0.1:{port}"
    with closing(Producer(settings_of(folder, listen=address, keys=str(keys)), MODEL)) as producer:
        producer.put("x", SMALL)
        async with rank_at(address, client_keys(others)) as stranger, rank_at(address) as naked:
            for rank in (stranger, naked):
                with suppress(PeerBusy):  # its connection has been refused already, for good
                    rank.dealer.send(wire.Hello(wire.EC_VERSION, rank.origin, MODEL))
            async with rank_at(address, client_keys(keys)) as rank:
                await rank.greet()
                [(item, frames)] = await rank.want("x")
                assert isinstance(item.payload, Inline)
                assert bytes(frames[0]) == SMALL.tobytes()
            assert stranger.dealer.take() is None
            assert naked.dealer.take() is None


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_start_that_fails_leaves_nothing(folder: Path) -> None:
    """The address is taken when pool, thread and socket in the folder are made."""
    address = f"tcp://127.0.0.1:{unused_port()}"
    with (
        closing(Producer(settings_of(folder, listen=address), MODEL)),
        pytest.raises(DeploymentError, match="cannot listen at"),
    ):
        Producer(settings_of(folder, listen=address), MODEL)
    assert list(folder.iterdir()) == []


def test_sockets_of_the_dead_are_swept_and_those_of_the_young_and_the_living_are_not(folder: Path) -> None:
    with closing(Producer(settings_of(folder), MODEL)):
        living = set(folder.iterdir())
        for name in ("old", "young"):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(folder / f"{name}{PRODUCER}"))
        (folder / "old.pool").touch()
        for path in (*living, folder / f"old{PRODUCER}"):
            os.utime(path, (0, 0))
        sweep(folder)
        assert set(folder.iterdir()) == living | {folder / f"young{PRODUCER}"}
