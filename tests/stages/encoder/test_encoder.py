"""An encoder rank's batches: who shares a call, who fails alone, and what nobody encodes twice. No sockets here."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
from tests.stages.played_peers import PlayedPeers

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.tensors import CODES, view_of
from tensorferry.pipeline.deployment.spec import EncoderSpec
from tensorferry.stages.adapters.base import Finish, ItemInfo, Load, Out, split
from tensorferry.stages.encoder.encoder import Encoder

OWNER, STRANGER = wire.Origin("tokenizer", 0, 3), wire.Origin("tokenizer", 0, 4)
SCHEDULER = wire.Origin("scheduler", 0, 8)
PATCHES = 4
POISONED, CRASHING, WRONG_ROWS = 200, 201, 202  #: first bytes of pixels that an adapter does not like


class Echo:
    """Embeddings of an item are the first byte of its pixels; `calls` has those of each call, before it fails."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.numbers: list[list[int]] = []
        self.before: Callable[[], None] = lambda: None

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        self.before()
        self.numbers.append([item.index for item in items])
        firsts = [int(view.data[0]) for view in split(load(self.numbers[-1]), items)]
        self.calls.append(firsts)
        for item, first in zip(items, firsts, strict=True):
            if first == POISONED:
                raise BadItem(item.index, "is poisoned")
            rows = item.rows + (first == WRONG_ROWS)
            out(item.index, "embeddings", (rows, 8), "uint8").data[:] = first
        if CRASHING in firsts:
            raise ZeroDivisionError("nobody knows of which item")
        return None


class Queued(Echo):
    """The same, by a GPU: whether all went well is known only when `finish` has waited for it; `gate` holds it up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.awaited = 0

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        self.before()
        self.numbers.append([item.index for item in items])
        firsts = [int(view.data[0]) for view in split(load(self.numbers[-1]), items)]
        self.calls.append(firsts)
        for item, first in zip(items, firsts, strict=True):
            rows = item.rows + (first == WRONG_ROWS)
            out(item.index, "embeddings", (rows, 8), "uint8").data[:] = first

        def finish() -> None:
            self.awaited += 1
            assert self.gate.wait(20)
            for item, first in zip(items, firsts, strict=True):
                if first == POISONED:
                    raise BadItem(item.index, "is poisoned")
            if CRASHING in firsts:
                raise ZeroDivisionError("nobody knows of which item")

        return finish


class Rank:
    """An encoder rank whose owner and scheduler the test plays."""

    def __init__(self, adapter: Any, undo: AsyncExitStack, **spec: Any) -> None:
        self.adapter = adapter
        played = PlayedPeers("encoder", undo, OWNER, SCHEDULER, encoder=EncoderSpec(**{"batch_wait_ms": 0.0} | spec))
        self.stage, self.epoch, self.reader = played.stage, played.stage.epoch, played.stage.reader
        self._played = played
        self._embeddings: dict[bytes, list[tuple[int, int]]] = {}
        self._failures: dict[bytes, wire.Failure] = {}
        self.thread, self.waiter = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.encoder = Encoder(self.stage, self.adapter, self.thread, self.waiter)

    @property
    def embeddings(self) -> dict[bytes, list[tuple[int, int]]]:
        """The first byte of each item of each request's message."""
        for message, frames, *_ in self._played.sent(SCHEDULER):
            assert isinstance(message, wire.Embeddings)
            assert message.request not in self._embeddings, "one message for each request"
            items = [(item.index, item.outputs[0].payload) for item in message.items]
            self._embeddings[message.request] = [
                (index, frames[payload.frame][0]) for index, payload in items if isinstance(payload, wire.Inline)
            ]
        return self._embeddings

    @property
    def failures(self) -> dict[bytes, wire.Failure]:
        """What the owner was told."""
        for message, *_ in self._played.sent(OWNER):
            assert isinstance(message, wire.Failed)
            self._failures[message.request] = message.failure
        return self._failures

    def ask(self, request: bytes, pixels: Sequence[int], **changes: Any) -> None:
        """A request whose items have these first bytes, and so these contents."""
        features = [np.full((PATCHES, 3), first, np.uint8) for first in pixels]
        payloads = [wire.Inline(index, CODES["uint8"], (PATCHES, 3)) for index in range(len(pixels))]
        self.send(request, [(bytes([first]), payload) for first, payload in zip(pixels, payloads, strict=True)],
                  [view_of(tensor).data for tensor in features], **changes)  # fmt: skip

    def send(
        self,
        request: bytes,
        items: Sequence[tuple[bytes, wire.Payload]],
        frames: Sequence[Any] = (),
        *,
        deadline_ns: int = 1 << 62,
        encoders: tuple[wire.Rank, ...] = (),
        owner: wire.Origin = OWNER,
        scheduler: int = SCHEDULER.epoch,
    ) -> None:
        """items: what each is a content of, and its payload. encoders: by default this rank alone."""
        sent = tuple(wire.Item("image", (1, 2, 2), 1, content.rjust(16, b"\0"), payload) for content, payload in items)
        encoders, schedulers = encoders or (wire.Rank(0, self.epoch),), (wire.Rank(0, scheduler),)
        message = wire.Encode(request.rjust(16), 0, self.epoch, owner, encoders, schedulers, sent, deadline_ns)
        self.encoder.take(message, frames)

    async def serve(self) -> None:
        """Until every job is done."""
        async with self.encoding():
            await self.encoder._jobs.join()

    @asynccontextmanager
    async def encoding(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.encoder.encode())
        try:
            async with asyncio.timeout(20):
                yield task
        finally:
            task.cancel()
            await asyncio.wait([task])

    def answers(self, request: bytes) -> list[tuple[int, int]] | str:
        """(index, first byte) of each item, or the kind of failure and the item at fault."""
        name = request.rjust(16)
        if name in self.failures:
            assert name not in self.embeddings
            failure = self.failures[name]
            return f"{failure.kind} {failure.item}"
        return self.embeddings[name]


