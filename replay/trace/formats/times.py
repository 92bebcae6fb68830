"""The field and the unit of a row's time: those of its format, those of --keys, or the unit that the numbers show."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import msgspec

from tensorferry.pipeline.recording.request import BrokenRow
from tensorferry.replay.trace.exact_numbers import NS, Number, checked, nanoseconds, number, wall_clock

#: Fields of OpenAI's objects, in seconds since 1970.
CREATED = tuple(f"{place}{key}" for place in ("", "body.", "response.body.") for key in ("created", "created_at"))
UNITS_NS = {"s": NS, "ms": NS // 1000, "us": 1000, "ns": 1}
#: The seconds since 1970 in which a trace may have been recorded: 2001 to 2128.
_EPOCH_S = range(10**9, 5 * 10**9)
_DAY_S = 86_400


class Times(msgspec.Struct, frozen=True):
    """The place and the unit of the times in a trace's rows."""

    field: str  #: a key; or `a.b`, the key b of the object a
    unit_ns: int | None  #: of a number; None: an ISO date
    wall: bool = False  #: whether it counts from 1970
    spelt: bool = True  #: whether a number may stand in a string
    decided: str = ""  #: a sentence, if the numbers decided the unit because the trace does not say it

    def value(self, row: dict[str, Any]) -> object:
        """Return the time of a row as written; None if it has none."""
        return value_at(row, self.field)

    def at_ns(self, row: dict[str, Any]) -> int:
        """Return the time of a row. Raises BrokenRow: missing, not_a_number, bad_time, negative, out_of_range."""
        value = self.value(row)
        if self.unit_ns is None:
            at_ns, zoned = wall_clock(str(value or ""), self.field)
            if not zoned:
                raise BrokenRow("bad_time", f"{self.field} is {str(value)[:40]!r}, which names no zone")
            return at_ns
        if self.spelt and isinstance(value, str):  # RAGPulse's seconds are strings
            value = number(value, self.field)
        return moment(value, self.field, self.unit_ns)


class JsonRows:
    """The common part of formats with one JSON object a line."""

    name: str
    first_line = 1

    def __init__(self, times: Times | None) -> None:
        """times: the place of a row's time; None: rows have no times."""
        self._times = times
        self.timed, self.wall = times is not None, times is not None and times.wall
        self.decided = times.decided if times is not None else ""

    def _at_ns(self, row: dict[str, Any]) -> int:
        """Return the time of a row, or 0. Raises BrokenRow as `Times.at_ns` does."""
        return self._times.at_ns(row) if self._times is not None else 0


def moment(value: object, field: str, unit_ns: int) -> int:
    """Convert a time with `nanoseconds`. If it is out of range, the error also suggests another unit."""
    try:
        return nanoseconds(value, field, unit_ns)
    except BrokenRow as problem:
        if problem.reason != "out_of_range":
            raise
        raise BrokenRow(problem.reason, f"{problem.problem}; --keys time={field},unit=UNIT says another unit") from None


def value_at(row: dict[str, Any], field: str) -> object:
    """Return the value at a key, or at nested keys."""
    if field in row or "." not in field:
        return row.get(field)
    value: object = row
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def decided(times: Times, rows: Iterable[dict[str, Any]]) -> Times:
    """Decide the unit by the first rows.

    If the numbers are dates since 2001 in one unit, they have that unit, since in the format's unit they would be
    offsets of weeks or of millennia. This holds only if they are less than a day apart on average. Numbers farther
    apart are offsets in the format's unit, and so are numbers that are dates in several units. In both cases `decided`
    says so.
    """
    values = [value for row in rows if (value := _number(times.value(row))) is not None]
    if times.unit_ns is None or not values:
        return times
    gap = abs(Decimal(values[-1]) - Decimal(values[0])) / max(1, len(values) - 1)
    remedy = f"--keys time={times.field},unit=UNIT says otherwise"
    sized = {unit: unit_ns for unit, unit_ns in UNITS_NS.items() if all(_is_date(value, unit_ns) for value in values)}
    for unit, unit_ns in sized.items():
        if unit_ns == times.unit_ns:
            return msgspec.structs.replace(times, wall=True)
        if gap * unit_ns < _DAY_S * NS:
            sentence = f"{times.field} is taken as {unit} since 1970, for its size ({values[0]}) and its spacing"
            return msgspec.structs.replace(times, unit_ns=unit_ns, wall=True, decided=f"{sentence}; {remedy}")
    usual = next((unit for unit, unit_ns in UNITS_NS.items() if unit_ns == times.unit_ns), "")
    doubt = ""
    if sized:
        doubt = f"although its size ({values[0]}) is that of a date in {next(iter(sized))}, for its spacing"
    elif all(any(_is_date(value, unit_ns) for unit_ns in UNITS_NS.values()) for value in values):
        doubt = f"although its sizes ({min(values)} to {max(values)}) are those of dates in several units"
    if usual and doubt and not times.wall:
        return msgspec.structs.replace(times, decided=f"{times.field} is taken as {usual}, {doubt}; {remedy}")
    return times


def _is_date(value: Number, unit_ns: int) -> bool:
    """Return whether so many units after 1970 are within the years of recorded traces."""
    return _EPOCH_S.start * NS // unit_ns <= value < _EPOCH_S.stop * NS // unit_ns


def _number(value: object) -> Number | None:
    try:
        return checked(number(value, "") if isinstance(value, str) else value, "")
    except BrokenRow:
        return None
