"""The way back of a request: from the reports of encoders and schedulers to the one outcome that its client gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import structlog
from structlog.contextvars import bound_contextvars

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage, FerryError, SlowClient, StreamDiverged
from tensorferry.pipeline.process.stage import Stage
from tensorferry.pipeline.telemetry.span_exporter import Exporter
from tensorferry.pipeline.telemetry.traceparent import sampled
from tensorferry.stages.failures import failure_of
from tensorferry.stages.request_spans import Ended
from tensorferry.stages.tokenizer.admission import Overload
from tensorferry.stages.tokenizer.answer_relay import AnswerRelay
from tensorferry.stages.tokenizer.clients import Clients
from tensorferry.stages.tokenizer.detokenizer import Detokenizer
from tensorferry.stages.tokenizer.dispatch import Dispatch
from tensorferry.stages.tokenizer.latencies import Latencies
from tensorferry.stages.tokenizer.owned_requests import OwnedRequests
from tensorferry.stages.tokenizer.planner import Prompt
from tensorferry.stages.tokenizer.request import Reported, Request
from tensorferry.stages.tokenizer.text import TextEncoder

log = structlog.get_logger()

Outcome = wire.Result | wire.Failed | wire.Busy


@dataclass(slots=True)
class Reply:
    """What a client is going to get."""

    outcome: Outcome | None = None  #: None: not known yet


class Replies:
    """Takes reports of owned requests, and answers their clients."""

    def __init__(
        self,
        stage: Stage,
        clients: Clients,
        requests: OwnedRequests,
        dispatch: Dispatch,
        text: TextEncoder,
        spans: Exporter | None = None,
    ) -> None:
        self._stage, self._clients, self._requests = stage, clients, requests
        self._dispatch, self._text, self._spans = dispatch, text, spans
        self._latencies = Latencies()

    def gauges(self) -> Mapping[str, float]:
        """How long requests took lately."""
        return self._latencies.numbers(time.monotonic())

    # --- from encoders and schedulers

    def take(self, message: wire.Message) -> bool:
        """Note a report in its request; False: the message is no report."""
        if not isinstance(message, wire.Collected | wire.Done | wire.Delta | wire.Failed):
            return False
        request = self._requests.get(message.request)
        if request is None or request.attempt != message.attempt:
            self._stage.counters.count("reports_late")
        elif isinstance(message, wire.Failed):
            self._note_failure(request, message.failure)
        elif isinstance(message, wire.Delta):
            self._relay(request, message)
        else:
            self._note_progress(request, message)
        return True

    def _note_failure(self, request: Request, failure: wire.Failure) -> None:
        told = any(life.epoch == failure.origin.epoch for life in request.told)
        # An encoder reports its results as lost when a connection breaks, and they may have arrived before that.
        arrived = failure.origin.stage == "encoder" and not request.collecting
        if told and not arrived and request.failure is None:
            request.failure = failure
            request.news.set()

    def _note_progress(self, request: Request, report: wire.Collected | wire.Done) -> None:
        rank = report.origin.rank
        if not request.is_attended_by(report.origin):
            self._stage.counters.count("messages_unknown_peer")
        elif isinstance(report, wire.Collected):
            request.collecting.discard(rank)
        elif len(report.digests) not in (0, len(request.hashes)):
            self._stage.refused(BadMessage(f"digests of {len(report.digests)} items; there are {len(request.hashes)}"))
        elif rank in request.waiting:
            request.waiting.discard(rank)
            request.reports[rank] = report
            if not request.waiting:
                request.news.set()

    def _relay(self, request: Request, delta: wire.Delta) -> None:
        """Send a stretch of the answer on to the client."""
        if request.relay is None or not request.is_told_by(delta.origin):
            self._stage.counters.count("messages_unknown_peer")
            return
        try:
            if not request.relay.take(delta):
                self._stage.counters.count("deltas_early")
        except (StreamDiverged, SlowClient) as problem:
            request.broken = request.broken or problem
            request.news.set()

    # --- to clients

    def relay_of(self, client: bytes, submit: wire.Submit) -> AnswerRelay | None:
        """What sends the answer to the client as it comes, if the client wants that."""
        if not submit.stream:
            return None
        detokenizer = Detokenizer(self._text.tokenizer)
        return AnswerRelay(submit, self._stage.origin, detokenizer, partial(self._clients.offer, client))

    @contextmanager
    def replying(self, request: Request) -> Iterator[Reply]:
        """Around the service of a request. At the end of the block its client gets one outcome: the one that was put
        into the reply, or else the one that the block's exception means, which ends here."""
        with bound_contextvars(request=request.submit.request.hex()):
            reply = Reply()
            try:
                yield reply
            except (Exception, asyncio.CancelledError) as problem:
                said = self._outcome_of(request, problem)
                reply.outcome = reply.outcome or said
            assert reply.outcome is not None, "a service ended without outcome or exception"
            with self._stage.alone():
                self._clients.answer(request.client, reply.outcome)
            with self._stage.alone():
                self._count(request, reply.outcome)
            with self._stage.alone():
                self._send_spans(request, reply.outcome)

    def _outcome_of(self, request: Request, problem: BaseException) -> Outcome:
        submit = request.submit
        if isinstance(problem, Overload):
            return wire.Busy(submit.request, submit.attempt, problem.retry_ms, problem.reason)
        self._stage.outlive(problem)
        if not isinstance(problem, FerryError | TimeoutError | asyncio.CancelledError):
            log.error("request_crashed", exc_info=problem)
        return wire.Failed(submit.request, submit.attempt, self._failure(request, problem))

    def _failure(self, request: Request, problem: BaseException) -> wire.Failure:
        match problem:
            case Reported(failure=failure):
                return failure
            case TimeoutError():
                said = [f"not done within {request.timeout_s:g} s", *self._missing(request)]
                problem = TimeoutError("; ".join(said))
            case asyncio.CancelledError():
                problem = asyncio.CancelledError("cancelled by the client, or the deployment stopped")
        return failure_of(problem, self._stage.origin)

    def _missing(self, request: Request) -> list[str]:
        """Which missing peers may have kept a request, in words."""
        said = [f"{life.peer} is gone" for life in request.told if life.over]
        said += [f"{life.peer} {life.peer.quarantine}" for life in request.told if life.peer.state == "quarantined"]
        if not self._stage.peers.usable("encoder"):
            said.append("no encoder rank is ready")
        if not self._dispatch.groups():
            said.append("no attention group has all of its scheduler ranks ready")
        return list(dict.fromkeys(said))

    def _count(self, request: Request, outcome: Outcome) -> None:
        ms = round((time.monotonic_ns() - request.marks["received"]) / 1e6, 1)
        match outcome:
            case wire.Result():
                self._stage.counters.count("requests_ok")
                self._latencies.add(time.monotonic(), ms)
                log.info("answered", items=len(outcome.items), prompt_tokens=outcome.prompt_tokens, ms=ms)
            case wire.Busy():
                self._stage.counters.count("requests_busy")
            case wire.Failed(failure=failure):
                self._stage.counters.count("requests_failed")
                log.info("failed", kind=failure.kind, problem=failure.problem, ms=ms)

    def _send_spans(self, request: Request, outcome: Outcome) -> None:
        """Give a sampled request's spans to their exporter. A `busy` request has none."""
        if self._spans is None or request.context is None or not sampled(request.context):
            return
        if isinstance(outcome, wire.Result | wire.Failed):
            model, now_ns = self._stage.deployment.model.adapter, time.monotonic_ns()
            self._spans.take(Ended.of(request.submit, request.context, model, outcome, request.marks, now_ns).spans)


def result_of(request: Request, prompt: Prompt, text: TextEncoder) -> wire.Result:
    """The result of a request that all of its scheduler ranks have reported as done. text: makes the answer text, where
    the engine gives token ids alone."""
    first = request.reports[min(request.reports)]
    digests = first.digests or (b"",) * len(prompt.plans)
    items = tuple(
        wire.ItemReport(request.encoded_by(index), plan.grid, plan.rows, *request.sent[index], digest)
        for index, (plan, digest) in enumerate(zip(prompt.plans, digests, strict=True))
    )
    before = tuple(wire.Mark(step, at_ns) for step, at_ns in request.marks.items())
    return wire.Result(
        request.submit.request,
        request.submit.attempt,
        len(prompt.token_ids),
        first.output_tokens,
        items,
        (*before, *first.marks, wire.Mark("answered", time.monotonic_ns())),
        first.token_ids,
        first.text or text.decode(first.token_ids),
        first.finish,
        first.cached_tokens,
        first.logprobs,
    )
