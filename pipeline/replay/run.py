"""One replay: sends what was prepared on its schedule, and keeps what became of each request."""

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
from tensorferry.pipeline.replay.prepare import Part, Prepared
from tensorferry.pipeline.replay.schedule import Ceiling, Clock, MonotonicClock, Speed, pace
from tensorferry.pipeline.replay.text import TokenSource

log = structlog.get_logger()

#: A request without an outcome this long after its deadline has none coming: the run must end.
GRACE_S = 10.0
_LOOK_S = 0.2  # how often progress is shown and the oldest request's deadline is looked at

Answer = Result | Failed | Busy
Reply = asyncio.Future[Answer]


class Submitter(Protocol):
    """What a replay needs of `tensorferry.Client`."""

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
    """What became of one request. Times are nanoseconds since the start of the run."""

    request: Prepared
    intended_ns: int  #: when it was due; with `--speed max`, when it was sent
    sent_ns: int
    delayed: bool  #: the ceiling of --concurrency held it back
    done_ns: int = 0
    status: Literal["waiting", "ok", "failed"] = "waiting"
    reason: str = ""  #: of a failure: busy, no_answer, cancelled, or the class of the error
    problem: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    items: tuple[ItemReport, ...] = ()
    marks: tuple[Mark, ...] = ()  #: as the deployment sent them: on CLOCK_MONOTONIC


class Snapshot(msgspec.Struct, frozen=True):
    """How far a run is, for whoever shows progress."""

    total: int
    sent: int
    ok: int
    failed: int
    in_flight: int
    delayed: int
    elapsed_s: float


Watch = Callable[[Snapshot], None]


