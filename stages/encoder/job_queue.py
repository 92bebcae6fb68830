"""The jobs that wait for an encoder rank, and which of them share a call of the adapter."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import prod

from tensorferry.codecs import messages as wire
from tensorferry.stages.adapters.base import ItemInfo
from tensorferry.stages.encoder.embedding_cache import Content, EmbeddingCache, Outputs
from tensorferry.stages.encoder.features import Features


@dataclass(frozen=True, slots=True)
class JobItem:
    """An item that this rank encodes."""

    info: ItemInfo  #: its index is its place in its request
    content: Content


class Job:
    """One request's items for this rank, from their arrival until the request is answered for."""

    def __init__(self, message: wire.Encode, features: Features) -> None:
        self.message, self.features = message, features
        self.came_s = time.monotonic()
        self.until_s = self.came_s + message.deadline_ms / 1e3  #: nobody waits for it afterwards
        self.items = [
            JobItem(
                ItemInfo(index, item.modality, item.grid, prod(item.grid), item.rows, item.content_hash),
                Content.of(item, item.features[0].payload),
            )
            for index, item in enumerate(message.items)
            if item.features
        ]
        #: Dtype and extents of a patch of its features. Only requests of one form share a batch: otherwise a wrong
        #: claim of one request could shift the rows of another's items, or have them refused. None: it goes alone,
        #: as a request does that is sent again, because the rank that had it died or failed, perhaps of it.
        self.form: tuple[int, tuple[int, ...]] | None = None
        forms = {(item.content.dtype, item.content.shape[1:]) for item in self.items}
        again = message.anew or message.attempt % wire.SENDINGS
        if not again and len(forms) == 1 and all(item.content.shape[:1] == (item.info.patches,) for item in self.items):
            self.form = forms.pop()
        self._known: dict[int, Outputs] = {}
        self._pins = ExitStack()

    def known(self, item: JobItem, cache: EmbeddingCache) -> Outputs | None:
        """What the cache has for an item, pinned until `close`. Its features are then released unread (promise E4)."""
        index = item.info.index
        if index not in self._known and item.content in cache:
            self._known[index] = self._pins.enter_context(cache.pinned(item.content))
            self.features.acknowledge(index)
        return self._known.get(index)

    def close(self) -> None:
        """Release every payload that came, and unpin what the cache has for it."""
        self.features.close()
        self._known.clear()
        self._pins.close()


class Jobs:
    """Jobs in order of arrival. As many are taken together as the patch budget allows."""

    def __init__(self, budget_patches: int, wait_s: float, patches: Callable[[Job], int]) -> None:
        """budget_patches: of the jobs taken together; one that has more goes alone. wait_s: how long a job waits for
        others, from its arrival. patches: how many of a job are to be encoded."""
        self._budget, self._wait_s, self._patches = budget_patches, wait_s, patches
        self._waiting: deque[Job] = deque()
        self._unfinished = 0
        self._hurried = False
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def unfinished(self) -> int:
        """How many wait, or were taken and are not done."""
        return self._unfinished

    @property
    def waiting(self) -> int:
        """How many were not taken yet."""
        return len(self._waiting)

    def put_nowait(self, job: Job) -> None:
        self._waiting.append(job)
        self._unfinished += 1
        self._idle.clear()
        self._changed.set()

    async def take(self) -> list[Job]:
        """Take the oldest job, and the next ones that fit beside it. The caller owes `done` for each."""
        await self._arrives()
        batch = [self._waiting.popleft()]
        total, form = self._patches(batch[0]), batch[0].form
        while form is not None and total < self._budget:
            if not self._waiting:
                # A job with nothing to encode gains nothing by waiting for others.
                until = batch[0].came_s + self._wait_s if total and not self._hurried else 0.0
                if not await self._arrives(until):
                    break
            job = self._waiting[0]
            patches = self._patches(job)
            if job.form != form or total + patches > self._budget:
                break
            batch.append(self._waiting.popleft())
            total += patches
        return batch

    async def fills(self, unless: Callable[[], bool]) -> None:
        """Wait until the next batch is one that no further job could join, or `unless` says so; see `look_again`."""
        while not unless() and not self._is_full():
            self._changed.clear()
            await self._changed.wait()

    def look_again(self) -> None:
        """What `unless` of `fills` says may have changed."""
        self._changed.set()

    def _is_full(self) -> bool:
        """Whether `take` would give a batch that a job to come could not be in."""
        total = 0
        for place, job in enumerate(self._waiting):
            patches = self._patches(job)
            if place and (job.form != self._waiting[0].form or total + patches > self._budget):
                return True
            total += patches
            if job.form is None or total >= self._budget:
                return True
        return False

    def done(self, jobs: int) -> None:
        self._unfinished -= jobs
        if not self._unfinished:
            self._idle.set()

    def hurry(self) -> None:
        """From now on no job waits for others."""
        self._hurried = True
        self._changed.set()

    async def join(self) -> None:
        """Wait until every job is done."""
        await self._idle.wait()

    async def _arrives(self, until_s: float | None = None) -> bool:
        """Wait until there is a job; False: there is none at `until_s` (of the monotonic clock), or after `hurry`."""
        while not self._waiting:
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and (self._hurried or left_s <= 0):
                return False
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
        return True
