"""Tokenizer workers, the request owners: requests in; tokens to schedulers, pixels to encoders; one outcome out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage, BadRequest, PeerBusy, PeerGone
from tensorferry.codecs.frames import Buffer
from tensorferry.pipeline.channels.interface import Door
from tensorferry.pipeline.deployment.spec import Deployment, tokenizer_pool_nbytes
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.pools.own_pool import PoolShare
from tensorferry.pipeline.process.run_process import Stop
from tensorferry.pipeline.process.stage import Stage
from tensorferry.pipeline.process.start_stage import FLUSH_S, opened
from tensorferry.pipeline.recording import traffic
from tensorferry.pipeline.telemetry.span_exporter import Exporter
from tensorferry.stages.adapters.registry import embedding_form
from tensorferry.stages.failures import failure_of
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.off_loop import run_to_end
from tensorferry.stages.processors.base import Processor
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.request_spans import new_context
from tensorferry.stages.tokenizer.admission import Overload, Rate
from tensorferry.stages.tokenizer.clients import Clients
from tensorferry.stages.tokenizer.dispatch import Dispatch
from tensorferry.stages.tokenizer.owned_requests import OwnedRequests
from tensorferry.stages.tokenizer.planner import Planner, Prompt
from tensorferry.stages.tokenizer.recovery import Recovery
from tensorferry.stages.tokenizer.reply import Replies, result_of
from tensorferry.stages.tokenizer.request import Reported, Request
from tensorferry.stages.tokenizer.text import TextEncoder
from tensorferry.stages.tokenizer.traffic_recorder import Recorder

log = structlog.get_logger()

#: Whether a silent client is there, while it has requests. One that is stopped keeps what it is sent for that, and its
#: answers need room in the same queue (`channels.HIGH_WATER`).
MOST_LOOKS = 200


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
        tokenizer = Tokenizer(stage, door, threads, processor, planner, text, recorder, spans)
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
    """See the module. A request's way is from `take_from_client` to `serve`, in the order of the methods."""

    def __init__(
        self,
        stage: Stage,
        door: Door,
        threads: ThreadPoolExecutor,
        processor: Processor,
        planner: Planner,
        text: TextEncoder,
        recorder: Recorder | None = None,
        spans: Exporter | None = None,
    ) -> None:
        self._stage, self._door, self._threads = stage, door, threads
        self._planner, self._recorder, self._spans = planner, recorder, spans
        self._text = text
        self._watch = Watch("tokenizer.processor", stage.deployment.tokenizer.processor, stage.counters)
        self._limits = stage.deployment.limits
        self._rate = Rate(self._limits.client_requests_per_s)
        self._requests = OwnedRequests(self._limits)
        self._clients = Clients(door, self._members, stage.deployment.timeouts.quarantine_s, stage.counters)
        self._dispatch = Dispatch(stage, threads, processor, self._watch)
        self._recovery = Recovery(stage, self._dispatch)
        self._replies = Replies(stage, self._clients, self._requests, self._dispatch, text, spans)
        self._open = self._draining = False

    # --- what its process asks: see `Work`

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> bool:
        """Take what encoders and schedulers report of a request."""
        return self._replies.take(message)

    def in_flight(self) -> int:
        return len(self._requests)

    def busy_since(self) -> float | None:
        return min((request.since for request in self._requests), default=None)

    def gauges(self) -> Mapping[str, float]:
        """What is queued here is planned or processed, or waits for that."""
        queued = sum(not request.schedulers for request in self._requests)
        return {"queued": queued, **self._replies.gauges()}

    def connection_mended(self, peer: Peer) -> None:
        """Do nothing: `watch_peers` saw that the connection broke, and its requests count what was sent as lost."""

    # --- a request, from its receipt to its reply

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
        """client: the way back. who: the name of the client's key, or without keys its connection; each has a rate."""
        match message:
            case wire.Submit() as submit:
                self._accept(client, submit, frames, who)
            case wire.Cancel(request=request, attempt=attempt):
                self._cancel(client, request, attempt)
            case wire.Hello():
                self._clients.greeted(client)
            case wire.Drained():
                self._clients.left(client)
            case other:
                self._stage.refused(BadMessage(f"a client sent {type(other).__name__}"))

    def _accept(self, client: bytes, submit: wire.Submit, frames: Sequence[Buffer], who: str | bytes) -> None:
        """Begin to serve a request, or answer why it is not served."""
        owned = self._requests.get(submit.request)
        if owned is not None and owned.submit.attempt >= submit.attempt:
            self._stage.counters.count("submits_repeated")
            return
        if self._requests.is_finished(submit.request, submit.attempt):
            self._stage.counters.count("submits_repeated")
            used = BadRequest("this request id was answered already: use a new id, or a higher attempt")
            failure = failure_of(used, self._stage.origin)
            self._clients.answer(client, wire.Failed(submit.request, submit.attempt, failure))
            return
        if owned is not None:
            owned.cancel()  # an older attempt of the same client; the newer one is answered
        context = submit.context if self._spans is None else new_context(submit)
        timeout_s = min(submit.deadline_ms / 1000, self._limits.request_timeout_s)
        request = Request(client, submit, timeout_s, _name_of(who), context)
        request.relay = self._replies.relay_of(client, submit)
        try:
            self._admit(request, frames, who)
        except Overload as full:
            self._stage.counters.count("requests_busy")
            self._record(request, frames)
            self._clients.answer(client, wire.Busy(submit.request, submit.attempt, full.retry_ms, full.reason))
            return
        service = self.serve(request, frames)
        try:
            request.task = self._stage.tasks.create_task(service, name=submit.request.hex())
        except BaseException:
            service.close()
            self._requests.remove(request, finished=False)
            raise

    def _admit(self, request: Request, frames: Sequence[Buffer], who: str | bytes) -> None:
        """Own a request, if there is room for it now. Raises Overload, and owns nothing then."""
        self._rate.take(who, time.monotonic())
        if self._draining:
            raise Overload("the deployment is draining")
        if not self._able:
            raise Overload("the deployment is not ready")
        items = sum(not isinstance(part, wire.TextPart | wire.TokensPart) for part in request.submit.parts)
        self._requests.add(request, items, sum(len(frame) for frame in frames))

    async def serve(self, request: Request, frames: Sequence[Buffer]) -> None:
        """Serve a request that is owned: plan it, send it until it is done, reply.

        However this ends, the blocks end in turn, the last one first: peers drop what they have of the request, its
        room is free again, and its client gets the outcome, after which it may submit the next request. None of them
        awaits anything, so that nothing comes between, and each ends even if the one before it raises.
        """
        with (
            self._replies.replying(request) as reply,
            self._requests.removing(request),
            self._dispatch.cancelling(request),
        ):
            async with asyncio.timeout(request.timeout_s):
                prompt = await self._plan(request, frames)
                await self._send_until_done(request, prompt)
                reply.outcome = result_of(request, prompt, self._text)

    async def _plan(self, request: Request, frames: Sequence[Buffer]) -> Prompt:
        """Read the headers of its items, and add its tensors to the load. Raises RequestError, Overload."""
        prompt: Prompt | None = None
        try:
            with self._watch.beside():
                prompt = await run_to_end(self._threads, partial(self._planner.plan, request.submit, frames))
        finally:
            self._record(request, frames, prompt)
        request.marks["planned"] = time.monotonic_ns()
        self._requests.grow(request, prompt.nbytes)
        return prompt

    async def _send_until_done(self, request: Request, prompt: Prompt) -> None:
        """Send all items, and again those that are lost with a process, until all scheduler ranks have reported."""
        items = every = list(range(len(prompt.plans)))
        while True:
            try:
                await self._dispatch.send(request, prompt, items)
                items = await self._recovery.unfinished(request)
                if not items:
                    return
            except (PeerBusy, PeerGone, Reported) as problem:
                await self._recovery.start_again(request, problem)
                items = every

    def _record(self, request: Request, frames: Sequence[Buffer], prompt: Prompt | None = None) -> None:
        """Write the first attempt of a request into the recorded trace, if there is one. prompt: as it was planned."""
        if self._recorder is not None and not request.submit.attempt:
            self._recorder.take(request.submit, frames, request.marks["received"], prompt)

    def _cancel(self, client: bytes, request: bytes, attempt: int) -> None:
        owned = self._requests.get(request)
        if owned is not None and owned.submit.attempt == attempt and self._is_of(owned, client):
            owned.cancel()
        else:
            self._stage.counters.count("cancels_late")

    def _is_of(self, request: Request, client: bytes) -> bool:
        """Whether a request is this client's. A client that has connected again has another name, and knows its id."""
        return request.client == client or not self._clients.is_there(request.client)

    # --- its peers and its clients

    def open(self) -> None:
        """All peers were ready once: from now on requests are taken while enough of them are."""
        self._open = True
        self._clients.tell()

    async def drain(self) -> None:
        """Take no more requests, and wait for those that are owned."""
        self._draining = True
        self._stage.peers.tell(wire.Drain(self._stage.origin))
        log.info("draining", in_flight=len(self._requests))
        await self._requests.wait_empty()
        self._clients.pay()

    async def watch_peers(self) -> None:
        """At every change among the peers, wake the requests that lost a part with one, and tell clients; for ever."""
        while True:
            await self._stage.peers.changed()
            for request in self._requests:
                if self._recovery.has_lost(request):
                    request.news.set()
            self._clients.tell()

    async def watch_clients(self) -> None:
        """Cancel the requests of clients that are gone, so that others need not wait for these; for ever.

        A client says Hello with every heartbeat. A client whose connection broke is gone too: it connects again under
        another name, and submits again.
        """
        heartbeat_s = self._stage.deployment.timeouts.heartbeat_s
        while True:
            await asyncio.sleep(max(heartbeat_s, self._limits.request_timeout_s / MOST_LOOKS))
            self._clients.pay()
            clients = {request.client for request in self._requests}
            gone = {client for client in clients if self._clients.is_gone(client, 2 * heartbeat_s)}
            abandoned = [one for one in self._requests if one.client in gone and not one.is_cancelled]
            if abandoned:
                self._stage.counters.count("requests_abandoned", len(abandoned))
                log.info("requests_abandoned", clients=len(gone), requests=len(abandoned))
            for request in abandoned:
                request.cancel()

    @property
    def _able(self) -> bool:
        """Whether requests could be sent on now."""
        return self._open and bool(self._dispatch.groups()) and bool(self._stage.peers.usable("encoder"))

    def _members(self) -> wire.Members:
        peers, origin = self._stage.peers, self._stage.origin
        ready = self._able and not self._draining
        state = "leaving" if self._draining else "ready" if ready else "waiting"
        me = wire.Member("tokenizer", origin.rank, origin.epoch, state, self._stage.gauges())
        return wire.Members(origin, ready, (me, *peers.members()))


def _name_of(who: str | bytes) -> str:
    """A client as schedulers know it, where it names no tenant."""
    name = who if isinstance(who, str) else f"connection {who.hex()}"
    return name[: wire.MOST_TENANT]
