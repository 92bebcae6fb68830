"""Encoder data-parallel ranks: they encode the items of requests and send the embeddings to the scheduler ranks.

Requests that wait together share a call of the adapter; each fails alone, and gets a message of its own. While the
results of a call are awaited, the next full batch is queued behind it, so that a GPU does not pause between the two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage, PeerBusy, text_of
from tensorferry.codecs.frames import Buffer
from tensorferry.pipeline.deployment.spec import MIB, Deployment, device_of, encoder_pool_nbytes, most_requests
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.pools.own_pool import PoolShare
from tensorferry.pipeline.process.run_process import Stop
from tensorferry.pipeline.process.stage import Stage
from tensorferry.pipeline.process.start_stage import opened
from tensorferry.pipeline.telemetry.span_exporter import Exporter
from tensorferry.pipeline.telemetry.traceparent import sampled
from tensorferry.stages.adapters.base import ModelAdapter
from tensorferry.stages.adapters.registry import make_adapter
from tensorferry.stages.encoder import batch_state
from tensorferry.stages.encoder.attempt import Attempt
from tensorferry.stages.encoder.batch_call import Call
from tensorferry.stages.encoder.batch_state import Batch, Next, next_batch
from tensorferry.stages.encoder.embedding_cache import Content, EmbeddingCache
from tensorferry.stages.encoder.features import Features
from tensorferry.stages.encoder.job_checks import check_addressees, check_assignment, payloads_of
from tensorferry.stages.encoder.job_queue import Job, Jobs
from tensorferry.stages.encoder.replies import Replies
from tensorferry.stages.finished_requests import FinishedRequests
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
        # Before any peer hears of this process: imports and weights can keep its heartbeats back for seconds.
        threads, device = deployment.encoder.threads, device_of(deployment, "encoder", rank)
        adapter = await run_to_end(thread, partial(make_adapter, deployment.model, threads, device))
        async with opened(deployment, "encoder", rank, share) as stage:
            spans = None
            if deployment.telemetry.otlp_endpoint is not None:
                spans = Exporter(deployment, "encoder", rank, stage.counters)
                stage.channels.callback(spans.close)
            cache = EmbeddingCache(deployment.encoder.cache_mb * MIB) if deployment.encoder.cache_mb else None
            encoder = Encoder(stage, adapter, thread, waiter, cache, spans)
            with stage.running(stage.serve(encoder), encoder.encode()):
                await stage.peers.wait_ready()
                stage.peers.open()
                stop.announce_ready()
                await stop.wait_draining()
                await encoder.drain()


class Encoder:
    """See the module. A job passes `take`, `encode`, `_run`, `_attempt` and `_reply`, which stand in this order."""

    def __init__(
        self,
        stage: Stage,
        adapter: ModelAdapter,
        thread: ThreadPoolExecutor,
        waiter: ThreadPoolExecutor,
        cache: EmbeddingCache | None = None,
        spans: Exporter | None = None,
    ) -> None:
        """thread: where the adapter is called; waiter: where its results are awaited. One thread each."""
        self._stage, self._adapter, self._thread, self._waiter = stage, adapter, thread, waiter
        self._cache, self._spans = cache, spans
        self._watch = Watch("model.adapter", stage.deployment.model.adapter, stage.counters)
        spec = stage.deployment.encoder
        self._jobs = Jobs(spec.batch_patches, spec.batch_wait_ms / 1e3, self._unknown_patches)
        self._most_jobs = most_requests(stage.deployment)
        self._finished = FinishedRequests(stage.deployment.limits.request_timeout_s)
        self._replies = Replies(stage, self._finished)
        self._state: batch_state.State = batch_state.Idle()
        self._state_changed = asyncio.Event()
        self._calls = self._encoded = self._found = 0  # successful calls of the adapter, and items; see `gauges`

    # --- what its process asks: see `Work`

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> bool:
        match message:
            case wire.Encode() as encode:
                self._queue(Job(encode, Features(self._stage.reader, encode, frames)))
            case wire.Cancel(request=request, attempt=attempt):
                self._finished.add(request, attempt)
            case _:
                return False
        return True

    def in_flight(self) -> int:
        return self._jobs.unfinished

    def busy_since(self) -> float | None:
        return min((batch.began_s for batch in batch_state.under_way(self._state)), default=None)

    def gauges(self) -> Mapping[str, float]:
        """`encoded_items` divided by `encode_calls` is the mean batch; both count successful calls alone."""
        numbers = {"encode_calls": self._calls, "encoded_items": self._encoded, "queued": self._jobs.waiting}
        if self._cache is not None:
            numbers |= {"cache_hits": self._found, "cache_misses": self._encoded, "cache_nbytes": self._cache.nbytes}
        return numbers

    def connection_mended(self, peer: Peer) -> None:
        if peer.stage == "scheduler":
            self._replies.report_possibly_lost(peer)

    # --- from receive to reply

    def _queue(self, job: Job) -> None:
        """Queue a job. A job of an unknown owner is dropped, and one that is refused is answered; both are closed."""
        with ExitStack() as undo:
            undo.callback(job.close)
            if not self._stage.peers.knows(job.message.owner):
                self._stage.counters.count("messages_unknown_peer")
            elif self._jobs.unfinished >= self._most_jobs:
                self._replies.failed(job.message, PeerBusy(f"encoder-{self._stage.origin.rank}"))
            elif self._is_sound(job):
                self._jobs.put_nowait(job)
                undo.pop_all()

    async def encode(self) -> None:
        """Begin one batch after the other, as `batch_state` allows, and encode each in a task of its own; for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._until(lambda: next_batch(self._state) is not Next.NONE)
                if next_batch(self._state) is Next.FULL:
                    await self._jobs.fills(unless=lambda: next_batch(self._state) is Next.ANY)
                await self._begin(tasks)

    async def _begin(self, tasks: asyncio.TaskGroup) -> None:
        """Take the next batch and begin it, once no other encodes what this one would find in the cache.

        It is a method of its own so that the loop keeps no job while it waits.
        """
        jobs = await self._jobs.take()
        contents = self._unknown_contents(jobs)
        await self._until(lambda: not batch_state.must_wait(self._state, contents))
        batch = Batch(time.monotonic(), contents)
        self._enter(batch_state.begun(self._state, batch))
        tasks.create_task(self._run(jobs, batch))

    async def _run(self, jobs: Sequence[Job], batch: Batch) -> None:
        """Answer each of these jobs. Their payloads are released on every path."""
        try:
            attempts = Attempt(jobs).of(self._still_wanted(jobs))
            while attempts:
                attempts += await self._attempt(attempts.pop(0), batch)
        finally:
            for job in jobs:
                job.close()
            self._enter(batch_state.ended(self._state, batch))
            self._jobs.done(len(jobs))

    async def _attempt(self, attempt: Attempt[Job], batch: Batch) -> list[Attempt[Job]]:
        """Encode these jobs in one call of the adapter and answer them; returns the attempts that must follow."""
        with ExitStack() as embeddings:
            call = Call(attempt.jobs, self._cache, self._stage.publisher, self._stage.device, embeddings)
            began_ns = time.monotonic_ns()
            try:
                await call.wait_ready(
                    self._stage.reader,
                    self._stage.deployment.timeouts.ready_s,
                    unless=lambda: any(map(self._is_finished, attempt.jobs)),
                )
                wanted = self._still_wanted(attempt.jobs)
                if len(wanted) < len(attempt.jobs):
                    return attempt.of(wanted)
                await self._call(attempt.jobs, call, batch)
            except Exception as problem:
                self._stage.outlive(problem)
                return self._after_failure(attempt, call, problem)
            self._reply(attempt.jobs, call, began_ns, time.monotonic_ns())
            return []

    async def _call(self, jobs: Sequence[Job], call: Call, batch: Batch) -> None:
        """Call the adapter, and wait until the embeddings can be sent. Raises what the adapter raises."""
        with self._watch.beside():
            finish = await run_to_end(self._thread, lambda: call.run(self._adapter))
        if finish is not None:
            self._complete(jobs, call)
            self._enter(batch_state.queued(self._state, batch))
            with self._watch.beside():
                await run_to_end(self._waiter, finish)
        call.keep()
        if self._stage.device is not None:
            await stage(lambda: [route for job in jobs for route in self._replies.routes(job.message, call.made(job))])

    def _reply(self, jobs: Sequence[Job], call: Call, began_ns: int, ended_ns: int) -> None:
        """Send each job its embeddings, and the call's span to the collector."""
        self._calls += bool(call.items)
        self._encoded += len(call.items)
        self._found += call.found
        self._send_span(jobs, call, (began_ns, ended_ns))
        read = wire.Mark(f"read-{self._stage.origin.rank}", call.copied_ns or ended_ns)
        marks = (wire.Mark("encoding", began_ns), wire.Mark("encoded", ended_ns), read)
        for job in jobs:
            self._replies.embeddings(job.message, job.until_s, call.made(job), marks)

    async def drain(self) -> None:
        """Take no more jobs, and finish those that are here."""
        self._stage.peers.tell(wire.Drain(self._stage.origin))
        log.info("draining", in_flight=self._jobs.unfinished)
        self._jobs.hurry()
        await self._jobs.join()

    # --- steps of that path

    def _is_sound(self, job: Job) -> bool:
        """Whether a job passes `job_checks`; if not, its owner is told. Leases whose proxies declare what is not so are
        given back whatever they declare."""
        deployment = self._stage.deployment
        try:
            try:
                check_addressees(job.message, deployment.scheduler.attention_tp_size)
            except BadMessage:
                job.close()
                self._stage.reader.refuse(payloads_of(job.message))
                raise
            check_assignment(job.message, deployment, self._stage.epoch)
        except BadMessage as problem:
            self._replies.failed(job.message, problem)
            return False
        return True

    def _enter(self, state: batch_state.State) -> None:
        self._state = state
        self._state_changed.set()
        self._jobs.look_again()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a state of the batches."""
        while not condition():
            self._state_changed.clear()
            await self._state_changed.wait()

    def _complete(self, jobs: Sequence[Job], call: Call) -> None:
        """Queue all that sending these jobs needs of the GPU. What is queued behind the next batch would be done only
        when that batch is."""
        for job in jobs:
            for made in call.made(job):
                for draft in made.outputs.values():
                    draft.complete()
            if self._stage.device is not None:
                for draft, column in self._replies.routes(job.message, call.made(job)):
                    draft.prepared(column)

    def _after_failure(self, attempt: Attempt[Job], call: Call, problem: Exception) -> list[Attempt[Job]]:
        """Tell the owners of the jobs that a failure is due to; returns the attempts at the others."""
        jobs, problem = attempt.jobs, call.understood(problem)
        faults = call.at_fault(problem)
        if len(jobs) == 1:
            faults = {jobs[0]: faults.get(jobs[0], problem)}
        for job, fault in faults.items():
            self._replies.failed(job.message, fault)
        innocent = [job for job in jobs if job not in faults]
        if innocent:
            self._stage.counters.count("batches_encoded_anew")
            log.info("batch_failed", kind=type(problem).__name__, problem=text_of(problem), at_fault=len(faults))
        return attempt.after_failure(self._still_wanted(innocent), faults)

    def _still_wanted(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs whose requests go on. The others are counted."""
        wanted = [job for job in jobs if not self._is_finished(job)]
        for _ in range(len(jobs) - len(wanted)):
            self._stage.counters.count("jobs_late")
        return wanted

    def _is_finished(self, job: Job) -> bool:
        message = job.message
        return self._finished.is_finished(message.request, message.attempt) or time.monotonic() > job.until_s

    def _unknown_patches(self, job: Job) -> int:
        """How many patches of a job must be encoded, as the cache is now."""
        cache = self._cache
        return sum(item.info.patches for item in job.items if cache is None or item.content not in cache)

    def _unknown_contents(self, jobs: Sequence[Job]) -> frozenset[Content]:
        """What these jobs need that the cache does not have; empty without a cache."""
        cache = self._cache
        if cache is None:
            return frozenset()
        return frozenset(item.content for job in jobs for item in job.items if item.content not in cache)

    def _send_span(self, jobs: Sequence[Job], call: Call, times_ns: tuple[int, int]) -> None:
        """Send the span of a call, with a link to each of its requests that is sampled."""
        contexts = [context for job in jobs if (context := job.message.context) is not None and sampled(context)]
        if self._spans is None or not contexts:
            return
        model, patches = self._stage.deployment.model.adapter, sum(item.patches for item in call.items)
        rank, items = self._stage.origin.rank, len(call.items)
        self._spans.take(partial(of_call, contexts, model, rank, times_ns, items, patches))
