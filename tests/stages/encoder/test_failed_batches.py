"""Which requests of a batch fail with it, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.stages.encoder.rank import CRASHING, PATCHES, POISONED, WRONG_ROWS, lent

from tensorferry.codecs import messages as wire
from tensorferry.codecs.tensors import CODES


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
