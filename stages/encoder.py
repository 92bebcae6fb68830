"""Encoder data-parallel ranks: a request's items in, embeddings of those this rank owns out to the schedulers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from math import prod

import structlog
from structlog.contextvars import bound_contextvars

from tensorferry.codecs import messages as wire
from tensorferry.codecs.consumers import acknowledging
from tensorferry.codecs.errors import BadItem, BadMessage, FerryError, PeerBusy, PeerGone
from tensorferry.codecs.frames import Buffer, open_inline
from tensorferry.codecs.publisher import Draft
from tensorferry.codecs.tensors import View, dtype_of
from tensorferry.pipeline.config import Deployment, encoder_pool_nbytes
from tensorferry.pipeline.lifecycle import Stop
from tensorferry.pipeline.peer import Peer
from tensorferry.pipeline.stage import PoolShare, Stage, opened
from tensorferry.stages.adapters.base import ItemInfo, ModelAdapter
from tensorferry.stages.adapters.registry import make_adapter
from tensorferry.stages.assignment import owners
from tensorferry.stages.staging import stage, wait_ready
from tensorferry.stages.threads import run_to_end
from tensorferry.stages.tombstones import Tombstones

log = structlog.get_logger()


async def main(deployment: Deployment, rank: int, stop: Stop) -> None:
    """Run encoder rank `rank` until `stop` drains it."""
    share = PoolShare(
        encoder_pool_nbytes(deployment),
        deployment.embeddings_pool.slots,
        deployment.embeddings_pool.inline_below_kb << 10,
        "embeddings_pool.budget_mb",
    )
    with ThreadPoolExecutor(1, "encode") as thread:
        # Before anybody hears of this process: imports and weights can keep its heartbeats for seconds.
        adapter = await run_to_end(thread, partial(make_adapter, deployment.model, deployment.encoder.threads))
        async with opened(deployment, "encoder", rank, share) as stage:
            encoder = Encoder(stage, adapter, thread)
            with stage.running(encoder.hear(), encoder.encode()):
                await stage.peers.wait_ready()
                stage.peers.open()
                stop.announce_ready()
                await stop.wait_draining()
                await encoder.drain()


class Encoder:
    """See the module."""

    def __init__(self, stage: Stage, adapter: ModelAdapter, thread: ThreadPoolExecutor) -> None:
        self._stage, self._adapter, self._thread = stage, adapter, thread
        self._jobs: asyncio.Queue[tuple[wire.Encode, Sequence[Buffer]]] = asyncio.Queue()
        self._over = Tombstones()
        self._in_flight = 0
        stage.in_flight = lambda: self._in_flight

    async def hear(self) -> None:
        """Take what peers send, for ever."""
        async for received in self._stage.inbox:
            with self._stage.alone():
                self._take(received.message, received.frames)
            del received  # else its frames stay in use while the next is waited for

    def _take(self, message: wire.Message, frames: Sequence[Buffer]) -> None:
        match message:
            case wire.Encode(to=to) as job if to == self._stage.epoch:
                self._in_flight += 1
                self._jobs.put_nowait((job, frames))
            case wire.Encode():
                self._stage.counters.count("mail_of_a_former_life")
            case wire.Cancel(request=request, attempt=attempt):
                self._over.add(request, attempt)
            case _:
                if not self._stage.peers.hear(message):
                    self._stage.refused(BadMessage(f"an encoder takes no {type(message).__name__}"))

    async def encode(self) -> None:
        """Take a job, load what this rank owns, encode it, send the embeddings; for ever."""
        while True:
            await self._run(*await self._jobs.get())  # in a frame of its own: a rank that waits keeps no job
            self._in_flight -= 1
            self._jobs.task_done()

    async def _run(self, job: wire.Encode, frames: Sequence[Buffer]) -> None:
        with bound_contextvars(request=job.request.hex()):
            marks = [wire.Mark("encoding", time.monotonic_ns())]
            with ExitStack() as embeddings:
                try:
                    made = await self._encode(job, frames, embeddings)
                    if self._stage.device is not None:
                        await stage(lambda: self._ways(job, made))
                    marks.append(wire.Mark("encoded", time.monotonic_ns()))
                    self._send(job, made, tuple(marks))
                except Exception as problem:
                    self._stage.outlive(problem)
                    self._report(job, problem)

    async def drain(self) -> None:
        """Take no more jobs, and finish those that are here."""
        self._stage.peers.tell(wire.Drain(self._stage.origin))
        log.info("draining", in_flight=self._in_flight)
        await self._jobs.join()

    async def _encode(self, job: wire.Encode, frames: Sequence[Buffer], embeddings: ExitStack) -> Sequence[Made]:
        """Run the adapter over the owned items; every payload that came is released, whatever happens."""
        features = Features(self._stage, job, frames)
        try:
            if self._over.covers(job.request, job.attempt) or time.monotonic_ns() > job.deadline_ns:
                self._stage.counters.count("jobs_late")
                return []
            owned = self._owned(job)
            await wait_ready(self._stage.reader, features.payloads, self._stage.deployment.timeouts.ready_s)
            outputs = Outputs(self._stage, owned, embeddings)
            await run_to_end(self._thread, lambda: self._adapter.encode(owned, features.load, outputs.out))
            return outputs.finished()
        finally:
            features.close()

    def _owned(self, job: wire.Encode) -> list[ItemInfo]:
        """This rank's items, by the assignment that every process computes alike. Raises BadMessage."""
        items = [
            ItemInfo(index, item.modality, item.grid, prod(item.grid), item.rows, item.content_hash)
            for index, item in enumerate(job.items)
        ]
        assignment = self._stage.deployment.encoder.assignment
        hashes, ranks = [item.content_hash for item in items], [rank.rank for rank in job.encoders]
        places = owners(assignment, job.request, [item.patches for item in items], hashes, ranks)
        mine = [
            item for item, place in zip(items, places, strict=True) if job.encoders[place].epoch == self._stage.epoch
        ]
        sent = [index for index, item in enumerate(job.items) if item.payload is not None]
        if [item.index for item in mine] != sent:
            raise BadMessage(
                f"encoder.assignment: {assignment} gives this rank items {[item.index for item in mine]}, but the "
                f"message carries {sent}"
            )
        return mine

    def _readers(self, job: wire.Encode) -> Sequence[wire.Rank]:
        """The scheduler ranks that read the embeddings of a request."""
        spec = self._stage.deployment.scheduler
        return job.schedulers[: acknowledging(len(job.schedulers), spec.tp_size, spec.attention_tp_size)]

    def _ways(self, job: wire.Encode, made: Sequence[Made]) -> list[tuple[Draft, int | None]]:
        """Every draft with its column at each reader that is there."""
        ways: list[tuple[Draft, int | None]] = []
        for rank in self._readers(job) if made else ():
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
        peers = [self._stage.peers.taker("scheduler", rank.rank, rank.epoch) for rank in self._readers(job)]
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
        nbytes = sum(draft.nbytes for item in made for draft in item.outputs.values())
        log.debug("encoded", items=len(made), nbytes=nbytes, ms=round((marks[-1].at_ns - marks[0].at_ns) / 1e6, 1))

    def _post(self, peer: Peer, message: wire.Embeddings, frames: list[Buffer], made: Sequence[Made]) -> None:
        try:
            peer.outbox.send_nowait(message, frames)
        except Exception:  # whatever it was: a send is all or nothing
            for item in made:
                for draft in item.outputs.values():
                    draft.retract(peer.column)
            raise

    def _report(self, job: wire.Encode, problem: Exception) -> None:
        """Tell the request owner that this job failed; the rank lives on."""
        self._over.add(job.request, job.attempt)
        item = problem.index if isinstance(problem, BadItem) else -1
        if isinstance(problem, FerryError):
            log.info("failed", kind=type(problem).__name__, problem=str(problem))
        else:
            log.exception("encode_crashed")
        text = str(problem) if isinstance(problem, FerryError) else f"{type(problem).__name__}: {problem}"
        kind = type(problem).__name__ if isinstance(problem, FerryError) else "EncodeError"
        retryable = isinstance(problem, PeerBusy | PeerGone)
        failure = wire.Failure(kind, text[:4096], self._stage.origin, item, retryable)
        with suppress(PeerGone):
            owner = self._stage.peers.get(job.owner.stage, job.owner.rank, job.owner.epoch)
            self._stage.peers.send(owner, wire.Failed(job.request, job.attempt, failure))


