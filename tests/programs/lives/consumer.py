"""A consumer: takes what comes in every way there is, and judges every byte and every error."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np

from lives import mail
from lives.life import Life, belongings
from lives.stream import Stream
from tensorferry.codecs.errors import AttachRefused, FerryError, LeasePoisoned, PeerGone
from tensorferry.codecs.memory.host import HostSegment
from tensorferry.codecs.messages import Payload, Proxy
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.pools.broker import attach

PATIENCE_S = 15.0  #: for what is not ready; a stopped producer goes on or dies earlier
CHUNKS = 6  #: that a tensor is looked at in, so that its bytes may change meanwhile


#: What becomes of a tensor. `late`: as on a GPU, where a stream reads it after the block has ended, and then
#: acknowledges.
WAYS = ("read", "copied", "abandoned", "failed", "late")


class Whim(Exception):
    """The error that a block fails with where it is to fail."""


class Consumer(Life):
    role = "consumer"

    async def live(self) -> None:
        self._pools: set[int] = set()  # attached, or tried to
        self._attaching = self._handling = 0
        #: What became of the uses of tensors; `former`: mail of a former life.
        self._outcomes: Counter[str] = Counter()
        HostSegment.order = Stream.begin  # type: ignore[method-assign]
        with Reader(self.epoch) as self.reader:
            async with asyncio.TaskGroup() as self._tasks:
                for rank in range(len(self.others)):
                    self._greet(rank)
                await self.leaving()

    def _greet(self, rank: int) -> None:
        try:
            self.post(rank, mail.Hello(self.origin))
        except BlockingIOError:
            pass  # many have died before us, and it has heard of nobody yet

    def receive(self, note: mail.Any) -> None:
        match note:
            case mail.Announce(to=to) if to in (0, self.epoch) and note.pool not in self._pools:
                self._pools.add(note.pool)
                self._attaching += 1
                self._tasks.create_task(self._attach(note))
            case mail.Tensors(to=to):
                if to != self.epoch:
                    self._outcomes["former"] += 1
                    if self.fault != "reads its former life's mail":
                        return
                for _ in range(note.uses):
                    for identity, payload in zip(note.identities, note.payloads, strict=True):
                        self._handling += 1
                        self._tasks.create_task(self._handle(note, identity, payload))

    async def _attach(self, note: mail.Announce) -> None:
        try:
            await attach(note.path, self.origin, note.pool, self.reader, PATIENCE_S)
        except (PeerGone, AttachRefused):  # it has died, and perhaps another life answers at its socket
            self._outcomes["not attached"] += 1
        self._attaching -= 1

    # --- a tensor

    async def _handle(self, note: mail.Tensors, identity: int, payload: Payload) -> None:
        way = self.rng.choices(WAYS, weights=(40, 10, 10, 10, 30))[0]
        try:
            await self._dawdle()
            await self._take(note, identity, payload, way)
        except LeasePoisoned as problem:
            way = "poisoned"
            if not note.poisoned:
                self._wrong(note, payload, repr(problem))
        except PeerGone as problem:
            way = "gone"
            self.report("gone", note.origin.epoch)
            if isinstance(payload, Proxy) and self._is_written(payload):
                self._wrong(note, payload, f"given up although it is ready: {problem!r}")
        except FerryError as problem:
            self._wrong(note, payload, repr(problem))
        self._outcomes[way] += 1
        self._handling -= 1

    async def _take(self, note: mail.Tensors, identity: int, payload: Payload, way: str) -> None:
        if way == "abandoned":
            self.reader.acknowledge(payload)
            return
        if isinstance(payload, Proxy):
            await self._until_ready(note, payload)
        own: View | None = None
        stream = Stream()
        with suppress(Whim), self.reader.open(payload, note.frames) as view:
            if isinstance(payload, Proxy):
                stream = Stream.latest
            if way == "late":
                own = view  # as on a GPU: the block ends, and the stream that reads is still at it
            else:
                await self._judge(note, payload, view, identity)
                own = view.copy() if way == "copied" else None
            if way != "late" or self.fault == "acknowledges before its stream has read":
                stream.finish()
            del view
            if way == "failed":
                raise Whim
        if own is not None:
            await self._judge(note, payload, own, identity)
            del own
        stream.finish()

    async def _until_ready(self, note: mail.Tensors, proxy: Proxy) -> None:
        until = asyncio.get_running_loop().time() + PATIENCE_S
        try:
            while not self.reader.is_ready(proxy):
                if asyncio.get_running_loop().time() > until:
                    self._wrong(note, proxy, f"neither ready nor given up after {PATIENCE_S} s")
                    break
                await asyncio.sleep(0.0005)
        except FerryError:
            self.reader.acknowledge(proxy)  # one use less
            raise

    async def _judge(self, note: mail.Tensors, payload: Payload, view: View, identity: int) -> None:
        """Every word, a part at a time, forth and back."""
        if note.poisoned and isinstance(payload, Proxy):
            self._wrong(note, payload, "poisoned, and read")
        words: np.ndarray[Any, Any] = view.numpy()
        parts = np.array_split(words, CHUNKS)
        for part in (*parts, *reversed(parts)):
            if not (part == identity).all():
                found = hex(int(part[part != identity][0]))
                self._wrong(note, payload, f"{found} where all should be {hex(identity)}")
                return
            if self.rng.random() < 0.3:
                await asyncio.sleep(0)

    async def _dawdle(self) -> None:
        for _ in range(self.rng.choice((0, 0, 10, 60))):
            await asyncio.sleep(0)

    def _is_written(self, proxy: Proxy) -> bool:
        imported = self.reader._pools.get(proxy.pool)
        return imported is not None and imported.control.look(proxy.slot)[:2] == (proxy.generation,) * 2

    def _wrong(self, note: mail.Tensors, payload: Payload, problem: str) -> None:
        self.report("wrong", f"{self.origin} of {payload} by {note.origin}: {problem}")

    # --- commands

    def do_idle(self) -> bool:
        return not (self._attaching or self._handling or self.mail_waits())

    def do_forget(self) -> tuple[int, int]:
        """Detach the pools of dead producers; how many pools are left, and mappings of memfds."""
        for pool in self.reader.orphans():
            self.reader.detach(pool)
        return len(self.reader.pools), belongings()[1]

    def do_outcomes(self) -> dict[str, int]:
        return self._outcomes
