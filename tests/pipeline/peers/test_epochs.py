"""R4: what was sent to a former life of a process is dropped and counted, whatever it says."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import PeerGone
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.tensors import CODES
from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.process.stage import Stage
from tensorferry.pipeline.process.start_stage import opened
from tensorferry.pipeline.process.work import NoWork, Work
from tensorferry.stages.tokenizer.clients import Clients
from tensorferry.stages.tokenizer.owned_requests import OwnedRequests
from tensorferry.stages.tokenizer.reply import Replies
from tensorferry.stages.tokenizer.request import Life, Request

NOW, BEFORE = 7, 6  #: epochs
OWNER, REQUEST = wire.Origin("tokenizer", 0, 3), bytes(16)
RANKS = (wire.Rank(0, NOW),)
PAYLOAD = wire.Inline(0, CODES["uint8"], (4, 32))
PLACED = wire.PlacedItem("image", (1, 4, 4), bytes(32), (wire.Span(0, 4),))


def encode(to: int) -> wire.Encode:
    item = wire.Item("image", (1, 4, 4), 4, bytes(32), (wire.Tensor("features", PAYLOAD),))
    return wire.Encode(REQUEST, 0, to, OWNER, RANKS, RANKS, (item,), 60_000)


def admit(to: int) -> wire.Admit:
    return wire.Admit(REQUEST, 0, to, OWNER, RANKS, bytes(16), (PLACED,), 1, 60_000)


def embeddings(to: int) -> wire.Embeddings:
    items = (wire.Embedding(0, 4, (wire.Tensor("embeddings", PAYLOAD),)),)
    return wire.Embeddings(REQUEST, 0, to, wire.Origin("encoder", 0, 5), items, ())


def cancel(to: int) -> wire.Cancel:
    return wire.Cancel(REQUEST, 0, to)


def done(to: int) -> wire.Done:
    return wire.Done(REQUEST, 0, to, wire.Origin("scheduler", 0, 5), 1, (), ())


def failed(to: int) -> wire.Failed:
    return wire.Failed(REQUEST, 0, wire.Failure("BadItem", "", wire.Origin("scheduler", 0, 5)), to)


def collected(to: int) -> wire.Collected:
    return wire.Collected(REQUEST, 0, to, wire.Origin("scheduler", 0, 5))


class Noted:
    """Work that takes whatever it is given, and keeps it."""

    def __init__(self) -> None:
        self.taken: list[wire.Message] = []

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> bool:
        self.taken.append(message)
        return True

    def in_flight(self) -> int:
        return len(self.taken)

    def busy_since(self) -> float | None:
        return None

    def gauges(self) -> Mapping[str, float]:
        return {"noted": len(self.taken)}

    def connection_mended(self, peer: Peer) -> None:
        pass


@asynccontextmanager
async def serving(work: Work, name: str = "encoder") -> AsyncIterator[Stage]:
    """A stage process's parts in this process, which serve this work."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        deployment = Deployment(name="a", transport="cpu", runtime_dir=f"{folder}/run")
        async with opened(deployment, name, 0) as stage:
            with stage.running(stage.serve(work)):
                await asyncio.sleep(0)  # until the loop waits for messages
                yield stage


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("tokenizer", (collected, done, failed)),
        ("encoder", (encode, cancel)),
        ("scheduler", (admit, embeddings, cancel)),
    ],
)
async def test_a7_messages_for_a_previous_epoch_are_dropped_and_counted(name: str, made: Sequence[Any]) -> None:
    """Also a report to an owner: its client has sent the request again, under the same id, so it is in flight here."""
    work = Noted()
    async with serving(work, name) as stage:
        for message in made:
            stage.take(message(stage.epoch ^ 1), [bytes(128)])
        assert (work.taken, stage.counters.value("messages_stale_epoch")) == ([], len(made))
        present = [message(stage.epoch) for message in made]
        for sent in present:
            stage.take(sent, [bytes(128)])
        assert (work.taken, stage.counters.value("messages_stale_epoch")) == (present, len(made))


