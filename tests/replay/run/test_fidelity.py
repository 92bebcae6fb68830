"""The duties of a faithful replay that no other test holds; docs/replay.md has the table of all twelve."""

from __future__ import annotations

import asyncio
import heapq
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from benchmarks.service import serving

from tensorferry.codecs.errors import TraceError
from tensorferry.codecs.messages import Result
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.recording.request import Image, Request
from tensorferry.replay.results.report import results
from tensorferry.replay.run.conversations import Mode, Turns, natural_mode
from tensorferry.replay.run.schedule import Speed
from tensorferry.replay.run.sender import Replay, Reply
from tensorferry.replay.trace.loaded_trace import Trace, load
from tensorferry.replay.trace.trace_file import Recording
from tensorferry.replay.workload.photos import load_photos
from tensorferry.replay.workload.prepare import Part, Preparation, Prepared, prepare
from tensorferry.replay.workload.token_ids import TokenSource

DATA = Path(__file__).parents[2] / "data"
MS = 1_000_000
DEADLINE_S = 20.0  # of each test's waits
TOKENS = TokenSource(1000, [0, 1], seed=0)


class VirtualClock:
    """A clock that jumps to the end of the next sleep when no task can run."""

    def __init__(self) -> None:
        self.at_ns = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []

    def now_ns(self) -> int:
        return self.at_ns

    async def sleep_until(self, at_ns: int) -> None:
        if at_ns > self.at_ns:
            end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._sleepers, (at_ns, id(end), end))
            await end

    async def pass_by(self) -> None:
        while True:
            for _ in range(30):  # turns of the loop, in which everybody does what is due
                await asyncio.sleep(0)
            if self._sleepers:
                at_ns, _, end = heapq.heappop(self._sleepers)
                if not end.done():
                    self.at_ns = max(self.at_ns, at_ns)
                    end.set_result(None)


class Service:
    """A client that answers each request `service_ns` after its arrival, on the virtual clock."""

    def __init__(self, clock: VirtualClock, service_ns: int) -> None:
        self._clock, self._service_ns = clock, service_ns
        self._tasks: set[asyncio.Task[None]] = set()
        self.in_flight = self.most_in_flight = 0

    def submit_nowait(
        self,
        parts: Sequence[Part],
        *,
        output_tokens: int = 0,
        deadline_s: float | None = None,
        request: bytes | None = None,
    ) -> Reply:
        reply: Reply = asyncio.get_running_loop().create_future()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

        async def answer() -> None:
            await self._clock.sleep_until(self._clock.at_ns + self._service_ns)
            self.in_flight -= 1
            if not reply.done():
                reply.set_result(Result(request or b"", 0, 1, 1, (), ()))

        task = asyncio.create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return reply

    def cancel(self, request: bytes) -> None:
        pass


def turn(line: int, at_ms: int, session: str = "", **fields: object) -> Request:
    return Request(line=line, at_ns=at_ms * MS, output_tokens=1, text="x", session=session, **fields)  # type: ignore[arg-type]


async def replayed(
    requests: Sequence[Request], mode: Mode, *, service_ms: int = 150, speed: str = "1", concurrency: int | None = None
) -> Replay:
    clock = VirtualClock()
    service = Service(clock, service_ms * MS)
    prepared = [Prepared(request, (), 0, None) for request in requests]
    options = {"deadline_s": 3600.0, "clock": clock, "sessions": mode, "concurrency": concurrency}
    replay = Replay(prepared, TOKENS, Speed.parse(speed), **options)  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE_S):
        passing = asyncio.create_task(clock.pass_by())
        await replay.run(service)
        passing.cancel()
        with suppress(asyncio.CancelledError):
            await passing
    return replay


def sent_ms(replay: Replay) -> list[tuple[int, float]]:
    """(line, when) in the order of sending."""
    return [(outcome.request.request.line, outcome.sent_ns / MS) for outcome in replay.outcomes]


# --- 2, 4: times, against a service in another process ------------------------------------------------------------


@pytest.mark.processes
async def test_latency_is_what_the_service_took_and_lateness_what_the_sender_lost() -> None:
    """40 requests, 10 ms apart, to a service that answers after 30 ms and stands still once for 300 ms: an open loop
    goes on sending, so the requests of those 300 ms are all late, by their latency and not by their sending."""
    with TemporaryDirectory(prefix="ferry-") as folder, serving(Path(folder), 30, 10, 300) as deployment:
        requests = [turn(number, number * 10) for number in range(40)]
        prepared = [Prepared(request, (), 0, None) for request in requests]
        replay = Replay(prepared, TOKENS, Speed.parse("1"), deadline_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S), Client.connect(deployment, timeout_s=DEADLINE_S) as client:
            await replay.run(client)
    latencies = [(outcome.done_ns - outcome.intended_ns) / MS for outcome in replay.outcomes]
    assert {outcome.status for outcome in replay.outcomes} == {"ok"}
    assert min(latencies) >= 30
    stalled = latencies[12:30]  # due 20 to 190 ms after the stall began
    assert all(latency > 330 - (10 * number + 20) - 5 for number, latency in enumerate(stalled))
    intended = [outcome.intended_ns for outcome in replay.outcomes]
    assert intended == [number * 10 * MS for number in range(40)]
    assert all(outcome.sent_ns >= outcome.intended_ns for outcome in replay.outcomes)


