"""A client, and a tokenizer that is a front door and nothing else."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadRequest, DeploymentError
from tensorferry.codecs.frames import Limits
from tensorferry.pipeline.channels.channels import FrontDoor, open_context
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.client.prompt_parts import Video
from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec, TimeoutsSpec, TokenizerSpec
from tensorferry.pipeline.process.runtime_dir import Runtime

DEADLINE_S = 20.0


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        yield Deployment(name="client-test", runtime_dir=folder, timeouts=TimeoutsSpec(heartbeat_s=0.05))


class Tokenizer:
    """Says that it is ready, and keeps who has submitted what."""

    def __init__(self, door: FrontDoor, rank: int) -> None:
        self.door, self._origin = door, wire.Origin("tokenizer", rank, 1)
        self.submitted: asyncio.Queue[tuple[bytes, wire.Submit]] = asyncio.Queue()
        self.cancelled: asyncio.Queue[wire.Cancel] = asyncio.Queue()

    async def serve(self) -> None:
        async for received in self.door:
            if isinstance(received.message, wire.Hello):
                me = wire.Member("tokenizer", self._origin.rank, self._origin.epoch, "ready")
                self.door.send_nowait(received.peer, wire.Members(self._origin, True, (me,)))
            elif isinstance(received.message, wire.Submit):
                self.submitted.put_nowait((received.peer, received.message))
            elif isinstance(received.message, wire.Cancel):
                self.cancelled.put_nowait(received.message)


@asynccontextmanager
async def tokenizer(deployment: Deployment, rank: int = 0) -> AsyncIterator[Tokenizer]:
    """Always the same life."""
    runtime, limits = Runtime.of(deployment), Limits(inline_nbytes=1 << 20)
    runtime.prepare()
    with open_context() as context:
        with closing(FrontDoor(context, runtime.front_door(rank), limits, lambda problem: None)) as door:
            made = Tokenizer(door, rank)
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


def kind_of(outcome: Any) -> str:
    return outcome.failure.kind if isinstance(outcome, wire.Failed) else type(outcome).__name__


async def test_a_request_that_was_cancelled_is_never_sent_again(deployment: Deployment) -> None:
    """Neither to the tokenizer's next life nor to another, where the one that was told of it dies."""
    async with asyncio.timeout(DEADLINE_S):
        async with tokenizer(deployment) as first, Client.connect(deployment) as client:
            asked, kept = client.submit_nowait(["x"], request=bytes(16)), client.submit_nowait(["y"])
            await first.submitted.get()
            await first.submitted.get()
            client.cancel(bytes(16))
            await first.cancelled.get()
            first.door.close()
            assert kind_of(await asked) == "Cancelled"
            async with tokenizer(deployment) as again:
                peer, repeated = await again.submitted.get()
                assert repeated.request != bytes(16)
                again.door.send_nowait(peer, answer(repeated))
                assert isinstance(await kept, wire.Result)
                assert again.submitted.empty()


async def test_b19_what_comes_of_an_older_attempt_is_no_outcome(deployment: Deployment) -> None:
    """Nor what a tokenizer says that does not have the request."""
    deployment = msgspec.structs.replace(deployment, tokenizer=TokenizerSpec(workers=2))
    async with asyncio.timeout(DEADLINE_S):
        async with tokenizer(deployment) as first, tokenizer(deployment, 1) as second:
            async with Client.connect(deployment) as client:
                asked = client.submit_nowait(["x"])
                _, submit = await first.submitted.get()
                other = client.submit_nowait(["y"])
                peer, its_own = await second.submitted.get()
                second.door.send_nowait(peer, answer(submit))  # not its request
                second.door.send_nowait(peer, answer(its_own))
                assert isinstance(await other, wire.Result)
                assert not asked.done()
                first.door.close()
                peer, repeated = await second.submitted.get()
                assert (repeated.request, repeated.attempt) == (submit.request, 1)
                failure = wire.Failure("Late", "of the attempt before", wire.Origin("tokenizer", 1, 1))
                second.door.send_nowait(peer, wire.Failed(submit.request, 0, failure))
                second.door.send_nowait(peer, answer(repeated))
                assert isinstance(await asked, wire.Result)


async def test_a_request_that_was_cancelled_may_still_have_its_result(deployment: Deployment) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with tokenizer(deployment) as it, Client.connect(deployment) as client:
            asked = client.submit_nowait(["x"], request=bytes(16))
            peer, submit = await it.submitted.get()
            client.cancel(bytes(16))
            await it.cancelled.get()
            it.door.send_nowait(peer, answer(submit))
            assert isinstance(await asked, wire.Result)


async def test_cancelling_a_request_that_waits_to_be_sent_again_ends_it(deployment: Deployment) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with tokenizer(deployment) as first, Client.connect(deployment) as client:
            asked = client.submit_nowait(["x"], request=bytes(16))
            await first.submitted.get()
            with capture_logs() as logged:
                first.door.close()
                while not any(entry["event"] == "tokenizer_gone" for entry in logged):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            client.cancel(bytes(16))
            assert kind_of(await asked) == "Cancelled"


