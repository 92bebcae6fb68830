"""A client, and a tokenizer that is a front door and nothing else."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Limits
from tensorferry.pipeline.channels import FrontDoor, open_context
from tensorferry.pipeline.client import Client
from tensorferry.pipeline.config import Deployment, TimeoutsSpec
from tensorferry.pipeline.runtime import Runtime

DEADLINE_S = 20.0


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        yield Deployment(name="client-test", runtime_dir=folder, timeouts=TimeoutsSpec(heartbeat_s=0.05))


class Tokenizer:
    """Says that it is ready, and keeps who has submitted what."""

    def __init__(self, door: FrontDoor) -> None:
        self.door, self._origin = door, wire.Origin("tokenizer", 0, 1)
        self.submitted: asyncio.Queue[tuple[bytes, wire.Submit]] = asyncio.Queue()

    async def serve(self) -> None:
        async for received in self.door:
            if isinstance(received.message, wire.Hello):
                me = wire.Member("tokenizer", 0, self._origin.epoch, "ready")
                self.door.send_nowait(received.peer, wire.Members(self._origin, True, (me,)))
            elif isinstance(received.message, wire.Submit):
                self.submitted.put_nowait((received.peer, received.message))


@asynccontextmanager
async def tokenizer(deployment: Deployment) -> AsyncIterator[Tokenizer]:
    """Always the same life."""
    runtime, limits = Runtime.of(deployment), Limits(inline_nbytes=1 << 20)
    runtime.prepare()
    with open_context() as context:
        with closing(FrontDoor(context, runtime.front_door(0), limits, lambda problem: None)) as door:
            made = Tokenizer(door)
            serving = asyncio.create_task(made.serve())
            try:
                yield made
            finally:
                serving.cancel()
                await asyncio.wait([serving])


def answer(submit: wire.Submit) -> wire.Result:
    return wire.Result(submit.request, submit.attempt, 1, 1, (), ())


async def test_what_a_tokenizer_answered_last_counts_though_it_is_gone(deployment: Deployment) -> None:
    """The break may be noticed before the answer is read: both have come."""
    for _ in range(3):
        async with asyncio.timeout(DEADLINE_S):
            async with tokenizer(deployment) as it, Client.connect(deployment) as client:
                asked = client.submit_nowait(["x"])
                peer, submit = await it.submitted.get()
                it.door.send_nowait(peer, answer(submit))
                assert await it.door.flush(DEADLINE_S)
                time.sleep(0.01)  # noqa: ASYNC251  (the loop is busy: both come in one round)
                assert isinstance(await asked, wire.Result)


async def test_b19_a_client_submits_again_at_once_what_a_connection_that_broke_had(deployment: Deployment) -> None:
    """To the same tokenizer, which lives and does not say so itself: the epoch it names is the same."""
    async with asyncio.timeout(DEADLINE_S):
        async with tokenizer(deployment) as first, Client.connect(deployment) as client:
            asked = client.submit_nowait(["x"])
            _, submit = await first.submitted.get()
            first.door.close()
            async with tokenizer(deployment) as again:
                peer, repeated = await again.submitted.get()
                assert (repeated.request, repeated.attempt) == (submit.request, 1)
                again.door.send_nowait(peer, answer(repeated))
                assert isinstance(await asked, wire.Result)
