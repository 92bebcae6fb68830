"""A tokenizer worker as a client sees it, and whether it can be expected to answer.

    HERE ── SILENT_GREETINGS unanswered, or its connection broke ──► SILENT ── `patience` unanswered ──► GONE
      ▲                                                                │                                 │
      └──────────────────────────────── it answered ◄──────────────────┴─────────────────────────────────┘

Every state becomes DENIED when its front door does not accept our keys, and DENIED becomes HERE when it answers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.channels.channels import Dealer
from tensorferry.pipeline.channels.interface import Denial

SILENT_GREETINGS = 3  #: unanswered, a tokenizer gets no request that another could take
MOST_DENIALS = 3  #: handshakes in a row that it may interrupt before its keys count as different from ours


class Presence(enum.Enum):
    HERE = "it has answered lately, or has not had the time to"
    SILENT = "it gets no request that another could take"
    GONE = "others get the requests that it has"
    DENIED = "it does not accept our keys"


@dataclass(slots=True)
class SignsOfLife:
    """Decides the presence of one tokenizer from what is heard of it."""

    patience: int  #: greetings that may stay unanswered before it is GONE; 2 or more
    unanswered: int = 0  #: heartbeats since it last answered; a broken connection counts as SILENT_GREETINGS
    denied: str = ""  #: why it does not accept our keys
    _denials: int = 0

    @property
    def presence(self) -> Presence:
        if self.denied:
            return Presence.DENIED
        if self.is_overdue:
            return Presence.GONE
        return Presence.SILENT if self.unanswered >= SILENT_GREETINGS else Presence.HERE

    @property
    def is_overdue(self) -> bool:
        """Whether it has left more greetings unanswered than it may, for whatever reason."""
        return self.unanswered > self.patience

    def answered(self) -> None:
        self.unanswered, self.denied, self._denials = 0, "", 0

    def heartbeat_passed(self) -> None:
        self.unanswered += 1

    def connection_broke(self) -> None:
        self.unanswered = max(self.unanswered, SILENT_GREETINGS)

    def handshake_failed(self, denial: Denial, who: str) -> bool:
        """Whether it is DENIED since now. An interrupted handshake is no proof, as the worker may have been about to
        end; MOST_DENIALS in a row are. who: names the worker in `denied`."""
        self._denials += 1
        if self.denied or not (denial.final or self._denials >= MOST_DENIALS):
            return False
        self.denied = f"{who}: {denial.reason} (see security.keys)"
        return True


@dataclass(slots=True)
class Door:
    """The front door of one tokenizer worker."""

    rank: int
    dealer: Dealer
    life: SignsOfLife
    members: wire.Members | None = None  #: its last answer
    open: set[bytes] = field(default_factory=set)  #: requests that it owns

    @property
    def presence(self) -> Presence:
        return self.life.presence

    @property
    def ready(self) -> bool:
        return self.members is not None and self.members.ready


def members_reported(reports: Iterable[wire.Members]) -> list[wire.Member]:
    """Each process once, by stage and rank, as `Client.members` returns them."""
    found: dict[tuple[str, int], wire.Member] = {}
    for member in (member for report in reports for member in report.members):
        known = found.setdefault((member.stage, member.rank), member)
        if known.state == "ready":  # otherwise one tokenizer has reported that it is not
            found[member.stage, member.rank] = member
    return [found[key] for key in sorted(found)]
