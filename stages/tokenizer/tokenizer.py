"""Tokenizer workers, the request owners: requests in; tokens to schedulers, pixels to encoders; one outcome out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import structlog
from structlog.contextvars import bound_contextvars

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage, BadRequest, FerryError, LethalRequest, PeerBusy, PeerGone
from tensorferry.codecs.frames import Buffer
from tensorferry.pipeline.backoff import backoff_s
from tensorferry.pipeline.channels.interface import Door
from tensorferry.pipeline.deployment.spec import Deployment, tokenizer_pool_nbytes
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.pools.own_pool import PoolShare
from tensorferry.pipeline.process.run_process import Stop
from tensorferry.pipeline.process.stage import Stage
from tensorferry.pipeline.process.start_stage import FLUSH_S, opened
from tensorferry.pipeline.recording import traffic
from tensorferry.pipeline.telemetry.span_exporter import Exporter
from tensorferry.pipeline.telemetry.traceparent import sampled
from tensorferry.stages.adapters.registry import embedding_form
from tensorferry.stages.failures import failure_of
from tensorferry.stages.finished_requests import Tombstones
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.off_loop import run_to_end
from tensorferry.stages.processors.base import Processor
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.request_spans import Ended, new_context
from tensorferry.stages.tokenizer.admission import Load, Overload, Rate
from tensorferry.stages.tokenizer.clients import Clients
from tensorferry.stages.tokenizer.dispatch import Dispatch
from tensorferry.stages.tokenizer.latencies import Latencies
from tensorferry.stages.tokenizer.planner import Planner, Prompt
from tensorferry.stages.tokenizer.request import Life, Reported, Request
from tensorferry.stages.tokenizer.text import TextEncoder
from tensorferry.stages.tokenizer.traffic_recorder import Recorder

log = structlog.get_logger()

RESEND_S, LONGEST_RESEND_S = 0.05, 1.0  #: before a request is sent again as a whole; doubled each time
#: Whether a silent client is there, while it has requests. One that is stopped keeps what it is sent for that, and its
#: answers need room in the same queue (`channels.HIGH_WATER`).
MOST_LOOKS = 200
MOST_LOSSES = 3  #: of processes with a part in a request, before it is taken for the cause
MOST_REPORTED = 8  #: failures of a request that were said to be worth a retry, before one is believed to be its own


async def main(deployment: Deployment, rank: int, stop: Stop) -> None:
    """Run tokenizer worker `rank` until `stop` drains it."""
    share = PoolShare(
        tokenizer_pool_nbytes(deployment),
        deployment.pool.slots,
        deployment.pool.inline_below_kb << 10,
        "pool.budget_mb",
    )
    processor = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)
    text = TextEncoder.from_file(deployment.tokenizer.vocabulary)
    planner = Planner(
        processor,
        text,
        deployment.limits,
        embedding_form(deployment.model),
    )
    async with opened(deployment, "tokenizer", rank, share) as stage:
        door = stage.front_door()
        threads = stage.channels.enter_context(ThreadPoolExecutor(deployment.tokenizer.threads, "decode"))
        spans = None
        if deployment.telemetry.otlp_endpoint is not None:
            spans = Exporter(deployment, "tokenizer", rank, stage.counters)
            stage.channels.callback(spans.close)
        recorder = None
        if deployment.telemetry.record is not None:
            record = Path(deployment.telemetry.record)
            media = traffic.media_folder(record) if deployment.telemetry.record_media else None
            recorder = Recorder(traffic.part_of(record, rank), media, text, deployment.limits, stage.counters)
            stage.channels.callback(recorder.close)
        tokenizer = Tokenizer(stage, door, threads, processor, planner, recorder, spans)
        with stage.running(
            tokenizer.serve_clients(), stage.serve(tokenizer), tokenizer.watch_peers(), tokenizer.watch_clients()
        ):
            await stage.peers.wait_ready()
            tokenizer.open()
            stop.announce_ready()
            await stop.wait_draining()
            await tokenizer.drain()
        await door.flush(FLUSH_S)


class Tokenizer:
    """See the module. `serve` is one request from acceptance to outcome."""

    def __init__(
        self,
        stage: Stage,
        door: Door,
        threads: ThreadPoolExecutor,
        processor: Processor,
        planner: Planner,
        recorder: Recorder | None = None,
        spans: Exporter | None = None,
    ) -> None:
        self._stage, self._door, self._threads = stage, door, threads
        self._planner, self._recorder, self._spans = planner, recorder, spans
        self._watch = Watch("tokenizer.processor", stage.deployment.tokenizer.processor, stage.counters)
        self._dispatch = Dispatch(stage, threads, processor, self._watch)
        self._limits = stage.deployment.limits
        self._requests: dict[bytes, Request] = {}
        self._load = Load(self._limits)
        self._rate = Rate(self._limits.client_requests_per_s)
        self._over = Tombstones(stage.deployment.limits.request_timeout_s)
        self._clients = Clients(door, self._members, stage.deployment.timeouts.quarantine_s, stage.counters)
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = self._draining = False
        self._latencies = Latencies()

    # --- what its process asks: see `Work`

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> bool:
        """Take what encoders and schedulers report of a request."""
        match message:
            case wire.Collected() | wire.Done():
                request = self._owned(message.request, message.attempt)
                if request is not None:
                    self._reported(request, message)
            case wire.Failed(failure=failure) as failed:
                request = self._owned(failed.request, failed.attempt)
                told = request is not None and any(life.epoch == failure.origin.epoch for life in request.told)
                # What an encoder made may be lost with a connection; it does not know that it was not.
                came = failure.origin.stage == "encoder" and request is not None and not request.collecting
                if request is not None and told and not came and request.failure is None:
                    request.failure = failure
                    request.news.set()
            case _:
                return False
        return True

    def in_flight(self) -> int:
        return len(self._requests)

    def busy_since(self) -> float | None:
        return min((request.since for request in self._requests.values()), default=None)

    def gauges(self) -> Mapping[str, float]:
        """What is queued here is planned or processed, or waits for that."""
        queued = sum(not request.schedulers for request in self._requests.values())
        return {"queued": queued, **self._latencies.numbers(time.monotonic())}

    def connection_mended(self, peer: Peer) -> None:
        """Nothing: `watch_peers` has seen that it broke, and its requests count what it was sent as lost."""

    # --- clients

    async def serve_clients(self) -> None:
        """Take what clients send, for ever."""
        await self._stage.receive(
            self._door,
            lambda received: self.take_from_client(
                received.peer, received.message, received.frames, received.client or received.peer
            ),
        )

    def take_from_client(
        self, client: bytes, message: wire.Message, frames: Sequence[Buffer], who: str | bytes
    ) -> None:
        """client: the way back. who: whose rate it is: a key's name, or where there are no keys the connection."""
        match message:
            case wire.Submit() as submit:
                self._accept(client, submit, frames, who)
            case wire.Cancel(request=request, attempt=attempt):
                owned = self._requests.get(request)
                if owned is not None and owned.submit.attempt == attempt and self._is_of(owned, client):
                    owned.cancel()
                else:
                    self._stage.counters.count("cancels_late")
            case wire.Hello():
                self._clients.greeted(client)
            case wire.Drained():
                self._clients.left(client)
            case other:
                self._stage.refused(BadMessage(f"a client sent {type(other).__name__}"))

    def open(self) -> None:
        """Everybody was there once: from now on requests are taken while enough of them are."""
        self._open = True
        self._clients.tell()

    @property
    def _able(self) -> bool:
        """Whether requests could be sent on now."""
        return self._open and bool(self._dispatch.groups()) and bool(self._stage.peers.usable("encoder"))

    async def watch_peers(self) -> None:
        """At every change among the peers, see to requests that the dead had a part in, and tell clients; for ever."""
        while True:
            await self._stage.peers.changed()
            for request in self._requests.values():
                if self._lost_schedulers(request) or self._lost_items(request):
                    request.news.set()
            self._clients.tell()

    async def watch_clients(self) -> None:
        """Give up what clients had asked for that are gone, so that others need not wait for it; for ever.

        A client says Hello with every heartbeat. One whose connection broke is gone too: it comes back as another, and
        submits again.
        """
        heartbeat_s = self._stage.deployment.timeouts.heartbeat_s
        while True:
            await asyncio.sleep(max(heartbeat_s, self._limits.request_timeout_s / MOST_LOOKS))
            clients = {request.client for request in self._requests.values()}
            gone = {client for client in clients if self._clients.is_gone(client, 2 * heartbeat_s)}
            asked = [request for request in self._requests.values() if request.client in gone]
            abandoned = [request for request in asked if not request.task.cancelling()]
            if abandoned:
                self._stage.counters.count("requests_abandoned", len(abandoned))
                log.info("requests_abandoned", clients=len(gone), requests=len(abandoned))
            for request in abandoned:
                request.cancel()

    async def drain(self) -> None:
        """Take no more requests, and wait for those that are owned."""
        self._draining = True
        self._stage.peers.tell(wire.Drain(self._stage.origin))
        log.info("draining", in_flight=len(self._requests))
        await self._idle.wait()

    def _accept(self, client: bytes, submit: wire.Submit, frames: Sequence[Buffer], who: str | bytes) -> None:
        owned = self._requests.get(submit.request)
        if owned is not None and owned.submit.attempt >= submit.attempt:
            self._stage.counters.count("submits_repeated")
            return
        if self._over.covers(submit.request, submit.attempt):
            self._stage.counters.count("submits_repeated")
            used = BadRequest("this request id was answered already: use a new id, or a higher attempt")
            failure = failure_of(used, self._stage.origin)
            self._clients.answer(client, wire.Failed(submit.request, submit.attempt, failure))
            return
        if owned is not None:
            owned.cancel()  # an older attempt of the same client; the newer one is answered
        try:
            self._rate.take(who, time.monotonic())
            if self._draining:
                raise Overload("the deployment is draining")
            if not self._able:
                raise Overload("the deployment is not ready")
            items = sum(not isinstance(part, wire.TextPart | wire.TokensPart) for part in submit.parts)
            self._load.take((submit.request, submit.attempt), items, sum(len(frame) for frame in frames))
        except Overload as full:
            self._stage.counters.count("requests_busy")
            self._record(submit, frames, time.monotonic_ns())
            self._clients.answer(client, wire.Busy(submit.request, submit.attempt, full.retry_ms, full.reason))
            return
        task = self._stage.tasks.create_task(self.serve(client, submit, frames), name=submit.request.hex())
        context = submit.context if self._spans is None else new_context(submit)
        self._requests[submit.request] = Request(client, submit, task, context)
        self._idle.clear()

    def _is_of(self, request: Request, client: bytes) -> bool:
        """Whether a request is this client's; one that has connected again is another to us, and knows its id."""
        return request.client == client or not self._clients.is_there(request.client)

    def _members(self) -> wire.Members:
        peers, origin = self._stage.peers, self._stage.origin
        ready = self._able and not self._draining
        state = "leaving" if self._draining else "ready" if ready else "waiting"
        me = wire.Member("tokenizer", origin.rank, origin.epoch, state, self._stage.gauges())
        return wire.Members(origin, ready, (me, *peers.members()))

    # --- a request

    async def serve(self, client: bytes, submit: wire.Submit, frames: Sequence[Buffer]) -> None:
        """Plan, process, send, wait; whatever happens, answer once and give everything back."""
        marks = {"received": time.monotonic_ns()}
        request = self._requests[submit.request]
        timeout_s = min(submit.deadline_ms / 1000, self._limits.request_timeout_s)
        deadline_ns = marks["received"] + int(timeout_s * 1e9)
        with bound_contextvars(request=submit.request.hex()):
            outcome: wire.Message
            try:
                async with asyncio.timeout(timeout_s):
                    outcome = await self._serve(request, frames, marks, deadline_ns)
            except Overload as full:
                outcome = wire.Busy(submit.request, submit.attempt, full.retry_ms, full.reason)
            except (FerryError, TimeoutError, asyncio.CancelledError) as problem:
                self._stage.outlive(problem)
                failure = self._failure(problem, timeout_s, request)
                outcome = wire.Failed(submit.request, submit.attempt, failure)
            except Exception as bug:
                self._stage.outlive(bug)
                log.exception("request_crashed")
                outcome = wire.Failed(submit.request, submit.attempt, failure_of(bug, self._stage.origin))
            self._cancel(request, request.relieved() if isinstance(outcome, wire.Result) else request.told)
            self._load.give_back((submit.request, submit.attempt))
            if not isinstance(outcome, wire.Busy):  # that may be offered again
                self._over.add(submit.request, submit.attempt)
            if self._requests.get(submit.request) is request:
                del self._requests[submit.request]
            if not self._requests:
                self._idle.set()
            self._clients.answer(client, outcome)
            self._tell(request, outcome, marks)
            self._log(outcome, marks["received"])

    async def _serve(
        self, request: Request, frames: Sequence[Buffer], marks: dict[str, int], deadline_ns: int
    ) -> wire.Message:
        """Send it, and again what is lost with a process that dies, until all scheduler ranks have reported."""
        prompt: Prompt | None = None
        try:
            with self._watch.beside():
                prompt = await run_to_end(self._threads, partial(self._planner.plan, request.submit, frames))
        finally:
            self._record(request.submit, frames, marks["received"], prompt)
        marks["planned"] = time.monotonic_ns()
        self._load.grow((request.submit.request, request.submit.attempt), prompt.nbytes)
        items = everything = list(range(len(prompt.plans)))
        while True:
            try:
                await self._dispatch.send(request, prompt, items, marks, deadline_ns)
                items = await self._owed(request)
            except (PeerBusy, PeerGone, Reported) as problem:
                await self._start_again(request, problem)
                items = everything
            else:
                if not items:
                    return self._result(request, prompt, marks)
                self._stage.counters.count("items_sent_again", len(items))
                marks["sent_again"] = time.monotonic_ns()
                log.info("items_sent_again", items=items)

    def _record(self, submit: wire.Submit, frames: Sequence[Buffer], at_ns: int, prompt: Prompt | None = None) -> None:
        """Have a request recorded, where traffic is, once it is known what is in it; what is sent again was asked
        once."""
        if self._recorder is not None and not submit.attempt:
            self._recorder.take(submit, frames, at_ns, prompt)

    async def _owed(self, request: Request) -> list[int]:
        """Wait until all scheduler ranks have reported: then none; or until items must be encoded anew: these.

        Raises PeerGone when a scheduler is lost with what it had, and Reported.
        """
        while True:
            await request.news.wait()
            request.news.clear()
            if request.failure is not None:
                raise Reported(request.failure)
            if not request.waiting:
                return []
            for life in self._lost_schedulers(request):
                self._count_loss(request, life)
                raise PeerGone(str(life.peer), "died, or fell silent, with what it had of the request")
            if items := self._lost_items(request):
                self._count_loss(request, request.owners[items[0]])
                return items

    def _count_loss(self, request: Request, life: Life) -> None:
        """Raises LethalRequest once it looks like the request's fault: it is not to go round until nobody is left."""
        request.losses += 1
        if request.losses > MOST_LOSSES:
            raise LethalRequest(request.losses, str(life.peer))

    def _lost_schedulers(self, request: Request) -> list[Life]:
        return request.lost_schedulers(elsewhere=bool(self._dispatch.groups()))

    def _lost_items(self, request: Request) -> list[int]:
        return request.lost_items(elsewhere=bool(self._stage.peers.usable("encoder")))

    async def _start_again(self, request: Request, problem: PeerBusy | PeerGone | Reported) -> None:
        """Have everybody drop what they have of a request, which is to be sent anew; or raise the problem."""
        if isinstance(problem, Reported):
            request.reported += 1
            if not problem.failure.retryable or request.reported > MOST_REPORTED:
                raise problem
        if request.sendings + 1 >= wire.SENDINGS:
            raise problem
        self._stage.counters.count("requests_sent_again")
        log.info("sent_again", reason=str(problem))
        self._cancel(request, request.told)
        pause_s = backoff_s(RESEND_S, LONGEST_RESEND_S, request.sendings)
        request.start_again()
        await asyncio.sleep(pause_s)

    def _result(self, request: Request, prompt: Prompt, marks: dict[str, int]) -> wire.Result:
        first = request.reports[min(request.reports)]
        digests = first.digests or (b"",) * len(prompt.plans)
        items = tuple(
            wire.ItemReport(request.encoded_by(index), plan.grid, plan.rows, *request.sent[index], digest)
            for index, (plan, digest) in enumerate(zip(prompt.plans, digests, strict=True))
        )
        before = tuple(wire.Mark(step, at_ns) for step, at_ns in marks.items())
        return wire.Result(
            request.submit.request,
            request.submit.attempt,
            len(prompt.token_ids),
            first.output_tokens,
            items,
            (*before, *first.marks, wire.Mark("answered", time.monotonic_ns())),
            first.token_ids,
        )

    def _cancel(self, request: Request, told: Sequence[Life]) -> None:
        """Tell these, who know of this attempt, that it is over."""
        for peer, epoch in {(life.peer, life.epoch) for life in told}:
            if peer.epoch == epoch:
                self._stage.peers.send(peer, wire.Cancel(request.submit.request, request.attempt, epoch))

    def _failure(self, problem: BaseException, timeout_s: float, request: Request) -> wire.Failure:
        match problem:
            case Reported(failure=failure):
                return failure
            case TimeoutError():
                problem = TimeoutError("; ".join([f"not done within {timeout_s:g} s", *self._absent(request)]))
            case asyncio.CancelledError():
                problem = asyncio.CancelledError("cancelled by the client, or the deployment stopped")
        return failure_of(problem, self._stage.origin)

    def _absent(self, request: Request) -> list[str]:
        """What may have kept a request, in words."""
        said = [f"{life.peer} is gone" for life in request.told if life.over]
        said += [f"{life.peer} {life.peer.quarantine}" for life in request.told if life.peer.state == "quarantined"]
        if not self._stage.peers.usable("encoder"):
            said.append("no encoder rank is ready")
        if not self._dispatch.groups():
            said.append("no attention group has all of its scheduler ranks ready")
        return list(dict.fromkeys(said))

    def _tell(self, request: Request, outcome: wire.Message, marks: Mapping[str, int]) -> None:
        """Have the spans of a request sent that was answered."""
        if self._spans is None or request.context is None or not sampled(request.context):
            return
        if isinstance(outcome, wire.Result | wire.Failed):
            model, now_ns = self._stage.deployment.model.adapter, time.monotonic_ns()
            self._spans.take(Ended.of(request.submit, request.context, model, outcome, marks, now_ns).spans)

    def _log(self, outcome: wire.Message, received_ns: int) -> None:
        ms = round((time.monotonic_ns() - received_ns) / 1e6, 1)
        if isinstance(outcome, wire.Result):
            self._stage.counters.count("requests_ok")
            self._latencies.add(time.monotonic(), ms)
            log.info("answered", items=len(outcome.items), prompt_tokens=outcome.prompt_tokens, ms=ms)
        elif isinstance(outcome, wire.Busy):
            self._stage.counters.count("requests_busy")
        elif isinstance(outcome, wire.Failed):
            self._stage.counters.count("requests_failed")
            log.info("failed", kind=outcome.failure.kind, problem=outcome.failure.problem, ms=ms)

    # --- peers

    def _reported(self, request: Request, report: wire.Collected | wire.Done) -> None:
        """Book what a scheduler rank has done for a request, if it is one that attends to it."""
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

    def _owned(self, request: bytes, attempt: int) -> Request | None:
        owned = self._requests.get(request)
        if owned is None or owned.attempt != attempt:
            self._stage.counters.count("reports_late")
            return None
        return owned
