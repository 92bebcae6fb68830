"""What a scheduler rank collects: tokens and embeddings of requests, until both are here and fit each other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, BadMessage, FerryError, LeaseNotReady
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.pool.declared import check_declared
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.deployment.spec import most_requests
from tensorferry.pipeline.process.stage import Stage
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.gpu_wait import unready, wait_ready
from tensorferry.stages.off_loop import run_to_end
from tensorferry.stages.scheduler.engine_side import CompleteRequest, EngineSide
from tensorferry.stages.scheduler.replies import Replies
from tensorferry.stages.scheduler.splice import check, contradiction, splice

log = structlog.get_logger()

COPY_BESIDE = 1 << 18  #: elements of a message's embeddings, from which on the copy thread takes them: about 50 us


@dataclass(slots=True)
class Pending:
    """A request that lacks its tokens, some of its embeddings, or both."""

    admit: wire.Admit | None = None
    embeddings: dict[int, Mapping[str, View]] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)  #: step -> the latest time over all encoder ranks
    until_ns: int = 0
    problem: FerryError | None = None  #: why its embeddings are unusable; the owner is told once it is known


class Collector:
    """See the module. A complete request goes to the backlog, and one that cannot become complete fails."""

    def __init__(
        self, stage: Stage, copier: Executor, finished: FinishedRequests, backlog: EngineSide, replies: Replies
    ) -> None:
        """copier: a thread that copies large embeddings."""
        self._stage, self._copier, self._backlog, self._replies = stage, copier, backlog, replies
        self._patience_ns = int(stage.deployment.limits.request_timeout_s * 1e9)
        self._most_pending = most_requests(stage.deployment)
        self._pending: dict[tuple[bytes, int], Pending] = {}
        self._over = finished
        self._collected = FinishedRequests(
            stage.deployment.limits.request_timeout_s
        )  #: all that belongs to these is here

    @property
    def pending(self) -> Mapping[tuple[bytes, int], Pending]:
        """By request and attempt."""
        return self._pending

    def forget(self, request: bytes, attempt: int) -> None:
        """Drop what is collected for this attempt and for older ones, which are finished."""
        self._over.add(request, attempt)
        for key in [key for key in self._pending if key[0] == request and key[1] <= attempt]:
            del self._pending[key]

    def expire(self) -> None:
        """Drop what can no longer become complete."""
        now = time.monotonic_ns()
        for key in [key for key, pending in self._pending.items() if now > pending.until_ns]:
            self._expire(key)

    def _expire(self, key: tuple[bytes, int]) -> None:
        del self._pending[key]
        self._over.add(*key)
        self._stage.counters.count("requests_expired")

    # --- tokens

    def admit(self, admit: wire.Admit) -> None:
        """Take the tokens of a request of a known owner."""
        if admit.attempt:  # the sender of an older attempt has sent it again, or it has died and its client has
            self.forget(admit.request, admit.attempt - 1)
        pending = self._of(admit.request, admit.attempt)
        pending.admit = admit
        pending.until_ns = time.monotonic_ns() + min(admit.deadline_ms * 1_000_000, self._patience_ns)
        problem = pending.problem or contradiction(admit, self._stage.epoch)
        if problem is not None:
            self._fail(admit, problem)
            return
        self._complete(admit.request, admit.attempt, pending)

    # --- embeddings

    def arrived(self, message: wire.Embeddings, frames: Sequence[Buffer]) -> None:
        """Collect embeddings: small ones now; large ones, and those that a GPU may still write, beside the loop."""
        payloads = [output.payload for item in message.items for output in item.outputs]
        if not self._stage.peers.knows(message.origin):
            self._stage.counters.count("messages_unknown_peer")
            for payload in payloads:
                with suppress(FerryError):  # most leases are over already
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
            self._backlog.copy_began()
            self._stage.tasks.create_task(self._collect(message, payloads, frames), name="collect")
        else:
            self._file(message, over, *self._copied(message, frames, over))

    def _is_late(self, message: wire.Embeddings) -> bool:
        """Whether nobody waits for these: the request is finished, or the same embeddings arrived before."""
        return any(known.is_finished(message.request, message.attempt) for known in (self._over, self._collected))

    def _are_written(self, payloads: Sequence[wire.Payload]) -> bool:
        with suppress(FerryError):  # raised again for its payload alone when that is opened
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
            self._backlog.copy_ended()

    def _copied(
        self, message: wire.Embeddings, frames: Sequence[Buffer], over: bool, problem: FerryError | None = None
    ) -> tuple[dict[int, Mapping[str, View]], FerryError | None]:
        """Copy embeddings out as they arrive, so that an encoder's pool never waits for the language model.

        problem: why no payload may be read; all are then given back unread.
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
                self._fail(pending.admit, problem)
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
        if admit is None or any(item not in pending.embeddings for item in range(len(admit.items))):
            return
        try:
            check(admit, pending.embeddings)
            ready = splice(admit, pending.embeddings, pending.until_ns)
        except FerryError as problem:
            self._fail(admit, problem)
            return
        del self._pending[request, attempt]
        self._collected.add(request, attempt)
        self._replies.collected(admit)
        self._backlog.add(CompleteRequest(admit, ready, {**pending.marks, "collected": time.monotonic_ns()}))

    def _fail(self, admit: wire.Admit, problem: Exception) -> None:
        self._pending.pop((admit.request, admit.attempt), None)
        self._replies.failed(admit, problem)
