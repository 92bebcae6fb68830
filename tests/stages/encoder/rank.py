"""An encoder rank whose peers are lists, and adapters that say which pixels they were given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
from tests.stages.doubles import WorkStage

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.tensors import CODES, view_of
from tensorferry.pipeline.deployment.spec import Deployment, EncoderSpec
from tensorferry.stages.adapters.base import Finish, ItemInfo, Load, Out, split
from tensorferry.stages.encoder.embedding_cache import EmbeddingCache
from tensorferry.stages.encoder.encoder import Encoder

ME = 7  #: epoch
OWNER, SCHEDULER = wire.Origin("tokenizer", 0, 3), wire.Origin("scheduler", 0, 8)
PATCHES = 4
POISONED, CRASHING, WRONG_ROWS = 200, 201, 202  #: first bytes of pixels that an adapter does not like


class Echo:
    """Embeddings of an item are the first byte of its pixels; `calls` has those of each call, before it fails."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.numbers: list[list[int]] = []
        self.before: Callable[[], None] = lambda: None

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        self.before()
        self.numbers.append([item.index for item in items])
        firsts = [int(view.data[0]) for view in split(load(self.numbers[-1]), items)]
        self.calls.append(firsts)
        for item, first in zip(items, firsts, strict=True):
            if first == POISONED:
                raise BadItem(item.index, "is poisoned")
            rows = item.rows + (first == WRONG_ROWS)
            out(item.index, "embeddings", (rows, 8), "uint8").data[:] = first
        if CRASHING in firsts:
            raise ZeroDivisionError("nobody knows of which item")
        return None


class Queued(Echo):
    """The same, by a GPU: whether all went well is known only when `finish` has waited for it; `gate` holds it up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.awaited = 0

    def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish | None:
        self.before()
        self.numbers.append([item.index for item in items])
        firsts = [int(view.data[0]) for view in split(load(self.numbers[-1]), items)]
        self.calls.append(firsts)
        for item, first in zip(items, firsts, strict=True):
            rows = item.rows + (first == WRONG_ROWS)
            out(item.index, "embeddings", (rows, 8), "uint8").data[:] = first

        def finish() -> None:
            self.awaited += 1
            assert self.gate.wait(20)
            for item, first in zip(items, firsts, strict=True):
                if first == POISONED:
                    raise BadItem(item.index, "is poisoned")
            if CRASHING in firsts:
                raise ZeroDivisionError("nobody knows of which item")

        return finish


class Rank:
    """An encoder rank. `embeddings` has the first byte of each item of each request's message, `failures` what the
    owner was told."""

    def __init__(self, adapter: Any, *, cache_nbytes: int = 0, keys: dict[str, Any] | None = None, **spec: Any) -> None:
        """keys: of the deployment file; spec: those of its `encoder`."""
        self.adapter = adapter
        encoder = EncoderSpec(**{"batch_wait_ms": 0.0} | spec)
        self.deployment = Deployment(name="test", encoder=encoder, **(keys or {}))
        self.stage: Any = WorkStage("encoder", ME, self.deployment, [OWNER, SCHEDULER])
        self.reader = self.stage.reader
        self.thread, self.waiter = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        cache = EmbeddingCache(cache_nbytes) if cache_nbytes else None
        self.encoder = Encoder(self.stage, self.adapter, self.thread, self.waiter, cache)

    def close(self) -> None:
        self.thread.shutdown()
        self.waiter.shutdown()
        self.stage.close()

    @property
    def embeddings(self) -> dict[bytes, list[tuple[int, int]]]:
        found: dict[bytes, list[tuple[int, int]]] = {}
        for message, frames in self.stage.peers.sent(SCHEDULER):
            assert message.request not in found, "one message for each request"
            found[message.request] = [
                (item.index, int(np.asarray(frames[item.outputs[0].payload.frame])[0])) for item in message.items
            ]
        return found

    @property
    def failures(self) -> dict[bytes, wire.Failure]:
        return {message.request: message.failure for message in self.stage.peers.reports}

    def ask(self, request: bytes, pixels: Sequence[int], **changes: Any) -> None:
        """A request whose items have these first bytes, and so these contents."""
        features = [np.full((PATCHES, 3), first, np.uint8) for first in pixels]
        payloads = [wire.Inline(index, CODES["uint8"], (PATCHES, 3)) for index in range(len(pixels))]
        self.send(request, [(bytes([first]), payload) for first, payload in zip(pixels, payloads, strict=True)],
                  [view_of(tensor).data for tensor in features], **changes)  # fmt: skip

    def send(
        self,
        request: bytes,
        items: Sequence[tuple[bytes, wire.Payload]],
        frames: Sequence[Any] = (),
        *,
        deadline_ms: int = 60_000,
        owner: wire.Origin = OWNER,
        encoders: tuple[wire.Rank, ...] = (wire.Rank(0, ME),),
        schedulers: tuple[wire.Rank, ...] = (wire.Rank(0, SCHEDULER.epoch),),
    ) -> None:
        """items: what each is a content of, and its payload."""
        sent = tuple(
            wire.Item("image", (1, 2, 2), 1, content.rjust(32, b"\0"), (wire.Tensor("features", payload),))
            for content, payload in items
        )
        self.encoder.take(wire.Encode(request.rjust(16), 0, ME, owner, encoders, schedulers, sent, deadline_ms), frames)

    def cancel(self, request: bytes) -> None:
        self.encoder.take(wire.Cancel(request.rjust(16), 0, ME), [])

    async def serve(self) -> None:
        """Until every job is done."""
        async with self.encoding():
            await self.encoder.drain()

    @asynccontextmanager
    async def encoding(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.encoder.encode())
        try:
            async with asyncio.timeout(20):
                yield task
        finally:
            task.cancel()
            await asyncio.wait([task])

    def answers(self, request: bytes) -> list[tuple[int, int]] | str:
        """(index, first byte) of each item, or the kind of failure and the item at fault."""
        name = request.rjust(16)
        if name in self.failures:
            assert name not in self.embeddings
            failure = self.failures[name]
            return f"{failure.kind} {failure.item}"
        return self.embeddings[name]


async def until(condition: Callable[[], object]) -> None:
    """Another thread does it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


@contextmanager
def lent(rank: Rank, first: int) -> Iterator[tuple[Pool, wire.Payload]]:
    """Features in a pool that this rank has mapped."""
    with Pool.create(1 << 20, 8) as pool:
        attachment, fds = rank.reader.attach(*pool.export())
        column = pool.admit(attachment, fds)
        with Publisher(pool, inline_below_nbytes=0).draft([("uint8", (PATCHES, 3))]) as draft:
            draft.views[0].data[:] = first
            [payload] = draft.dispatch(column, [])
        yield pool, payload
        rank.reader.detach(pool.description.pool)
