"""Arguments of the library's calls, checked before anything is taken. A wrong one is a mistake in the caller's program,
so what is raised is Python's own, and no FerryError."""

from __future__ import annotations

from math import isfinite
from operator import index


def whole(name: str, value: object, least: int, most: int) -> int:
    """A whole number from least to most. Raises TypeError or ValueError, with name, value and what is wanted."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}={value!r}: a whole number from {least} to {most} is needed") from None
    if not least <= number <= most:
        raise ValueError(f"{name}={value!r}: from {least} to {most} is possible")
    return number


def seconds(name: str, value: object) -> float:
    """A time. Raises as `whole`."""
    if not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: a number of seconds is needed")
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value!r}: 0 or more seconds are possible")
    return value
