"""What a scheduler rank has its engine do, whichever kind of engine that is: see `batches` and `streams`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from tensorferry.codecs import messages as wire
from tensorferry.stages.engines.base import EngineRequest
from tensorferry.stages.scheduler.waiting import Cost


@dataclass(frozen=True, slots=True, eq=False)
class CompleteRequest:
    """A request whose tokens and embeddings are here and fit each other."""

    admit: wire.Admit
    request: EngineRequest
    marks: dict[str, int]  #: step -> when it was, the latest time over all encoder ranks

    @property
    def cost(self) -> Cost:
        """What it asks of an engine."""
        admit = self.admit
        patches = sum(prod(item.grid) for item in admit.items)
        return Cost(len(admit.token_ids) // 4 + admit.output_tokens, patches)


class EngineSide(Protocol):
    """Complete requests, from when they are until their owners know what became of them.

    What the engine has no room for waits: by priority, and inside one priority fair between tenants.
    """

    def add(self, request: CompleteRequest) -> None: ...

    def copy_began(self) -> None:
        """Embeddings of a message are awaited or copied from now on. They may complete a request."""
        ...

    def copy_ended(self) -> None:
        """Owed once for each `copy_began`, however the copy went."""
        ...

    def drop_over(self) -> None:
        """Some attempts are finished, or given up: those are not worked on any longer."""
        ...

    def tell_again(self, owner: int) -> None:
        """The connection to an owner (its epoch) broke, and what was told of running answers may be lost."""
        ...

    @property
    def busy_since(self) -> float | None:
        """Since when (monotonic) the engine has given no sign, while it has something to do."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests that wait and that run."""
        ...

    @property
    def unfinished(self) -> int:
        """These, and messages whose embeddings are copied."""
        ...

    def gauges(self) -> Mapping[str, float]: ...

    async def run(self) -> None:
        """Work, for ever."""

    async def join(self) -> None:
        """Wait until nothing is unfinished."""
