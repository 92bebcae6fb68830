"""When each request is due: one absolute time each, in integer nanoseconds, never a sum of gaps.

Sleeping gap by gap adds every overshoot to all that follows (200 requests a second become 186); a due time
that is computed from the start of the run cannot drift, however long the run is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Protocol

from tensorferry.replay.run.timer import rings

#: A burst of more than this many is sent in slices, so that answers are taken in between.
_SLICE = 64


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast trace time passes: 2 is twice as fast as recorded. `None`: as fast as the deployment takes it."""

    ratio: Fraction | None

    @classmethod
    def parse(cls, text: str) -> Speed:
        """`max`, or a decimal number or fraction above 0. Raises ValueError with a sentence."""
        if text.strip().casefold() == "max":
            return cls(None)
        try:
            exact = Fraction(text.strip()) if "/" in text else Decimal(text.strip())
            # Compared as it is: 1e999999999 is short as a decimal and half a gigabyte as a fraction.
            inside = Decimal("1e-6") <= exact <= 10**6 if isinstance(exact, Decimal) else 1 <= exact * 10**6 <= 10**12
        except (ValueError, ZeroDivisionError, InvalidOperation):
            raise ValueError(f"{text!r} is neither a number nor max") from None
        if not inside:
            raise ValueError(f"{text} is not between 0.000001 and 1000000")
        ratio = Fraction(exact)
        return cls(ratio)

    def __str__(self) -> str:
        return "max" if self.ratio is None else f"{float(self.ratio):g}"

    def due_ns(self, offset_ns: int) -> int:
        """From the start of the run, when what lies `offset_ns` into the trace is due."""
        if self.ratio is None:
            return 0
        return offset_ns * self.ratio.denominator // self.ratio.numerator


class Clock(Protocol):
    """The time a run goes by, and how it waits."""

    def now_ns(self) -> int: ...

    async def sleep_until(self, at_ns: int) -> None:
        """Return at `at_ns` or as soon after as the machine manages."""


class MonotonicClock:
    """CLOCK_MONOTONIC, which is what the stages' marks are on too: a step of the wall clock moves nothing."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    async def sleep_until(self, at_ns: int) -> None:
        if at_ns > time.monotonic_ns():
            await rings(at_ns)


class Ceiling:
    """At most `limit` requests in flight. Who comes to a full house waits in line, and that is told apart."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.in_flight = 0
        self._line: deque[asyncio.Future[None]] = deque()

    @property
    def full(self) -> bool:
        return self.limit is not None and self.in_flight >= self.limit

    async def room(self) -> None:
        """Return when one more may be sent; who waits longest is let in first."""
        while self.full:
            room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._line.append(room)
            await room

    def enter(self) -> None:
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
        while self._line:
            room = self._line.popleft()
            if not room.done():  # who was cancelled has left the line
                room.set_result(None)
                break


async def pace(
    due_ns: Sequence[int],
    clock: Clock,
    start_ns: int,
    ceiling: Ceiling,
    send: Callable[[int, bool], None],
    idle: Callable[[int, int], None] = lambda index, until_ns: None,
) -> None:
    """Call `send(index, delayed)` for each request at start_ns + due_ns[index], in order, whatever has become
    of those before it: an open loop.

    due_ns: ascending. What is due at one instant is sent in one go. Only the ceiling can hold a request back;
    then it, and those that came due while it waited, are `delayed`. Cancel it to stop sending: it never
    awaits between the decision to send and the send. idle(index, until_ns): called when that request is the next
    and not due before `until_ns`, for work that would be late later.
    """
    blocked_until_ns = start_ns
    for index, due in enumerate(due_ns):
        due_at = start_ns + due
        if clock.now_ns() < due_at:
            idle(index, due_at)
            await clock.sleep_until(due_at)
        elif index % _SLICE == 0:
            await asyncio.sleep(0)
        delayed = due_at < blocked_until_ns
        if ceiling.full:
            delayed = True
            await ceiling.room()
            blocked_until_ns = clock.now_ns()
        send(index, delayed)
