"""What goes wrong in the thread that grows and shrinks an elastic pool; see `test_growth.py`."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
)
from types import SimpleNamespace
from typing import Any

import pytest
from tests.codecs.pool.elastic.elastic_pools import (
    CHUNK,
    Create,
    Stub,
    Until,
    growth_of,
    idle_after,
    look_again,
    mapped,
    out,
    physical,
    retiring,
    shrink_to,
)

from tensorferry.codecs.errors import PoolFull
from tensorferry.codecs.memory.cuda_driver import CudaError
from tensorferry.codecs.memory.cuda_vmm import VmmSegment
from tensorferry.codecs.messages import Origin
from tensorferry.codecs.pool.elastic import growth_state
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.stage import Stage


def fail(monkeypatch: pytest.MonkeyPatch, times: int, problem: Exception, call: str = "grow") -> None:
    """Let the memory of pools fail so often."""
    work, left = getattr(VmmSegment, call), [problem] * times

    def failing(memory: VmmSegment, position: int) -> Any:
        if left:
            raise left.pop()
        return work(memory, position)

    monkeypatch.setattr(VmmSegment, call, failing)


@pytest.mark.parametrize(
    "problem",
    [RuntimeError("CUDA error: out of memory"), MemoryError(), KeyError(3), OSError(24, "Too many open files")],
    ids=["torch", "memory", "bug", "descriptors"],
)
def test_a_failure_while_growing_is_counted_and_reported_once(
    create: Create, monkeypatch: pytest.MonkeyPatch, until: Until, problem: Exception
) -> None:
    monkeypatch.setattr(growth_state, "REFUSED_S", 0.05)
    pool = create(4)
    fail(monkeypatch, 2, problem)
    for count in (1, 2):
        with pytest.raises(PoolFull):
            pool.lease(2 * CHUNK).__enter__()
        assert (mapped(pool), pool.statistics().growth_failed) == (1, count), "the position is not coming for ever"
        until(lambda: growth_of(pool).state.grow_from_ns < time.monotonic_ns())
    assert [pool.check_growth(), pool.check_growth()] == [problem, None]
    with pool.lease(2 * CHUNK):
        assert pool.statistics().growth_refused == 0


def test_a_failure_before_growing_does_not_end_the_thread(
    create: Create, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(growth_state, "REFUSED_S", 0.05)
    pool = create(4)
    with monkeypatch.context() as patch:
        patch.setattr(growth_of(pool).chunks, "needed", lambda *_: 1 / 0)
        look_again(pool, until)
    assert isinstance(pool.check_growth(), ZeroDivisionError)
    until(lambda: pool.fits([3 * CHUNK]))


def test_a_chunk_that_cannot_be_unmapped_stays_in_the_budget_and_is_tried_again(
    create: Create, monkeypatch: pytest.MonkeyPatch, stub: Stub, until: Until
) -> None:
    monkeypatch.setattr(growth_state, "REFUSED_S", 0.05)
    pool = create(4)
    with pool.lease(4 * CHUNK):
        pass
    pool.reclaim()
    stub.refuse("cuMemUnmap", "CUDA_ERROR_UNKNOWN")
    idle_after(pool, 0.0)
    until(lambda: pool.statistics().growth_failed >= 3)
    assert (retiring(pool), pool.statistics().retired, physical(os.getpid())) == (1, 0, 4), "one is enough to know"
    assert not pool.growing([4 * CHUNK]), "its memory is still there"
    assert isinstance(pool.check_growth(), CudaError)
    assert pool.check_growth() is None
    stub.allow()
    shrink_to(pool, until, 0)
    assert (pool.statistics().retired, physical(os.getpid())) == (3, 1)
    with pool.lease(4 * CHUNK):
        pass


@pytest.mark.parametrize("problem", [CudaError("cuMemUnmap", "CUDA_ERROR_LAUNCH_FAILED"), "torch's"], ids=["ours", ""])
@pytest.mark.parametrize("call", ["grow", "shrink"])
def test_r10_a_context_that_is_lost_in_the_thread_is_raised_by_leases_and_by_check_growth(
    create: Create, monkeypatch: pytest.MonkeyPatch, until: Until, call: str, problem: Any
) -> None:
    if problem == "torch's":
        problem = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    pool = create(4)
    growing = growth_of(pool)
    if call == "shrink":
        with pool.lease(3 * CHUNK):
            pass
        pool.reclaim()
    fail(monkeypatch, 99, problem, call)
    idle_after(pool, 0.0)
    if call == "grow":
        growing.ask([3 * CHUNK])
    until(lambda: pool.check_growth() is problem)
    assert pool.check_growth() is problem, "as often as anybody looks"
    for nbytes in (4 * CHUNK, 1):  # also what finds room: nobody could write it
        for ask in (lambda nbytes: pool.lease(nbytes).__enter__(), lambda nbytes: pool.fits([nbytes])):
            with pytest.raises(type(problem)) as raised:
                ask(nbytes)
            assert raised.value is problem
    assert out(pool) == 0
    statistics = pool.statistics()
    assert statistics.mapped_nbytes + statistics.retiring_nbytes <= 4 * CHUNK
    assert growing.patience_s() is None, "and nothing more is tried"


async def test_r10_a_stage_s_next_look_finds_the_lost_context(
    create: Create, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    pool, ended = create(4), []
    lost = CudaError("cuMemCreate", "CUDA_ERROR_ECC_UNCORRECTABLE")
    fail(monkeypatch, 1, lost)
    assert pool.growing([2 * CHUNK])
    until(lambda: pool.check_growth() is lost)
    monkeypatch.setattr("tensorferry.pipeline.process.stage.Broker", lambda *_, **__: Serving())
    stage = Stage.__new__(Stage)
    stage.origin, stage.runtime = Origin("encoder", 0, 7), SimpleNamespace(broker=lambda *_: "")  # type: ignore[assignment]
    stage.deployment, stage.mends = Deployment(name="a"), []
    stage.peers = SimpleNamespace(announce=lambda _: None, admitted=None)  # type: ignore[assignment]

    def end(problem: BaseException) -> None:
        ended.append(problem)
        raise asyncio.CancelledError  # the process ends here

    monkeypatch.setattr(stage, "outlive", end)
    async with AsyncExitStack() as undo:
        with pytest.raises(asyncio.CancelledError):
            await (await stage.hand_out(pool, undo))
    assert ended == [lost]


class Serving(AbstractAsyncContextManager[Any]):
    """As much of a Broker as a stage has without consumers."""

    mend = staticmethod(lambda: False)
    check_words = staticmethod(lambda: None)

    async def __aexit__(self, *_: object) -> None: ...
