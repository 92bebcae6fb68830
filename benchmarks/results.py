"""What a benchmark finds: measurements of contenders, and how they stand to the floors."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rounds: int  #: turns that each contender has; they take turns, so that a busy moment meets all of them
    shrink: int = 1  #: sizes and counts are divided by this: then nothing is measured, only run
    contenders: Set[str] | None = None  #: those that may take part; None: all

    def of(self, count: int) -> int:
        return max(1, count // self.shrink)


FULL = Scale(rounds=40)
QUICK = Scale(rounds=8)
SMOKE = Scale(rounds=1, shrink=64, contenders=frozenset({"copied in", "inline", "msgpack frames"}))


class Measurement(msgspec.Struct, frozen=True):
    """One number of one contender, as the median of many and what lies around it."""

    contender: str
    unit: str
    p50: float
    p10: float
    p90: float
    samples: int
    safe: bool = True  #: the source may be overwritten as soon as a message is handed over
    details: dict[str, float] = {}  #: further numbers of the same runs; their units are in their names


class Verdict(msgspec.Struct, frozen=True):
    """How a floor was met."""

    floor: str  #: in words
    measured: float | None  #: None: not measured at this scale
    sense: Literal["<=", ">="]
    limit: float
    met: bool

    @classmethod
    def of(cls, floor: str, measured: float | None, sense: Literal["<=", ">="], limit: float) -> Verdict:
        met = measured is not None and (measured <= limit if sense == "<=" else measured >= limit)
        return cls(floor, measured, sense, limit, met)


class Outcome(msgspec.Struct, frozen=True):
    """All that one benchmark found."""

    name: str
    title: str
    measurements: tuple[Measurement, ...]
    verdicts: tuple[Verdict, ...] = ()

    def of(self, contender: str) -> Measurement:
        return next(found for found in self.measurements if found.contender == contender)


def measurement(
    contender: str, unit: str, values: Sequence[float], *, safe: bool = True, details: dict[str, float] | None = None
) -> Measurement:
    """values: at least one."""
    return Measurement(
        contender,
        unit,
        p50=quantile(values, 0.5),
        p10=quantile(values, 0.1),
        p90=quantile(values, 0.9),
        samples=len(values),
        safe=safe,
        details=details or {},
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them lies below, without interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def speedup(outcome: Outcome, ours: str, rival: str) -> float | None:
    """How many times better ours is by the medians: 2 is half the time, or twice the throughput.

    None: one of them does not take part.
    """
    found = {measured.contender: measured for measured in outcome.measurements}
    if not {ours, rival} <= found.keys():
        return None
    mine, theirs = found[ours], found[rival]
    return mine.p50 / theirs.p50 if mine.unit.endswith("/s") else theirs.p50 / mine.p50