class Replay:
    """Sends `requests` through `client`; made for one run.

    concurrency: at most so many in flight; None: no ceiling. deadline_s: what each request is given.
    run_id: makes the request ids differ from those of another replay of the same trace.
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
    ) -> None:
        self.outcomes: list[Outcome] = []  #: of those that were sent, in the order of sending
        self.start_ns = 0  #: of the run, on `clock`
        self.interrupted = False
        self._requests, self._tokens, self._speed = requests, tokens, speed
        self._ceiling = Ceiling(concurrency)
        self._deadline_s, self._run_id = deadline_s, run_id
        self._clock = clock or MonotonicClock()
        self._waiting: dict[bytes, tuple[Outcome, Reply]] = {}  #: by request id, oldest first
        self._answered = asyncio.Event()
        self._pacer: asyncio.Task[None] | None = None
        self._ok = self._failed = self._delayed = 0

    @property
    def unsent(self) -> Sequence[Prepared]:
        """Those that a stop left behind."""
        return self._requests[len(self.outcomes) :]

    async def run(self, client: Submitter, watch: Watch = lambda snapshot: None) -> None:
        """Send everything and wait for every outcome; returns early, with what there is, after `stop`.

        watch: told a few times a second, and once at the end, how far the run is. A request that cannot even be
        submitted is a failed one. Other tasks of the loop should be few: the pacer shares it with the client.
        """
        first_ns = self._requests[0].request.at_ns if self._requests else 0
        due_ns = [self._speed.due_ns(prepared.request.at_ns - first_ns) for prepared in self._requests]
        send = partial(self._send, client, due_ns)
        with _no_collection():
            async with asyncio.TaskGroup() as tasks:
                looker = tasks.create_task(self._look(client, watch))
                self.start_ns = self._clock.now_ns()
                self._pacer = tasks.create_task(pace(due_ns, self._clock, self.start_ns, self._ceiling, send))
                if self.interrupted:
                    self._pacer.cancel()
                await asyncio.wait([self._pacer])
                while self._waiting:
                    self._answered.clear()
                    await self._answered.wait()
                looker.cancel()
        watch(self.snapshot())

    def stop(self) -> None:
        """Send nothing more; outcomes of what was sent are still waited for."""
        self.interrupted = True
        if self._pacer is not None:
            self._pacer.cancel()

    def abandon(self, client: Submitter | None, reason: str = "cancelled", problem: str = "") -> None:
        """Wait for nothing more: what was sent and has no outcome yet has failed."""
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

    def _send(self, client: Submitter, due_ns: Sequence[int], index: int, delayed: bool) -> None:
        prepared = self._requests[index]
        request = self._request_id(prepared.request.place)
        parts = prepared.parts(self._tokens)
        sent_ns = self._clock.now_ns() - self.start_ns
        unscheduled = self._speed.ratio is None
        outcome = Outcome(
            prepared,
            sent_ns if unscheduled else due_ns[index],
            sent_ns,
            delayed and not unscheduled,
        )
        self.outcomes.append(outcome)
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
            self._finish(outcome, "failed", type(problem).__name__, str(problem))
            return
        self._waiting[request] = outcome, reply
        reply.add_done_callback(partial(self._settle, request))

    def _settle(self, request: bytes, reply: Reply) -> None:
        """The client has an outcome; runs as a callback of its future."""
        if request not in self._waiting:  # given up before
            if not reply.cancelled():
                reply.exception()  # looked at, so that asyncio does not report it as forgotten
            return
        outcome, _ = self._waiting.pop(request)
        if reply.cancelled():
            self._finish(outcome, "failed", "cancelled", "")
            return
        problem = reply.exception()
        if problem is not None:
            if not isinstance(problem, FerryError | TimeoutError):
                log.error("replay reply failed", exc_info=problem)  # a bug, and not of one request
            self._finish(outcome, "failed", type(problem).__name__, str(problem))
            return
        match reply.result():
            case Result() as result:
                outcome.items, outcome.marks = result.items, result.marks
                outcome.prompt_tokens, outcome.output_tokens = result.prompt_tokens, result.output_tokens
                self._finish(outcome, "ok")
            case Busy() as busy:
                # Not sent again: the trace's load would no longer be what arrives.
                self._finish(outcome, "failed", "busy", busy.reason)
            case Failed() as failed:
                self._finish(outcome, "failed", failed.failure.kind, failed.failure.problem)

    def _finish(self, outcome: Outcome, status: Literal["ok", "failed"], reason: str = "", problem: str = "") -> None:
        outcome.done_ns = self._clock.now_ns() - self.start_ns
        outcome.status, outcome.reason, outcome.problem = status, reason, problem
        if status == "ok":
            self._ok += 1
        else:
            self._failed += 1
        self._ceiling.leave()
        self._answered.set()

    def _give_up(self, request: bytes, reason: str, problem: str) -> None:
        outcome, reply = self._waiting.pop(request)
        self._finish(outcome, "failed", reason, problem)
        reply.cancel()

    async def _look(self, client: Submitter, watch: Watch) -> None:
        """Show progress; give up on requests that neither the deployment nor the client has ended."""
        patience_ns = math.ceil((self._deadline_s + GRACE_S) * 1e9)
        while True:
            await asyncio.sleep(_LOOK_S)
            watch(self.snapshot())
            now_ns = self._clock.now_ns() - self.start_ns
            for request, (outcome, _) in list(self._waiting.items()):
                if now_ns - outcome.sent_ns < patience_ns:
                    break  # the oldest come first
                client.cancel(request)
                self._give_up(request, "no_answer", f"no outcome {self._deadline_s + GRACE_S:g} s after it was sent")

    def _request_id(self, place: int | str) -> bytes:
        """Of the run and the place in the file: two replays of a trace to fresh deployments assign items to ranks
        alike."""
        return blake2b(str(place).encode(), digest_size=16, key=self._run_id[:64]).digest()


@contextmanager
def _no_collection() -> Iterator[None]:
    """A full garbage collection over a million prepared requests takes a second, in which nothing is sent: what
    is there before the clock starts is taken out of the collector's sight."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
