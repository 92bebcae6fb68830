"""A request that is told `busy` is offered again while it has time, and never after."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing

import pytest

from tensorferry import BadRequest, Busy, Client, Failed, Failure, Result, submit_patiently
from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Limits
from tensorferry.pipeline.channels.channels import FrontDoor, open_context
from tensorferry.pipeline.deployment.spec import Deployment, TimeoutsSpec
from tensorferry.pipeline.process.runtime_dir import Runtime

DEADLINE_S = 20.0
ORIGIN = wire.Origin("tokenizer", 0, 1)
Answer = Callable[[wire.Submit], wire.Message]


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        yield Deployment(name="patience", runtime_dir=folder, timeouts=TimeoutsSpec(heartbeat_s=0.05))


def busy(retry_ms: int) -> Answer:
    return lambda submit: Busy(submit.request, submit.attempt, retry_ms, "full (limits.in_flight_requests)")


def served(submit: wire.Submit) -> Result:
    return Result(submit.request, submit.attempt, 1, 1, (), ())


def failed(submit: wire.Submit) -> Failed:
    return Failed(submit.request, submit.attempt, Failure("PeerGone", "died", ORIGIN, retryable=True))


@asynccontextmanager
async def answering(deployment: Deployment, *answers: Answer) -> AsyncIterator[tuple[Client, list[wire.Submit]]]:
    """A client of a tokenizer that gives these answers in turn, the last for ever; what it was asked."""
    runtime, asked = Runtime.of(deployment), list[wire.Submit]()
    runtime.prepare()

    async def serve(door: FrontDoor) -> None:
        async for received in door:
            if isinstance(received.message, wire.Hello):
                me = wire.Member("tokenizer", 0, 1, "ready")
                door.send_nowait(received.peer, wire.Members(ORIGIN, True, (me,)))
            elif isinstance(received.message, wire.Submit):
                asked.append(received.message)
                answer = answers[min(len(asked), len(answers)) - 1]
                door.send_nowait(received.peer, answer(received.message))

    with open_context() as context:
        with closing(
            FrontDoor(context, runtime.front_door(0), Limits(inline_nbytes=1 << 20), lambda problem: None)
        ) as door:
            serving = asyncio.create_task(serve(door))
            try:
                async with asyncio.timeout(DEADLINE_S), Client.connect(deployment) as client:
                    yield client, asked
            finally:
                serving.cancel()
                await asyncio.wait([serving])


async def test_it_is_offered_again_until_it_is_taken(deployment: Deployment) -> None:
    async with answering(deployment, busy(1), busy(1), busy(0), served) as (client, asked):
        outcome = await submit_patiently(client, ["x"], output_tokens=3, deadline_s=10.0)
        assert isinstance(outcome, Result)
        assert len(asked) == 4
        assert len({submit.request for submit in asked}) == 4
        assert {submit.output_tokens for submit in asked} == {3}
        deadlines = [submit.deadline_ms for submit in asked]
        assert deadlines == sorted(deadlines, reverse=True)  # what is left of one deadline
        assert deadlines[0] == 10_000


async def test_it_waits_for_as_long_as_it_was_told_and_longer_each_time(deployment: Deployment) -> None:
    async with answering(deployment, busy(100), busy(100), served) as (client, _):
        loop = asyncio.get_running_loop()
        began = loop.time()
        await submit_patiently(client, ["x"], deadline_s=10.0)
        assert loop.time() - began >= 0.5 * (0.1 + 0.15)  # at the least that chance allows


async def test_without_time_for_another_pause_it_stays_busy(deployment: Deployment) -> None:
    async with answering(deployment, busy(60_000)) as (client, asked):
        outcome = await submit_patiently(client, ["x"], deadline_s=0.5)
        assert isinstance(outcome, Busy)
        assert outcome.retry_ms == 60_000
        assert len(asked) == 1


async def test_a_failure_is_an_outcome(deployment: Deployment) -> None:
    async with answering(deployment, busy(1), failed) as (client, asked):
        assert isinstance(await submit_patiently(client, ["x"]), Failed)
        assert len(asked) == 2


async def test_it_ends_with_its_caller(deployment: Deployment) -> None:
    async with answering(deployment, busy(4_000)) as (client, asked):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await submit_patiently(client, ["x"])
        assert len(asked) == 1


@pytest.mark.parametrize("deadline_s", [0, -1.0, float("nan"), True, "10"])
async def test_a_deadline_that_is_none_is_refused(deployment: Deployment, deadline_s: float) -> None:
    async with answering(deployment, served) as (client, asked):
        with pytest.raises(BadRequest, match="deadline_s"):
            await submit_patiently(client, ["x"], deadline_s=deadline_s)
        assert asked == []
