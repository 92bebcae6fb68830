"""Exact numbers and times of a trace, which never pass through a float.

An epoch time loses its microseconds as a float (the step of a double is 2^-12 ms at today's epoch in milliseconds), so
times go from their text to integer nanoseconds in one step.
"""

from __future__ import annotations

import re
from datetime import date
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from functools import lru_cache
from typing import ClassVar

from tensorferry.pipeline.recording.request import BrokenRow

NS = 1_000_000_000
_MAX_DIGITS = 19  # digits before the point: above every time and count, below anything costly to expand
_MAX_INT = 10**_MAX_DIGITS
_MAX_NS = 1 << 63
_EPOCH = date(1970, 1, 1).toordinal()
_WESTMOST, _EASTMOST = -12 * 60, 14 * 60  # minutes: the offsets of the IANA time zone database since 1970
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
_WALL = re.compile(
    r"(\d{4}-\d\d-\d\d)[ Tt](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:([Zz])|([+-])(\d\d):?(\d\d))?", re.ASCII
)

Number = int | Decimal


def number(cell: str, name: str) -> Number:
    """Read the number of a CSV cell. Raises BrokenRow: missing, not_a_number."""
    cell = cell.strip()
    if len(cell) < _MAX_DIGITS and cell.isascii() and cell.isdigit():
        return int(cell)
    if not cell:
        raise BrokenRow("missing", f"{name} is empty")
    if not _NUMBER.fullmatch(cell):
        raise BrokenRow("not_a_number", f"{name} is {cell[:40]!r}, not a number")
    return Decimal(cell)


def whole(value: object, name: str, most: int, *, least: int = 0) -> int:
    """Check a count, which may be written as `4808`, `4808.0` or `4.808e3`.

    Raises BrokenRow: missing, not_a_number, not_whole, negative, out_of_range.
    """
    if type(value) is int and least <= value <= most:
        return value
    exact = checked(value, name)
    if exact < 0:
        raise BrokenRow("negative", f"{name} is {exact}")
    count = int(exact)
    if count != exact:
        raise BrokenRow("not_whole", f"{name} is {exact}, not a whole number")
    if not least <= count <= most:
        raise BrokenRow("out_of_range", f"{name} is {count}; it must be within {least} and {most}")
    return count


def nanoseconds(value: object, name: str, unit_ns: int) -> int:
    """Convert a time in units to nanoseconds, exactly. Parts of a nanosecond are rounded half to even.

    Raises BrokenRow: missing, not_a_number, negative, out_of_range.
    """
    exact = checked(value, name)
    if exact < 0:
        raise BrokenRow("negative", f"{name} is {exact}")
    if isinstance(exact, int):
        ns = exact * unit_ns
    else:
        ns = int((exact * unit_ns).to_integral_value(ROUND_HALF_EVEN))
    if ns >= _MAX_NS:
        raise BrokenRow("out_of_range", f"{name} is {exact}, which is more than 292 years")
    return ns


