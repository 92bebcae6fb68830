"""A request that is owned: which lives of peers were told of it, and what these still have to do."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import FerryError
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.stages.tokenizer.answer_relay import AnswerRelay


class Life(NamedTuple):
    """One life of a peer that was told of a request through one connection. If either ends, the message may be lost."""

    peer: Peer
    epoch: int
    connection: int

    @classmethod
    def of(cls, peer: Peer) -> Life:
        return cls(peer, peer.epoch, peer.connection)

    @property
    def over(self) -> bool:
        return (self.peer.epoch, self.peer.connection) != (self.epoch, self.connection) or self.peer.gone

    def is_lost(self, elsewhere: bool) -> bool:
        """Whether other peers get its work. elsewhere: there are others; without them a silent peer keeps its work.

        A peer that is quarantined for invalid acknowledgements goes on with its work.
        """
        silent = self.peer.state == "quarantined" and not self.peer.life.distrusted
        return self.over or (elsewhere and silent)


@dataclass(slots=True)
class Request:
    """A request this worker owns, until its outcome is sent."""

    client: bytes
    submit: wire.Submit
    timeout_s: float  #: from its acceptance, which is when this is made
    who: str = ""  #: its client, to schedulers, where the request names no tenant
    context: bytes | None = None  #: of its span, where there is one, or its client's
    task: asyncio.Task[None] | None = None  #: that serves it
    marks: dict[str, int] = field(default_factory=lambda: {"received": time.monotonic_ns()})  #: when it reached a step
    sendings: int = 0  #: how often it was sent again as a whole
    losses: int = 0  #: how often a peer with a part in it died or fell silent
    reported: int = 0  #: how often of these after a retryable failure
    hashes: dict[int, bytes] = field(default_factory=dict)  #: the content hash of every item that was processed
    schedulers: list[Life] = field(default_factory=list)  #: the attention group
    waiting: set[int] = field(default_factory=set)  #: scheduler ranks that have not reported
    collecting: set[int] = field(default_factory=set)  #: scheduler ranks that have not reported all embeddings
    owners: dict[int, Life] = field(default_factory=dict)  #: the encoder rank of every item that was sent to one
    sent: dict[int, tuple[str, int]] = field(default_factory=dict)  #: the transport and the size of every item
    told: list[Life] = field(default_factory=list)  #: the peers that know of this attempt, and must hear Cancel
    reports: dict[int, wire.Done] = field(default_factory=dict)  #: by scheduler rank
    failure: wire.Failure | None = None  #: what an encoder or scheduler said
    relay: AnswerRelay | None = None  #: of its answer, if its client wants that streamed
    broken: FerryError | None = None  #: why its answer cannot go on
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def since(self) -> float:
        """When it was accepted (monotonic seconds)."""
        return self.marks["received"] / 1e9

    @property
    def deadline_ns(self) -> int:
        """When it fails (monotonic) unless it is done."""
        return self.marks["received"] + int(self.timeout_s * 1e9)

    @property
    def left_ms(self) -> int:
        """How long until then, in milliseconds; at least 1, since a peer can be told no less."""
        return max(1, (self.deadline_ns - time.monotonic_ns()) // 1_000_000)

    @property
    def attempt(self) -> int:
        """Its attempt as encoders and schedulers count it."""
        return self.submit.attempt * wire.SENDINGS + self.sendings

    def encoded_by(self, item: int) -> int:
        """The encoder rank of an item; -1: its embeddings came with the request."""
        return self.owners[item].peer.rank if item in self.owners else -1

    def is_attended_by(self, origin: wire.Origin) -> bool:
        """Whether a message comes from a scheduler rank of this request, in the life that was told of it."""
        lives = ((life.peer.stage, life.peer.rank, life.epoch) for life in self.schedulers)
        return (origin.stage, origin.rank, origin.epoch) in lives

    def is_told_by(self, origin: wire.Origin) -> bool:
        """Whether it is the scheduler rank that tells this request's answer as it comes: the first of its group."""
        return self.is_attended_by(origin) and origin.rank == min(life.peer.rank for life in self.schedulers)

    def lost_schedulers(self, *, elsewhere: bool) -> list[Life]:
        """Scheduler ranks that have not reported and are lost. elsewhere: another group can take over from silent
        ranks."""
        return [life for life in self.schedulers if life.peer.rank in self.waiting and life.is_lost(elsewhere)]

    def lost_items(self, *, elsewhere: bool) -> list[int]:
        """Items whose encoder ranks are lost before all embeddings arrived. elsewhere: another rank can take over from
        silent ranks."""
        if not self.collecting:
            return []
        return [index for index, life in sorted(self.owners.items()) if life.is_lost(elsewhere)]

    def relieved(self) -> list[Life]:
        """Peers that were told of it, and whose part others have done since."""
        busy = {*self.schedulers, *self.owners.values()}
        return [life for life in self.told if life not in busy]

    def start_again(self) -> None:
        """Forget the state of this attempt, and begin the next one."""
        self.sendings += 1
        self.failure = None
        self.schedulers, self.told = [], []
        self.waiting, self.collecting = set(), set()
        self.owners, self.reports = {}, {}
        if self.relay is not None:
            self.relay.begin_attempt()

    @property
    def is_cancelled(self) -> bool:
        """Whether its task was told to give it up."""
        return self.task is not None and bool(self.task.cancelling())

    def cancel(self) -> None:
        """Cancel its task soon, and not at once: a task that is cancelled before its first step never replies."""
        if self.task is not None:
            asyncio.get_running_loop().call_soon(self.task.cancel)


class Reported(FerryError):
    """An encoder or scheduler has reported a failure of a request."""

    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return f"{self.failure.origin.stage}-{self.failure.origin.rank}: {self.failure.problem}"
