"""Scheduler ranks: collect a request's embeddings in item order, admit it under a token budget, run it, report."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import (
    BadItem,
    BadMessage,
    FerryError,
    LeaseNotReady,
    PeerGone,
    text_of,
)
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.pool.declared import check_declared
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.deployment.spec import Deployment, most_requests
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.process.run_process import Stop
from tensorferry.pipeline.process.stage import Stage
from tensorferry.pipeline.process.start_stage import opened
from tensorferry.stages.engines.base import Engine, EngineRequest, EngineResult
from tensorferry.stages.engines.registry import make_engine
from tensorferry.stages.failures import failure_of
from tensorferry.stages.finished_requests import Tombstones
from tensorferry.stages.gpu_wait import unready, wait_ready
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.off_loop import run_to_end
from tensorferry.stages.scheduler.splice import Answer, check, contradiction, splice

log = structlog.get_logger()

SWEEP_PERIOD_S = 1.0
COPY_BESIDE = 1 << 18  #: elements of a message's embeddings, from which on the copy thread takes them: about 50 us


async def main(deployment: Deployment, rank: int, stop: Stop) -> None:
    """Run scheduler rank `rank` until `stop` drains it."""
    engine = make_engine(deployment.scheduler)  # before anybody hears of this process: it may take its time
    async with opened(deployment, "scheduler", rank) as stage:
        copier = stage.channels.enter_context(ThreadPoolExecutor(1, "copy"))
        scheduler = Scheduler(stage, engine, copier)
        with stage.running(stage.serve(scheduler), scheduler.run(), scheduler.sweep()):
            stage.peers.open()
            stop.announce_ready()
            await stop.wait_draining()
            await scheduler.drain()


@dataclass(slots=True)
class Pending:
    """A request that is not complete yet: its tokens, its embeddings, or both are still to come."""

    admit: wire.Admit | None = None
    embeddings: dict[int, Mapping[str, View]] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)  #: step -> the latest time over all encoder ranks
    until_ns: int = 0
    ready: EngineRequest | None = None  #: what the engine gets, once everything is here and fits
    problem: FerryError | None = None  #: its embeddings are unusable; told to the owner as soon as that is known


Running = tuple[wire.Admit, Pending, EngineRequest]


class Scheduler:
    """See the module."""

    def __init__(self, stage: Stage, engine: Engine, copier: Executor) -> None:
        self._stage, self._engine, self._copier = stage, engine, copier
        self._watch = Watch("scheduler.engine", stage.deployment.scheduler.engine, stage.counters)
        self._budget = stage.deployment.scheduler.batch_tokens
        self._patience_ns = int(stage.deployment.limits.request_timeout_s * 1e9)
        self._most_pending = most_requests(stage.deployment)
        self._pending: dict[tuple[bytes, int], Pending] = {}
        self._ready: deque[Pending] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._running: list[Running] = []  #: what the engine has
        self._collecting = 0  #: messages whose embeddings are waited for, or copied
        self._call: asyncio.Task[Sequence[EngineResult | Exception]] | None = None
        self._over = Tombstones(stage.deployment.limits.request_timeout_s)
        self._collected = Tombstones(stage.deployment.limits.request_timeout_s)  #: all that belongs to these is here
        self._busy_since: float | None = None

    # --- what its process asks: see `Work`

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> bool:
        match message:
            case wire.Admit() as admit:
                self._admit(admit)
            case wire.Embeddings() as embeddings:
                self._arrived(embeddings, frames)
            case wire.Cancel(request=request, attempt=attempt):
                self._give_up(request, attempt)
            case _:
                return False
        return True

    def in_flight(self) -> int:
        return len(self._pending) + len(self._ready) + len(self._running)

    def busy_since(self) -> float | None:
        return self._busy_since

    def gauges(self) -> Mapping[str, float]:
        return {"queued": len(self._ready)}

    def connection_mended(self, peer: Peer) -> None:
        """Nothing: `Peers` says its reports again."""

    # --- loops

    async def run(self) -> None:
        """Take as many complete requests as the token budget allows, run them, report each; for ever."""
        while True:
            while not self._ready:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            self._running = self._batch()
            if self._running:
                self._busy_since = time.monotonic()
                await self._run(self._running)
            self._running, self._busy_since = [], None

    async def sweep(self) -> None:
        """Drop what can never become complete, once a second, for ever."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            now = time.monotonic_ns()
            for key in [key for key, pending in self._pending.items() if now > pending.until_ns]:
                self._expire(key)

    async def drain(self) -> None:
        """Finish what is complete; what is not was given up by its owner, which left before us."""
        self._stage.peers.tell(wire.Drain(self._stage.origin))
        log.info("draining", in_flight=self.in_flight())
        while self._ready or self._running or self._collecting:
            self._idle.clear()
            await self._idle.wait()

    def _give_up(self, request: bytes, attempt: int) -> None:
        """Nobody waits for this attempt any more, nor for an older one."""
        self._over.add(request, attempt)
        for key in [key for key in self._pending if key[0] == request and key[1] <= attempt]:
            del self._pending[key]
        self._abandon_if_over()

    def _expire(self, key: tuple[bytes, int]) -> None:
        del self._pending[key]
        self._over.add(*key)
        self._stage.counters.count("requests_expired")

    # --- collecting

    def _admit(self, admit: wire.Admit) -> None:
        if not self._stage.peers.knows(admit.owner):
            self._stage.counters.count("messages_unknown_peer")
            return
        if self._over.covers(admit.request, admit.attempt):
            self._stage.counters.count("admits_late")
            return
        if admit.attempt:  # whoever sent an older one has sent it anew, or has died and its client has
            self._give_up(admit.request, admit.attempt - 1)
        pending = self._of(admit.request, admit.attempt)
        pending.admit = admit
        pending.until_ns = min(admit.deadline_ns, time.monotonic_ns() + self._patience_ns)
        problem = pending.problem or contradiction(admit, self._stage.epoch)
        if problem is not None:
            self._fail(admit.request, admit.attempt, pending, problem)
            return
        self._complete(admit.request, admit.attempt, pending)

    def _arrived(self, message: wire.Embeddings, frames: Sequence[Buffer]) -> None:
        """Collect embeddings: small ones now; large ones, and those that a GPU may still write, beside the loop."""
        payloads = [output.payload for item in message.items for output in item.outputs]
        if not self._stage.peers.knows(message.origin):
            self._stage.counters.count("messages_unknown_peer")
            for payload in payloads:
                with suppress(FerryError):  # nothing is owed of most
                    self._stage.reader.acknowledge(payload)
            return
        over = self._is_late(message)
        try:
            check_declared(payloads, self._stage.deployment.scheduler.attention_tp_size)
        except BadMessage as problem:
            self._stage.reader.refuse(payloads)
            self._file(message, over, {}, problem)
            return
        large = sum(prod(payload.shape) for payload in payloads) >= COPY_BESIDE
        if large or self._stage.device is not None or not self._are_written(payloads):
            self._collecting += 1
            self._stage.tasks.create_task(self._collect(message, payloads, frames), name="collect")
        else:
            self._file(message, over, *self._copied(message, frames, over))

    def _is_late(self, message: wire.Embeddings) -> bool:
        """Whether nobody waits for these: the request is over, or they were encoded twice and have come already."""
        return any(known.covers(message.request, message.attempt) for known in (self._over, self._collected))

    def _are_written(self, payloads: Sequence[wire.Payload]) -> bool:
        with suppress(FerryError):  # said again, of its payload alone, when that is opened
            return unready(self._stage.reader, payloads) is None
        return True

    async def _collect(
        self, message: wire.Embeddings, payloads: Sequence[wire.Payload], frames: Sequence[Buffer]
    ) -> None:
        is_over = partial(self._is_late, message)
        problem: FerryError | None = None
        try:
            with self._stage.alone():
                try:
                    patience_s = self._stage.deployment.timeouts.ready_s
                    await wait_ready(self._stage.reader, payloads, patience_s, unless=is_over)
                except LeaseNotReady as late:
                    problem = late
                except FerryError:  # as in `_are_written`
                    pass
                over = is_over()
                copy = partial(self._copied, message, frames, over, problem)
                # On a GPU it only tells the GPU to.
                copied = await run_to_end(self._copier, copy) if self._stage.device is None else copy()
                self._file(message, over, *copied)
        finally:
            self._collecting -= 1
            self._idle.set()

    def _copied(
        self, message: wire.Embeddings, frames: Sequence[Buffer], over: bool, problem: FerryError | None = None
    ) -> tuple[dict[int, Mapping[str, View]], FerryError | None]:
        """Copy embeddings out as they arrive, so that an encoder's pool never waits for the language model.

        problem: why none of them is to be read; they are given back.
        """
        arrived: dict[int, Mapping[str, View]] = {}
        for item in message.items:
            outputs: dict[str, View] = {}
            for output in item.outputs:
                try:
                    if over or problem is not None:
                        self._stage.reader.acknowledge(output.payload)
                    else:
                        with self._stage.reader.open(output.payload, frames) as view:
                            outputs[output.name] = view.copy()
                except FerryError as found:
                    self._stage.outlive(found)
                    problem = problem or found
                except Exception as found:  # such as no memory for the copy, beside an engine on the same GPU
                    self._stage.outlive(found)
                    log.exception("copy_crashed")
                    text = f"its embeddings could not be copied: {type(found).__name__}: {found}"
                    problem = problem or BadItem(item.index, text)
            arrived[item.index] = outputs
        return arrived, problem

    def _file(
        self,
        message: wire.Embeddings,
        over: bool,
        arrived: Mapping[int, Mapping[str, View]],
        problem: FerryError | None,
    ) -> None:
        if over or self._is_late(message):
            self._stage.counters.count("embeddings_late")
            return
        pending = self._of(message.request, message.attempt)
        if problem is not None:
            pending.problem = problem
            if pending.admit is not None:
                self._fail(message.request, message.attempt, pending, problem)
            return
        for index, embedding in arrived.items():
            pending.embeddings.setdefault(index, embedding)
        for mark in message.marks:
            pending.marks[mark.step] = max(mark.at_ns, pending.marks.get(mark.step, 0))
        self._complete(message.request, message.attempt, pending)

    def _of(self, request: bytes, attempt: int) -> Pending:
        pending = self._pending.get((request, attempt))
        if pending is None:
            while len(self._pending) >= self._most_pending:
                self._expire(next(iter(self._pending)))
            pending = self._pending[request, attempt] = Pending(until_ns=time.monotonic_ns() + self._patience_ns)
        return pending

    def _complete(self, request: bytes, attempt: int, pending: Pending) -> None:
        """Queue the request once its tokens and all its embeddings are here, and fit each other."""
        admit = pending.admit
        if admit is None or any(item not in pending.embeddings for item in range(len(admit.spans))):
            return
        try:
            check(admit, pending.embeddings)
            pending.ready = splice(admit, pending.embeddings)
        except FerryError as problem:
            self._fail(request, attempt, pending, problem)
            return
        pending.marks["collected"] = time.monotonic_ns()
        del self._pending[request, attempt]
        self._collected.add(request, attempt)
        self._tell_owner(admit.owner, wire.Collected(request, attempt, admit.owner.epoch, self._stage.origin))
        self._ready.append(pending)
        self._wake.set()

    # --- running

    def _batch(self) -> list[Running]:
        """The next requests, in order of completion, within the token budget; one that exceeds it runs alone."""
        batch: list[Running] = []
        budget = self._budget
        while self._ready:
            pending = self._ready[0]
            admit = pending.admit
            assert admit is not None
            assert pending.ready is not None
            cost = len(admit.token_ids) // 4 + admit.output_tokens
            if batch and cost > budget:
                break
            self._ready.popleft()
            if self._over.covers(admit.request, admit.attempt):
                continue
            budget -= cost
            batch.append((admit, pending, pending.ready))
        return batch

    async def _run(self, batch: Sequence[Running]) -> None:
        started = time.monotonic_ns()
        answers = await self._answers(batch)
        for (admit, pending, _), result in zip(batch, answers, strict=True):
            if self._over.covers(admit.request, admit.attempt):
                continue
            if isinstance(result, Exception):
                self._fail(admit.request, admit.attempt, pending, result)
                continue
            try:
                answer = Answer.of(result, len(admit.spans))
            except ValueError as problem:
                self._fail(admit.request, admit.attempt, pending, problem)
                continue
            marks = {**pending.marks, "running": started, "done": time.monotonic_ns()}
            done = wire.Done(
                admit.request,
                admit.attempt,
                admit.owner.epoch,
                self._stage.origin,
                answer.output_tokens,
                answer.digests,
                tuple(wire.Mark(step, at_ns) for step, at_ns in marks.items()),
                answer.token_ids,
            )
            self._over.add(admit.request, admit.attempt)
            self._tell_owner(admit.owner, done)
            log.debug("done", request=admit.request.hex(), items=len(admit.spans), output_tokens=answer.output_tokens)

    async def _answers(self, batch: Sequence[Running]) -> Sequence[EngineResult | Exception]:
        """What the engine makes of a batch, which it is spared once nobody waits for any of its requests."""
        patience_ns = max(admit.deadline_ns for admit, _, _ in batch) - time.monotonic_ns()
        call = self._call = asyncio.create_task(self._ask(batch))
        late = False

        def give_up() -> None:
            nonlocal late
            late = True
            call.cancel()

        deadline = asyncio.get_running_loop().call_later(max(0, patience_ns) / 1e9, give_up)
        try:
            return await call
        except asyncio.CancelledError:
            if (ourselves := asyncio.current_task()) is not None and ourselves.cancelling():
                raise
            if late:  # their owners have given them up too, or are about to
                for admit, _, _ in batch:
                    self._over.add(admit.request, admit.attempt)
            self._stage.counters.count("batches_abandoned")
            log.info("abandoned", requests=len(batch))
            return [RuntimeError("the engine gave it up")] * len(batch)  # told to whoever has not given it up
        except Exception as crash:
            self._stage.outlive(crash)
            log.exception("engine_crashed", requests=len(batch))
            return [crash] * len(batch)
        finally:
            deadline.cancel()
            self._call = None

    async def _ask(self, batch: Sequence[Running]) -> Sequence[EngineResult | Exception]:
        try:
            requests = [request for _, _, request in batch]
            with self._watch.beside():  # an engine has threads of its own
                answers = await self._watch.steps(lambda: self._engine.run(requests))
        except SystemExit as problem:  # else it would end this process
            raise RuntimeError(f"SystemExit: {text_of(problem)}") from problem
        if len(answers) != len(batch):
            raise ValueError(f"the engine gave {len(answers)} answers for {len(batch)} requests")
        return answers

    def _abandon_if_over(self) -> None:
        if self._call is not None and all(
            self._over.covers(admit.request, admit.attempt) for admit, _, _ in self._running
        ):
            self._call.cancel()

    def _fail(self, request: bytes, attempt: int, pending: Pending, problem: Exception) -> None:
        """Give an admitted request up, and tell its owner."""
        assert pending.admit is not None
        self._pending.pop((request, attempt), None)
        self._over.add(request, attempt)
        failure = failure_of(problem, self._stage.origin, items=len(pending.admit.spans))
        log.info("failed", request=request.hex(), kind=failure.kind, problem=failure.problem)
        owner = pending.admit.owner
        self._tell_owner(owner, wire.Failed(request, attempt, failure, owner.epoch))

    def _tell_owner(self, owner: wire.Origin, message: wire.Collected | wire.Done | wire.Failed) -> None:
        with suppress(PeerGone):
            self._stage.peers.report(self._stage.peers.get(owner.stage, owner.rank, owner.epoch), message)
