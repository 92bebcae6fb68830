"""Arguments of the library's calls, checked before anything is taken. A wrong one is a mistake in the caller's program,
so what is raised is Python's own, and no FerryError."""

from __future__ import annotations

from operator import index

MOST_S = 1e9  #: of any time: longer than a process lives, and a clock's nanoseconds can still be added to it


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
    """A time, from 0 to MOST_S. Raises as `whole`."""
    if not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: a number of seconds is needed")
    if not 0 <= value <= MOST_S:  # nor is "not a number"
        raise ValueError(f"{name}={value!r}: from 0 to {MOST_S:.0e} seconds are possible")
    return value
