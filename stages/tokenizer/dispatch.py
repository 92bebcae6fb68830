"""Sends a request from its owner: pixels to the encoders that own the items, tokens and ready embeddings to the
schedulers. Items are processed where their tensors are sent from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, PeerGone, text_of
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.pool.publisher import Draft
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.process.stage import Stage
from tensorferry.stages.assignment import owners
from tensorferry.stages.gpu_wait import stage
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.off_loop import run_to_end
from tensorferry.stages.processors.base import BadMedia, Processor, write
from tensorferry.stages.tokenizer.planner import Prompt
from tensorferry.stages.tokenizer.pool_room import wait_for_room
from tensorferry.stages.tokenizer.precomputed import NO_HASH, Precomputed
from tensorferry.stages.tokenizer.request import Life, Request

FEATURES = "features"  #: the name of the one tensor that a processor makes of an item


class Dispatch:
    """Notes in the request which peers it has told."""

    def __init__(self, stage: Stage, threads: ThreadPoolExecutor, processor: Processor, watch: Watch) -> None:
        """watch: over the calls of the processor."""
        self._stage, self._threads, self._processor, self._watch = stage, threads, processor, watch

    async def send(self, request: Request, prompt: Prompt, items: Sequence[int]) -> None:
        """Process these items, and send each to the encoder that owns it, or to the schedulers if its embeddings came
        with the request. Raises BadItem, PeerBusy, PeerGone."""
        while not (self.groups() and (self._stage.peers.usable("encoder") or not prompt.to_encode(items))):
            await self._stage.peers.changed()
        every = prompt.layouts
        layouts = {index: every[index] for index in items}
        await wait_for_room(self._stage, list(layouts.values()))
        publisher = self._stage.publisher
        with ExitStack() as leases:
            drafts = {
                index: leases.enter_context(publisher.draft(layout, patient=False)) for index, layout in layouts.items()
            }
            with self._watch.beside():
                request.hashes |= await self._process(prompt, drafts)
            if self._stage.device is not None:
                await stage(lambda: self._ways(request, prompt, drafts))
            request.marks["processed"] = time.monotonic_ns()
            self._hand_over(request, prompt, drafts)
        request.marks["sent"] = time.monotonic_ns()

    @contextmanager
    def cancelling(self, request: Request) -> Iterator[None]:
        """Around the service of a request. At the end of the block peers hear Cancel: all that were told of the request
        if the block failed, else those whose part in it others have done."""
        try:
            yield
        except BaseException:
            self.cancel(request, request.told)
            raise
        self.cancel(request, request.relieved())

    def cancel(self, request: Request, told: Sequence[Life]) -> None:
        """Tell these peers, which know of the present attempt, that it has ended."""
        for peer, epoch in {(life.peer, life.epoch) for life in told}:
            if peer.epoch == epoch:
                with self._stage.alone():
                    self._stage.peers.send(peer, wire.Cancel(request.submit.request, request.attempt, epoch))

    async def _process(self, prompt: Prompt, drafts: Mapping[int, Draft]) -> dict[int, bytes]:
        """Decode items into their drafts, `threads` at a time, and return their content hashes. Raises BadItem."""

        async def process(index: int, draft: Draft) -> bytes:
            try:
                return await run_to_end(self._threads, partial(self._write, prompt, index, draft))
            except BadMedia as problem:
                raise BadItem(index, text_of(problem)) from None

        try:
            async with asyncio.TaskGroup() as decoding:
                tasks = {index: decoding.create_task(process(index, draft)) for index, draft in drafts.items()}
        except ExceptionGroup as group:
            bad, others = group.split(BadItem)
            if others is not None:  # not the item's fault
                raise others.exceptions[0] from None
            assert bad is not None
            raise min((e for e in bad.exceptions if isinstance(e, BadItem)), key=lambda e: e.index) from None
        return {index: task.result() for index, task in tasks.items()}

    def _write(self, prompt: Prompt, index: int, draft: Draft) -> bytes:
        """Write one item's tensors into its draft, and return the content hash. Raises BadMedia."""
        source, plan = prompt.sources[index], prompt.plans[index]
        if isinstance(source, Precomputed):
            source.write(draft.views)
            return NO_HASH
        return write(self._processor, source, plan, draft.views[0])

    def _ways(self, request: Request, prompt: Prompt, drafts: Mapping[int, Draft]) -> list[tuple[Draft, int | None]]:
        """Every draft with the column of each process that will read it: the encoder rank that owns the item, or the
        scheduler ranks if the embeddings came with the request."""
        owned = self._owners(request, prompt, prompt.to_encode(drafts), self._stage.peers.usable("encoder"))
        ways = [(drafts[index], peer.column) for index, peer in owned.items()]
        if ready := drafts.keys() & prompt.precomputed.keys():
            with suppress(PeerGone):  # `_admit` says so
                group = self.attention_group(request.submit.request)
                ways += [(drafts[index], peer.column) for index in ready for peer in group]
        return ways

    def _owners(
        self, request: Request, prompt: Prompt, items: Sequence[int], encoders: Sequence[Peer]
    ) -> dict[int, Peer]:
        """The encoder rank that owns each of these items; {} without encoder ranks."""
        if not encoders:
            return {}
        places = owners(
            self._stage.deployment.encoder.assignment,
            request.submit.request,
            [prompt.plans[index].patches for index in items],
            [request.hashes[index] for index in items],
            [peer.rank for peer in encoders],
        )
        return {index: encoders[place] for index, place in zip(items, places, strict=True)}

    def _hand_over(self, request: Request, prompt: Prompt, drafts: Mapping[int, Draft]) -> None:
        """Send the request to its schedulers, unless they have it, and the items to the encoder ranks that own them.
        Nothing in here awaits.

        Raises PeerBusy or PeerGone; drafts of messages that were not sent are retracted.
        """
        encoders = self._stage.peers.usable("encoder")
        to_encode = prompt.to_encode(drafts)
        if to_encode and not encoders:
            raise PeerGone("encoder", "no rank is ready")
        owned = self._owners(request, prompt, to_encode, encoders)
        anew = tuple(to_encode) if request.schedulers else ()
        if not request.schedulers:
            self._admit(request, prompt, drafts)
        ranks = tuple(wire.Rank(peer.rank, peer.epoch) for peer in encoders)
        group = tuple(wire.Rank(life.peer.rank, life.epoch) for life in request.schedulers)
        for peer in (peer for peer in encoders if peer in owned.values()):
            frames: list[Buffer] = []
            its = [index for index, owner in owned.items() if owner is peer]
            payloads = {index: drafts[index].dispatch(peer.column, frames)[0] for index in its}
            items = tuple(
                wire.Item(plan.modality, plan.grid, plan.rows, request.hashes[index], _features(payloads.get(index)))
                for index, plan in enumerate(prompt.plans)
            )
            message = wire.Encode(
                request.submit.request,
                request.attempt,
                peer.epoch,
                self._stage.origin,
                ranks,
                group,
                items,
                request.left_ms,
                anew,
                request.context,
            )
            life = Life.of(peer)
            request.told.append(life)
            Draft.send_all(
                [drafts[index] for index in its], peer.column, partial(peer.outbox.send_nowait, message, frames)
            )
            request.owners |= dict.fromkeys(its, life)
        request.sent |= {index: (draft.transport, draft.nbytes) for index, draft in drafts.items()}

    def _admit(self, request: Request, prompt: Prompt, drafts: Mapping[int, Draft]) -> None:
        """Send a request, and the embeddings that came with it, to the scheduler ranks that attend to it. Raises
        PeerBusy or PeerGone."""
        lives = [Life.of(peer) for peer in self.attention_group(request.submit.request)]
        group = tuple(wire.Rank(life.peer.rank, life.epoch) for life in lives)
        token_bytes = prompt.token_ids.astype("<i4", copy=False).tobytes()
        items = tuple(
            wire.PlacedItem(plan.modality, prompt.grid(index), request.hashes[index], (wire.Span(offset, length),))
            for index, (plan, (offset, length)) in enumerate(zip(prompt.plans, prompt.spans, strict=True))
        )
        submit = request.submit
        request.schedulers = lives
        request.waiting = {life.peer.rank for life in lives}
        request.collecting = set(request.waiting)
        for life in lives:
            request.told.append(life)
            life.peer.outbox.send_nowait(
                wire.Admit(
                    submit.request,
                    request.attempt,
                    life.epoch,
                    self._stage.origin,
                    group,
                    token_bytes,
                    items,
                    submit.output_tokens,
                    request.left_ms,
                    request.context,
                    submit.sampling,
                    submit.stream,
                    submit.priority,
                    submit.tenant or request.who,
                )
            )
            if prompt.precomputed:
                self._send_ready(request, prompt, drafts, life)

    def _send_ready(self, request: Request, prompt: Prompt, drafts: Mapping[int, Draft], life: Life) -> None:
        """Send the embeddings that came with a request to one of the scheduler ranks. Every rank reads all of them."""
        frames: list[Buffer] = []
        items = []
        for index, source in prompt.precomputed.items():
            payloads = drafts[index].dispatch(life.peer.column, frames, consumers=len(request.schedulers))
            outputs = tuple(map(wire.Tensor, source.outputs, payloads))
            items.append(wire.Embedding(index, prompt.plans[index].rows, outputs))
        message = wire.Embeddings(
            request.submit.request, request.attempt, life.epoch, self._stage.origin, tuple(items), ()
        )
        its = [drafts[index] for index in prompt.precomputed]
        Draft.send_all(its, life.peer.column, partial(life.peer.outbox.send_nowait, message, frames))

    def groups(self) -> list[list[Peer]]:
        """The attention groups that have all of their ranks ready."""
        spec = self._stage.deployment.scheduler
        size = spec.attention_tp_size
        usable = {peer.rank: peer for peer in self._stage.peers.usable("scheduler")}
        groups = [range(first, first + size) for first in range(0, spec.groups * spec.tp_size, size)]
        return [[usable[rank] for rank in group] for group in groups if usable.keys() >= set(group)]

    def attention_group(self, request: bytes) -> list[Peer]:
        """The scheduler ranks that attend to this request: one of the complete groups, by the request's id. Raises
        PeerGone."""
        whole = self.groups()
        if not whole:
            raise PeerGone("scheduler", "no attention group has all of its ranks ready")
        return whole[int.from_bytes(request[:8], "big") % len(whole)]


def _features(payload: wire.Payload | None) -> tuple[wire.Tensor, ...]:
    """An item's features as its owner gets them; none for everybody else."""
    return () if payload is None else (wire.Tensor(FEATURES, payload),)
