"""An encoder rank's jobs: which it takes, who shares a call, and what is over before it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.stages.encoder.rank import ME, OWNER, PATCHES, POISONED, SCHEDULER, Echo, Rank, lent

from tensorferry.codecs import messages as wire
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.tensors import CODES, view_of
from tensorferry.pipeline.deployment.spec import LimitsSpec, TokenizerSpec, most_requests
from tensorferry.stages.adapters.base import Finish, ItemInfo, Load, Out


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
    other, me = (wire.Rank(0, 99), wire.Rank(1, ME))
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
    item = wire.Item("image", (1, 2, 2), rows, bytes(32), (wire.Tensor("features", payload),))
    message = wire.Encode(
        b"a".rjust(16), 0, ME, OWNER, (wire.Rank(0, ME),), (wire.Rank(0, SCHEDULER.epoch),), (item,), 60_000
    )
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

    rank = rank_of(Prolific())
    rank.ask(b"a", [1])
    await rank.serve()
    assert rank.answers(b"a") == ([(0, 9)] if outputs == wire.MOST_OUTPUTS else "BadItem 0")


async def test_items_of_an_owner_that_nobody_has_met_are_dropped_and_what_they_lent_is_given_back(rank_of: Any) -> None:
    rank = rank_of()
    with lent(rank, 1) as (pool, payload):
        rank.send(b"a", [(b"a", payload)], owner=wire.Origin("tokenizer", 0, 4))
        pool.reclaim()
        assert pool.statistics().lent_slots == 0
    await rank.serve()
    assert (rank.adapter.calls, rank.failures, rank.embeddings) == ([], {}, {})
    assert rank.stage.counters.value("messages_unknown_peer") == 1


async def test_no_more_jobs_wait_than_a_deployment_can_have(rank_of: Any) -> None:
    rank = rank_of(keys={"limits": LimitsSpec(in_flight_requests=1), "tokenizer": TokenizerSpec(workers=2)})
    most = most_requests(rank.deployment)
    for number in range(most + 2):
        rank.ask(b"%d" % number, [number])
    assert most == 4
    assert [rank.answers(request) for request in (b"4", b"5")] == ["PeerBusy -1", "PeerBusy -1"]
    assert all(failure.retryable for failure in rank.failures.values())
    await rank.serve()
    assert [rank.answers(b"%d" % number) for number in range(most)] == [[(0, number)] for number in range(most)]


@pytest.mark.parametrize(
    ("anew", "sent", "problem"),
    [
        ((), (0, 2), ""),
        ((0, 2), (0, 2), ""),
        ((2,), (2,), ""),
        ((2,), (0, 2), "gives this rank items [2], but the message carries [0, 2]"),
        ((1, 2), (2,), "items (1, 2) to encode again, of [0, 2]"),
        ((2, 0), (0, 2), "items (2, 0) to encode again, of [0, 2]"),
        ((2, 2), (2,), "items (2, 2) to encode again, of [0, 2]"),
        ((2, 3), (2,), "items (2, 3) to encode again, of [0, 2]"),
    ],
)
async def test_e3_a_rank_encodes_of_what_is_named_anew_and_never_what_came_encoded(
    rank_of: Any, anew: tuple[int, ...], sent: tuple[int, ...], problem: str
) -> None:
    """Item 1 has no patches: its embeddings came with the request."""
    rank, frame = rank_of(), np.full((PATCHES, 3), 7, np.uint8)
    grids = [(1, 2, 2), (0, 0, 0), (1, 2, 2)]
    features = (wire.Tensor("features", wire.Inline(0, CODES["uint8"], frame.shape)),)
    items = tuple(
        wire.Item("image", grid, 1, bytes(32), features if index in sent else ()) for index, grid in enumerate(grids)
    )
    ranks = (wire.Rank(0, ME),)
    message = wire.Encode(b"a".rjust(16), 0, ME, OWNER, ranks, (wire.Rank(0, SCHEDULER.epoch),), items, 60_000, anew)
    rank.encoder.take(message, [view_of(frame).data])
    await rank.serve()
    if problem:
        failure = rank.failures[b"a".rjust(16)]
        assert (failure.kind, failure.retryable) == ("BadMessage", False)
        assert problem in failure.problem
    else:
        assert rank.answers(b"a") == [(index, 7) for index in sent]


async def test_cancelled_and_late_jobs_drop_out(rank_of: Any) -> None:
    rank = rank_of()
    with lent(rank, 3) as (pool, payload):
        rank.ask(b"a", [1])
        rank.send(b"cancelled", [(b"x", payload)])
        rank.ask(b"late", [4], deadline_ms=0)
        rank.cancel(b"cancelled")
        await rank.serve()
        assert pool.reclaim() == 1
    assert rank.adapter.calls == [[1]]
    assert list(rank.embeddings) == [b"a".rjust(16)]
    assert not rank.failures
    assert rank.stage.counters.value("jobs_late") == 2


async def test_what_is_cancelled_while_it_is_encoded_is_not_sent_nor_encoded_anew(rank_of: Any) -> None:
    rank = rank_of()
    rank.adapter.before = lambda: rank.cancel(b"b")
    for request, first in ((b"a", 1), (b"b", 2), (b"c", POISONED)):
        rank.ask(request, [first])
    await rank.serve()
    assert rank.adapter.calls == [[1, 2, POISONED], [1]]
    rank.ask(b"b", [2])
    rank.adapter.before = lambda: None
    await rank.serve()
    assert b"b".rjust(16) not in rank.embeddings.keys() | rank.failures.keys()


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
        rank.send(b"late", [(b"late", proxy)], deadline_ms=20 if how == "past its deadline" else 60_000)
        rank.ask(b"good", [6])
        if how == "cancelled":
            asyncio.get_running_loop().call_later(0.02, rank.cancel, b"late")
        await rank.serve()
        assert rank.answers(b"good") == [(0, 6)]
        assert rank.adapter.calls == [[6]]
        assert list(rank.embeddings) == [b"good".rjust(16)]
        assert rank.failures == {}
        pool.reclaim()
        assert pool.statistics().lent_slots == 0


async def test_one_whose_scheduler_is_gone_takes_nobody_with_it(rank_of: Any) -> None:
    rank = rank_of()
    rank.ask(b"a", [1], schedulers=(wire.Rank(0, SCHEDULER.epoch + 1),))
    rank.ask(b"b", [2])
    await rank.serve()
    assert (rank.answers(b"a"), rank.answers(b"b")) == ("PeerGone -1", [(0, 2)])


async def test_a_drain_finishes_the_batch_that_waits_for_company(rank_of: Any) -> None:
    rank = rank_of(batch_wait_ms=60_000.0)  # more than a deployment file may say, so that only a drain can end it
    rank.ask(b"a", [1])
    rank.ask(b"b", [2])
    async with rank.encoding():
        await rank.encoder.drain()
    assert rank.adapter.calls == [[1, 2]]
    assert rank.encoder.in_flight() == 0
