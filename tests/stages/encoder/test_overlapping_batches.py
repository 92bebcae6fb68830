"""A batch that is queued behind the one whose results are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.stages.encoder.rank import PATCHES, POISONED, Queued, Rank, lent, until

from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher


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
        await rank.encoder.drain()
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
        await rank.encoder.drain()
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
        await rank.encoder.drain()
    assert rank.adapter.calls == [[1, POISONED], [3, 4], [1]]
    answers = [rank.answers(request) for request in (b"a", b"b", b"c", b"d")]
    assert answers == [[(0, 1)], "BadItem 0", [(0, 3)], [(0, 4)]]


@pytest.mark.parametrize("rank_of", [Queued], indirect=True)
async def test_e4_what_is_being_encoded_is_waited_for_and_not_encoded_again(rank_of: Callable[..., Rank]) -> None:
    rank = rank_of(batch_patches=2 * PATCHES, cache_nbytes=1 << 20)
    rank.adapter.gate.clear()
    rank.ask(b"a", [1, 2])
    rank.ask(b"b", [2, 3])
    async with rank.encoding():
        await until(lambda: rank.adapter.awaited)
        for _ in range(100):
            await asyncio.sleep(0)
        assert rank.adapter.calls == [[1, 2]]
        rank.adapter.gate.set()
        await rank.encoder.drain()
    assert rank.adapter.calls == [[1, 2], [3]]
    assert (rank.answers(b"a"), rank.answers(b"b")) == ([(0, 1), (1, 2)], [(0, 2), (1, 3)])


@pytest.mark.parametrize("rank_of", [Queued], indirect=True)
async def test_what_is_cancelled_while_it_is_awaited_is_not_sent(rank_of: Callable[..., Rank]) -> None:
    rank = rank_of()
    rank.adapter.gate.clear()
    rank.ask(b"a", [1])
    rank.ask(b"b", [2])
    async with rank.encoding():
        await until(lambda: rank.adapter.awaited)
        rank.cancel(b"a")
        rank.adapter.gate.set()
        await rank.encoder.drain()
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
        rank.stage.publisher = Publisher(out, inline_below_nbytes=0)
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
