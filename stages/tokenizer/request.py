"""A request as its owner knows it: who was told of it, in which of their lives, and what they still owe."""

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
    """One life of a peer that was told of a request, through one connection: what breaks that may have lost it."""

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
        """Whether to give its work to others. elsewhere: there are others; else the silent may yet do it.

        One that acknowledges nonsense is not lost: it goes on with what it has, and others might learn it from that.
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
    losses: int = 0  #: how often somebody died, or fell silent, who had a part in it
    reported: int = 0  #: and of these, because of a failure that an encoder or scheduler said was worth it
    hashes: dict[int, bytes] = field(default_factory=dict)  #: content of every item, once they were processed
    schedulers: list[Life] = field(default_factory=list)  #: the attention group
    waiting: set[int] = field(default_factory=set)  #: scheduler ranks that have not reported
    collecting: set[int] = field(default_factory=set)  #: scheduler ranks that may not have all embeddings yet
    owners: dict[int, Life] = field(default_factory=dict)  #: item -> who encodes it, of those that are encoded
    sent: dict[int, tuple[str, int]] = field(default_factory=dict)  #: item -> how it travelled, and its bytes
    told: list[Life] = field(default_factory=list)  #: who knows of this attempt and must hear of a cancel
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
        """The number under which encoders and schedulers know it now."""
        return self.submit.attempt * wire.SENDINGS + self.sendings

    def encoded_by(self, item: int) -> int:
        """The encoder rank of an item; -1: none, its embeddings came with the request."""
        return self.owners[item].peer.rank if item in self.owners else -1

    def is_attended_by(self, origin: wire.Origin) -> bool:
        """Whether this is the life of a scheduler rank that was told of it."""
        lives = ((life.peer.stage, life.peer.rank, life.epoch) for life in self.schedulers)
        return (origin.stage, origin.rank, origin.epoch) in lives

    def lost_schedulers(self, *, elsewhere: bool) -> list[Life]:
        """Those that owe a report and will not give one. elsewhere: there is another group for what silent ones have,
        which may yet come back."""
        return [life for life in self.schedulers if life.peer.rank in self.waiting and life.is_lost(elsewhere)]

    def lost_items(self, *, elsewhere: bool) -> list[int]:
        """Items that will not be encoded where they were sent. elsewhere: there is another rank for those at silent
        ones, which may yet come back."""
        if not self.collecting:
            return []
        return [index for index, life in sorted(self.owners.items()) if life.is_lost(elsewhere)]

    def relieved(self) -> list[Life]:
        """Those that were told of it and whose part others have done: they may not know yet."""
        busy = {*self.schedulers, *self.owners.values()}
        return [life for life in self.told if life not in busy]

    def start_again(self) -> None:
        """Forget what has become of it: it is sent anew, as a whole."""
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
        """Give it up. Not at once: a task cancelled before its first step would never run, nor answer."""
        if self.task is not None:
            asyncio.get_running_loop().call_soon(self.task.cancel)


class Reported(FerryError):
    """An encoder or scheduler has given a request up."""

    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return f"{self.failure.origin.stage}-{self.failure.origin.rank}: {self.failure.problem}"