def checked(value: object, name: str) -> Number:
    """Return the value if it is a finite number that is not too large to expand."""
    if value is None:
        raise BrokenRow("missing", f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise BrokenRow("not_a_number", f"{name} is {str(value)[:40]!r}, not a number")
    if isinstance(value, Decimal) and not value.is_finite():
        raise BrokenRow("not_a_number", f"{name} is {value}, not a number")
    if value.adjusted() >= _MAX_DIGITS if isinstance(value, Decimal) else abs(value) >= _MAX_INT:
        spelt = str(value) if isinstance(value, Decimal) else f"{Decimal(value):.3E}"  # str refuses a very long int
        problem = f"{name} is {spelt[:40]}; it may have {_MAX_DIGITS} digits before the point at most"
        raise BrokenRow("out_of_range", problem)
    return value


def decimal(literal: str) -> Decimal:
    """Read a JSON number with a point or an exponent. A number that no Decimal can hold becomes NaN, which `checked`
    refuses, since a hook that raises would hide the decoder's own message."""
    try:
        return Decimal(literal)
    except InvalidOperation:
        return Decimal("NaN")


def wall_clock(text: str, name: str) -> tuple[int, bool]:
    """Return the nanoseconds since 1970 of an ISO time, and whether it names its zone.

    Reads the forms of the Azure traces: `2023-11-16 18:17:03.9799600`, `2024-05-12 00:00:00+00:00`,
    `2024-10-15T12:00:00.269Z`. A time without a zone is read as UTC, since in the local zone the hour in which clocks
    go back would occur twice. Raises BrokenRow: missing, bad_time.
    """
    text = text.strip()
    if not text:
        raise BrokenRow("missing", f"{name} is empty")
    match = _WALL.fullmatch(text)
    if match is None:
        raise BrokenRow("bad_time", f"{name} is {text[:40]!r}, not a time such as 2024-10-15T12:00:00.269Z")
    day, hour, minute, second, fraction, utc, sign, zone_hour, zone_minute = match.groups()
    if int(hour) > 23 or int(minute) > 59 or int(second) > 59:
        raise BrokenRow("bad_time", f"{name} is {text!r}: no such time of day")
    try:
        days = _days(day)
    except ValueError:
        raise BrokenRow("bad_time", f"{name} is {text!r}: no such day") from None
    seconds = ((days * 24 + int(hour)) * 60 + int(minute)) * 60 + int(second)
    if sign:
        east = (int(zone_hour) * 60 + int(zone_minute)) * (1 if sign == "+" else -1)
        if int(zone_minute) > 59 or not _WESTMOST <= east <= _EASTMOST:
            problem = f"{name} is {text!r}: no such time zone; offsets are minutes below 60, from -12:00 to +14:00"
            raise BrokenRow("bad_time", problem)
        seconds -= east * 60
    return seconds * NS + (int(fraction.ljust(9, "0")) if fraction else 0), bool(utc or sign)


class WallClocks:
    """A fast `wall_clock` for millions of times, most of which have the minute and the form of the one before."""

    _SECONDS: ClassVar = {f"{second:02}": second * NS for second in range(60)}
    _SCALES = tuple(10 ** (9 - digits) for digits in range(10))

    def __init__(self, name: str) -> None:
        self._name = name
        self._minute, self._minute_ns = "", 0  #: of the last time read in full: `2023-11-16 18:17:`
        self._zone, self._zoned = "", False  #: the text after its seconds, and whether that is a zone

    def read(self, text: str) -> tuple[int, bool]:
        """Read a time, as `wall_clock` does."""
        if text[:17] == self._minute:
            second_ns = self._SECONDS.get(text[17:19])
            if second_ns is not None:
                end = len(text) - len(self._zone)
                fraction = text[20:end]
                if (
                    text[19:20] == "."
                    and text[end:] == self._zone
                    and len(fraction) < 10
                    and fraction.isdigit()
                    and fraction.isascii()
                ):
                    at_ns = self._minute_ns + second_ns + int(fraction) * self._SCALES[len(fraction)]
                    return at_ns, self._zoned
        at_ns, zoned = wall_clock(text, self._name)
        match = _WALL.fullmatch(text)
        if match is not None and match[5]:
            second_ns = self._SECONDS[match[4]] + int(match[5].ljust(9, "0"))
            self._minute, self._minute_ns = text[:17], at_ns - second_ns
            self._zone, self._zoned = text[match.end(5) :], zoned
        return at_ns, zoned


@lru_cache(maxsize=64)  # a trace has few days and millions of rows
def _days(day: str) -> int:
    return date.fromisoformat(day).toordinal() - _EPOCH


def wall_text(at_ns: int) -> str:
    """Write a time of `wall_clock` in ISO form for people, without a zone, since the trace may have had none."""
    seconds, fraction = divmod(at_ns, NS)
    days, seconds = divmod(seconds, 86_400)
    hours, seconds = divmod(seconds, 3600)
    minutes, seconds = divmod(seconds, 60)
    day = date.fromordinal(days + _EPOCH).isoformat()
    return f"{day} {hours:02}:{minutes:02}:{seconds:02}" + (f".{fraction:09}".rstrip("0") if fraction else "")
