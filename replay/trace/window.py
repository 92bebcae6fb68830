"""A part of a trace between two times."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from tensorferry.pipeline.recording.request import BrokenRow
from tensorferry.replay.trace.exact_numbers import NS, wall_clock

_UNITS_NS = {"ms": NS // 1000, "s": NS, "m": 60 * NS, "h": 3600 * NS, "d": 86_400 * NS}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+", re.ASCII)
_STEP = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])", re.ASCII)
_BARE = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Moment:
    """A time in a trace: a date, or a time after the first request."""

    ns: int
    absolute: bool

    @classmethod
    def parse(cls, text: str) -> Moment:
        """Read `2023-11-16 18:20:00`, `1h30m`, `250ms`, or seconds. Raises ValueError with a sentence."""
        text = text.strip()
        if _BARE.fullmatch(text):
            return cls(int(Decimal(text) * NS), False)
        if _SPAN.fullmatch(text):
            return cls(sum(int(Decimal(count) * _UNITS_NS[unit]) for count, unit in _STEP.findall(text)), False)
        try:
            return cls(wall_clock(text, "it")[0], True)
        except BrokenRow:
            raise ValueError(
                f"{text!r} is neither a date nor a time from the start, such as 90, 90s or 1h30m"
            ) from None

    def at_ns(self, origin_ns: int) -> int:
        return self.ns if self.absolute else origin_ns + self.ns


@dataclass(frozen=True, slots=True)
class Window:
    """From `start`, inclusive, to `end`, exclusive."""

    start: Moment | None = None
    end: Moment | None = None

    @property
    def whole(self) -> bool:
        return self.start is None and self.end is None

    @property
    def absolute(self) -> bool:
        return any(moment is not None and moment.absolute for moment in (self.start, self.end))

    def bounds_ns(self, origin_ns: int) -> tuple[int | None, int | None]:
        """Return the bounds on the trace's clock, whose first request is at `origin_ns`; None: no bound."""
        start_ns = None if self.start is None else self.start.at_ns(origin_ns)
        return start_ns, None if self.end is None else self.end.at_ns(origin_ns)
