"""The schedule has absolute times and an open loop; a run has a counted ceiling and one outcome a request."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from fractions import Fraction

import numpy as np
import pytest

from tensorferry.codecs.errors import DeploymentError, PeerBusy
from tensorferry.codecs.messages import (
    Busy,
    Failed,
    Failure,
    Gauge,
    ItemReport,
    Mark,
    Member,
    Origin,
    Result,
)
from tensorferry.pipeline.recording.request import Request
from tensorferry.replay.run.gauge_samples import PoolUse
from tensorferry.replay.run.schedule import Ceiling, MonotonicClock, Speed, pace
from tensorferry.replay.run.sender import Answer, Replay, Reply, Snapshot
from tensorferry.replay.run.session import Session
from tensorferry.replay.workload.prepare import Part, Prepared
from tensorferry.replay.workload.token_ids import TokenSource

MS = 1_000_000
S = 1_000_000_000
TOKENS = TokenSource(1000, [0, 1], seed=0)
DEADLINE_S = 20.0  # of each test's waits


class FakeClock:
    """A clock that advances only in sleeps. Each sleep overshoots, as real ones do."""

    def __init__(self, overshoot_ns: int = 0) -> None:
        self.at_ns, self.overshoot_ns = 7 * S, overshoot_ns

    def now_ns(self) -> int:
        return self.at_ns

    async def sleep_until(self, at_ns: int) -> None:
        self.at_ns = max(self.at_ns, at_ns) + self.overshoot_ns
        for _ in range(5):  # turns of the loop, in which answers arrive
            await asyncio.sleep(0)


class FakeClient:
    """A fake client. `answer` gives the value of a reply, or None for a reply that stays open."""

    def __init__(self, answer: Callable[[int, bytes], Answer | Exception | None]) -> None:
        self.answer = answer
        self.parts: list[list[Part]] = []
        self.open: dict[bytes, Reply] = {}
        self.most_open = 0
        self.cancelled: list[bytes] = []
        self.sent = asyncio.Event()

    def submit_nowait(
        self,
        parts: Sequence[Part],
        *,
        output_tokens: int = 0,
        deadline_s: float | None = None,
        request: bytes | None = None,
    ) -> Reply:
        assert request is not None
        assert len(request) == 16
        assert request not in self.open
        self.parts.append(list(parts))
        answer = self.answer(len(self.parts) - 1, request)
        if isinstance(answer, PeerBusy):
            raise answer
        reply: Reply = asyncio.get_running_loop().create_future()
        self.open[request] = reply
        self.most_open = max(self.most_open, len(self.open))
        reply.add_done_callback(lambda _: self.open.pop(request))
        if isinstance(answer, Exception):
            reply.set_exception(answer)
        elif answer is not None:
            reply.set_result(answer)
        self.sent.set()
        return reply

    def cancel(self, request: bytes) -> None:
        self.cancelled.append(request)

    async def refresh(self, timeout_s: float = 5.0) -> list[Member]:
        gauges = {"pool_capacity_nbytes": 100.0, "pool_peak_lent_nbytes": 60.0, "pool_refused": 2.0, "other": 1.0}
        told = tuple(Gauge(name, value) for name, value in gauges.items())
        return [Member("scheduler", 0, 5, "ready"), Member("tokenizer", 1, 5, "ready", told)]


def result(request: bytes, *items: ItemReport) -> Result:
    return Result(request, 0, 10, 3, items, (Mark("received", 1),))


def always_ok(index: int, request: bytes) -> Result:
    return result(request)


def never(index: int, request: bytes) -> None:
    return None


def rows(times_ns: Sequence[int]) -> list[Prepared]:
    return [
        Prepared(Request(line=index + 1, at_ns=at, output_tokens=3, text_tokens=5), (), 5, None)
        for index, at in enumerate(times_ns)
    ]


def replay_of(times_ns: Sequence[int], speed: str = "1", **options: object) -> Replay:
    options = {"deadline_s": DEADLINE_S, "clock": FakeClock(), **options}
    return Replay(rows(times_ns), TOKENS, Speed.parse(speed), **options)  # type: ignore[arg-type]


async def run(replay: Replay, client: FakeClient) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await replay.run(client)


# --- due times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ratio"),
    [("1", Fraction(1)), ("0.5", Fraction(1, 2)), ("1e2", Fraction(100)), ("1/3", Fraction(1, 3)), (" MAX ", None)],
)
def test_speeds(text: str, ratio: Fraction | None) -> None:
    assert Speed.parse(text).ratio == ratio


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "fast", "1/0", "1e9", "1e-9", "1e999999999"])
def test_what_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither|between"):
        Speed.parse(text)


def test_due_times_are_exact_integers() -> None:
    offset = 19_440_110 * S + 1  # 225 days: doubles are 2 ns apart here
    assert Speed.parse("1").due_ns(offset) == offset
    assert Speed.parse("3").due_ns(offset) == offset // 3
    assert Speed.parse("0.1").due_ns(offset) == offset * 10
    assert Speed.parse("max").due_ns(offset) == 0


# --- the pacer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", ["0.5", "1", "2"])
async def test_ten_thousand_rows_do_not_drift(speed: str) -> None:
    """Each sleep is 0.4 ms too long and each send takes 0.1 ms: added up, the last would be 5 s late."""
    clock = FakeClock(overshoot_ns=400_000)
    due_ns = [Speed.parse(speed).due_ns(index * 5 * MS) for index in range(10_000)]
    late_ns: list[int] = []

    def send(index: int, delayed: bool) -> None:
        late_ns.append(clock.at_ns - 7 * S - due_ns[index])
        clock.at_ns += 100_000

    await pace(due_ns, clock, 7 * S, Ceiling(None), send)
    assert len(late_ns) == 10_000
    assert (min(late_ns), max(late_ns)) == (0, 400_000)  # only the row due at once needs no sleep
    assert clock.at_ns - 7 * S == due_ns[-1] + 500_000


async def test_what_is_due_together_is_sent_together() -> None:
    clock = FakeClock(overshoot_ns=400_000)
    sent_ns: list[int] = []
    await pace([0] * 28 + [3 * S] * 19, clock, 7 * S, Ceiling(None), lambda index, delayed: sent_ns.append(clock.at_ns))
    assert sent_ns == [7 * S] * 28 + [10 * S + 400_000] * 19


async def test_the_monotonic_clock_never_wakes_early() -> None:
    clock = MonotonicClock()
    for wait_ns in (0, 100, 900_000, 3 * MS):
        at_ns = clock.now_ns() + wait_ns
        await clock.sleep_until(at_ns)
        assert clock.now_ns() >= at_ns


# --- the run ---------------------------------------------------------------------------------------------------


async def test_an_open_loop_sends_whatever_became_of_the_earlier_requests() -> None:
    """Nothing is answered until the last has been sent, and all are sent at their times."""
    client = FakeClient(never)
    replay = replay_of([0, 10 * MS, 10 * MS, 25 * MS])

    def last(index: int, request: bytes) -> Result | None:
        if index == 3:
            for waiting, reply in list(client.open.items()):
                reply.set_result(result(waiting))
            return result(request)
        return None

    client.answer = last
    await run(replay, client)
    assert [outcome.sent_ns for outcome in replay.outcomes] == [0, 10 * MS, 10 * MS, 25 * MS]
    assert [outcome.intended_ns for outcome in replay.outcomes] == [0, 10 * MS, 10 * MS, 25 * MS]
    assert {outcome.status for outcome in replay.outcomes} == {"ok"}
    assert client.most_open == 4


async def test_a_real_wait_never_ends_early_and_can_be_given_up() -> None:
    """A hundred of 0.3 ms, which the loop's own timer would make 1 ms. Nothing stays open."""
    clock, before = MonotonicClock(), set(os.listdir("/proc/self/fd"))
    late_ns = []
    for _ in range(100):
        at_ns = clock.now_ns() + 300_000
        await clock.sleep_until(at_ns)
        late_ns.append(clock.now_ns() - at_ns)
    assert min(late_ns) >= 0
    assert min(late_ns) < 500_000
    await clock.sleep_until(clock.now_ns() - S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(clock.sleep_until(clock.now_ns() + 1000 * S), 0.01)
    assert set(os.listdir("/proc/self/fd")) == before


async def test_the_trace_is_rebased_to_its_first_request() -> None:
    replay = replay_of([19_440_110 * S, 19_440_111 * S], speed="4")
    await run(replay, FakeClient(always_ok))
    assert [outcome.intended_ns for outcome in replay.outcomes] == [0, S // 4]


async def test_over_the_ceiling_requests_wait_and_are_counted_from_their_intended_time() -> None:
    """Two at most: the third waits 100 ms for the first answer, and what came due meanwhile is late as well."""
    clock = FakeClock()
    client = FakeClient(never)
    replay = replay_of([0, 0, 0, 50 * MS, 500 * MS], concurrency=2, clock=clock)

    async def answer() -> None:
        """The oldest of the first two, 100 ms later; then all, as soon as they come."""
        while len(client.parts) < 5 or client.open:
            await client.sent.wait()
            client.sent.clear()
            if len(client.parts) in (2, 3):
                clock.at_ns += 100 * MS
                request, reply = next(iter(client.open.items()))
                reply.set_result(result(request))
            elif len(client.parts) > 3:
                for request, reply in list(client.open.items()):
                    reply.set_result(result(request))
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        await run(replay, client)
    assert client.most_open == 2
    assert [outcome.delayed for outcome in replay.outcomes] == [False, False, True, True, False]
    third = replay.outcomes[2]
    assert (third.intended_ns, third.sent_ns) == (0, 100 * MS)
    assert third.done_ns - third.intended_ns == third.done_ns - third.sent_ns + 100 * MS


async def test_what_came_due_while_another_waited_is_delayed_too() -> None:
    """Both places become free at 100 ms: the fourth finds one, and was held back by the ceiling all the same."""
    clock = FakeClock()
    client = FakeClient(never)
    replay = replay_of([0, 0, 0, 50 * MS], concurrency=2, clock=clock)

    async def answer_all() -> None:
        while len(client.parts) < 4 or client.open:
            await client.sent.wait()
            client.sent.clear()
            if len(client.parts) in (2, 4):
                clock.at_ns += 100 * MS
                for request, reply in list(client.open.items()):
                    reply.set_result(result(request))
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer_all())
        await run(replay, client)
    assert [outcome.sent_ns for outcome in replay.outcomes] == [0, 0, 100 * MS, 100 * MS]
    assert [outcome.delayed for outcome in replay.outcomes] == [False, False, True, True]


async def test_as_fast_as_possible_is_closed_by_the_ceiling_alone() -> None:
    client = FakeClient(never)
    replay = replay_of([index * S for index in range(20)], speed="max", concurrency=3)

    async def answer_all() -> None:
        while len(client.parts) < 20 or client.open:
            for request, reply in list(client.open.items()):
                if not reply.done():
                    reply.set_result(result(request))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer_all())
        await run(replay, client)
    assert client.most_open == 3
    assert all(outcome.intended_ns == outcome.sent_ns for outcome in replay.outcomes)
    assert not any(outcome.delayed for outcome in replay.outcomes)


