"""Encoder data-parallel ranks: requests' items in, embeddings of those this rank owns out to the schedulers.

Requests that wait together share a call of the adapter; each fails alone, and gets a message of its own. While results
of a call are awaited, the next full batch is queued behind it, so that a GPU has no pause between the two.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from math import prod

import msgspec
import structlog
from structlog.contextvars import bound_contextvars

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import (
    BadMessage,
    BadRequest,
    FerryError,
    PeerBusy,
    PeerGone,
    text_of,
)
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.pool.declared import check_declared
from tensorferry.codecs.pool.publisher import Draft
from tensorferry.pipeline.deployment.spec import MIB, Deployment, device_of, encoder_pool_nbytes, most_requests
from tensorferry.pipeline.peers.peer import REPORTS, Peer
from tensorferry.pipeline.pools.own_pool import PoolShare
from tensorferry.pipeline.process.run_process import Stop
from tensorferry.pipeline.process.stage import Stage
from tensorferry.pipeline.process.start_stage import opened
from tensorferry.pipeline.telemetry.span_exporter import Exporter
from tensorferry.pipeline.telemetry.traceparent import sampled
from tensorferry.stages.adapters.base import ModelAdapter
from tensorferry.stages.adapters.registry import make_adapter
from tensorferry.stages.assignment import owners
from tensorferry.stages.encoder.batch_call import Call, Made
from tensorferry.stages.encoder.embedding_cache import Content, EmbeddingCache
from tensorferry.stages.encoder.features import Features
from tensorferry.stages.encoder.job_queue import Job, Jobs
from tensorferry.stages.failures import failure_of
from tensorferry.stages.finished_requests import Tombstones
from tensorferry.stages.gpu_wait import stage
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.off_loop import run_to_end
from tensorferry.stages.request_spans import of_call

log = structlog.get_logger()


async def main(deployment: Deployment, rank: int, stop: Stop) -> None:
    """Run encoder rank `rank` until `stop` drains it."""
    share = PoolShare(
        encoder_pool_nbytes(deployment),
        deployment.embeddings_pool.slots,
        deployment.embeddings_pool.inline_below_kb << 10,
        "embeddings_pool.budget_mb",
    )
    with ThreadPoolExecutor(1, "encode") as thread, ThreadPoolExecutor(1, "results") as waiter:
        # Before anybody hears of this process: imports and weights can keep its heartbeats for seconds.
        threads, device = deployment.encoder.threads, device_of(deployment, "encoder", rank)
        adapter = await run_to_end(thread, partial(make_adapter, deployment.model, threads, device))
        async with opened(deployment, "encoder", rank, share) as stage:
            spans = None
            if deployment.telemetry.otlp_endpoint is not None:
                spans = Exporter(deployment, "encoder", rank, stage.counters)
                stage.channels.callback(spans.close)
            encoder = Encoder(stage, adapter, thread, waiter, spans)
            with stage.running(stage.serve(encoder), encoder.encode()):
                await stage.peers.wait_ready()
                stage.peers.open()
                stop.announce_ready()
                await stop.wait_draining()
                await encoder.drain()


class Encoder:
    """See the module."""

    def __init__(
        self,
        stage: Stage,
        adapter: ModelAdapter,
        thread: ThreadPoolExecutor,
        waiter: ThreadPoolExecutor,
        spans: Exporter | None = None,
    ) -> None:
        """thread: where the adapter is called; waiter: where its results are waited for. One thread each."""
        self._stage, self._adapter, self._thread, self._waiter = stage, adapter, thread, waiter
        self._spans = spans
        self._watch = Watch("model.adapter", stage.deployment.model.adapter, stage.counters)
        spec = stage.deployment.encoder
        self._cache = EmbeddingCache(spec.cache_mb * MIB) if spec.cache_mb else None
        self._jobs = Jobs(spec.batch_patches, spec.batch_wait_ms / 1e3, self._unknown_patches)
        self._most_jobs = most_requests(stage.deployment)
        self._over = Tombstones(stage.deployment.limits.request_timeout_s)
        self._contents: set[Content] = set()  # of the batch that was begun last; without a cache nobody asks
        self._calls = self._encoded = self._found = 0  # calls of the adapter that went well, and items; see `gauges`
        self._sent: dict[int, deque[wire.Encode]] = defaultdict(lambda: deque(maxlen=REPORTS))  # without payloads
        self._begun: list[float] = []  # when each batch that is under way was

    # --- what its process asks: see `Work`

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> bool:
        match message:
            case wire.Encode() as job:
                self._queue(Job(job, Features(self._stage.reader, job, frames)))
            case wire.Cancel(request=request, attempt=attempt):
                self._over.add(request, attempt)
            case _:
                return False
        return True

    def in_flight(self) -> int:
        return self._jobs.unfinished

    def busy_since(self) -> float | None:
        return min(self._begun, default=None)

    def gauges(self) -> Mapping[str, float]:
        """Calls that went well and the items they had are the mean batch."""
        numbers = {"encode_calls": self._calls, "encoded_items": self._encoded, "queued": self._jobs.waiting}
        if self._cache is not None:
            numbers |= {"cache_hits": self._found, "cache_misses": self._encoded, "cache_nbytes": self._cache.nbytes}
        return numbers

    def connection_mended(self, peer: Peer) -> None:
        """What a scheduler rank was sent last may be lost: tell the owners, of whom those whose requests are collected
        need not mind."""
        for job in self._sent.pop(peer.rank, ()):
            if time.monotonic_ns() < job.deadline_ns:
                self._report(job, PeerGone(str(peer), "may not have got the embeddings: its connection broke"))

    # --- jobs

    def _queue(self, job: Job) -> None:
        """Let a job wait for its turn; or not, where it is nobody's, or lies: nothing of it is then kept."""
        message = job.message
        with ExitStack() as undo:
            undo.callback(job.close)
            if not self._stage.peers.knows(message.owner):
                self._stage.counters.count("messages_unknown_peer")
            elif self._jobs.unfinished >= self._most_jobs:
                self._report(message, PeerBusy(f"encoder-{self._stage.origin.rank}"))
            elif self._is_sound(job) and self._is_ours(job):
                self._jobs.put_nowait(job)
                undo.pop_all()

    async def encode(self) -> None:
        """Take the jobs that wait, as many as share a call, encode them, send each its embeddings; for ever.

        At most two batches are under way. The second one is full: what could still be joined has nothing to lose by
        waiting for company.
        """
        async with asyncio.TaskGroup() as batches:
            before: asyncio.Task[None] | None = None
            while True:
                if before is not None:
                    await self._jobs.fills(unless=before)
                batch, queued = await self._begin(batches, before)
                await queued.wait()
                if before is not None:
                    await asyncio.wait([before])
                before = None if batch.done() else batch

    async def _begin(
        self, batches: asyncio.TaskGroup, before: asyncio.Task[None] | None
    ) -> tuple[asyncio.Task[None], asyncio.Event]:
        """Take a batch and encode it beside the one before, which may hold what this one needs no encoding for.

        The event is set when the next batch may begin. Nothing here keeps a job once it is encoded.
        """
        jobs, queued = await self._jobs.take(), asyncio.Event()
        if self._cache is not None:
            contents = {item.content for job in jobs for item in job.items if item.content not in self._cache}
            if before is not None and contents & self._contents:
                await asyncio.wait([before])
            self._contents = contents
        return batches.create_task(self._run(jobs, queued.set)), queued

    async def drain(self) -> None:
        """Take no more jobs, and finish those that are here."""
        self._stage.peers.tell(wire.Drain(self._stage.origin))
        log.info("draining", in_flight=self._jobs.unfinished)
        self._jobs.hurry()
        await self._jobs.join()

    async def _run(self, jobs: Sequence[Job], queued: Callable[[], None]) -> None:
        """Answer for each of these; every payload that came is released, whatever happens. queued: called when the next
        batch may be encoded, at the latest when this one is done."""
        began = time.monotonic()
        self._begun.append(began)
        try:
            await self._encode([job for job in jobs if not self._is_late(job)], queued)
        finally:
            self._begun.remove(began)
            for job in jobs:
                job.close()
            queued()
            self._jobs.done(len(jobs))

    async def _encode(self, jobs: Sequence[Job], queued: Callable[[], None], *, anew: bool = False) -> None:
        """Encode these in one call of the adapter.

        If it fails, whoever is at fault is told, and the others are encoded anew: together the first time, where it is
        known who is at fault, and otherwise each alone. So nobody is encoded more than three times, however many are
        bad; and a batch that is too much for the memory there is fails nobody who is not, alone.
        """
        if not jobs:
            return
        with ExitStack() as embeddings:
            call = Call(jobs, self._cache, self._stage.publisher, self._stage.device, embeddings)
            marks = [wire.Mark("encoding", encoding_ns := time.monotonic_ns())]
            try:
                wanted = await self._wanted(jobs, call)
                if len(wanted) == len(jobs):
                    with self._watch.beside():
                        finish = await run_to_end(self._thread, lambda: call.run(self._adapter))
                    if finish is not None:
                        self._complete(jobs, call)
                        queued()
                        with self._watch.beside():
                            await run_to_end(self._waiter, finish)
                    call.keep()
                    if self._stage.device is not None:
                        await stage(lambda: [way for job in jobs for way in self._ways(job.message, call.made(job))])
            except Exception as problem:
                self._stage.outlive(problem)
                innocent, together = self._blame(jobs, call, problem)
                innocent = [job for job in innocent if not self._is_late(job)]
            else:
                if len(wanted) < len(jobs):
                    await self._encode(wanted, queued, anew=anew)
                    return
                marks.append(wire.Mark("encoded", encoded_ns := time.monotonic_ns()))
                marks.append(wire.Mark(f"read-{self._stage.origin.rank}", call.copied_ns or encoded_ns))
                self._count(call)
                self._tell(jobs, call, (encoding_ns, encoded_ns))
                for job in jobs:
                    self._answer(job.message, call.made(job), tuple(marks))
                return
        for group in [innocent] if together and not anew else [[job] for job in innocent]:
            await self._encode(group, queued, anew=True)

    def _complete(self, jobs: Sequence[Job], call: Call) -> None:
        """Queue all that sending these needs of the GPU before the next batch is: what would be queued behind it, were
        done when that is."""
        for job in jobs:
            for made in call.made(job):
                for draft in made.outputs.values():
                    draft.complete()
            if self._stage.device is not None:
                for draft, column in self._ways(job.message, call.made(job)):
                    draft.prepared(column)

    def _blame(self, jobs: Sequence[Job], call: Call, problem: Exception) -> tuple[list[Job], bool]:
        """Tell the owners of the requests that a failure is due to; returns the others, and whether it was anybody."""
        problem = call.understood(problem)
        faults = call.at_fault(problem)
        if len(jobs) == 1:
            faults = {jobs[0]: faults.get(jobs[0], problem)}
        for job, fault in faults.items():
            self._report(job.message, fault)
        innocent = [job for job in jobs if job not in faults]
        if innocent:
            self._stage.counters.count("batches_encoded_anew")
            log.info("batch_failed", kind=type(problem).__name__, problem=text_of(problem), at_fault=len(faults))
        return innocent, bool(faults)

    async def _wanted(self, jobs: Sequence[Job], call: Call) -> list[Job]:
        """Wait until the features of these are written, or one of them is over; those that somebody waits for."""
        patience_s = self._stage.deployment.timeouts.ready_s
        await call.wait_ready(self._stage.reader, patience_s, unless=lambda: any(map(self._is_over, jobs)))
        return [job for job in jobs if not self._is_late(job)]

    def _is_over(self, job: Job) -> bool:
        """Whether nobody waits for it any more."""
        message = job.message
        return self._over.covers(message.request, message.attempt) or time.monotonic_ns() > message.deadline_ns

    def _is_late(self, job: Job) -> bool:
        if late := self._is_over(job):
            self._stage.counters.count("jobs_late")
        return late

    def _is_sound(self, job: Job) -> bool:
        """Whether the message names one whole attention group, and its proxies declare that they were lent to this rank
        alone; if not, its owner is told, and the leases are given back whatever they declare."""
        message = job.message
        payloads = [item.payload for item in message.items if item.payload is not None]
        group, ranks = self._stage.deployment.scheduler.attention_tp_size, [rank.rank for rank in message.schedulers]
        try:
            first = ranks[0] // group * group if ranks else 0
            if ranks != list(range(first, first + group)):
                raise BadMessage(
                    f"scheduler ranks {ranks} are no attention group, which has {group} (scheduler.attention_tp_size), "
                    "named in order"
                )
            check_declared(payloads, 1)
        except BadMessage as problem:
            job.close()
            self._stage.reader.refuse(payloads)
            self._report(message, problem)
            return False
        return True

    def _is_ours(self, job: Job) -> bool:
        """Whether the message has the items that are this rank's, by the assignment that every process computes alike;
        if not, its owner is told."""
        message, deployment = job.message, self._stage.deployment
        assignment, most_rows = deployment.encoder.assignment, deployment.limits.request_tokens
        # An item without patches is nobody's: its embeddings came with the request.
        encoded = [index for index, item in enumerate(message.items) if prod(item.grid)]
        assigned = message.anew or encoded
        try:
            if (rows := sum(item.rows for item in message.items)) > most_rows:  # an adapter makes as many as it is told
                raise BadMessage(f"items of {rows} rows; limits.request_tokens is {most_rows}")
            if list(assigned) != sorted({*assigned} & {*encoded}):
                raise BadMessage(f"items {message.anew} anew, of {encoded}; they are named once each, in order")
            places = owners(
                assignment,
                message.request,
                [prod(message.items[index].grid) for index in assigned],
                [message.items[index].content_hash for index in assigned],
                [rank.rank for rank in message.encoders],
            )
            epochs = [message.encoders[place].epoch for place in places]
            mine = [index for index, epoch in zip(assigned, epochs, strict=True) if epoch == self._stage.epoch]
            if mine != (sent := [item.info.index for item in job.items]):
                raise BadMessage(
                    f"encoder.assignment: {assignment} gives this rank items {mine}, but the message carries {sent}"
                )
        except BadMessage as problem:
            self._report(message, problem)
            return False
        return True

    def _unknown_patches(self, job: Job) -> int:
        """How many patches of a job are to be encoded, as the cache is now."""
        cache = self._cache
        return sum(item.info.patches for item in job.items if cache is None or item.content not in cache)

    def _tell(self, jobs: Sequence[Job], call: Call, times_ns: tuple[int, int]) -> None:
        """Have the span of a call sent that some of its requests have theirs sent beside."""
        contexts = [context for job in jobs if (context := job.message.context) is not None and sampled(context)]
        if self._spans is None or not contexts:
            return
        model, patches = self._stage.deployment.model.adapter, sum(item.patches for item in call.items)
        rank, items = self._stage.origin.rank, len(call.items)
        self._spans.take(partial(of_call, contexts, model, rank, times_ns, items, patches))

    def _count(self, call: Call) -> None:
        self._calls += bool(call.items)
        self._encoded += len(call.items)
        self._found += call.found

    def _answer(self, job: wire.Encode, made: Sequence[Made], marks: tuple[wire.Mark, ...]) -> None:
        with bound_contextvars(request=job.request.hex()):
            try:
                self._send(job, made, marks)
            except Exception as problem:
                self._stage.outlive(problem)
                self._report(job, problem)

    def _ways(self, job: wire.Encode, made: Sequence[Made]) -> list[tuple[Draft, int | None]]:
        """Every draft with its column at each reader that is there."""
        ways: list[tuple[Draft, int | None]] = []
        for rank in job.schedulers:
            with suppress(PeerGone):  # `_send` says so
                column = self._stage.peers.taker("scheduler", rank.rank, rank.epoch).column
                ways += [(draft, column) for item in made for draft in item.outputs.values()]
        return ways

    def _send(self, job: wire.Encode, made: Sequence[Made], marks: tuple[wire.Mark, ...]) -> None:
        """Hand the embeddings to every scheduler rank that attends to the request: no await in here."""
        if not made:
            return
        if self._over.covers(job.request, job.attempt):
            self._stage.counters.count("embeddings_late")
            return
        peers = [self._stage.peers.taker("scheduler", rank.rank, rank.epoch) for rank in job.schedulers]
        for peer in peers:
            frames: list[Buffer] = []
            items = tuple(
                wire.Embedding(
                    item.info.index,
                    item.info.rows,
                    tuple(
                        wire.Output(name, draft.dispatch(peer.column, frames, consumers=len(peers))[0])
                        for name, draft in item.outputs.items()
                    ),
                )
                for item in made
            )
            message = wire.Embeddings(job.request, job.attempt, peer.epoch, self._stage.origin, items, marks)
            self._post(peer, message, frames, made)
            self._sent[peer.rank].append(_named(job))
        nbytes = sum(draft.nbytes for item in made for draft in item.outputs.values())
        log.debug("encoded", items=len(made), nbytes=nbytes, ms=round((marks[-1].at_ns - marks[0].at_ns) / 1e6, 1))

    def _post(self, peer: Peer, message: wire.Embeddings, frames: list[Buffer], made: Sequence[Made]) -> None:
        nbytes, most = sum(map(len, frames)), self._stage.limits.inline_nbytes
        try:
            if nbytes > most:  # its receiver would break the connection
                raise BadRequest(
                    f"{nbytes} bytes of embeddings have no room in the pool, and go inline up to limits.request_mb, "
                    f"{most >> 20}; raise embeddings_pool.budget_mb or limits.request_mb"
                )
            peer.outbox.send_nowait(message, frames)
        except Exception:  # whatever it was: a send is all or nothing
            for item in made:
                for draft in item.outputs.values():
                    draft.retract(peer.column)
            raise

    def _report(self, job: wire.Encode, problem: Exception) -> None:
        """Tell the request owner that this job failed; the rank lives on."""
        self._over.add(job.request, job.attempt)
        failure = failure_of(problem, self._stage.origin)
        if isinstance(problem, FerryError):
            log.info("failed", request=job.request.hex(), kind=failure.kind, problem=failure.problem)
        else:
            log.error("encode_crashed", request=job.request.hex(), exc_info=problem)
        with suppress(PeerGone):
            owner = self._stage.peers.get(job.owner.stage, job.owner.rank, job.owner.epoch)
            self._stage.peers.report(owner, wire.Failed(job.request, job.attempt, failure, owner.epoch))


def _named(job: wire.Encode) -> wire.Encode:
    """Enough of a job to report of it, which keeps no payload alive."""
    return msgspec.structs.replace(job, encoders=(), schedulers=(), items=())