class Features:
    """The payloads of one job: each is read at most once and released exactly once."""

    def __init__(self, stage: Stage, job: wire.Encode, frames: Sequence[Buffer]) -> None:
        self._stage, self._frames = stage, frames
        self._payloads = {index: item.payload for index, item in enumerate(job.items) if item.payload is not None}
        self._borrowed = ExitStack()

    @property
    def payloads(self) -> Sequence[wire.Payload]:
        """Those that nobody has loaded."""
        return list(self._payloads.values())

    def load(self, indices: Sequence[int]) -> View:
        """The pixels of these items, one after the other; a single item is borrowed where it lies."""
        device, reader = self._stage.device, self._stage.reader
        if len(indices) == 1 and (device is None or isinstance(self._payloads.get(indices[0]), wire.Proxy)):
            return self._borrowed.enter_context(reader.open(self._take(indices[0]), self._frames))
        payloads = [self._checked(index) for index in indices]
        dtype, width = (dtype_of(payloads[0].dtype), payloads[0].shape[1:]) if payloads else ("float32", (0,))
        for index, payload in zip(indices, payloads, strict=True):
            if not payload.shape or (dtype_of(payload.dtype), payload.shape[1:]) != (dtype, width):
                found = f"{dtype_of(payload.dtype)} {payload.shape}"
                raise BadItem(index, f"features of {found} in a batch of {dtype} {width}")
        batch = View.empty(dtype, (sum(payload.shape[0] for payload in payloads), *width), device)
        start = 0
        for index, payload in zip(indices, payloads, strict=True):
            end = start + payload.shape[0]
            reader.copy(self._take(index), batch.rows(start, end), self._frames)
            start = end
        return batch

    def close(self) -> None:
        """Give back what is borrowed, and abandon what was never read."""
        self._borrowed.close()
        for payload in self._payloads.values():
            with suppress(FerryError):  # over already, or its producer is gone: nothing is owed
                self._stage.reader.acknowledge(payload)
        self._payloads.clear()

    def _checked(self, index: int) -> wire.Payload:
        """A payload that does not lie, so that memory can be taken for what it says. Raises as `Reader.open`."""
        payload = self._payloads.get(index)
        if isinstance(payload, wire.Proxy):
            self._stage.reader.is_ready(payload)
        elif payload is not None:
            open_inline(payload, self._frames)
        return payload or self._take(index)

    def _take(self, index: int) -> wire.Payload:
        payload = self._payloads.pop(index, None)
        if payload is None:
            raise BadItem(index, "its features were loaded already, or never sent")
        return payload


