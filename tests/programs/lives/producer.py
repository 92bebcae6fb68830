"""A producer: lends a small pool's bytes in every way there is, as fast as they come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy.typing as npt

from lives import mail
from lives.life import Life
from lives.stream import Stream
from tensorferry.codecs.errors import LeaseError, PoolFull
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.messages import Origin
from tensorferry.codecs.pool import ledger
from tensorferry.codecs.pool.pool import Lease, Pool
from tensorferry.codecs.pool.publisher import Draft, Publisher
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.pools.broker import Broker, recycle

NBYTES, SLOTS = 1 << 16, 12  # so small that what comes back is lent again at once
WORDS = 1500  #: of the largest tensor
WINDOW = 4  #: leases that a consumer may have
WORKERS = 3  #: drafts being made at once
ROUNDS_PER_TICK = 4

#: What becomes of a draft. `late`: as on a GPU, where the block ends, and others are told, while a stream still has to
#: write the bytes, and then `ready` after them.
HOW = ("good", "failing", "cancelled", "late", "late and poisoned", "late and cancelled")
LATE = HOW[3:]

Receiver = tuple[Origin, int]  #: a consumer's life, and its column


class Whim(Exception):
    """The error that a block fails with where it is to fail."""


class Producer(Life):
    role = "producer"

    async def live(self) -> None:
        self._receivers: dict[int, Receiver] = {}  # by rank
        self._rounds = 0
        self._traffic = True
        ledger.FEW = self.rng.choice((0, 16))  # leases that have come back are found by a scan, or one by one
        path = f"{self.folder}/{self.origin.rank}.sock"
        with Pool.create(NBYTES, SLOTS, producer=self.epoch) as self.pool:
            self._publisher = Publisher(self.pool, inline_below_nbytes=0)
            self._announcement = mail.Announce(0, self.origin, self.pool.description.pool, path)
            broker = Broker(path, self.pool, self._admitted, self._died)
            async with broker, asyncio.TaskGroup() as tasks:
                for rank in range(len(self.others)):
                    self._announce(rank, 0)
                running = [tasks.create_task(recycle(self.pool, 0.002))]
                running += [tasks.create_task(self._work()) for _ in range(WORKERS)]
                await self.leaving()
                for task in running:
                    task.cancel()

    def receive(self, note: mail.Any) -> None:
        if isinstance(note, mail.Hello):
            self._announce(note.origin.rank, note.origin.epoch)

    def _announce(self, rank: int, epoch: int) -> None:
        origin, pool, path = self._announcement.origin, self._announcement.pool, self._announcement.path
        with suppress(BlockingIOError):  # full of a former life's mail: this one goes without
            self.post(rank, mail.Announce(epoch, origin, pool, path))

    def _admitted(self, origin: Origin, column: int) -> None:
        self._receivers[origin.rank] = origin, column

    def _died(self, origin: Origin, column: int) -> None:
        if self._receivers.get(origin.rank) == (origin, column):
            del self._receivers[origin.rank]

    # --- traffic

    async def _work(self) -> None:
        while True:
            busy = self._traffic and await self._round()
            if self._traffic:
                self._rounds += 1
                if self._rounds % ROUNDS_PER_TICK == 0:
                    self.report("tick")
            await asyncio.sleep(0 if busy else 0.001)

    async def _round(self) -> bool:
        """One draft, and whatever becomes of it; False: nobody is there to take one."""
        rng = self.rng
        outstanding = self.pool._ledger.outstanding
        able = [receiver for receiver in self._receivers.values() if len(outstanding(receiver[1])) < WINDOW]
        if not able:
            return False
        receivers = rng.sample(able, rng.randint(1, len(able)))
        layout = [("uint64", (rng.randint(1, WORDS),)) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        identities = tuple(rng.getrandbits(64) for _ in layout)
        how = rng.choices(HOW, weights=(45, 10, 10, 25, 5, 5))[0]
        with suppress(Whim), self._publisher.draft(layout) as draft:
            views = draft.views
            lease = draft._lease if how in LATE else None
            stream = Stream()
            if lease is None:
                await self._write(views, identities)
            elif self.fault != "publishes before it has written":
                lease.order = stream
            if how not in ("cancelled", "late and cancelled"):
                self._tell(draft, receivers, identities, poisoned=lease is not None and how == "late and poisoned")
            if how == "failing":
                raise Whim
        if lease is not None:
            await self._write(views, identities, slowly=True)
            if how == "late and poisoned":
                lease.poison()
            stream.finish()
        self.pool.reclaim()
        return True

    async def _write(self, views: list[View], identities: tuple[int, ...], slowly: bool = False) -> None:
        for view, identity in zip(views, identities, strict=True):
            words: npt.NDArray[Any] = view.numpy()
            half = len(words) // 2
            await self._dawdle(slowly)
            words[:half] = identity
            await self._dawdle(slowly)
            words[half:] = identity

    async def _dawdle(self, slowly: bool) -> None:
        for _ in range(self.rng.choice((1, 4, 12, 30) if slowly else (0, 0, 1, 2))):
            await asyncio.sleep(0)

    def _tell(
        self, draft: Draft, receivers: list[Receiver], identities: tuple[int, ...], poisoned: bool = False
    ) -> None:
        for origin, column in receivers:
            frames: list[Buffer] = []
            uses = self.rng.choice((1, 1, 1, 2))
            try:
                payloads = tuple(draft.dispatch(column, frames, consumers=len(receivers), uses=uses))
            except LeaseError:  # the pool has found it dead a moment before its watch has
                continue
            copies = tuple(bytes(frame) for frame in frames)
            note = mail.Tensors(origin.epoch, self.origin, identities, payloads, copies, uses, poisoned)
            try:
                self.post(origin.rank, note)
            except BlockingIOError:
                draft.retract(column)
                continue
            if self.fault == "takes back what it has sent":
                draft.retract(column)

    # --- commands

    def do_pause(self) -> None:
        self._traffic = False

    def do_lent(self) -> tuple[int, dict[int, int]]:
        """Leases that are out, and how many of them wait for each consumer, by epoch."""
        while self.pool.reclaim():
            pass
        ledger = self.pool._ledger
        waiting: Counter[int] = Counter()
        for column, consumer in self.pool._consumers.items():
            assert consumer.page is not None
            words = consumer.page.words()
            owed = [lease for lease in ledger.outstanding(column) if words[lease.slot] != lease.generation]
            waiting[consumer.epoch] += len(owed)
        return ledger.lent_slots, +waiting

    def do_scribble(self) -> int:
        """Write over every byte that may be lent now, and cancel; how many bytes that was."""
        scribbled = 0
        leases: list[Lease] = []
        nbytes = NBYTES
        while nbytes:
            lease = self.pool.lease(nbytes)
            try:
                lease.__enter__()
            except PoolFull as full:
                nbytes = min(full.longest_free_nbytes, nbytes - 1) if full.free_slots else 0
                continue
            lease.data[:] = 0xAA
            scribbled += nbytes
            leases.append(lease)
        for lease in leases:
            lease.__exit__()
        return scribbled