# --- 3: prepared before it is due --------------------------------------------------------------------------------


async def test_prompts_that_were_not_held_are_made_while_there_is_nothing_to_send() -> None:
    clock = VirtualClock()
    made: list[tuple[int, int]] = []

    class Watched(TokenSource):
        def ids(self, request: Request, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
            made.append((request.line, clock.at_ns // MS))
            ids: np.ndarray[tuple[int], np.dtype[np.int32]] = super().ids(request, count)  # type: ignore[assignment]
            return ids

    requests = [Request(line=n, at_ns=n * 100 * MS, output_tokens=1, text_tokens=5) for n in range(4)]
    prepared = [Prepared(request, (), 5, None) for request in requests]
    replay = Replay(prepared, Watched(1000, [], 0), Speed.parse("1"), deadline_s=3600.0, clock=clock)
    async with asyncio.timeout(DEADLINE_S):
        passing = asyncio.create_task(clock.pass_by())
        await replay.run(Service(clock, MS))
        passing.cancel()
    assert made == [(0, 0), (1, 0), (2, 0), (3, 0)]  # the first is due at once; the others long before their time
    assert [line for line, _ in sent_ms(replay)] == [0, 1, 2, 3]


# --- 6: order ------------------------------------------------------------------------------------------------------


def test_strictly_an_unsorted_file_is_refused_by_its_line() -> None:
    recording = Recording(DATA / "traces" / "azure_2023.shuffled.csv")
    assert load(recording).inversions
    with pytest.raises(TraceError, match=r":4: it is earlier than the row before it"):
        load(recording, strict=True)
    assert load(Recording(DATA / "traces" / "azure_lmm.csv"), strict=True).read == 10


# --- 9: sessions ---------------------------------------------------------------------------------------------------

CHAT = [turn(1, 0, "a"), turn(2, 50, "b"), turn(3, 100, "a"), turn(4, 200, "a"), turn(5, 900, "a")]


async def test_by_the_clock_turns_come_at_their_times_whatever_the_answers() -> None:
    replay = await replayed(CHAT, "clock")
    assert sent_ms(replay) == [(1, 0), (2, 50), (3, 100), (4, 200), (5, 900)]
    assert replay.turns.following == 0


async def test_waiting_turns_come_at_their_times_but_after_the_answer_before() -> None:
    replay = await replayed(CHAT, "wait")
    assert sent_ms(replay) == [(1, 0), (2, 50), (3, 150), (4, 300), (5, 900)]
    assert [outcome.waited for outcome in replay.outcomes] == [False, False, True, True, False]
    assert all(outcome.sent_ns == outcome.intended_ns for outcome in replay.outcomes)
    assert replay.turns.following == 3


async def test_thinking_turns_come_their_think_time_after_the_answer() -> None:
    """Recorded delays are kept. Otherwise the gap counts, without the time of the answer if that is recorded."""
    chat = [turn(1, 0, "a", took_ns=60 * MS), turn(2, 100, "a"), turn(3, 180, "a"), turn(4, 200, "a", think_ns=7 * MS)]
    replay = await replayed(chat, "think")
    assert sent_ms(replay) == [(1, 0), (2, 150 + 40), (3, 340 + 80), (4, 570 + 7)]
    assert replay.turns.guessed == 1


async def test_speed_scales_think_times_and_no_answers() -> None:
    chat = [turn(1, 0, "a"), turn(2, 100, "a", think_ns=40 * MS), turn(3, 1000, "b")]
    replay = await replayed(chat, "think", speed="2")
    assert sent_ms(replay) == [(1, 0), (2, 170), (3, 500)]


async def test_a_tree_of_conversations_follows_its_links() -> None:
    chat = [
        turn(1, 0, id="r"),
        turn(2, 10, id="x", parent="r"),
        turn(3, 20, id="y", parent="r"),
        turn(4, 30, id="z", parent="x"),
        turn(5, 40, parent="before the recording"),
    ]
    replay = await replayed(chat, "wait")
    assert sent_ms(replay) == [(1, 0), (5, 40), (2, 150), (3, 150), (4, 300)]


async def test_turns_that_follow_keep_to_the_ceiling() -> None:
    chat = [turn(n, 0, str(n)) for n in range(4)] + [turn(n + 4, 10, str(n)) for n in range(4)]
    replay = await replayed(chat, "wait", concurrency=2)
    assert len(replay.outcomes) == 8
    assert {outcome.status for outcome in replay.outcomes} == {"ok"}
    starts = sorted(outcome.sent_ns for outcome in replay.outcomes)
    assert starts == [n // 2 * 150 * MS for n in range(8)]


async def test_a_failed_turn_is_followed_all_the_same() -> None:
    clock = VirtualClock()

    class Broken(Service):
        def submit_nowait(self, parts: Sequence[Part], **options: object) -> Reply:  # type: ignore[override]
            reply = super().submit_nowait(parts, **options)  # type: ignore[arg-type]
            reply.cancel()
            return reply

    prepared = [Prepared(request, (), 0, None) for request in CHAT]
    replay = Replay(prepared, TOKENS, Speed.parse("1"), deadline_s=3600.0, clock=clock, sessions="wait")
    async with asyncio.timeout(DEADLINE_S):
        passing = asyncio.create_task(clock.pass_by())
        await replay.run(Broken(clock, MS))
        passing.cancel()
    assert [outcome.status for outcome in replay.outcomes] == ["failed"] * 5
    assert replay.unsent == []


async def test_a_stop_leaves_the_turns_that_follow_unsent() -> None:
    clock = VirtualClock()
    prepared = [Prepared(request, (), 0, None) for request in CHAT]
    replay = Replay(prepared, TOKENS, Speed.parse("1"), deadline_s=3600.0, clock=clock, sessions="think")

    class Stopping(Service):
        def submit_nowait(self, parts: Sequence[Part], **options: object) -> Reply:  # type: ignore[override]
            if self.in_flight:
                replay.stop()
            return super().submit_nowait(parts, **options)  # type: ignore[arg-type]

    async with asyncio.timeout(DEADLINE_S):
        passing = asyncio.create_task(clock.pass_by())
        await replay.run(Stopping(clock, 150 * MS))
        passing.cancel()
    assert [outcome.request.request.line for outcome in replay.outcomes] == [1, 2]
    assert [prepared.request.line for prepared in replay.unsent] == [3, 4, 5]


def test_the_mode_is_what_the_trace_asks_for() -> None:
    assert natural_mode(CHAT) == "clock"
    assert natural_mode([*CHAT, turn(6, 1000, "a", think_ns=1)]) == "think"
    assert Turns([], "think", Speed.parse("1")).starting == []


# --- 8, 10, 12: the same bytes -------------------------------------------------------------------------------------


def prepared_from(trace: Trace, *, seed: int = 0) -> Preparation:
    class Processor:
        def rows_for(self, width: int, height: int) -> int:
            return max(1, width // 28) * max(1, height // 28)

        def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
            return rows * 28, 28

    return prepare(trace, load_photos(None), Processor(), TokenSource(1000, [0, 1], seed), seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["mooncake.jsonl", "servegen.jsonl", "azure_lmm.csv"])
def test_the_same_file_and_seed_send_the_same_bytes(file: str) -> None:
    trace = load(Recording(DATA / "traces" / file))
    first = prepared_from(trace).payload_sha256
    assert prepared_from(trace).payload_sha256 == first
    assert prepared_from(trace, seed=1).payload_sha256 != first
    fewer = load(Recording(DATA / "traces" / file), limit=len(trace.requests) - 1)
    assert prepared_from(fewer).payload_sha256 != first


@pytest.mark.processes
def test_equal_blocks_are_equal_tokens_in_every_process() -> None:
    program = (
        "from tensorferry.replay.workload.token_ids import TokenSource\n"
        "from tensorferry.pipeline.recording.request import Request\n"
        "from hashlib import sha256\n"
        "ids = TokenSource(1000, [0, 1], 7).ids(Request(line={line}, at_ns=0, output_tokens=1, blocks=(2**64 - 1, 5),\n"
        "                                               block_tokens=16), 32)\n"
        "print(sha256(ids.tobytes()).hexdigest())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program.format(line=line)], check=True, capture_output=True, text=True, timeout=60
        ).stdout
        for line in (1, 2)
    }
    request = Request(line=3, at_ns=0, output_tokens=1, blocks=(2**64 - 1, 5), block_tokens=16)
    here = sha256(TokenSource(1000, [0, 1], 7).ids(request, 32).tobytes()).hexdigest()
    assert said == {f"{here}\n"}


# --- 11: images ----------------------------------------------------------------------------------------------------


async def test_each_request_says_where_its_images_came_from(tmp_path: Path) -> None:
    photo = (DATA / "images" / "tiny_20x20.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(photo)
    images = [{"path": "a.jpg"}, {"width": 30, "height": 40}, {"path": "absent.jpg"}]
    rows = [
        {"at_ms": 0, "images": images[:2], "output_tokens": 1},
        {"at_ms": 1, "images": images, "output_tokens": 1},
        {"at_ms": 2, "text": "x", "output_tokens": 1},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    preparation = prepared_from(load(Recording(path)))
    assert [drop.reason for drop in preparation.drops] == ["missing_image"]
    assert preparation.requests[0].images[0] == photo  # not decoded, not encoded again, its EXIF in place
    replay = await replayed([prepared.request for prepared in preparation.requests], "clock")
    said = [row["images"] for row in results(replay.outcomes, preparation.drops, 0) if row["status"] == "ok"]
    assert said == [{"in_trace": 0, "from_file": 1, "invented": 1}, {"in_trace": 0, "from_file": 0, "invented": 0}]
    assert Image(data=photo).recorded
