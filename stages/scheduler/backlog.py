"""What a scheduler rank has to finish: embeddings that are being copied, complete requests, and the batch that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tensorferry.stages.scheduler.engine_side import CompleteRequest
from tensorferry.stages.scheduler.waiting import Waiting


class Backlog:
    """See the module. A request is copied, waits and runs, in this order; `join` waits until none does any of these."""

    def __init__(self, batch_tokens: int, is_over: Callable[[CompleteRequest], bool]) -> None:
        """batch_tokens: the budget of a batch; a request that exceeds it runs alone. is_over: nobody waits for it."""
        self._batch_tokens, self._is_over = batch_tokens, is_over
        self._copying = 0
        self._waiting: Waiting[CompleteRequest] = Waiting()
        self._running: Sequence[CompleteRequest] = ()
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> Sequence[CompleteRequest]:
        """What the engine has now."""
        return self._running

    @property
    def unfinished(self) -> int:
        """Messages that are copied, requests that wait, and requests that run."""
        return self._copying + len(self._waiting) + len(self._running)

    def copy_began(self) -> None:
        """Embeddings of a message are awaited or copied from now on. They may complete a request."""
        self._copying += 1

    def copy_ended(self) -> None:
        """Owed once for each `copy_began`, however the copy went."""
        self._copying -= 1
        self._changed.set()

    def add(self, request: CompleteRequest) -> None:
        admit = request.admit
        self._waiting.put(request, priority=admit.priority, tenant=admit.tenant, cost=request.cost)
        self._changed.set()

    @contextmanager
    def batch(self) -> Iterator[Sequence[CompleteRequest]]:
        """The requests that run next, for the time that they run; none if all were over."""
        self._running = batch = self._next()
        try:
            yield batch
        finally:
            self._running = ()
            self._changed.set()

    async def arrives(self) -> None:
        """Wait until a request waits to run."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()

    async def join(self) -> None:
        """Wait until nothing is unfinished."""
        while self.unfinished:
            self._changed.clear()
            await self._changed.wait()

    def _next(self) -> list[CompleteRequest]:
        batch: list[CompleteRequest] = []
        budget = self._batch_tokens
        while (first := self._waiting.first()) is not None:
            _, cost = first
            if batch and cost.tokens > budget:
                break
            request = self._waiting.take()
            if self._is_over(request):
                continue
            budget -= cost.tokens
            batch.append(request)
        return batch
