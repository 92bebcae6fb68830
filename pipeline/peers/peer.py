"""A peer: what this process knows of another one, and whether it may be sent work."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.channels.interface import Sender

#: Reports to a peer that are sent again after its connection broke: more than a connection holds.
REPORTS = 1024


@dataclass(slots=True)
class PeerLife:
    """What is known of one life of a peer, from its start to its end. The next life begins with a new object."""

    epoch: int = 0  #: 0: not heard yet
    column: int | None = None  #: its column in our pool, None: it cannot read it
    pool: int | None = None  #: that it has announced
    refusal: str = ""  #: why its pool cannot be read here
    ready: bool = False
    wants: bool = False  #: it waits for our Ready
    leaving: bool = False
    drained: bool = False  #: it has sent its last message
    dead: bool = False  #: its process is proven dead
    broken: bool = False  #: its connection broke, and it was not heard since
    lost: int = 0  #: the connection broke, and so many heartbeats must come before we believe that it lives
    distrusted: bool = False  #: it has sent an acknowledgement never owed
    silent_s: float = 0.0  #: since it was heard, as far as we listened
    gauges: tuple[wire.Gauge, ...] = ()
    reports: deque[wire.Message] = field(default_factory=lambda: deque(maxlen=REPORTS))  #: the last that it was sent

    @property
    def gone(self) -> bool:
        """Whether its work is given to others: it is dead, or most likely so."""
        return self.dead or self.lost > 0

    @property
    def left(self) -> bool:
        """Whether it needs no more messages: its process is proven dead, or has sent Drained."""
        return self.dead or self.drained


@dataclass(slots=True, eq=False)
class Peer:
    """A rank of a stage, of any epoch. `str()` of it is its name."""

    stage: str
    rank: int
    outbox: Sender
    downstream: bool  #: it takes our work, and we wait for it to be ready
    quarantine_s: float  #: silent for this long it gets no new work
    connection: int = 0  #: how often it broke: what was sent before the last time may never have come
    life: PeerLife = field(default_factory=PeerLife)  #: the present one, or the last

    def __str__(self) -> str:
        return f"{self.stage}-{self.rank}"

    @property
    def epoch(self) -> int:
        """Of the life that is known; 0: none."""
        return self.life.epoch

    @property
    def column(self) -> int | None:
        """Its column in our pool, None: it cannot read it."""
        return self.life.column

    @property
    def gone(self) -> bool:
        """See `PeerLife.gone`."""
        return self.life.gone

    @property
    def state(self) -> str:
        """waiting, ready, quarantined, leaving or gone."""
        if self.life.leaving:
            return "leaving"
        if self.life.gone:
            return "gone"
        if not self.life.ready:
            return "waiting"
        return "quarantined" if self.life.distrusted or self.is_silent else "ready"

    @property
    def is_silent(self) -> bool:
        """Whether it was not heard for so long that it gets no new work."""
        return self.life.silent_s >= self.quarantine_s

    @property
    def quarantine(self) -> str:
        """Of one that is quarantined: why, in words."""
        if self.life.distrusted:
            return "is quarantined: it acknowledged what it was never lent"
        return f"is quarantined: not heard for {self.life.silent_s:.1f} s"

    @property
    def over(self) -> bool:
        """Whether the life we know has ended, or may have: only then another may take its place."""
        return not self.life.epoch or self.life.leaving or self.life.gone or self.is_silent

    def meet(self, epoch: int) -> bool:
        """Begin this epoch; False: the known epoch goes on.

        A new epoch begins with nothing of the previous one, not even its column: nobody would acknowledge its leases.
        """
        if self.life.epoch == epoch:
            self.life.lost = 0  # it answers
            return True
        if not self.over:
            return False
        self.life = PeerLife(epoch)
        return True

    def was_silent(self, for_s: float) -> None:
        """Count silence since the last call, at most half a quarantine.

        The time since the last call is long when this process was stopped, or its loop was blocked. Messages may have
        come meanwhile that are not read yet, so no peer is quarantined at once. A silent one is in the end.
        """
        self.life.silent_s += min(for_s, self.quarantine_s / 2)
