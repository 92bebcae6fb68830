"""Tokenizer workers, the request owners: requests in; tokens to schedulers, pixels to encoders; one outcome out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
from structlog.contextvars import bound_contextvars

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import (
    BadItem,
    BadMessage,
    BadRequest,
    FerryError,
    PeerBusy,
    PeerGone,
    RequestError,
)
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.publisher import Draft, Layout
from tensorferry.pipeline import traffic
from tensorferry.pipeline.channels import FrontDoor
from tensorferry.pipeline.config import Deployment, tokenizer_pool_nbytes
from tensorferry.pipeline.lifecycle import Stop
from tensorferry.pipeline.peer import Peer
from tensorferry.pipeline.stage import FLUSH_S, LINGER_S, PoolShare, Stage, opened
from tensorferry.stages.adapters.registry import embedding_form
from tensorferry.stages.assignment import owners
from tensorferry.stages.precomputed import Precomputed
from tensorferry.stages.processors.base import BadMedia, Processor, write
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.processors.text import TextEncoder
from tensorferry.stages.prompt import Planner, Prompt
from tensorferry.stages.recorder import Recorder
from tensorferry.stages.staging import stage
from tensorferry.stages.threads import run_to_end
from tensorferry.stages.tombstones import Tombstones

log = structlog.get_logger()

LOOK_AGAIN_S = 0.002
GROWN_S = 0.0005  #: making a chunk takes about twice as long
NO_HASH = bytes(16)  #: of an item that nobody encodes
RETRY_MS = 200  #: hint to clients that were told `busy`


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
        door = FrontDoor(stage.context, stage.runtime.front_door(rank), stage.limits, stage.refused)
        stage.channels.callback(door.close, LINGER_S)
        threads = stage.channels.enter_context(ThreadPoolExecutor(deployment.tokenizer.threads, "decode"))
        recorder = None
        if deployment.telemetry.record is not None:
            record = Path(deployment.telemetry.record)
            media = traffic.media_folder(record) if deployment.telemetry.record_media else None
            recorder = Recorder(traffic.part_of(record, rank), media, text, deployment.limits, stage.counters)
            stage.channels.callback(recorder.close)
        tokenizer = Tokenizer(stage, door, threads, processor, planner, recorder)
        with stage.running(tokenizer.serve_clients(), tokenizer.hear_peers(), tokenizer.tell_clients()):
            await stage.peers.wait_ready()
            stop.announce_ready()
            await stop.wait_draining()
            await tokenizer.drain()
        await door.flush(FLUSH_S)


@dataclass(slots=True)
class Request:
    """A request this worker owns, until its outcome is sent."""

    client: bytes
    submit: wire.Submit
    task: asyncio.Task[None]
    reports: dict[int, wire.Done] = field(default_factory=dict)  #: by scheduler rank
    waiting: set[int] = field(default_factory=set)  #: scheduler ranks that have not reported
    told: list[Peer] = field(default_factory=list)  #: who knows of it and must hear of a cancel
    failure: wire.Failure | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def cancel(self) -> None:
        """Give it up. Not at once: a task cancelled before its first step would never run, nor answer."""
        asyncio.get_running_loop().call_soon(self.task.cancel)


class Tokenizer:
    """See the module. `serve` is one request from acceptance to outcome."""

    def __init__(
        self,
        stage: Stage,
        door: FrontDoor,
        threads: ThreadPoolExecutor,
        processor: Processor,
        planner: Planner,
        recorder: Recorder | None = None,
    ) -> None:
        self._stage, self._door, self._threads = stage, door, threads
        self._processor, self._planner, self._recorder = processor, planner, recorder
        self._limits = stage.deployment.limits
        self._requests: dict[bytes, Request] = {}
        self._over = Tombstones()
        self._clients: set[bytes] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        stage.in_flight = lambda: len(self._requests)

    # --- clients

    async def serve_clients(self) -> None:
        """Take what clients send, for ever."""
        async for received in self._door:
            with self._stage.alone():
                self._take(received.peer, received.message, received.frames)
            del received  # else its frames stay in use while the next is waited for

    def _take(self, client: bytes, message: wire.Message, frames: Sequence[Buffer]) -> None:
        match message:
            case wire.Submit() as submit:
                self._accept(client, submit, frames)
            case wire.Cancel(request=request):
                owned = self._requests.get(request)
                if owned is not None and owned.client == client:
                    owned.cancel()
            case wire.Hello():
                self._clients.add(client)
                self._answer(client, self._members())
            case wire.Drained():
                self._clients.discard(client)
            case other:
                self._stage.refused(BadMessage(f"a client sent {type(other).__name__}"))

    async def tell_clients(self) -> None:
        """Tell clients of every change among the peers, for ever."""
        while True:
            await self._stage.peers.changed()
            for client in list(self._clients):
                self._answer(client, self._members())

    async def drain(self) -> None:
        """Take no more requests, and wait for those that are owned."""
        self._draining = True
        self._stage.peers.tell(wire.Drain(self._stage.origin))
        log.info("draining", in_flight=len(self._requests))
        await self._idle.wait()

    def _accept(self, client: bytes, submit: wire.Submit, frames: Sequence[Buffer]) -> None:
        owned = self._requests.get(submit.request)
        if owned is not None and owned.submit.attempt >= submit.attempt:
            self._stage.counters.count("submits_repeated")
            return
        if self._over.covers(submit.request, submit.attempt):
            used = BadRequest("this request id was answered already: use a new id, or a higher attempt")
            self._answer(client, wire.Failed(submit.request, submit.attempt, self._failure(used, 0.0)))
            return
        if owned is not None:
            owned.cancel()  # an older attempt of the same client; the newer one is answered
        elif self._recorder is not None:
            self._recorder.take(submit, frames)
        reason = ""
        if self._draining:
            reason = "the deployment is draining"
        elif len(self._requests) >= self._limits.in_flight_requests:
            reason = f"{len(self._requests)} requests in flight (limits.in_flight_requests)"
        elif not self._stage.peers.all_ready:
            reason = "the deployment is not ready"
        if reason:
            self._stage.counters.count("requests_busy")
            self._answer(client, wire.Busy(submit.request, submit.attempt, RETRY_MS, reason))
            return
        task = self._stage.tasks.create_task(self.serve(client, submit, frames), name=submit.request.hex())
        self._requests[submit.request] = Request(client, submit, task)
        self._idle.clear()

    def _answer(self, client: bytes, message: wire.Message) -> None:
        try:
            self._door.send_nowait(client, message)
        except (PeerGone, PeerBusy) as problem:
            self._clients.discard(client)
            self._stage.counters.count("answers_undeliverable")
            log.warning("answer_undeliverable", message=type(message).__name__, problem=str(problem))

    def _members(self) -> wire.Members:
        peers, origin = self._stage.peers, self._stage.origin
        ready = peers.all_ready and not self._draining
        state = "leaving" if self._draining else "ready" if ready else "waiting"
        me = wire.Member("tokenizer", origin.rank, origin.epoch, state, self._stage.gauges())
        return wire.Members(origin, ready, (me, *peers.members()))

    # --- a request

    async def serve(self, client: bytes, submit: wire.Submit, frames: Sequence[Buffer]) -> None:
        """Plan, process, send, wait; whatever happens, answer once and give everything back."""
        marks = [wire.Mark("received", time.monotonic_ns())]
        request = self._requests[submit.request]
        timeout_s = min(submit.deadline_ms / 1000, self._limits.request_timeout_s)
        with bound_contextvars(request=submit.request.hex()):
            outcome: wire.Message
            try:
                async with asyncio.timeout(timeout_s):
                    outcome = await self._serve(request, frames, marks, timeout_s)
            except (FerryError, TimeoutError, asyncio.CancelledError) as problem:
                self._stage.outlive(problem)
                failure = self._failure(problem, timeout_s, request.told)
                outcome = wire.Failed(submit.request, submit.attempt, failure)
            except Exception as bug:
                self._stage.outlive(bug)
                log.exception("request_crashed")
                outcome = wire.Failed(submit.request, submit.attempt, self._failure(bug, timeout_s))
            if not isinstance(outcome, wire.Result):
                self._cancel(request)
            self._over.add(submit.request, submit.attempt)
            if self._requests.get(submit.request) is request:
                del self._requests[submit.request]
            if not self._requests:
                self._idle.set()
            self._answer(client, outcome)
            self._log(outcome, marks[0].at_ns)

    async def _serve(
        self, request: Request, frames: Sequence[Buffer], marks: list[wire.Mark], timeout_s: float
    ) -> wire.Message:
        prompt = await run_to_end(self._threads, partial(self._planner.plan, request.submit, frames))
        marks.append(wire.Mark("planned", time.monotonic_ns()))
        layouts = prompt.layouts
        await self._wait_for_room(layouts)
        with ExitStack() as leases:
            drafts = [leases.enter_context(self._stage.publisher.draft(layout, patient=False)) for layout in layouts]
            hashes = await self._process(prompt, drafts)
            if self._stage.device is not None:
                await stage(lambda: self._ways(request.submit, prompt, drafts, hashes))
            marks.append(wire.Mark("processed", time.monotonic_ns()))
            deadline_ns = marks[0].at_ns + int(timeout_s * 1e9)
            encoded_by = self._send(request, prompt, drafts, hashes, deadline_ns)
        marks.append(wire.Mark("sent", time.monotonic_ns()))
        await request.finished.wait()
        if request.failure is not None:
            return wire.Failed(request.submit.request, request.submit.attempt, request.failure)
        first = request.reports[min(request.reports)]
        digests = first.digests or (b"",) * len(drafts)
        items = tuple(
            wire.ItemReport(owner, plan.grid, plan.rows, draft.transport, draft.nbytes, digest)
            for owner, plan, draft, digest in zip(encoded_by, prompt.plans, drafts, digests, strict=True)
        )
        marks.append(wire.Mark("answered", time.monotonic_ns()))
        return wire.Result(
            request.submit.request,
            request.submit.attempt,
            len(prompt.token_ids),
            first.output_tokens,
            items,
            (*marks[:-1], *first.marks, marks[-1]),
            first.token_ids,
        )

    async def _wait_for_room(self, layouts: Sequence[Layout]) -> None:
        """Until the pool has room for all of a request, or the wait is over: with `when_full: wait`, and while an
        elastic pool grows for it.

        Nothing is held meanwhile, so requests cannot lock each other out.
        """
        deployment, publisher, counters = self._stage.deployment, self._stage.publisher, self._stage.counters
        spec = deployment.pool
        waits, elastic = spec.when_full == "wait", deployment.transport == "cuda_vmm"
        if not (waits or elastic) or publisher.fits(layouts):
            return
        if elastic and publisher.growing(layouts):
            counters.count("growth_waits")
            until_ns = time.monotonic_ns() + spec.grow_wait_ms * 1_000_000
            while time.monotonic_ns() < until_ns and publisher.growing(layouts):
                await asyncio.sleep(GROWN_S)
                if publisher.fits(layouts):
                    return
        if not waits:
            return
        counters.count("pool_waits")
        until_ns = time.monotonic_ns() + spec.wait_ms * 1_000_000
        # Acknowledgements are words in memory: nobody calls when one is written.
        while time.monotonic_ns() < until_ns and not publisher.fits(layouts):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _process(self, prompt: Prompt, drafts: Sequence[Draft]) -> list[bytes]:
        """Decode every item into its draft, `threads` at a time; the content hashes. Raises BadItem."""

        async def process(index: int) -> bytes:
            try:
                return await run_to_end(self._threads, partial(self._write, prompt, index, drafts[index]))
            except BadMedia as problem:
                raise BadItem(index, str(problem)) from None

        try:
            async with asyncio.TaskGroup() as decoding:
                tasks = [decoding.create_task(process(index)) for index in range(len(drafts))]
        except* BadItem as group:
            raise min((e for e in group.exceptions if isinstance(e, BadItem)), key=lambda e: e.index) from None
        return [task.result() for task in tasks]

    def _write(self, prompt: Prompt, index: int, draft: Draft) -> bytes:
        """Make one item's tensors where they are to lie; the content hash. Raises BadMedia."""
        source, plan = prompt.sources[index], prompt.plans[index]
        if isinstance(source, Precomputed):
            source.write(draft.views)
            return NO_HASH
        return write(self._processor, source, plan, draft.views[0])

    def _ways(
        self, submit: wire.Submit, prompt: Prompt, drafts: Sequence[Draft], hashes: Sequence[bytes]
    ) -> list[tuple[Draft, int | None]]:
        """Every draft with its column at whoever reads it now: the encoder rank that owns the item, or the scheduler
        ranks, where its embeddings are there already."""
        encoders = self._stage.peers.usable("encoder")
        places = self._places(submit, prompt, hashes, encoders) if encoders else {}
        ways = [(drafts[index], encoders[place].column) for index, place in places.items()]
        if ready := prompt.precomputed:
            with suppress(PeerGone):  # `_send` says so
                group = self._attention_group(submit.request)
                ways += [(drafts[index], peer.column) for index in ready for peer in group]
        return ways

    def _places(
        self, submit: wire.Submit, prompt: Prompt, hashes: Sequence[bytes], encoders: Sequence[Peer]
    ) -> dict[int, int]:
        """Which of these encoder ranks, at least one, owns each item that is to be encoded: its place among them."""
        patches, ranks = [plan.patches for plan in prompt.plans], [peer.rank for peer in encoders]
        places = owners(self._stage.deployment.encoder.assignment, submit.request, patches, hashes, ranks)
        return {index: place for index, place in enumerate(places) if patches[index]}

    def _send(
        self,
        request: Request,
        prompt: Prompt,
        drafts: Sequence[Draft],
        hashes: Sequence[bytes],
        deadline_ns: int,
    ) -> list[int]:
        """Tell the schedulers, hand them what is encoded already, and every other item to the encoder rank that owns
        it: no await in here.

        Returns the owner's rank of each item, -1 for none. Raises PeerBusy or PeerGone; what was not sent is taken
        back.
        """
        submit, origin = request.submit, self._stage.origin
        schedulers = self._attention_group(submit.request)
        encoders = self._stage.peers.usable("encoder")
        ready = prompt.precomputed
        if len(drafts) > len(ready) and not encoders:
            raise PeerGone("encoder", "no rank is ready")
        places = self._places(submit, prompt, hashes, encoders) if encoders else {}
        ranks = tuple(wire.Rank(peer.rank, peer.epoch) for peer in encoders)
        group = tuple(wire.Rank(peer.rank, peer.epoch) for peer in schedulers)
        request.waiting = {peer.rank for peer in schedulers}
        token_bytes = prompt.token_ids.astype("<i4", copy=False).tobytes()
        spans = tuple(wire.Span(offset, length) for offset, length in prompt.spans)
        for peer in schedulers:
            request.told.append(peer)
            peer.outbox.send_nowait(
                wire.Admit(
                    submit.request,
                    submit.attempt,
                    peer.epoch,
                    origin,
                    group,
                    token_bytes,
                    spans,
                    submit.output_tokens,
                    deadline_ns,
                )
            )
            if ready:
                self._send_ready(request, prompt, drafts, peer, len(schedulers))
        for position in sorted(set(places.values())):
            peer = encoders[position]
            owned = [index for index, place in places.items() if place == position]
            frames: list[Buffer] = []
            payloads = {index: drafts[index].dispatch(peer.column, frames)[0] for index in owned}
            items = tuple(
                wire.Item(plan.modality, plan.grid, plan.rows, digest, payloads.get(index))
                for index, (plan, digest) in enumerate(zip(prompt.plans, hashes, strict=True))
            )
            message = wire.Encode(submit.request, submit.attempt, peer.epoch, origin, ranks, group, items, deadline_ns)
            request.told.append(peer)
            self._hand_over(peer, message, frames, [drafts[index] for index in owned])
        return [encoders[places[index]].rank if index in places else -1 for index in range(len(drafts))]

    def _send_ready(self, request: Request, prompt: Prompt, drafts: Sequence[Draft], peer: Peer, readers: int) -> None:
        """Hand the embeddings that came with a request to one of the scheduler ranks that read them."""
        frames: list[Buffer] = []
        items = []
        for index, source in prompt.precomputed.items():
            payloads = drafts[index].dispatch(peer.column, frames, consumers=readers)
            outputs = tuple(map(wire.Output, source.outputs, payloads))
            items.append(wire.Embedding(index, prompt.plans[index].rows, outputs))
        submit, origin = request.submit, self._stage.origin
        message = wire.Embeddings(submit.request, submit.attempt, peer.epoch, origin, tuple(items), ())
        self._hand_over(peer, message, frames, [drafts[index] for index in prompt.precomputed])

    @staticmethod
    def _hand_over(peer: Peer, message: wire.Message, frames: Sequence[Buffer], drafts: Sequence[Draft]) -> None:
        """Send what carries these drafts, which are not this peer's if that fails."""
        try:
            peer.outbox.send_nowait(message, frames)
        except Exception:  # whatever it was: a send is all or nothing
            for draft in drafts:
                draft.retract(peer.column)
            raise

    def _attention_group(self, request: bytes) -> list[Peer]:
        """The scheduler ranks that attend to this request together: of the groups that are whole, one by request id."""
        spec = self._stage.deployment.scheduler
        size = spec.attention_tp_size
        usable = {peer.rank: peer for peer in self._stage.peers.usable("scheduler")}
        groups = [range(first, first + size) for first in range(0, spec.groups * spec.tp_size, size)]
        whole = [group for group in groups if usable.keys() >= set(group)]
        if not whole:
            raise PeerGone("scheduler", "no attention group has all of its ranks ready")
        return [usable[rank] for rank in whole[int.from_bytes(request[:8], "big") % len(whole)]]

    def _cancel(self, request: Request) -> None:
        """Tell everybody who knows of a request that it is over."""
        for peer in request.told:
            self._stage.peers.send(peer, wire.Cancel(request.submit.request, request.submit.attempt))

    def _failure(self, problem: BaseException, timeout_s: float, told: Sequence[Peer] = ()) -> wire.Failure:
        origin = self._stage.origin
        match problem:
            case BadItem(index=index):
                return wire.Failure("BadItem", str(problem)[:4096], origin, index)
            case TimeoutError():
                silent = [f"{peer} {peer.quarantine}" for peer in told if peer.state == "quarantined"]
                text = "; ".join([f"not done within {timeout_s:g} s", *silent])
                return wire.Failure("DeadlineExceeded", text[:4096], origin, retryable=True)
            case asyncio.CancelledError():
                return wire.Failure("Cancelled", "cancelled by the client, or the deployment stopped", origin)
            case FerryError():
                retryable = not isinstance(problem, RequestError)
                return wire.Failure(type(problem).__name__, str(problem)[:4096], origin, retryable=retryable)
        return wire.Failure("InternalError", f"{type(problem).__name__}: {problem}"[:4096], origin)

    def _log(self, outcome: wire.Message, received_ns: int) -> None:
        ms = round((time.monotonic_ns() - received_ns) / 1e6, 1)
        if isinstance(outcome, wire.Result):
            self._stage.counters.count("requests_ok")
            log.info("answered", items=len(outcome.items), prompt_tokens=outcome.prompt_tokens, ms=ms)
        elif isinstance(outcome, wire.Failed):
            self._stage.counters.count("requests_failed")
            log.info("failed", kind=outcome.failure.kind, problem=outcome.failure.problem, ms=ms)

    # --- peers

    async def hear_peers(self) -> None:
        """Take what encoders and schedulers report, for ever."""
        async for received in self._stage.inbox:
            with self._stage.alone():
                self._take_report(received.message)
            del received  # else its frames stay in use while the next is waited for

    def _take_report(self, message: wire.Message) -> None:
        match message:
            case wire.Done() as done:
                request = self._owned(done.request, done.attempt)
                if request is not None and done.origin.rank in request.waiting:
                    request.waiting.discard(done.origin.rank)
                    request.reports[done.origin.rank] = done
                    if not request.waiting:
                        request.finished.set()
            case wire.Failed() as failed:
                request = self._owned(failed.request, failed.attempt)
                told = request is not None and any(peer.epoch == failed.failure.origin.epoch for peer in request.told)
                if request is not None and told and request.failure is None:
                    request.failure = failed.failure
                    request.finished.set()
            case _:
                if not self._stage.hear(message):
                    self._stage.refused(BadMessage(f"a tokenizer takes no {type(message).__name__}"))

    def _owned(self, request: bytes, attempt: int) -> Request | None:
        owned = self._requests.get(request)
        if owned is None or owned.submit.attempt != attempt:
            self._stage.counters.count("reports_late")
            return None
        return owned
