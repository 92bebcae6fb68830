"""What a stage does for requests, as far as its process has to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Buffer
from tensorferry.pipeline.peers.peer import Peer


class Work(Protocol):
    """Given to `Stage.serve`, which calls it in the event loop."""

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> bool:
        """Take a message of a request, which is for the present life of this process; False: this stage takes no such.

        The frames are valid as long as they are referred to.
        """
        ...

    def in_flight(self) -> int:
        """How many requests, or parts of requests, it has."""
        ...

    def busy_since(self) -> float | None:
        """Since when (monotonic) it has been at the oldest thing that it does; None: it does nothing."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Its own numbers, for heartbeats and metrics."""
        ...

    def connection_mended(self, peer: Peer) -> None:
        """A peer is heard after its connection broke, in the same life: what it was sent last may never have come."""
        ...


class NoWork:
    """Of a process that does not serve yet."""

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> bool:
        return False

    def in_flight(self) -> int:
        return 0

    def busy_since(self) -> float | None:
        return None

    def gauges(self) -> Mapping[str, float]:
        return {}

    def connection_mended(self, peer: Peer) -> None:
        pass
