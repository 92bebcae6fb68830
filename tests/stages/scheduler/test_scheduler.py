"""What a scheduler rank makes of what comes: which requests run, together with whom, and with which embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.stages.played_peers import PlayedPeers

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, BadMessage
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.tensors import CODES, View, view_of
from tensorferry.pipeline.deployment.spec import SchedulerSpec
from tensorferry.stages.engines.base import EngineRequest, EngineResult
from tensorferry.stages.scheduler.scheduler import Scheduler
from tensorferry.stages.scheduler.splice import check, contradiction, splice

ME = 7  #: epoch
OWNER, ENCODER, STRANGER = (wire.Origin("tokenizer", 0, 3), wire.Origin("encoder", 0, 5), wire.Origin("encoder", 0, 6))
ROWS, WIDTH = 2, 8


class Noted:
    """An engine that keeps what it was given, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[EngineRequest]] = []

    async def run(self, batch: Sequence[EngineRequest]) -> Sequence[EngineResult | Exception]:
        self.batches.append(list(batch))
        return [EngineResult(request.output_tokens) for request in batch]

    @property
    def names(self) -> list[list[bytes]]:
        return [[request.request.lstrip() for request in batch] for batch in self.batches]


def placed_at(*spans: tuple[int, int]) -> wire.PlacedItem:
    return wire.PlacedItem("image", (1, 2, 2), bytes(32), tuple(wire.Span(*span) for span in spans))


class Rank:
    """A scheduler rank whose owner and encoder the test plays."""

    def __init__(self, copier: ThreadPoolExecutor, undo: AsyncExitStack, **spec: Any) -> None:
        self.engine = Noted()
        self._played = PlayedPeers("scheduler", undo, OWNER, ENCODER, scheduler=SchedulerSpec(**spec))
        stage = self._played.stage
        self.epoch, self.reader, self.counters = stage.epoch, stage.reader, stage.counters
        self.scheduler = Scheduler(stage, self.engine, copier)

    @property
    def told(self) -> list[wire.Message]:
        """What its owner was told of requests since this was last asked."""
        return [received.message for received in self._played.sent(OWNER)]

    def admit(self, request: bytes, items: int, *, attempt: int = 0, tokens: int = 16) -> None:
        placed = tuple(placed_at((ROWS * index, ROWS)) for index in range(items))
        ranks = (wire.Rank(0, self.epoch),)
        self.scheduler.take(
            wire.Admit(request.rjust(16), attempt, self.epoch, OWNER, ranks, bytes(4 * tokens), placed, 0, 60_000), ()
        )

    def embed(self, request: bytes, items: Sequence[int], *, attempt: int = 0) -> None:
        """Embeddings of these items, each full of its number."""
        frames = [np.full((ROWS, WIDTH), item, np.uint8).data for item in items]
        embeddings = tuple(
            wire.Embedding(item, ROWS, (wire.Tensor("embeddings", wire.Inline(frame, CODES["uint8"], (ROWS, WIDTH))),))
            for frame, item in enumerate(items)
        )
        self.scheduler.take(wire.Embeddings(request.rjust(16), attempt, self.epoch, ENCODER, embeddings, ()), frames)

    async def serve(self) -> None:
        """Until nothing is left that could run."""
        task = asyncio.create_task(self.scheduler.run())
        try:
            async with asyncio.timeout(20):
                await self.scheduler.drain()
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
async def rank_of() -> AsyncIterator[Callable[..., Rank]]:
    async with AsyncExitStack() as undo:
        copier = undo.enter_context(ThreadPoolExecutor(1))
        yield lambda **spec: Rank(copier, undo, **spec)


async def test_s1_a_request_runs_once_all_its_embeddings_are_there_in_the_order_of_its_items(
    rank_of: Callable[..., Rank],
) -> None:
    rank = rank_of()
    rank.admit(b"a", 3)
    rank.embed(b"a", [2])
    await rank.serve()
    assert rank.engine.batches == []
    rank.embed(b"a", [1, 0])
    await rank.serve()
    [[request]] = rank.engine.batches
    assert [int(outputs["embeddings"].numpy()[0, 0]) for outputs in request.embeddings] == [0, 1, 2]
    assert [type(message).__name__ for message in rank.told] == ["Collected", "Done"]


