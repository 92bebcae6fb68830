"""What an encoder rank finds in its cache, and what it then neither reads nor encodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.stages.encoder.rank import PATCHES, POISONED, lent

from tensorferry.codecs import messages as wire
from tensorferry.codecs.tensors import CODES


async def test_e4_a_hit_is_acknowledged_without_being_read(rank_of: Any) -> None:
    rank = rank_of(cache_nbytes=1 << 20)
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
    rank = rank_of(cache_nbytes=1 << 20)
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
    rank = rank_of(cache_nbytes=1 << 20)
    rank.ask(b"a", [1, POISONED])
    rank.ask(b"b", [POISONED])
    rank.ask(b"c", [1])
    await rank.serve()
    assert rank.adapter.calls == [[1, POISONED], [1]]
    assert (rank.answers(b"a"), rank.answers(b"b"), rank.answers(b"c")) == ("BadItem 1", "BadItem 0", [(0, 1)])
    assert rank.encoder.gauges()["cache_nbytes"] == 8


async def test_what_the_cache_knows_takes_no_room_in_a_batch(rank_of: Any) -> None:
    rank = rank_of(cache_nbytes=1 << 20, batch_patches=2 * PATCHES)
    rank.ask(b"a", [1])
    await rank.serve()
    for request, pixels in ((b"b", [2, 1]), (b"c", [1, 1]), (b"d", [3])):
        rank.ask(request, pixels)
    await rank.serve()
    assert rank.adapter.calls == [[1], [2, 3]]


async def test_where_one_s_features_are_lost_those_of_an_equal_item_are_read(rank_of: Any) -> None:
    rank = rank_of(cache_nbytes=1 << 20)
    rank.send(b"lost", [(bytes([1]), wire.Proxy(666, 0, 1, 0, CODES["uint8"], (PATCHES, 3)))])
    rank.ask(b"sound", [1])
    await rank.serve()
    assert (rank.answers(b"lost"), rank.answers(b"sound")) == ("PeerGone -1", [(0, 1)])


async def test_a_hit_stays_while_a_batch_makes_others_go(rank_of: Any) -> None:
    rank = rank_of(cache_nbytes=16)  # of two items
    rank.ask(b"a", [1])
    await rank.serve()
    rank.ask(b"b", [2, 3, 1])
    await rank.serve()
    rank.ask(b"c", [1])
    await rank.serve()
    assert rank.adapter.calls == [[1], [2, 3]]
    assert rank.answers(b"b") == [(0, 2), (1, 3), (2, 1)]
    assert rank.encoder.gauges()["cache_nbytes"] == 16


async def test_a_failed_batch_keeps_its_hits(rank_of: Any) -> None:
    """Their pixels are gone, so they must not be lost to what is encoded anew."""
    rank = rank_of(cache_nbytes=1 << 20)
    rank.ask(b"a", [1])
    await rank.serve()
    rank.ask(b"hit", [1, 2])
    rank.ask(b"bad", [POISONED])
    await rank.serve()
    assert rank.answers(b"hit") == [(0, 1), (1, 2)]
    assert rank.adapter.calls == [[1], [2, POISONED], [2]]