async def test_every_kind_of_answer_is_one_outcome() -> None:
    failure = Failure("BadItem", "item 0: truncated", Origin("tokenizer", 0, 1), 0)
    answers: list[Callable[[bytes], Answer | Exception]] = [
        result,
        lambda request: Failed(request, 0, failure),
        lambda request: Busy(request, 0, 200, "256 requests in flight"),
        lambda request: PeerBusy("tokenizer-0"),
        lambda request: DeploymentError("gone"),
        lambda request: TimeoutError(),
    ]
    replay = replay_of([0] * len(answers))
    await run(replay, FakeClient(lambda index, request: answers[index](request)))
    assert [(outcome.status, outcome.reason) for outcome in replay.outcomes] == [
        ("ok", ""),
        ("failed", "BadItem"),
        ("failed", "busy"),
        ("failed", "PeerBusy"),
        ("failed", "DeploymentError"),
        ("failed", "TimeoutError"),
    ]
    assert replay.outcomes[1].problem == "item 0: truncated"
    assert (replay.outcomes[0].prompt_tokens, replay.outcomes[0].output_tokens) == (10, 3)
    snapshot = replay.snapshot()
    assert (snapshot.sent, snapshot.ok, snapshot.failed, snapshot.in_flight) == (6, 1, 5, 0)