@pytest.mark.parametrize(("name", "article"), [("tokenizer", "a"), ("encoder", "an"), ("scheduler", "a")])
async def test_what_neither_the_work_nor_its_process_takes_is_refused_and_counted(name: str, article: str) -> None:
    async with serving(NoWork(), name) as stage:
        with capture_logs() as lines:
            stage.take(encode(stage.epoch), [bytes(128)])
        assert stage.counters.value("messages_refused") == 1
        assert [line["problem"] for line in lines] == [f"{article} {name} takes no Encode"]


async def test_a_stage_says_how_its_work_is() -> None:
    work = Noted()
    async with serving(work) as stage:
        work.take(cancel(stage.epoch), ())
        gauges = {gauge.name: gauge.value for gauge in stage.gauges()}
        assert (gauges["in_flight"], gauges["noted"], gauges["busy_s"]) == (1, 1, 0)


def owner_of(request: Request) -> tuple[Replies, list[str]]:
    """What takes the reports of an owned request, and what it counts."""
    counted: list[str] = []
    stage: Any = SimpleNamespace(
        counters=SimpleNamespace(count=counted.append), refused=lambda problem: counted.append(str(problem))
    )
    requests, unused = OwnedRequests(LimitsSpec()), cast(Any, None)
    requests.add(request, 0, 0)
    return Replies(stage, unused, requests, unused, unused), counted


@pytest.mark.parametrize(
    ("origin", "digests", "said"),
    [
        (wire.Origin("scheduler", 0, BEFORE), (), "messages_unknown_peer"),
        (wire.Origin("scheduler", 1, NOW), (), "messages_unknown_peer"),
        (wire.Origin("encoder", 0, NOW), (), "messages_unknown_peer"),
        (wire.Origin("scheduler", 0, NOW), (b"1", b"2", b"3"), "digests of 3 items; there are 2"),
    ],
    ids=["a former life", "another rank", "another stage", "more items than there are"],
)
async def test_b26_b27_a_report_that_cannot_be_of_this_request_ends_nothing(
    origin: wire.Origin, digests: tuple[bytes, ...], said: str
) -> None:
    request = Request(b"client", wire.Submit(REQUEST, 0, (wire.TextPart("a"),), 1, 1000), 1.0)
    scheduler: Any = SimpleNamespace(stage="scheduler", rank=0)
    request.schedulers, request.hashes = [Life(scheduler, NOW, 0)], {0: bytes(16), 1: bytes(16)}
    request.waiting, request.collecting = {0}, {0}
    owner, counted = owner_of(request)
    owner.take(wire.Done(REQUEST, 0, NOW, origin, 1, digests, ()))
    assert counted == [said]
    assert (request.waiting, request.reports, request.news.is_set()) == ({0}, {}, False)
    if not digests:
        owner.take(wire.Collected(REQUEST, 0, NOW, origin))
        assert (counted, request.collecting) == ([said, said], {0})
    right = wire.Origin("scheduler", 0, NOW)
    owner.take(wire.Collected(REQUEST, 0, NOW, right))
    owner.take(wire.Done(REQUEST, 0, NOW, right, 1, (b"1", b"2"), ()))
    assert not owner.take(wire.Heartbeat(right, 0)), "it is of no request"
    assert (request.collecting, request.waiting, request.news.is_set()) == (set(), set(), True)


def test_b22_clients_that_left_without_a_word_are_forgotten() -> None:
    """However many: each one that comes looks after two that were silent; those that live and are silent stay."""
    gone: set[bytes] = set()

    def send(client: bytes, message: wire.Message) -> None:
        if client in gone:
            raise PeerGone("client", "has disconnected")

    door: Any = SimpleNamespace(send_nowait=send)
    members: Any = lambda: None  # noqa: E731
    counters: Any = SimpleNamespace(count=lambda name: None)
    clients = Clients(door, members, 0.0, counters)
    for number in range(1000):
        client = number.to_bytes(5, "big")
        clients.greeted(client)
        if number % 100:
            gone.add(client)
    assert set(clients._known) - gone == {number.to_bytes(5, "big") for number in range(0, 1000, 100)}
    assert len(clients._known) <= 20
