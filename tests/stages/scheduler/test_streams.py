"""Requests at an engine that streams: capacity, order, deadlines, cancellation, and engines that misbehave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadRequest
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.engines.base import Capacity, Delta, EngineDied, EngineRequest
from tensorferry.stages.engines.paced import Paced, made_up
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.scheduler.answer import Answer
from tensorferry.stages.scheduler.engine_side import CompleteRequest
from tensorferry.stages.scheduler.streams import Streams

OWNER = wire.Origin("tokenizer", 0, 7)
DEADLINE_S = 20.0


class Heard:
    """What the owners were told, in order."""

    origin = wire.Origin("scheduler", 0, 9)

    def __init__(self) -> None:
        self.deltas: list[wire.Delta] = []
        self.ends: list[tuple[str, Any]] = []
        self.over: set[bytes] = set()
        self.full = 0  #: how many deltas more find the owner's queue full
        self.something, self.ended = asyncio.Event(), asyncio.Event()

    def is_over(self, one: CompleteRequest) -> bool:
        return one.admit.request in self.over

    def delta(self, admit: wire.Admit, delta: wire.Delta) -> bool:
        if self.full:
            self.full -= 1
            return False
        self.deltas.append(delta)
        self.something.set()
        return True

    def done(self, admit: wire.Admit, answer: Answer, marks: dict[str, int]) -> None:
        self.ends.append((name_of(admit), answer))
        self.ended.set()

    def failed(self, admit: wire.Admit, problem: Exception) -> None:
        self.ends.append((name_of(admit), problem))

    def expired(self, admit: wire.Admit) -> None:
        self.ends.append((name_of(admit), None))


def name_of(admit: wire.Admit) -> str:
    return admit.request.decode().strip()


def job(
    name: str, tokens: int = 4, *, prompt: int = 1, stream: bool = True, left_s: float = 60.0, **more: Any
) -> CompleteRequest:
    request, ids = name.encode().ljust(16), np.arange(prompt, dtype=np.int32)
    admit = wire.Admit(request, 0, 1, OWNER, (), ids.tobytes(), (), tokens, 60_000, None, None, stream, **more)
    deadline_ns = time.monotonic_ns() + int(left_s * 1e9)
    return CompleteRequest(admit, EngineRequest(request, ids, [], [], tokens, deadline_ns=deadline_ns), {})


class Scripted:
    """An engine whose answers a test writes: `submit` runs `answers[name]`."""

    def __init__(self, **answers: Any) -> None:
        self.capacity, self.answers = Capacity(8, 1000), answers
        self.begun: list[str] = []
        self.closed: list[str] = []

    async def start(self) -> None:
        """Nothing to prepare."""

    async def close(self) -> None:
        """Nothing to leave behind."""

    async def submit(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        name = request.request.decode().strip()
        self.begun.append(name)
        try:
            async for delta in self.answers[name]():
                yield delta
        finally:
            self.closed.append(name)


@asynccontextmanager
async def running(engine: Any) -> AsyncIterator[tuple[Streams, Heard]]:
    heard = Heard()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        yield Streams(engine, heard, Watch("scheduler.engine", "test", Counters()), tasks.create_task), heard


async def forever() -> AsyncIterator[Delta]:
    yield Delta((1,))
    await asyncio.Event().wait()


def text_of(heard: Heard) -> bytes:
    """All letters that were told, each with its place checked."""
    told = bytearray()
    for delta in heard.deltas:
        assert delta.first == len(told)
        assert len(delta.at_ns) == len(delta.token_ids) // 4
        told += bytes(np.frombuffer(delta.token_ids, "<i4").astype(np.uint8))
    return bytes(told)


async def test_s5_tokens_are_told_in_order_once_and_the_answer_is_whole() -> None:
    async with running(Paced({"token_ms": 2})) as (streams, heard):
        streams.add(asked := job("a", 20))
        await streams.join()
    [(name, answer)] = heard.ends
    assert (name, answer.finish, answer.count) == ("a", "length", 20)
    assert text_of(heard) == made_up(asked.request)
    assert len(heard.deltas) > 1
    assert answer.at_ns == sorted(answer.at_ns)


async def test_a_fast_engine_s_tokens_travel_together() -> None:
    async with running(Paced({})) as (streams, heard):
        streams.add(job("a", 5000))
        await streams.join()
    assert len(text_of(heard)) == 5000
    assert len(heard.deltas) < 500


async def test_tokens_that_found_an_owner_s_queue_full_are_told_later() -> None:
    async with running(Paced({"token_ms": 20})) as (streams, heard):
        heard.full = 2
        streams.add(asked := job("a", 12))
        await streams.join()
    assert heard.full == 0
    assert text_of(heard) == made_up(asked.request)


async def test_who_does_not_ask_for_a_stream_gets_the_answer_alone() -> None:
    async with running(Paced({})) as (streams, heard):
        streams.add(job("a", stream=False))
        await streams.join()
    assert not heard.deltas
    assert heard.ends[0][1].count == 4


async def test_a_short_answer_does_not_wait_for_a_long_one() -> None:
    async with running(Scripted(long=forever, short=lambda: ends(1))) as (streams, heard):
        streams.add(job("long"))
        streams.add(job("short"))
        await heard.something.wait()  # the long one's first token
        await heard.ended.wait()
        assert heard.ends[0][0] == "short"
        heard.over.add(b"long".ljust(16))
        streams.drop_over()
        await streams.join()


async def ends(tokens: int) -> AsyncIterator[Delta]:
    yield Delta(tuple(range(tokens)), finish="stop")


async def test_what_the_engine_has_no_room_for_waits_by_priority() -> None:
    release = asyncio.Event()

    async def held() -> AsyncIterator[Delta]:
        await release.wait()
        yield Delta(finish="stop")

    engine = Scripted(first=held, usual=held, urgent=held)
    engine.capacity = Capacity(1, 1000)
    async with running(engine) as (streams, _):
        for each in (job("first"), job("usual"), job("urgent", priority=-1)):
            streams.add(each)
        assert (streams.running, streams.queued, streams.in_flight) == (1, 2, 3)
        release.set()
        await streams.join()
    assert engine.begun == ["first", "urgent", "usual"]


async def test_tokens_are_a_capacity_too_and_one_that_exceeds_it_runs_alone() -> None:
    engine = Scripted(huge=lambda: ends(1), small=lambda: ends(1))
    engine.capacity = Capacity(8, 10)
    async with running(engine) as (streams, _):
        streams.add(job("huge", prompt=100))
        streams.add(job("small"))
        assert (streams.running, streams.queued) == (1, 1)
        await streams.join()
    assert engine.begun == ["huge", "small"]


async def test_a_cancelled_request_closes_its_generator_and_makes_room() -> None:
    engine = Scripted(a=forever, b=lambda: ends(1))
    engine.capacity = Capacity(1, 1000)
    async with running(engine) as (streams, heard):
        streams.add(job("a"))
        streams.add(job("b"))
        await heard.something.wait()
        heard.over.add(b"a".ljust(16))
        streams.drop_over()
        await streams.join()
    assert [name for name, _ in heard.ends] == ["b"]
    assert engine.closed == ["a", "b"]


async def test_one_that_was_cancelled_before_its_first_step_takes_no_room() -> None:
    engine = Scripted(a=forever)
    async with running(engine) as (streams, heard):
        streams.add(job("a"))
        heard.over.add(b"a".ljust(16))
        streams.drop_over()
        await streams.join()
        assert streams.in_flight == 0
    assert not engine.begun


async def test_a_deadline_ends_a_request_and_no_other() -> None:
    engine = Scripted(late=forever, good=lambda: ends(2))
    async with running(engine) as (streams, heard):
        streams.add(job("late", left_s=0.05))
        streams.add(job("good"))
        await streams.join()
    assert [(name, outcome is None) for name, outcome in heard.ends] == [("good", False), ("late", True)]
    assert engine.closed == ["good", "late"]


async def no_delta() -> AsyncIterator[Any]:
    yield "text"


async def no_end() -> AsyncIterator[Delta]:
    yield Delta((1,))


async def too_many() -> AsyncIterator[Delta]:
    yield Delta(tuple(range(100)))


def raises(problem: BaseException) -> Callable[[], AsyncIterator[Delta]]:
    async def answer() -> AsyncIterator[Delta]:
        if problem.args:
            raise problem
        yield Delta()

    return answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (no_delta, "no Delta"),
        (no_end, "without a reason"),
        (too_many, "over 4 tokens"),
        (raises(BadRequest("top_k is 3")), "top_k is 3"),
        (raises(TimeoutError("its own")), "its own"),
        (raises(SystemExit(3)), "SystemExit: 3"),
    ],
)
async def test_an_engine_that_misbehaves_fails_that_request_alone(answer: Any, said: str) -> None:
    async with running(Scripted(bad=answer, good=lambda: ends(2))) as (streams, heard):
        streams.add(job("bad"))
        streams.add(job("good"))
        await streams.join()
    outcomes = dict(heard.ends)
    assert said in str(outcomes["bad"])
    assert outcomes["good"].finish == "stop"


async def test_an_engine_that_died_ends_the_process() -> None:
    async def serve() -> None:
        async with running(Scripted(a=raises(EngineDied("its core was killed")))) as (streams, _):
            streams.add(job("a"))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as ended:
        await serve()
    assert ended.group_contains(EngineDied, match="its core was killed")