@pytest.fixture(params=[Echo, Queued])
async def rank_of(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Rank]]:
    async with AsyncExitStack() as undo:

        def make(**spec: Any) -> Rank:
            rank = Rank(request.param(), undo, **spec)
            undo.callback(rank.thread.shutdown)
            undo.callback(rank.waiter.shutdown)
            return rank

        yield make


async def until(condition: Callable[[], object]) -> None:
    """Another thread does it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


@contextmanager
def lent(rank: Rank, first: int) -> Iterator[tuple[Pool, wire.Payload]]:
    """Features in a pool that this rank has mapped."""
    with Pool.create(1 << 20, 8) as pool:
        attachment, fds = rank.reader.attach(*pool.export())
        column = pool.admit(attachment, fds)
        with Publisher(pool, inline_below_nbytes=0).draft([("uint8", (PATCHES, 3))]) as draft:
            draft.views[0].data[:] = first
            [payload] = draft.dispatch(column, [])
        yield pool, payload
        rank.reader.detach(pool.description.pool)


async def test_requests_that_wait_together_share_a_call_and_get_messages_of_their_own(rank_of: Any) -> None:
    rank = rank_of()
    rank.ask(b"a", [1, 2])
    rank.ask(b"b", [3])
    rank.ask(b"c", [4, 5, 6])
    await rank.serve()
    assert rank.adapter.calls == [[1, 2, 3, 4, 5, 6]]
    assert rank.adapter.numbers == [[0, 1, 2, 3, 4, 5]]  # though there are three items 0
    assert rank.answers(b"a") == [(0, 1), (1, 2)]
    assert rank.answers(b"b") == [(0, 3)]
    assert rank.answers(b"c") == [(0, 4), (1, 5), (2, 6)]
    assert rank.encoder.gauges() == {"encode_calls": 1, "encoded_items": 6, "queued": 0}


async def test_an_item_of_another_rank_is_not_encoded_here(rank_of: Any) -> None:
    rank = rank_of()
    other, me = (wire.Rank(0, 99), wire.Rank(1, rank.epoch))
    payload = wire.Inline(0, CODES["uint8"], (PATCHES, 3))
    frames = [np.full(PATCHES * 3, 9, np.uint8)]
    # Two equal items go to two ranks, the first to the one that the request's id says.
    for request in (b"a", b"b", b"c", b"d"):
        rank.send(request, [(b"x", payload)], frames, encoders=(other, me))
    await rank.serve()
    kinds = {request: rank.answers(request) for request in (b"a", b"b", b"c", b"d")}
    assert {str(answer) for answer in kinds.values()} == {"[(0, 9)]", "BadMessage -1"}, kinds


async def test_rows_that_no_request_can_have_are_refused_before_anything_is_made_for_them(rank_of: Any) -> None:
    rank = rank_of()
    payload = wire.Inline(0, CODES["uint8"], (PATCHES, 3))
    rows = rank.stage.deployment.limits.request_tokens + 1
    item = wire.Item("image", (1, 2, 2), rows, bytes(16), payload)
    encoders, schedulers = (wire.Rank(0, rank.epoch),), (wire.Rank(0, SCHEDULER.epoch),)
    message = wire.Encode(b"a".rjust(16), 0, rank.epoch, OWNER, encoders, schedulers, (item,), 1 << 62)
    rank.encoder.take(message, [np.zeros(PATCHES * 3, np.uint8)])
    assert rank.answers(b"a") == "BadMessage -1"
    await rank.serve()
    assert rank.adapter.calls == []


@pytest.mark.parametrize("outputs", [wire.MOST_OUTPUTS, wire.MOST_OUTPUTS + 1])
async def test_an_adapter_that_makes_more_outputs_than_a_message_takes_fails_that_item(
    rank_of: Any, outputs: int
) -> None:
    class Prolific(Echo):
        def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
            for number in range(outputs):
                out(items[0].index, f"output-{number}", (items[0].rows, 8), "uint8").data[:] = 9
            return None

    rank = rank_of()
    rank.encoder._adapter = Prolific()
    rank.ask(b"a", [1])
    await rank.serve()
    assert rank.answers(b"a") == ([(0, 9)] if outputs == wire.MOST_OUTPUTS else "BadItem 0")


async def test_items_of_an_owner_that_nobody_has_met_are_dropped_and_what_they_lent_is_given_back(rank_of: Any) -> None:
    rank = rank_of()
    with lent(rank, 1) as (pool, payload):
        rank.send(b"a", [(b"a", payload)], owner=STRANGER)
        pool.reclaim()
        assert pool.statistics().lent_slots == 0
    await rank.serve()
    assert (rank.adapter.calls, rank.failures, rank.embeddings) == ([], {}, {})
    assert rank.stage.counters.value("messages_unknown_peer") == 1


async def test_no_more_jobs_wait_than_a_deployment_can_have(rank_of: Any) -> None:
    rank = rank_of()
    most = rank.encoder._most_jobs = 3
    for number in range(most + 2):
        rank.ask(b"%d" % number, [number])
    assert {request: rank.answers(request) for request in (b"3", b"4")} == {b"3": "PeerBusy -1", b"4": "PeerBusy -1"}
    assert all(failure.retryable for failure in rank.failures.values())
    await rank.serve()
    assert [rank.answers(b"%d" % number) for number in range(most)] == [[(0, number)] for number in range(most)]


@pytest.mark.parametrize("bad", [POISONED, WRONG_ROWS])
async def test_a_poisoned_item_fails_its_request_alone(rank_of: Any, bad: int) -> None:
    rank = rank_of()
    rank.ask(b"a", [1])
    rank.ask(b"b", [2, bad, 3])
    rank.ask(b"c", [4])
    await rank.serve()
    assert rank.adapter.calls == [[1, 2, bad, 3, 4], [1, 4]]
    assert rank.answers(b"a") == [(0, 1)]
    assert rank.answers(b"b") == "BadItem 1"  # the item's place in its own request
    assert rank.answers(b"c") == [(0, 4)]
    assert rank.stage.counters.value("batches_encoded_anew") == 1


async def test_many_poisoned_items_do_not_make_a_batch_come_again_and_again(rank_of: Any) -> None:
    rank = rank_of()
    for number in range(6):
        rank.ask(bytes([65 + number]), [number if number % 2 else POISONED])
    await rank.serve()
    assert max(sum(call.count(number) for call in rank.adapter.calls) for number in (1, 3, 5)) == 3
    answers = [rank.answers(bytes([65 + number])) for number in range(6)]
    assert answers == ["BadItem 0", [(0, 1)], "BadItem 0", [(0, 3)], "BadItem 0", [(0, 5)]]


async def test_a_crash_that_names_nobody_fails_its_request_alone(rank_of: Any) -> None:
    rank = rank_of()
    for request, first in ((b"a", 1), (b"b", CRASHING), (b"c", 2)):
        rank.ask(request, [first])
    await rank.serve()
    assert rank.adapter.calls == [[1, CRASHING, 2], [1], [CRASHING], [2]]
    assert [rank.answers(request) for request in (b"a", b"b", b"c")] == [[(0, 1)], "EncodeError -1", [(0, 2)]]


LOST = {
    "its pool is not here": ("PeerGone", wire.Proxy(666, 0, 1, 0, CODES["uint8"], (PATCHES, 3))),
    "too few bytes": ("BadMessage", wire.Inline(0, CODES["uint8"], (PATCHES, 3))),
}


@pytest.mark.parametrize("why", LOST)
async def test_features_that_cannot_be_had_fail_their_request_alone(rank_of: Any, why: str) -> None:
    rank, (kind, payload) = rank_of(), LOST[why]
    rank.ask(b"a", [1])
    rank.send(b"b", [(b"x", payload)], [np.zeros(5, np.uint8)])
    rank.ask(b"c", [2])
    await rank.serve()
    assert (rank.answers(b"a"), rank.answers(b"b"), rank.answers(b"c")) == ([(0, 1)], f"{kind} -1", [(0, 2)])
    assert rank.adapter.calls == [[1, 2]]  # it is known whose they were, so nobody goes alone


async def test_what_was_read_can_be_encoded_anew_and_comes_back_once(rank_of: Any) -> None:
    """A failed call has read the features already: the second has them from memory, and the lease is over."""
    rank = rank_of()
    with lent(rank, 1) as (pool, payload):
        rank.send(b"a", [(b"x", payload)])
        rank.ask(b"b", [POISONED])
        rank.ask(b"c", [2])
        await rank.serve()
        assert rank.adapter.calls == [[1, POISONED, 2], [1, 2]]
        assert rank.answers(b"a") == [(0, 1)]
        assert pool.reclaim() == 1
    assert rank.reader.stale == 0


async def test_cancelled_and_late_jobs_drop_out(rank_of: Any) -> None:
    rank = rank_of()
    with lent(rank, 3) as (pool, payload):
        rank.ask(b"a", [1])
        rank.send(b"cancelled", [(b"x", payload)])
        rank.ask(b"late", [4], deadline_ns=1)
        rank.encoder.take(wire.Cancel(b"cancelled".rjust(16), 0, rank.epoch), [])
        await rank.serve()
        assert pool.reclaim() == 1
    assert rank.adapter.calls == [[1]]
    assert list(rank.embeddings) == [b"a".rjust(16)]
    assert not rank.failures
    assert rank.stage.counters.value("jobs_late") == 2


async def test_what_is_cancelled_while_it_is_encoded_is_not_sent_nor_encoded_anew(rank_of: Any) -> None:
    rank = rank_of()
    rank.adapter.before = lambda: rank.encoder._over.add(b"b".rjust(16), 0)
    for request, first in ((b"a", 1), (b"b", 2), (b"c", POISONED)):
        rank.ask(request, [first])
    await rank.serve()
    assert rank.adapter.calls == [[1, 2, POISONED], [1]]
    rank.ask(b"b", [2])
    rank.adapter.before = lambda: None
    await rank.serve()
    assert b"b".rjust(16) not in rank.embeddings.keys() | rank.failures.keys()


# --- the cache -------------------------------------------------------------------------------------------------


async def test_e4_a_hit_is_acknowledged_without_being_read(rank_of: Any) -> None:
    rank = rank_of(cache_mb=1)
    rank.ask(b"first", [1])
    await rank.serve()
    back: list[int] = []
    with lent(rank, 99) as (pool, payload):  # other bytes, so that it would show if they were read
        rank.send(b"hit", [(bytes([1]), payload)])
        rank.ask(b"miss", [2])
        rank.adapter.before = lambda: back.append(pool.reclaim())
        await rank.serve()
    assert back == [1]  # before the others of its batch are encoded
    assert rank.reader.stale == 0  # and once
    assert rank.adapter.calls == [[1], [2]]
    assert (rank.answers(b"hit"), rank.answers(b"miss")) == ([(0, 1)], [(0, 2)])
    assert rank.encoder.gauges() == {
        "encode_calls": 2,
        "queued": 0,
        "encoded_items": 2,
        "cache_hits": 1,
        "cache_misses": 2,
        "cache_nbytes": 16,
    }


async def test_equal_items_in_flight_are_encoded_once(rank_of: Any) -> None:
    rank = rank_of(cache_mb=1)
    rank.ask(b"a", [1, 2, 1])
    rank.ask(b"b", [2, 3])
    await rank.serve()
    assert rank.adapter.calls == [[1, 2, 3]]
    assert rank.answers(b"a") == [(0, 1), (1, 2), (2, 1)]
    assert rank.answers(b"b") == [(0, 2), (1, 3)]


async def test_without_a_cache_nobody_trusts_a_content_hash(rank_of: Any) -> None:
    rank = rank_of()
    payload = wire.Inline(0, CODES["uint8"], (PATCHES, 3))
    for request, first in ((b"a", 1), (b"b", 2)):
        rank.send(request, [(b"the same", payload)], [np.full(PATCHES * 3, first, np.uint8)])
    await rank.serve()
    assert (rank.answers(b"a"), rank.answers(b"b")) == ([(0, 1)], [(0, 2)])


async def test_bad_content_fails_all_who_have_it_and_is_not_kept(rank_of: Any) -> None:
    rank = rank_of(cache_mb=1)
    rank.ask(b"a", [1, POISONED])
    rank.ask(b"b", [POISONED])
    rank.ask(b"c", [1])
    await rank.serve()
    assert rank.adapter.calls == [[1, POISONED], [1]]
    assert (rank.answers(b"a"), rank.answers(b"b"), rank.answers(b"c")) == ("BadItem 1", "BadItem 0", [(0, 1)])
    assert rank.encoder.gauges()["cache_nbytes"] == 8


async def test_what_the_cache_knows_takes_no_room_in_a_batch(rank_of: Any) -> None:
    rank = rank_of(cache_mb=1, batch_patches=2 * PATCHES)
    rank.ask(b"a", [1])
    await rank.serve()
    for request, pixels in ((b"b", [2, 1]), (b"c", [1, 1]), (b"d", [3])):
        rank.ask(request, pixels)
    await rank.serve()
    assert rank.adapter.calls == [[1], [2, 3]]


async def test_where_one_s_features_are_lost_those_of_an_equal_item_are_read(rank_of: Any) -> None:
    rank = rank_of(cache_mb=1)
    rank.send(b"lost", [(bytes([1]), wire.Proxy(666, 0, 1, 0, CODES["uint8"], (PATCHES, 3)))])
    rank.ask(b"sound", [1])
    await rank.serve()
    assert (rank.answers(b"lost"), rank.answers(b"sound")) == ("PeerGone -1", [(0, 1)])


async def test_a_hit_stays_while_a_batch_makes_others_go(rank_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_of(cache_mb=1)
    cache = rank.encoder._cache
    assert cache is not None
    monkeypatch.setattr(cache, "capacity_nbytes", 16)  # of two items
    rank.ask(b"a", [1])
    await rank.serve()
    rank.ask(b"b", [2, 3, 1])
    await rank.serve()
    rank.ask(b"c", [1])
    await rank.serve()
    assert rank.adapter.calls == [[1], [2, 3]]
    assert rank.answers(b"b") == [(0, 2), (1, 3), (2, 1)]
    assert cache.nbytes == 16


async def test_a_failed_batch_keeps_its_hits(rank_of: Any) -> None:
    """Their pixels are gone, so they must not be lost to what is encoded anew."""
    rank = rank_of(cache_mb=1)
    rank.ask(b"a", [1])
    await rank.serve()
    rank.ask(b"hit", [1, 2])
    rank.ask(b"bad", [POISONED])
    await rank.serve()
    assert rank.answers(b"hit") == [(0, 1), (1, 2)]
    assert rank.adapter.calls == [[1], [2, POISONED], [2]]


# --- a batch behind the one that is awaited --------------------------------------------------------------------


@pytest.mark.parametrize("rank_of", [Queued], indirect=True)
async def test_a_full_batch_is_queued_while_the_one_before_is_awaited(rank_of: Callable[..., Rank]) -> None:
    rank = rank_of(batch_patches=2 * PATCHES)
    rank.adapter.gate.clear()
    for number in range(1, 7):
        rank.ask(bytes([64 + number]), [number])
    async with rank.encoding():
        await until(lambda: len(rank.adapter.calls) == 2)
        await until(lambda: rank.adapter.awaited)
        assert rank.adapter.calls == [[1, 2], [3, 4]], "and no third"
        assert rank.embeddings == {}
        assert rank.encoder.in_flight() == 6
        rank.adapter.gate.set()
        await rank.encoder._jobs.join()
    assert rank.adapter.calls == [[1, 2], [3, 4], [5, 6]]
    assert [rank.answers(bytes([64 + number])) for number in range(1, 7)] == [[(0, number)] for number in range(1, 7)]
    assert list(rank.embeddings) == [bytes([64 + number]).rjust(16) for number in range(1, 7)]


@pytest.mark.parametrize("rank_of", [Queued], indirect=True)
async def test_a_batch_that_others_may_join_waits_for_them(rank_of: Callable[..., Rank]) -> None:
    rank = rank_of(batch_patches=2 * PATCHES)
    rank.adapter.gate.clear()
    rank.ask(b"a", [1])
    async with rank.encoding():
        await until(lambda: rank.adapter.awaited)
        rank.ask(b"b", [2])
        for _ in range(100):
            await asyncio.sleep(0)
        assert rank.adapter.calls == [[1]]
        rank.ask(b"c", [3])
        await until(lambda: len(rank.adapter.calls) == 2)
        assert rank.embeddings == {}
        rank.ask(b"d", [4])
        rank.adapter.gate.set()
        await rank.encoder._jobs.join()
    assert rank.adapter.calls == [[1], [2, 3], [4]]


@pytest.mark.parametrize("rank_of", [Queued], indirect=True)
async def test_a_batch_that_goes_wrong_leaves_the_one_behind_it_alone(rank_of: Callable[..., Rank]) -> None:
    rank = rank_of(batch_patches=2 * PATCHES)
    rank.adapter.gate.clear()
    for request, first in ((b"a", 1), (b"b", POISONED), (b"c", 3), (b"d", 4)):
        rank.ask(request, [first])
    async with rank.encoding():
        await until(lambda: len(rank.adapter.calls) == 2)
        rank.adapter.gate.set()
        await rank.encoder._jobs.join()
    assert rank.adapter.calls == [[1, POISONED], [3, 4], [1]]
    answers = [rank.answers(request) for request in (b"a", b"b", b"c", b"d")]
    assert answers == [[(0, 1)], "BadItem 0", [(0, 3)], [(0, 4)]]


@pytest.mark.parametrize("rank_of", [Queued], indirect=True)
async def test_e4_what_is_being_encoded_is_waited_for_and_not_encoded_again(rank_of: Callable[..., Rank]) -> None:
    rank = rank_of(batch_patches=2 * PATCHES, cache_mb=1)
    rank.adapter.gate.clear()
    rank.ask(b"a", [1, 2])
    rank.ask(b"b", [2, 3])
    async with rank.encoding():
        await until(lambda: rank.adapter.awaited)
        for _ in range(100):
            await asyncio.sleep(0)
        assert rank.adapter.calls == [[1, 2]]
        rank.adapter.gate.set()
        await rank.encoder._jobs.join()
    assert rank.adapter.calls == [[1, 2], [3]]
    assert (rank.answers(b"a"), rank.answers(b"b")) == ([(0, 1), (1, 2)], [(0, 2), (1, 3)])


@pytest.mark.parametrize(
    ("anew", "sent", "problem"),
    [
        ((), (0, 2), ""),
        ((0, 2), (0, 2), ""),
        ((2,), (2,), ""),
        ((2,), (0, 2), "gives this rank items [2], but the message carries [0, 2]"),
        ((1, 2), (2,), "items (1, 2) anew, of [0, 2]"),
        ((2, 0), (0, 2), "items (2, 0) anew, of [0, 2]"),
        ((2, 2), (2,), "items (2, 2) anew, of [0, 2]"),
        ((2, 3), (2,), "items (2, 3) anew, of [0, 2]"),
    ],
)
async def test_e3_a_rank_encodes_of_what_is_named_anew_and_never_what_came_encoded(
    rank_of: Any, anew: tuple[int, ...], sent: tuple[int, ...], problem: str
) -> None:
    """Item 1 has no patches: its embeddings came with the request."""
    rank, frame = rank_of(), np.full((PATCHES, 3), 7, np.uint8)
    grids = [(1, 2, 2), (0, 0, 0), (1, 2, 2)]
    items = tuple(
        wire.Item("image", grid, 1, bytes(16), wire.Inline(0, CODES["uint8"], frame.shape) if index in sent else None)
        for index, grid in enumerate(grids)
    )
    ranks = (wire.Rank(0, rank.epoch),)
    message = wire.Encode(
        b"a".rjust(16), 0, rank.epoch, OWNER, ranks, (wire.Rank(0, SCHEDULER.epoch),), items, 1 << 62, anew
    )
    rank.encoder.take(message, [view_of(frame).data])
    await rank.serve()
    if problem:
        failure = rank.failures[b"a".rjust(16)]
        assert (failure.kind, failure.retryable) == ("BadMessage", False)
        assert problem in failure.problem
    else:
        assert rank.answers(b"a") == [(index, 7) for index in sent]


@pytest.mark.parametrize("rank_of", [Queued], indirect=True)
async def test_what_is_cancelled_while_it_is_awaited_is_not_sent(rank_of: Callable[..., Rank]) -> None:
    rank = rank_of()
    rank.adapter.gate.clear()
    rank.ask(b"a", [1])
    rank.ask(b"b", [2])
    async with rank.encoding():
        await until(lambda: rank.adapter.awaited)
        rank.encoder.take(wire.Cancel(b"a".rjust(16), 0, rank.epoch), [])
        rank.adapter.gate.set()
        await rank.encoder._jobs.join()
    assert list(rank.embeddings) == [b"b".rjust(16)]
    assert rank.failures == {}


@pytest.mark.slow
@pytest.mark.parametrize("rank_of", [Queued], indirect=True)
async def test_a_rank_that_is_stopped_waits_for_what_is_queued_and_gives_everything_back(
    rank_of: Callable[..., Rank],
) -> None:
    """A GPU may still be reading the features and writing the embeddings."""
    rank = rank_of()
    rank.adapter.gate.clear()
    with lent(rank, 1) as (pool, payload), Pool.create(1 << 20, 8) as out:
        rank.stage.lend(None, Publisher(out, inline_below_nbytes=0))
        rank.send(b"a", [(b"x", payload)])
        async with rank.encoding() as encoding:
            await until(lambda: rank.adapter.awaited)
            encoding.cancel()
            for _ in range(100):
                await asyncio.sleep(0)
            assert not encoding.done()
            assert (out.reclaim(), out.statistics().lent_slots) == (0, 1)
            rank.adapter.gate.set()
            await asyncio.wait([encoding])
        assert (pool.reclaim(), out.reclaim()) == (1, 1)
    assert rank.embeddings == {}
    assert rank.encoder.in_flight() == 0


# --- all of it at once -----------------------------------------------------------------------------------------


def said(pixels: Sequence[int], answer: list[tuple[int, int]] | str) -> bool:
    """Whether this is what a request of these items must be told."""
    refused = [f"BadItem {index}" for index, first in enumerate(pixels) if first in (POISONED, WRONG_ROWS)]
    if CRASHING in pixels:
        refused.append("EncodeError -1")
    return answer in refused if refused else answer == list(enumerate(pixels))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
async def test_whatever_comes_together_output_i_belongs_to_input_i(rank_of: Any, seed: int) -> None:
    """Requests of good and bad items, equal and different, some given up, in batches and caches of any size."""
    rng = random.Random(seed)
    rank = rank_of(batch_patches=rng.choice([0, 8, 40, 16384]), cache_mb=rng.choice([0, 1]))
    cache = rank.encoder._cache
    if cache is not None:
        cache.capacity_nbytes = 8 * rng.choice([1, 3, 1000])  # of so many items
    contents = [*range(1, rng.choice([4, 40])), *rng.choices([POISONED, CRASHING, WRONG_ROWS, 1], k=rng.randrange(4))]
    asked: dict[bytes, list[int]] = {}
    over: set[bytes] = set()
    for turn in range(3):
        for number in range(rng.randrange(12)):
            request = f"{turn} {number}".encode()
            asked[request] = rng.choices(contents, k=rng.randrange(1, 5))
            late = rng.random() < 0.1
            rank.ask(request, asked[request], **({"deadline_ns": 1} if late else {}))
            if late or rng.random() < 0.1:
                over.add(request)
                rank.encoder.take(wire.Cancel(request.rjust(16), 0, rank.epoch), [])
        await rank.serve()
        assert cache is None or cache.nbytes <= cache.capacity_nbytes
    answered = {name.strip() for name in rank.embeddings.keys() | rank.failures.keys()}
    assert answered == asked.keys() - over
    wrong = {request: rank.answers(request) for request in answered if not said(asked[request], rank.answers(request))}
    assert not wrong, {request: (asked[request], answer) for request, answer in wrong.items()}


# --- leaving ---------------------------------------------------------------------------------------------------


async def test_a_drain_finishes_the_batch_that_waits_for_company(rank_of: Any) -> None:
    rank = rank_of(batch_wait_ms=60_000.0)  # more than a deployment file may say, so that only a drain can end it
    rank.ask(b"a", [1])
    rank.ask(b"b", [2])
    async with rank.encoding():
        await rank.encoder.drain()
    assert rank.adapter.calls == [[1, 2]]
    assert rank.encoder.in_flight() == 0


async def test_one_whose_scheduler_is_gone_takes_nobody_with_it(rank_of: Any) -> None:
    rank = rank_of()
    rank.ask(b"a", [1], scheduler=SCHEDULER.epoch + 1)
    rank.ask(b"b", [2])
    await rank.serve()
    assert (rank.answers(b"a"), rank.answers(b"b")) == ("PeerGone -1", [(0, 2)])


@pytest.mark.parametrize("how", ["cancelled", "past its deadline"])
async def test_a_request_that_nobody_wants_does_not_hold_its_batch_up(
    rank_of: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its features are never written, as far as can be seen; the others' are waited for no longer than it is wanted."""
    rank = rank_of()
    with Pool.create(1 << 20, 8) as pool:
        column = pool.admit(*rank.reader.attach(*pool.export()))
        with Publisher(pool, inline_below_nbytes=0).publish(np.full((PATCHES, 3), 5, np.uint8)) as draft:
            [proxy] = draft.dispatch(column, [])
        monkeypatch.setattr(rank.reader, "is_ready", lambda proxy: False)
        until_ns = time.monotonic_ns() + 20_000_000
        rank.send(b"late", [(b"late", proxy)], deadline_ns=until_ns if how == "past its deadline" else 1 << 62)
        rank.ask(b"good", [6])
        if how == "cancelled":
            cancel = wire.Cancel(b"late".rjust(16), 0, rank.epoch)
            asyncio.get_running_loop().call_later(0.02, rank.encoder.take, cancel, [])
        await rank.serve()
        assert rank.answers(b"good") == [(0, 6)]
        assert rank.adapter.calls == [[6]]
        assert list(rank.embeddings) == [b"good".rjust(16)]
        assert rank.failures == {}
        pool.reclaim()
        assert pool.statistics().lent_slots == 0