async def test_busy_is_not_sent_again() -> None:
    client = FakeClient(lambda index, request: Busy(request, 0, 1, "full"))
    await run(replay_of([0, 0, 0]), client)
    assert len(client.parts) == 3


async def test_a_request_without_an_outcome_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorferry.replay.run.sender.GRACE_S", 0.05)
    monkeypatch.setattr("tensorferry.replay.run.sender.LOOK_S", 0.01)
    client = FakeClient(never)
    replay = replay_of([0, 0], deadline_s=0.05, clock=MonotonicClock())
    await run(replay, client)
    assert [outcome.reason for outcome in replay.outcomes] == ["no_answer", "no_answer"]
    assert len(client.cancelled) == 2
    assert client.open == {}


async def test_request_ids_differ_by_line_and_by_run() -> None:
    seen: list[bytes] = []

    def note(index: int, request: bytes) -> Result:
        seen.append(request)
        return result(request)

    for run_id in (b"a", b"a", b"b"):
        await run(replay_of([0, 0], run_id=run_id), FakeClient(note))
    assert seen[:2] == seen[2:4]
    assert len(set(seen)) == 4


async def test_images_go_before_the_text_and_counted_text_becomes_ids() -> None:
    request = Request(line=1, at_ns=0, output_tokens=1, text_tokens=5)
    words = Request(line=2, at_ns=0, output_tokens=1, text="hello")
    prepared = [Prepared(request, (b"one", b"two"), 5, None), Prepared(words, (b"one",), 0, None)]
    client = FakeClient(always_ok)
    await run(Replay(prepared, TOKENS, Speed.parse("1"), deadline_s=DEADLINE_S), client)
    first, second = client.parts
    assert first[:2] == [b"one", b"two"]
    assert isinstance(first[2], np.ndarray)
    assert np.array_equal(first[2], TOKENS.ids(request, 5))
    assert second == [b"one", "hello"]