class Made:
    """The embeddings of one item, written and not yet sent."""

    def __init__(self, info: ItemInfo) -> None:
        self.info = info
        self.outputs: dict[str, Draft] = {}


class Outputs:
    """Where an adapter writes: leases of this rank's own pool, for as long as `block` lasts."""

    def __init__(self, stage: Stage, items: Sequence[ItemInfo], block: ExitStack) -> None:
        self._stage, self._block = stage, block
        self._made = {item.index: Made(item) for item in items}

    def out(self, index: int, name: str, shape: tuple[int, ...], dtype: str) -> View:
        made = self._made.get(index)
        if made is None or name in made.outputs:
            raise BadItem(index, f"the adapter asked twice for output {name!r}, or for an item it does not have")
        draft = made.outputs[name] = self._block.enter_context(self._stage.publisher.draft([(dtype, shape)]))
        return draft.views[0]

    def finished(self) -> Sequence[Made]:
        """All items, each with outputs of the rows it must have. Raises BadItem."""
        for index, made in self._made.items():
            first = next(iter(made.outputs.values()), None)
            if first is None:
                raise BadItem(index, "the adapter made no output for it")
            if first.views[0].shape[:1] != (made.info.rows,):
                raise BadItem(
                    index, f"the adapter made embeddings of shape {first.views[0].shape} for {made.info.rows} rows"
                )
        return list(self._made.values())
