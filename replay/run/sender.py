"""The sender of a replay. It sends the prepared requests on schedule, and records the outcome of each."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Literal, Protocol

import msgspec
import structlog

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.messages import Busy, Failed, ItemReport, Mark, Result
from tensorferry.replay.run.conversations import Mode, Turns
from tensorferry.replay.run.schedule import Ceiling, Clock, MonotonicClock, Speed, pace
from tensorferry.replay.workload.prepare import Part, Prepared
from tensorferry.replay.workload.token_ids import TokenSource

log = structlog.get_logger()

#: A request that has no outcome this long after its deadline gets none, so that the run ends.
GRACE_S = 10.0
LOOK_S = 0.2  #: how often progress is shown and the oldest request's deadline is checked

#: Prompts that were not held are made for so many requests ahead, until so long before the next one is due.
_AHEAD = 64
_MARGIN_NS = 1_000_000

Answer = Result | Failed | Busy
Reply = asyncio.Future[Answer]
Finish = Callable[[Literal["ok", "failed"], str, str], None]


class Submitter(Protocol):
    """The part of `tensorferry.Client` that a replay needs."""

    def submit_nowait(
        self,
        parts: Sequence[Part],
        *,
        output_tokens: int = 0,
        deadline_s: float | None = None,
        request: bytes | None = None,
    ) -> Reply: ...

    def cancel(self, request: bytes) -> None: ...


class Outcome(msgspec.Struct):
    """The outcome of one request. Times are nanoseconds since the start of the run."""

    request: Prepared
    intended_ns: int  #: its due time; with `--speed max`, its send time
    sent_ns: int
    delayed: bool  #: whether the limit of --concurrency held it back
    done_ns: int = 0
    status: Literal["waiting", "ok", "failed"] = "waiting"
    reason: str = ""  #: of a failure: busy, no_answer, cancelled, or the class of the error
    problem: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    items: tuple[ItemReport, ...] = ()
    marks: tuple[Mark, ...] = ()  #: as the deployment sent them: on CLOCK_MONOTONIC
    waited: bool = False  #: whether it waited for the answer of the turn before, beyond its recorded time


class Snapshot(msgspec.Struct, frozen=True):
    """The progress of a run."""

    total: int
    sent: int
    ok: int
    failed: int
    in_flight: int
    delayed: int
    elapsed_s: float


Watch = Callable[[Snapshot], None]


class Replay:
    """One run, which sends `requests` through a client.

    concurrency: the most requests in flight; None: no limit. deadline_s: the deadline of each request. run_id: makes
    the request ids differ from those of another replay of the same trace. sessions: the mode of later turns.
    """

    def __init__(
        self,
        requests: Sequence[Prepared],
        tokens: TokenSource,
        speed: Speed,
        *,
        concurrency: int | None = None,
        deadline_s: float,
        run_id: bytes = b"",
        clock: Clock | None = None,
        sessions: Mode = "clock",
    ) -> None:
        self.turns = Turns([prepared.request for prepared in requests], sessions, speed)
        self.outcomes: list[Outcome] = []  #: of the requests sent, in the order of sending
        self.start_ns = 0  #: of the run, on `clock`
        self.started = asyncio.Event()  #: set once `start_ns` is known
        self.interrupted = False
        self._requests, self._tokens, self._speed = requests, tokens, speed
        self._ceiling = Ceiling(concurrency)
        self._deadline_s, self._run_id = deadline_s, run_id
        self._clock = clock or MonotonicClock()
        self._waiting: dict[bytes, tuple[Outcome, Reply, Finish]] = {}  #: by request id, oldest first
        self._answered = asyncio.Event()
        self._pacer: asyncio.Task[None] | None = None
        self._runs = False
        self._followers: set[asyncio.Task[None]] = set()  #: unsent turns whose predecessor is answered
        self._ahead: dict[int, list[Part]] = {}  #: prompts made while there was nothing to send
        self._ok = self._failed = self._delayed = 0

    @property
    def unsent(self) -> Sequence[Prepared]:
        """The requests that a stop left unsent."""
        sent = {outcome.request.request.place for outcome in self.outcomes}
        return [prepared for prepared in self._requests if prepared.request.place not in sent]

    async def run(self, client: Submitter, watch: Watch = lambda snapshot: None) -> None:
        """Send everything and wait for every outcome. After `stop`, returns early.

        watch: is called with the progress a few times a second, and once at the end. A request that cannot be submitted
        is a failed one. The loop should have few other tasks, since the pacer shares it with the client.
        """
        starting = self.turns.starting
        due_ns = [self.turns.clock_ns(index) for index in starting]

        def send(number: int, delayed: bool) -> None:
            self._send(client, tasks, starting[number], due_ns[number], delayed)

        def idle(number: int, until_ns: int) -> None:
            self._make_ahead(starting[number : number + _AHEAD], until_ns)

        with _no_collection(), self._running():
            async with asyncio.TaskGroup() as tasks:
                looker = tasks.create_task(self._look(client, watch))
                self.start_ns = self._clock.now_ns()
                self.started.set()
                self._pacer = tasks.create_task(pace(due_ns, self._clock, self.start_ns, self._ceiling, send, idle))
                if self.interrupted:
                    self._pacer.cancel()
                await asyncio.wait([self._pacer])
                while self._waiting or self._followers:
                    self._answered.clear()
                    await self._answered.wait()
                looker.cancel()
        watch(self.snapshot())

    def stop(self) -> None:
        """Send nothing more, but wait for the outcomes of the requests sent."""
        self.interrupted = True
        if self._pacer is not None:
            self._pacer.cancel()
        for follower in self._followers:
            follower.cancel()

    def abandon(self, client: Submitter | None, reason: str = "cancelled", problem: str = "") -> None:
        """Stop waiting: the requests sent that have no outcome yet have failed."""
        for request in list(self._waiting):
            if client is not None:
                client.cancel(request)
            self._give_up(request, reason, problem)

    def snapshot(self) -> Snapshot:
        elapsed_s = (self._clock.now_ns() - self.start_ns) / 1e9 if self.start_ns else 0.0
        return Snapshot(
            len(self._requests),
            len(self.outcomes),
            self._ok,
            self._failed,
            self._ceiling.in_flight,
            self._delayed,
            elapsed_s,
        )

    async def _follow(self, client: Submitter, tasks: asyncio.TaskGroup, index: int, due_ns: int) -> None:
        """Send a turn, whose predecessor is answered, when it is due."""
        await self._clock.sleep_until(self.start_ns + due_ns)
        delayed = self._ceiling.full
        await self._ceiling.room()
        self._send(client, tasks, index, due_ns, delayed)

    def _make_ahead(self, indices: Sequence[int], until_ns: int) -> None:
        """Make the prompts that were too many to hold while there is nothing to send, instead of when they are due."""
        for index in indices:
            prepared = self._requests[index]
            if prepared.complete or index in self._ahead:
                continue
            if self._clock.now_ns() > until_ns - _MARGIN_NS:
                break
            self._ahead[index] = prepared.parts(self._tokens)

    def _send(self, client: Submitter, tasks: asyncio.TaskGroup, index: int, due_ns: int, delayed: bool) -> None:
        prepared = self._requests[index]
        request = self._request_id(prepared.request.place)
        parts = self._ahead.pop(index, None) or prepared.parts(self._tokens)
        sent_ns = self._clock.now_ns() - self.start_ns
        unscheduled = self._speed.ratio is None
        outcome = Outcome(
            prepared,
            sent_ns if unscheduled else due_ns,
            sent_ns,
            delayed and not unscheduled,
            waited=self.turns.mode == "wait" and not unscheduled and due_ns > self.turns.clock_ns(index),
        )
        self.outcomes.append(outcome)
        finish = partial(self._finish, client, tasks, index, outcome)
        self._delayed += outcome.delayed
        self._ceiling.enter()
        try:
            reply = client.submit_nowait(
                parts,
                output_tokens=prepared.request.output_tokens,
                deadline_s=self._deadline_s,
                request=request,
            )
        except FerryError as problem:
            finish("failed", type(problem).__name__, str(problem))
            return
        self._waiting[request] = outcome, reply, finish
        reply.add_done_callback(partial(self._settle, request))

    def _settle(self, request: bytes, reply: Reply) -> None:
        """Record the client's outcome. Runs as a callback of the client's future."""
        if request not in self._waiting:  # it was given up
            if not reply.cancelled():
                reply.exception()  # retrieved, so that asyncio does not report it as never retrieved
            return
        outcome, _, finish = self._waiting.pop(request)
        if reply.cancelled():
            finish("failed", "cancelled", "")
            return
        problem = reply.exception()
        if problem is not None:
            if not isinstance(problem, FerryError | TimeoutError):
                log.error("replay reply failed", exc_info=problem)  # a bug, which concerns more than this request
            finish("failed", type(problem).__name__, str(problem))
            return
        match reply.result():
            case Result() as result:
                outcome.items, outcome.marks = result.items, result.marks
                outcome.prompt_tokens, outcome.output_tokens = result.prompt_tokens, result.output_tokens
                finish("ok", "", "")
            case Busy() as busy:
                # Not sent again, since the load would no longer be that of the trace.
                finish("failed", "busy", busy.reason)
            case Failed() as failed:
                finish("failed", failed.failure.kind, failed.failure.problem)

    def _finish(
        self,
        client: Submitter,
        tasks: asyncio.TaskGroup,
        index: int,
        outcome: Outcome,
        status: Literal["ok", "failed"],
        reason: str,
        problem: str,
    ) -> None:
        outcome.done_ns = self._clock.now_ns() - self.start_ns
        outcome.status, outcome.reason, outcome.problem = status, reason, problem
        if status == "ok":
            self._ok += 1
        else:
            self._failed += 1
        self._ceiling.leave()
        if self._runs and not self.interrupted:
            for due_ns, later in self.turns.answered(index, outcome.done_ns):
                follower = tasks.create_task(self._follow(client, tasks, later, due_ns))
                self._followers.add(follower)
                follower.add_done_callback(self._followers.discard)
                follower.add_done_callback(lambda _: self._answered.set())
        self._answered.set()

    def _give_up(self, request: bytes, reason: str, problem: str) -> None:
        _, reply, finish = self._waiting.pop(request)
        finish("failed", reason, problem)
        reply.cancel()

    async def _look(self, client: Submitter, watch: Watch) -> None:
        """Show progress, and give up on requests that neither the deployment nor the client has ended."""
        patience_ns = math.ceil((self._deadline_s + GRACE_S) * 1e9)
        while True:
            await asyncio.sleep(LOOK_S)
            watch(self.snapshot())
            now_ns = self._clock.now_ns() - self.start_ns
            for request, (outcome, _, _) in list(self._waiting.items()):
                if now_ns - outcome.sent_ns < patience_ns:
                    break  # later ones are younger
                client.cancel(request)
                self._give_up(request, "no_answer", f"no outcome {self._deadline_s + GRACE_S:g} s after it was sent")

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._runs = True
        try:
            yield
        finally:
            self._runs = False

    def _request_id(self, place: int | str) -> bytes:
        """Derive a request id from the run and the place in the file, so that two replays of a trace through fresh
        deployments assign items to the same ranks."""
        return blake2b(str(place).encode(), digest_size=16, key=self._run_id[:64]).digest()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Exclude all present objects from garbage collection. A full collection over a million prepared requests takes a
    second, in which nothing is sent."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
