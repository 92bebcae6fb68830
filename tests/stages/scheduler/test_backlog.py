"""What a drain waits for, and which complete requests make a batch."""

from __future__ import annotations

import asyncio

import numpy as np

from tensorferry.codecs import messages as wire
from tensorferry.stages.engines.base import EngineRequest
from tensorferry.stages.scheduler.backlog import Backlog
from tensorferry.stages.scheduler.engine_side import CompleteRequest


def request(name: bytes, tokens: int = 4) -> CompleteRequest:
    owner = wire.Origin("tokenizer", 0, 3)
    admit = wire.Admit(name.rjust(16), 0, 7, owner, (wire.Rank(0, 7),), bytes(4 * tokens), (), 0, 60_000)
    return CompleteRequest(admit, EngineRequest(name, np.zeros(tokens, np.int32), [], [], 0), {})


async def is_done(joining: asyncio.Task[None]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return joining.done()


async def test_a_join_waits_for_what_is_copied_then_waits_then_runs() -> None:
    backlog = Backlog(100, lambda one: False)
    backlog.copy_began()
    joining = asyncio.create_task(backlog.join())
    assert not await is_done(joining)
    backlog.add(request(b"a"))
    backlog.copy_ended()
    assert not await is_done(joining)
    with backlog.batch() as batch:
        assert len(batch) == backlog.unfinished == 1
        assert not await is_done(joining)
    assert await is_done(joining)


async def test_a_join_and_a_run_wait_beside_each_other() -> None:
    backlog = Backlog(100, lambda one: False)
    backlog.copy_began()
    joining, arriving = asyncio.create_task(backlog.join()), asyncio.create_task(backlog.arrives())
    assert not await is_done(joining)
    backlog.add(request(b"a"))
    assert await is_done(arriving)
    assert not joining.done()
    backlog.copy_ended()
    with backlog.batch():
        assert not await is_done(joining)
    assert await is_done(joining)


async def test_requests_that_are_over_take_no_room_in_a_batch() -> None:
    backlog = Backlog(8, lambda one: one.admit.request.lstrip() == b"over")
    for name in (b"a", b"over", b"b", b"c"):
        backlog.add(request(name))
    with backlog.batch() as batch:
        assert [one.request.request for one in batch] == [b"a", b"b"]
        assert backlog.running == batch
    assert (backlog.running, backlog.waiting) == ((), 1)
