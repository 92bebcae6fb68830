"""R4: what was sent to a former life of a process is dropped and counted, whatever it says."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import PeerGone
from tensorferry.codecs.tensors import CODES
from tensorferry.stages.encoder.encoder import Encoder
from tensorferry.stages.scheduler.scheduler import Scheduler
from tensorferry.stages.tokenizer.clients import Clients
from tensorferry.stages.tokenizer.request import Life, Request
from tensorferry.stages.tokenizer.tokenizer import Tokenizer

NOW, BEFORE = 7, 6  #: epochs
OWNER, REQUEST = wire.Origin("tokenizer", 0, 3), bytes(16)
RANKS = (wire.Rank(0, NOW),)
PAYLOAD = wire.Inline(0, CODES["uint8"], (4, 32))


def encode(to: int) -> wire.Encode:
    item = wire.Item("image", (1, 4, 4), 4, bytes(16), PAYLOAD)
    return wire.Encode(REQUEST, 0, to, OWNER, RANKS, RANKS, (item,), 1 << 62)


def admit(to: int) -> wire.Admit:
    return wire.Admit(REQUEST, 0, to, OWNER, RANKS, bytes(16), (wire.Span(0, 4),), 1, 1 << 62)


def embeddings(to: int) -> wire.Embeddings:
    items = (wire.Embedding(0, 4, (wire.Output("embeddings", PAYLOAD),)),)
    return wire.Embeddings(REQUEST, 0, to, wire.Origin("encoder", 0, 5), items, ())


def cancel(to: int) -> wire.Cancel:
    return wire.Cancel(REQUEST, 0, to)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Encoder, encode), (Encoder, cancel), (Scheduler, admit), (Scheduler, embeddings), (Scheduler, cancel)],
    ids=["encode", "cancel at an encoder", "admit", "embeddings", "cancel at a scheduler"],
)
def test_a7_mail_of_a_former_life_is_dropped_and_counted(kind: type[Any], message: Any) -> None:
    counted: list[str] = []
    taken: list[str] = []
    receiver = object.__new__(kind)
    receiver._stage = SimpleNamespace(
        epoch=NOW,
        reader=None,
        alone=nullcontext,
        counters=SimpleNamespace(count=counted.append),
        peers=SimpleNamespace(hear=lambda message: False),
        refused=lambda problem: pytest.fail(str(problem)),
    )
    receiver._queue = lambda job: taken.append("job")
    receiver._admit = lambda message: taken.append("admit")
    receiver._over = SimpleNamespace(add=lambda request, attempt: taken.append("cancel"))
    receiver._give_up = lambda request, attempt: taken.append("cancel")
    receiver._arrived = lambda message, frames: taken.append("embeddings")
    receiver._take(message(BEFORE), [bytes(128)])
    assert (counted, taken) == (["mail_of_a_former_life"], [])
    receiver._take(message(NOW), [bytes(128)])
    assert len(taken) == 1


def done(to: int) -> wire.Done:
    return wire.Done(REQUEST, 0, to, wire.Origin("scheduler", 0, 5), 1, (), ())


def failed(to: int) -> wire.Failed:
    return wire.Failed(REQUEST, 0, wire.Failure("BadItem", "", wire.Origin("scheduler", 0, 5)), to)


def collected(to: int) -> wire.Collected:
    return wire.Collected(REQUEST, 0, to, wire.Origin("scheduler", 0, 5))


@pytest.mark.parametrize("message", [done, failed, collected])
def test_a7_an_owner_takes_no_report_that_was_meant_for_its_former_life(message: Any) -> None:
    """Its client has sent the request again, under the same id: it is in flight here, too."""
    counted: list[str] = []
    looked_up: list[bytes] = []
    owner = object.__new__(Tokenizer)
    owner._stage = SimpleNamespace(epoch=NOW, counters=SimpleNamespace(count=counted.append))  # type: ignore[assignment]
    owner._owned = lambda request, attempt: looked_up.append(request)  # type: ignore[assignment, method-assign]
    owner._take_report(message(BEFORE))
    assert (counted, looked_up) == (["mail_of_a_former_life"], [])
    owner._take_report(message(NOW))
    assert (counted, looked_up) == (["mail_of_a_former_life"], [REQUEST])


def owner_of(request: Request) -> tuple[Any, list[str]]:
    """A tokenizer that owns it, and what it counts."""
    counted: list[str] = []
    owner: Any = object.__new__(Tokenizer)
    owner._requests = {request.submit.request: request}
    owner._stage = SimpleNamespace(
        epoch=NOW,
        counters=SimpleNamespace(count=counted.append),
        refused=lambda problem: counted.append(str(problem)),
    )
    return owner, counted


@pytest.mark.parametrize(
    ("origin", "digests", "said"),
    [
        (wire.Origin("scheduler", 0, BEFORE), (), "messages_of_strangers"),
        (wire.Origin("scheduler", 1, NOW), (), "messages_of_strangers"),
        (wire.Origin("encoder", 0, NOW), (), "messages_of_strangers"),
        (wire.Origin("scheduler", 0, NOW), (b"1", b"2", b"3"), "digests of 3 items; there are 2"),
    ],
    ids=["a former life", "another rank", "another stage", "more items than there are"],
)
async def test_b26_b27_a_report_that_cannot_be_of_this_request_ends_nothing(
    origin: wire.Origin, digests: tuple[bytes, ...], said: str
) -> None:
    task: Any = None
    request = Request(b"client", wire.Submit(REQUEST, 0, (wire.TextPart("a"),), 1, 1000), task)
    scheduler: Any = SimpleNamespace(stage="scheduler", rank=0)
    request.schedulers, request.hashes = [Life(scheduler, NOW, 0)], {0: bytes(16), 1: bytes(16)}
    request.waiting, request.collecting = {0}, {0}
    owner, counted = owner_of(request)
    owner._take_report(wire.Done(REQUEST, 0, NOW, origin, 1, digests, ()))
    assert counted == [said]
    assert (request.waiting, request.reports, request.news.is_set()) == ({0}, {}, False)
    if not digests:
        owner._take_report(wire.Collected(REQUEST, 0, NOW, origin))
        assert (counted, request.collecting) == ([said, said], {0})
    right = wire.Origin("scheduler", 0, NOW)
    owner._take_report(wire.Collected(REQUEST, 0, NOW, right))
    owner._take_report(wire.Done(REQUEST, 0, NOW, right, 1, (b"1", b"2"), ()))
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
