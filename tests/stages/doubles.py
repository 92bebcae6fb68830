"""A stage for tests of its work: all is real but the peers, which are no processes. Nothing here opens a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import PeerGone
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.peers.peer import Peer, PeerLife
from tensorferry.pipeline.telemetry.counters import Counters


class ListOutbox:
    """An outbox that keeps what it was given."""

    def __init__(self) -> None:
        self.sent: list[tuple[wire.Message, Sequence[Any]]] = []

    def send_nowait(self, message: wire.Message, frames: Sequence[Any] = ()) -> None:
        self.sent.append((message, frames))


class ListPeers:
    """Peers of a stage: `reports` has what each was told, and each outbox what it was sent."""

    def __init__(self, origins: Iterable[wire.Origin]) -> None:
        self.reports: list[wire.Message] = []
        self.peers: dict[wire.Origin, Peer] = {}
        for origin in origins:
            outbox: Any = ListOutbox()
            self.peers[origin] = Peer(
                origin.stage, origin.rank, outbox, downstream=True, quarantine_s=60.0, life=PeerLife(origin.epoch)
            )

    def knows(self, origin: wire.Origin) -> bool:
        return origin in self.peers

    def get(self, stage: str, rank: int, epoch: int) -> Peer:
        try:
            return self.peers[wire.Origin(stage, rank, epoch)]
        except KeyError:
            raise PeerGone(f"{stage}-{rank}", "is not there in that life") from None

    taker = get

    def report(self, peer: Peer, message: wire.Message) -> None:
        self.reports.append(message)

    def tell(self, message: wire.Message) -> None:
        """Nobody listens."""

    def sent(self, origin: wire.Origin) -> list[tuple[wire.Message, Sequence[Any]]]:
        """What a peer was sent, with its frames."""
        outbox: Any = self.peers[origin].outbox
        sent: list[tuple[wire.Message, Sequence[Any]]] = outbox.sent
        return sent


class WorkStage:
    """What `Work` uses of a `Stage`."""

    def __init__(self, stage: str, epoch: int, deployment: Deployment, peers: Iterable[wire.Origin]) -> None:
        self.origin, self.epoch, self.deployment = wire.Origin(stage, 0, epoch), epoch, deployment
        self.limits, self.device = Limits(), None
        self.reader, self.publisher, self.counters = Reader(epoch), Publisher(None), Counters()
        self.peers = ListPeers(peers)
        self.tasks: Any = asyncio.TaskGroup()  #: not entered: a test that needs tasks gives its own
        self.alone = nullcontext

    def outlive(self, problem: BaseException) -> None:
        """There is no GPU to lose."""

    def close(self) -> None:
        self.reader.close()
        self.counters.close()