# --- interrupts ------------------------------------------------------------------------------------------------


async def test_stop_sends_nothing_more_and_waits_for_what_was_sent() -> None:
    client = FakeClient(never)
    replay = replay_of([0, 0, 3600 * S], clock=MonotonicClock())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(replay, client))
        await asyncio.wait_for(client.sent.wait(), DEADLINE_S)
        replay.stop()
        await asyncio.sleep(0)
        assert not running.done()
        for request, reply in list(client.open.items()):
            reply.set_result(result(request))
    assert replay.interrupted
    assert [outcome.status for outcome in replay.outcomes] == ["ok", "ok"]
    assert [prepared.request.line for prepared in replay.unsent] == [3]


async def test_two_interrupts_end_a_run_and_report_all_of_it() -> None:
    client, stopped = FakeClient(never), asyncio.Event()

    def watch(snapshot: Snapshot) -> None:
        if replay.interrupted:
            stopped.set()

    replay = replay_of([0, 3600 * S], clock=MonotonicClock())

    @asynccontextmanager
    async def deployment() -> AsyncIterator[FakeClient]:
        yield client

    session = Session(replay)

    async def interrupt() -> None:
        await client.sent.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await stopped.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(interrupt())
        await session.carry_out(deployment(), heartbeat_s=0.01, watch=watch)
    assert (session.error, session.pools) == ("", {"tokenizer-1": PoolUse(100, 60, 2)})
    assert [(outcome.status, outcome.reason) for outcome in replay.outcomes] == [("failed", "cancelled")]
    assert len(client.cancelled) == 1


async def test_a_deployment_that_dies_leaves_a_report() -> None:
    client = FakeClient(never)
    replay = replay_of([0, 3600 * S], clock=MonotonicClock())

    @asynccontextmanager
    async def deployment() -> AsyncIterator[FakeClient]:
        async def die() -> None:
            await client.sent.wait()
            raise DeploymentError("encoder-1 was killed")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(die())
            yield client

    session = Session(replay)
    async with asyncio.timeout(DEADLINE_S):
        await session.carry_out(deployment(), heartbeat_s=0.01)
    assert (session.error, session.pools) == ("encoder-1 was killed", {})
    outcome = replay.outcomes[0]
    assert (outcome.status, outcome.reason, outcome.problem) == ("failed", "deployment_failed", "encoder-1 was killed")
    assert len(replay.unsent) == 1


async def test_a_deployment_that_cannot_start_is_an_error() -> None:
    @asynccontextmanager
    async def deployment() -> AsyncIterator[FakeClient]:
        raise DeploymentError("encoder-1 is not ready")
        yield

    with pytest.raises(ExceptionGroup) as caught:
        await Session(replay_of([0])).carry_out(deployment(), heartbeat_s=0.01)
    assert caught.group_contains(DeploymentError, match="encoder-1 is not ready")
