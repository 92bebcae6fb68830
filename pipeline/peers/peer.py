"""Another process, as far as this one knows it, and whether it may be sent work."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.channels.channels import Outbox

#: Reports to a peer that are said again when its connection broke: more than a connection holds.
REPORTS = 1024


@dataclass(slots=True, eq=False)
class Peer:
    """See the module. `str()` of it is its name."""

    stage: str
    rank: int
    outbox: Outbox
    downstream: bool  #: it takes our work, and we wait for it to be ready
    quarantine_s: float  #: silent for this long it gets no new work
    epoch: int = 0  #: 0: not heard yet
    column: int | None = None  #: its column in our pool, None: it cannot read it
    pool: int | None = None  #: that it has announced
    ready: bool = False
    leaving: bool = False
    drained: bool = False  #: that was its last word
    dead: bool = False  #: its process is proven to be
    lost: int = 0  #: the connection broke, and so many heartbeats must come before we believe that it lives
    connection: int = 0  #: how often it broke: what was sent before the last time may never have come
    broken: bool = False  #: it broke, and the peer was not heard since
    reports: deque[wire.Message] = field(default_factory=lambda: deque(maxlen=REPORTS))  #: the last, of this life
    wants: bool = False  #: it waits for our Ready
    refusal: str = ""  #: why its pool cannot be read here
    distrusted: bool = False  #: it has acknowledged what it was never lent
    silent_s: float = 0.0  #: since it was heard, as far as we listened
    gauges: tuple[wire.Gauge, ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.stage}-{self.rank}"

    @property
    def state(self) -> str:
        """waiting, ready, quarantined, leaving or gone."""
        if self.leaving:
            return "leaving"
        if self.gone:
            return "gone"
        if not self.ready:
            return "waiting"
        return "quarantined" if self.distrusted or self.silent_s >= self.quarantine_s else "ready"

    @property
    def gone(self) -> bool:
        """Whether it is dead, as far as anybody can tell who does not have to prove it: its work is given to others."""
        return self.dead or self.lost > 0

    @property
    def left(self) -> bool:
        """Whether it needs nothing any more: its process is proven to have ended, or has said its last word."""
        return self.dead or self.drained

    @property
    def quarantine(self) -> str:
        """Of one that is quarantined: why, in words."""
        if self.distrusted:
            return "is quarantined: it acknowledged what it was never lent"
        return f"is quarantined: not heard for {self.silent_s:.1f} s"

    @property
    def over(self) -> bool:
        """Whether the life we know has ended, or may have: only then another may take its place."""
        return not self.epoch or self.leaving or self.gone or self.silent_s >= self.quarantine_s

    def meet(self, epoch: int) -> bool:
        """This is its life now; False: it is not, the one we know goes on.

        A former life's column is not its own: what is booked there, nobody would owe.
        """
        if self.epoch == epoch:
            self.lost = 0  # it answers
            return True
        if not self.over:
            return False
        self.epoch, self.column, self.pool, self.refusal = epoch, None, None, ""
        self.ready = self.leaving = self.drained = self.dead = self.wants = self.distrusted = False
        self.silent_s, self.lost, self.broken = 0.0, 0, False
        self.gauges = ()
        self.reports.clear()
        return True

    def was_silent(self, for_s: float) -> None:
        """Count silence, but not while we did not listen ourselves.

        Of a long time since the last look (we were stopped, or our loop was blocked) half a quarantine is counted: mail
        has come meanwhile that we have not read yet. So nobody is quarantined at once, and the silent are in the end.
        """
        self.silent_s += min(for_s, self.quarantine_s / 2)