async def test_what_was_accepted_once_waits_where_it_is_sent_again_to_one_that_is_busy(deployment: Deployment) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with tokenizer(deployment) as first, Client.connect(deployment) as client:
            asked = client.submit_nowait(["x"])
            await first.submitted.get()
            first.door.close()
            async with tokenizer(deployment) as again:
                peer, repeated = await again.submitted.get()
                again.door.send_nowait(peer, wire.Busy(repeated.request, repeated.attempt, 1, "full"))
                peer, repeated = await again.submitted.get()
                assert repeated.attempt == 2
                again.door.send_nowait(peer, answer(repeated))
                assert isinstance(await asked, wire.Result)


async def test_a_tokenizer_that_is_silent_keeps_no_client_out_where_another_is_ready(deployment: Deployment) -> None:
    timeouts = TimeoutsSpec(heartbeat_s=0.05, quarantine_s=0.2)
    deployment = msgspec.structs.replace(deployment, tokenizer=TokenizerSpec(workers=2), timeouts=timeouts)
    async with asyncio.timeout(DEADLINE_S):
        async with tokenizer(deployment, 1) as it, Client.connect(deployment) as client:
            asked = client.submit_nowait(["x"])
            peer, submit = await it.submitted.get()
            it.door.send_nowait(peer, answer(submit))
            assert isinstance(await asked, wire.Result)


@pytest.mark.parametrize(
    ("parts", "more", "says"),
    [
        ("hello", {}, r"parts is the str 'hello'; give a list, also of one part: \['hello'\]"),
        (
            [b"x" * (2 << 20)],
            {},
            r"parts have 2097152 bytes of files and tensors; 1048576 are possible \(limits.request",
        ),
        ([Video([b"x"] * 5000)], {}, "parts have 5000 files, pictures of videos and tensors; 4096 are possible"),
        (["a" * (1 << 22)] * 9, {}, "parts have 37748736 bytes of text and token ids; 33554432 are possible"),
        ([], {}, "0 parts; give 1 to 4096"),
        (["a"] * 5000, {}, "5000 parts; give 1 to 4096"),
        (["x", "a" * ((1 << 22) + 1)], {}, "part 1: a text of 4194305 characters; at most 4194304"),
        (["ab\ud800"], {}, r"part 0: a text is not valid Unicode: character 2 is the lone surrogate '.ud800'"),
        ([np.zeros((1 << 22) + 1, np.int32)], {}, "part 0: 4194305 token ids; at most 4194304"),
        (["x"], {"output_tokens": -1}, "output_tokens of -1; 0 to 1048576 are possible"),
        (["x"], {"output_tokens": 2**70}, f"output_tokens of {2**70}; 0 to 1048576 are possible"),
        (["x"], {"output_tokens": 1.5}, "output_tokens is the float 1.5; give an integer"),
        (["x"], {"output_tokens": None}, "output_tokens is the NoneType None; give an integer"),
        (["x"], {"request": b"x" * 15}, "request is the bytes b'x+' of 15 bytes; give bytes, 16 of them"),
        (["x"], {"request": b""}, "request is the bytes b'' of 0 bytes; give bytes, 16 of them"),
        (["x"], {"request": "x" * 16}, "request is the str 'x+'; give bytes, 16 of them"),
        (["x"], {"deadline_s": "5"}, "deadline_s is the str '5'; give seconds as a number"),
        (["x"], {"deadline_s": True}, "deadline_s is the bool True; give seconds as a number"),
        (["x"], {"deadline_s": float("nan")}, "deadline_s of nan; it must be more than 0"),
        (["x"], {"traceparent": 5}, "traceparent is the int 5; give the header as a str"),
    ],
    ids=lambda value: "" if isinstance(value, list) else None,
)
async def test_what_cannot_be_asked_for_is_refused_by_name_before_anything_is_sent(
    deployment: Deployment, parts: Any, more: Any, says: str
) -> None:
    deployment = msgspec.structs.replace(deployment, limits=LimitsSpec(request_mb=1))
    async with asyncio.timeout(DEADLINE_S):
        async with tokenizer(deployment) as it, Client.connect(deployment) as client:
            more = {"request": bytes(16)} | more
            with pytest.raises(BadRequest, match=f"^{says}"):
                client.submit_nowait(parts, **more)
            with pytest.raises(BadRequest, match=f"^{says}"):
                await client.submit(parts, **more)
            asked = client.submit_nowait(["it is the first"], request=bytes(16))  # not in flight already
            peer, submit = await it.submitted.get()
            assert submit.parts == (wire.TextPart("it is the first"),)
            it.door.send_nowait(peer, answer(submit))
            assert isinstance(await asked, wire.Result)


async def test_a_closed_client_refuses_a_request(deployment: Deployment) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with tokenizer(deployment), Client.connect(deployment) as client:
            pass
        with pytest.raises(DeploymentError, match="this client is closed; submit within"):
            client.submit_nowait(["x"])
