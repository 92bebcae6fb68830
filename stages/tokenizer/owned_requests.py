"""The requests that a worker owns, from their acceptance until their outcomes, and those that it finished lately."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.tokenizer.admission import Load, Overload
from tensorferry.stages.tokenizer.request import Request


class OwnedRequests:
    """One attempt of each request at most, and the load that they all are."""

    def __init__(self, limits: LimitsSpec) -> None:
        self._owned: dict[bytes, Request] = {}
        self._load = Load(limits)
        self._finished = FinishedRequests(limits.request_timeout_s)
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._owned)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._owned.values())

    def get(self, request: bytes) -> Request | None:
        """The owned request with this id."""
        return self._owned.get(request)

    def is_finished(self, request: bytes, attempt: int) -> bool:
        """Whether this attempt, or a later one, got its outcome lately. `busy` is no outcome: the attempt may come
        again."""
        return self._finished.is_finished(request, attempt)

    def add(self, request: Request, items: int, nbytes: int) -> None:
        """Own a request from now until `remove`. nbytes: of its message. Raises Overload, and owns nothing then.

        An older attempt of the same request stays in the load until it is removed too.
        """
        self._load.take(_key(request), items, nbytes)
        self._owned[request.submit.request] = request
        self._is_empty.clear()

    def grow(self, request: Request, nbytes: int) -> None:
        """Add to the load what a request needs beyond its message: its tensors. Raises Overload."""
        self._load.grow(_key(request), nbytes)

    def remove(self, request: Request, *, finished: bool) -> None:
        """Give back the room of a request. finished: it has an outcome, so that late messages of it are known."""
        self._load.give_back(_key(request))
        if finished:
            self._finished.add(request.submit.request, request.submit.attempt)
        if self._owned.get(request.submit.request) is request:
            del self._owned[request.submit.request]
        if not self._owned:
            self._is_empty.set()

    @contextmanager
    def removing(self, request: Request) -> Iterator[None]:
        """Around the service of an added request, which is removed at the end of the block, however that ends."""
        finished = True
        try:
            yield
        except Overload:
            finished = False
            raise
        finally:
            self.remove(request, finished=finished)

    async def wait_empty(self) -> None:
        """Until no request is owned."""
        await self._is_empty.wait()


def _key(request: Request) -> tuple[bytes, int]:
    return request.submit.request, request.submit.attempt
