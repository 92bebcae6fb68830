"""Waiting for bytes to be written, and to reach the host, without holding the event loop up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from tensorferry.codecs.errors import LeaseNotReady, LeasePoisoned, StaleLease
from tensorferry.codecs.memory.cuda_driver import CudaError, lost_context
from tensorferry.codecs.messages import Inline, Proxy
from tensorferry.codecs.pool.pool import Lease, Pool
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES
from tensorferry.stages.gpu_wait import stage, unready, wait_ready

DEADLINE_S = 20.0


@pytest.fixture
def reader() -> Iterator[tuple[Pool, Reader]]:
    with Pool.create(1 << 16, 8) as pool, Reader() as reader:
        pool.admit(*reader.attach(*pool.export()))
        yield pool, reader


def proxy_of(pool: Pool, lease: Lease) -> Proxy:
    slot, generation, offset, _ = lease.grant
    return Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (100,))


async def test_it_waits_for_the_last_of_all_payloads(reader: tuple[Pool, Reader]) -> None:
    pool, consumer = reader
    with pool.lease(100) as early, pool.lease(100) as late:
        payloads = [Inline(0, CODES["uint8"], (4,)), proxy_of(pool, early), proxy_of(pool, late)]
        early.publish()
        assert unready(consumer, payloads) == payloads[2]
        async with asyncio.timeout(DEADLINE_S):
            waiting = asyncio.create_task(wait_ready(consumer, payloads, DEADLINE_S))
            await asyncio.sleep(0)
            assert not waiting.done()
            late.publish()
            await waiting
        assert unready(consumer, payloads) is None


async def test_what_never_comes_is_an_error_that_says_how_long(reader: tuple[Pool, Reader]) -> None:
    pool, consumer = reader
    with pool.lease(100) as lease, pytest.raises(LeaseNotReady, match=r"was not written within 0\.01 s"):
        await wait_ready(consumer, [proxy_of(pool, lease)], 0.01)


async def test_what_never_can_come_is_an_error_at_once(reader: tuple[Pool, Reader]) -> None:
    pool, consumer = reader
    with pool.lease(100) as lease:
        lease.poison()
        with pytest.raises(LeasePoisoned):
            await wait_ready(consumer, [proxy_of(pool, lease)], DEADLINE_S)
        proxy = proxy_of(pool, lease)
    pool.reclaim()
    with pytest.raises(StaleLease):
        await wait_ready(consumer, [structs.replace(proxy, generation=8)], DEADLINE_S)


class GpuDraft:
    """What stands for a draft in GPU memory: on the host some looks after it was asked to be."""

    def __init__(self, looks: int) -> None:
        self.asked, self._looks = 0, looks

    def prepared(self, column: int | None) -> bool:
        self._looks -= bool(self.asked)
        must_stage = column is None and self._looks > 0
        self.asked += must_stage
        return not must_stage


async def test_only_what_leaves_inline_is_brought_to_the_host() -> None:
    pooled, inline = GpuDraft(3), GpuDraft(3)
    ways: Any = [(pooled, 4), (inline, None)]
    async with asyncio.timeout(DEADLINE_S):
        await stage(lambda: ways)
    assert (pooled.asked, inline.asked) == (0, 3)


async def test_what_is_told_of_by_message_is_complete_first() -> None:
    """All drafts are begun at once, and nobody waits for one before the next is."""
    begun: list[int] = []

    class Mailed:
        def __init__(self, number: int, looks: int) -> None:
            self._number, self._looks = number, looks

        def prepared(self, column: int | None) -> bool:
            begun.append(self._number)
            self._looks -= 1
            return self._looks < 0

    ways: Any = [(Mailed(number, looks=3 - number), 0) for number in range(3)]
    async with asyncio.timeout(DEADLINE_S):
        await stage(lambda: ways)
    assert begun == [0, 1, 2] * 4


async def test_a_consumer_that_loses_its_column_meanwhile_is_seen() -> None:
    first, second = GpuDraft(4), GpuDraft(4)

    def ways() -> Any:
        return [(first, None), (second, 4 if first.asked < 2 else None)]

    async with asyncio.timeout(DEADLINE_S):
        await stage(ways)
    assert second.asked


#: What torch adds to every error of CUDA's, whatever it is.
FOOTER = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"


@pytest.mark.parametrize(
    ("problem", "lost"),
    [
        (CudaError("cuMemcpyAsync", "CUDA_ERROR_ILLEGAL_ADDRESS"), True),
        (
            CudaError("cuMemImportFromShareableHandle", "CUDA_ERROR_OPERATING_SYSTEM"),
            False,
        ),  # a peer's handle may be bad
        (CudaError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError(f"CUDA error: OS call failed or operation not supported on this OS\n{FOOTER}"), True),
        (RuntimeError(f"CUDA error: invalid argument\n{FOOTER}"), False),
        (ExceptionGroup("items", [ValueError("1"), RuntimeError("CUDA error: unspecified launch failure")]), True),
        (ExceptionGroup("items", [ValueError("1"), RuntimeError("CUDA out of memory.")]), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("an illegal memory access"), False),
        (ValueError("CUDA error: an illegal memory access was encountered"), False),
        (asyncio.CancelledError(), False),
    ],
    ids=str,
)
def test_r10_which_problems_cost_a_process_its_gpu(problem: BaseException, lost: bool) -> None:
    found = lost_context(problem)
    assert (found is not None) is lost
    assert found is None or isinstance(problem, ExceptionGroup) or found is problem
