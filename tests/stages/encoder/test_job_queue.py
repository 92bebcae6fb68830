"""Which requests share a call: in order, within the budget, of one form, and after a wait that has an end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.tensors import CODES
from tensorferry.stages.encoder.features import Features
from tensorferry.stages.encoder.job_queue import Job, Jobs

ORIGIN = wire.Origin("tokenizer", 0, 3)
FOR_EVER_S = 1e6


def job(
    patches: int,
    *,
    rows: int | None = None,
    dtype: str = "float32",
    width: int = 3,
    attempt: int = 0,
    anew: tuple[int, ...] = (),
) -> Job:
    """A request of one item. rows: of its features, as many as patches unless it lies."""
    payload = wire.Inline(0, CODES[dtype], (patches if rows is None else rows, width))
    item = wire.Item("image", (1, 1, patches), 1, bytes(32), (wire.Tensor("features", payload),))
    message = wire.Encode(bytes(16), attempt, 7, ORIGIN, (), (), (item,), 60_000, anew)
    return Job(message, Features(None, message, []))  # type: ignore[arg-type]


def jobs_of(budget: int = 100, wait_s: float = 0.0, waiting: Sequence[Job] = ()) -> Jobs:
    jobs = Jobs(budget, wait_s, lambda job: sum(item.info.patches for item in job.items))
    for one in waiting:
        jobs.put_nowait(one)
    return jobs


async def take(jobs: Jobs) -> list[Job]:
    async with asyncio.timeout(20):
        return await jobs.take()


@pytest.mark.parametrize(
    ("patches", "budget", "batches"),
    [
        ([10, 20, 30, 40, 50], 100, [[10, 20, 30, 40], [50]]),
        ([10, 95, 5], 100, [[10], [95, 5]]),  # in order: nobody is overtaken
        ([500, 10], 100, [[500], [10]]),
        ([10, 20], 0, [[10], [20]]),
    ],
)
async def test_jobs_go_together_in_order_within_the_budget(
    patches: list[int], budget: int, batches: list[list[int]]
) -> None:
    jobs = jobs_of(budget, waiting=[job(count) for count in patches])
    taken = [await take(jobs) for _ in batches]
    assert [[one.items[0].info.patches for one in batch] for batch in taken] == batches


async def test_what_comes_again_goes_alone() -> None:
    """Whoever had it died, perhaps of it; with the same company it would take that with it each time."""
    again = [job(1, attempt=1), job(1, anew=(0,)), job(1, attempt=wire.SENDINGS + 2)]
    jobs = jobs_of(waiting=[job(1), job(1, attempt=wire.SENDINGS), *again, job(1), job(1)])
    assert [len(await take(jobs)) for _ in range(5)] == [2, 1, 1, 1, 2]


@pytest.mark.parametrize("again", [{"attempt": 1}, {"anew": (0,)}, {"attempt": wire.SENDINGS + 2}])
async def test_what_comes_again_has_no_company_of_those_that_come_first(again: dict[str, Any]) -> None:
    jobs = jobs_of(waiting=[job(1), job(1, **again), job(1)])
    assert [len(await take(jobs)) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("patches", "full"),
    [([], False), ([60], False), ([60, 41], True), ([60, 40], True), ([100], True), ([500], True), ([0, 60], False)],
)
async def test_a_batch_is_full_when_nobody_could_join_it(patches: list[int], full: bool) -> None:
    jobs, over = jobs_of(waiting=[job(count) for count in patches]), False
    filling = asyncio.create_task(jobs.fills(unless=lambda: over))
    await asyncio.sleep(0)
    assert filling.done() == full
    jobs.put_nowait(job(99))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert filling.done() == (full or bool(sum(patches))), "a job that has to go with another"
    over = True
    jobs.look_again()
    async with asyncio.timeout(20):
        await filling


async def test_what_no_other_may_join_is_full() -> None:
    jobs = jobs_of(waiting=[job(10), job(10, dtype="uint8")])
    async with asyncio.timeout(20):
        await jobs.fills(unless=lambda: False)
        await jobs.take()
        jobs.put_nowait(job(1, rows=2))
        await jobs.fills(unless=lambda: False)


@pytest.mark.parametrize(
    "odd", [dict(rows=11), dict(rows=9), dict(dtype="uint8"), dict(width=4)], ids=lambda odd: next(iter(odd))
)
async def test_what_is_not_of_the_others_form_does_not_come_between_them(odd: Any) -> None:
    """Otherwise it would shift their rows, or have them refused for not being like it."""
    jobs = jobs_of(waiting=[job(10), job(10), job(10, **odd), job(10)])
    assert [len(await take(jobs)) for _ in range(3)] == [2, 1, 1]


async def test_a_job_waits_for_company_until_the_batch_is_full() -> None:
    jobs = jobs_of(wait_s=FOR_EVER_S, waiting=[job(40)])
    taking = asyncio.create_task(take(jobs))
    for patches in (40, 20):
        done, _ = await asyncio.wait([taking], timeout=0.05)
        assert not done
        jobs.put_nowait(job(patches))
    assert [one.items[0].info.patches for one in await taking] == [40, 40, 20]


async def test_the_wait_has_an_end_and_counts_from_arrival() -> None:
    jobs = jobs_of(wait_s=0.05, waiting=[job(10)])
    loop = asyncio.get_running_loop()
    before = loop.time()
    assert len(await take(jobs)) == 1
    assert loop.time() - before > 0.03
    waited = job(10)
    waited.came_s -= FOR_EVER_S  # while the rank was busy with others
    jobs = jobs_of(wait_s=FOR_EVER_S, waiting=[waited])
    assert await take(jobs) == [waited]


@pytest.mark.parametrize("why", ["no wait", "nothing to encode", "full", "too large to share"])
async def test_nobody_waits_for_company_that_is_no_use(why: str) -> None:
    wait_s = 0.0 if why == "no wait" else FOR_EVER_S
    patches = {"nothing to encode": 0, "full": 100, "too large to share": 101}.get(why, 10)
    assert len(await take(jobs_of(wait_s=wait_s, waiting=[job(patches)]))) == 1


async def test_a_drain_hurries_a_batch_that_waits() -> None:
    jobs = jobs_of(wait_s=FOR_EVER_S, waiting=[job(10), job(20)])
    taking = asyncio.create_task(take(jobs))
    done, _ = await asyncio.wait([taking], timeout=0.05)
    assert not done
    jobs.hurry()
    assert len(await taking) == 2
    jobs.put_nowait(job(10))
    assert len(await take(jobs)) == 1


async def test_join_waits_for_every_job_that_was_taken() -> None:
    jobs = jobs_of(waiting=[job(10), job(20)])
    joining = asyncio.create_task(jobs.join())
    taken = await take(jobs)
    assert jobs.unfinished == 2
    jobs.done(1)
    done, _ = await asyncio.wait([joining], timeout=0.05)
    assert not done
    jobs.done(len(taken) - 1)
    async with asyncio.timeout(20):
        await joining
    assert jobs.unfinished == 0