async def test_b19_of_two_attempts_at_a_request_the_later_runs(rank_of: Callable[..., Rank]) -> None:
    rank = rank_of()
    rank.admit(b"a", 1)
    rank.admit(b"a", 1, attempt=1)
    rank.embed(b"a", [0])
    await rank.serve()
    assert rank.engine.batches == [], "the older one is over"
    rank.embed(b"a", [0], attempt=1)
    await rank.serve()
    assert rank.engine.names == [[b"a"]]
    assert [(type(message).__name__, getattr(message, "attempt", None)) for message in rank.told] == [
        ("Collected", 1),
        ("Done", 1),
    ]


async def test_requests_run_together_within_the_token_budget_and_one_above_it_alone(
    rank_of: Callable[..., Rank],
) -> None:
    rank = rank_of(batch_tokens=40)
    for name, tokens in ((b"a", 20), (b"b", 20), (b"c", 20), (b"d", 50), (b"e", 40)):
        rank.admit(name, 0, tokens=tokens)
    await rank.serve()
    assert rank.engine.names == [[b"a", b"b"], [b"c"], [b"d"], [b"e"]]


async def test_l3_what_a_stranger_lends_is_given_back_unread(rank_of: Callable[..., Rank]) -> None:
    rank = rank_of()
    with Pool.create(1 << 20, 8) as pool:
        column = pool.admit(*rank.reader.attach(*pool.export()))
        with Publisher(pool, inline_below_nbytes=0).draft([("uint8", (ROWS, WIDTH))]) as draft:
            [payload] = draft.dispatch(column, [])
        items = (wire.Embedding(0, ROWS, (wire.Tensor("embeddings", payload),)),)
        rank.scheduler.take(wire.Embeddings(bytes(16), 0, ME, STRANGER, items, ()), ())
        pool.reclaim()
        assert pool.statistics().lent_slots == 0
        rank.reader.detach(pool.description.pool)
    assert rank.counters.value("messages_unknown_peer") == 1


# --- tokens and embeddings that fit each other -------------------------------------------------------------------


def admitted(*spans: tuple[int, int], tokens: int = 10) -> wire.Admit:
    return wire.Admit(
        bytes(16),
        0,
        ME,
        OWNER,
        (wire.Rank(0, ME),),
        bytes(4 * tokens),
        tuple(map(placed_at, spans)),
        0,
        60_000,
    )


def rows(count: int, first: int = 0) -> dict[str, View]:
    return {"embeddings": view_of(np.full((count, WIDTH), first, np.uint8))}


@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        ([(0, 4), (3, 2)], "a span of item 1 is from token 3 on, behind token 4"),
        ([(4, 2), (0, 2)], "a span of item 1 is from token 0 on, behind token 6"),
        ([(0, 4), (4, 7)], "placeholders up to token 11 of 10"),
    ],
    ids=["over each other", "in another order", "past the end"],
)
def test_b31_placeholders_that_cannot_be_are_refused(spans: list[tuple[int, int]], problem: str) -> None:
    assert contradiction(admitted((0, 4), (4, 6)), ME) is None
    found = contradiction(admitted(*spans), ME)
    assert isinstance(found, BadMessage)
    assert str(found) == problem


def test_an_item_s_placeholders_may_be_in_several_stretches() -> None:
    admit = msgspec.structs.replace(admitted(), items=(placed_at((0, 1), (4, 2)), placed_at((7, 1))))
    assert contradiction(admit, ME) is None
    check(admit, {0: rows(3), 1: rows(1)})
    request = splice(admit, {0: rows(3), 1: rows(1)}, 7)
    assert [item.spans for item in request.items] == [((0, 1), (4, 2)), ((7, 1),)]
    backwards = msgspec.structs.replace(admit, items=(placed_at((4, 1), (0, 2)),))
    assert "a span of item 0 is from token 0 on, behind token 5" in str(contradiction(backwards, ME))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_s1_rows_are_as_many_as_placeholders(count: int) -> None:
    check(admitted((0, 3)), {0: rows(3)})
    with pytest.raises(BadItem, match=f"{count} rows of embeddings for 3 placeholders"):
        check(admitted((0, 3)), {0: rows(count)})


def test_s1_embeddings_are_spliced_in_the_order_of_the_spans_however_they_came() -> None:
    arrived = {2: rows(1, 2), 0: rows(1, 0), 1: rows(1, 1)}
    request = splice(admitted((0, 1), (3, 1), (5, 1)), arrived, 7)
    assert [int(outputs["embeddings"].numpy()[0, 0]) for outputs in request.embeddings] == [0, 1, 2]
