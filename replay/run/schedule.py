"""The schedule of a run: each request has one absolute due time in integer nanoseconds, never a sum of gaps.

Sleeping gap by gap adds every overshoot to all later requests (200 requests a second become 186). A due time that is
computed from the start of the run cannot drift, however long the run is.
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

#: A larger burst is sent in slices, so that answers are received in between.
_SLICE = 64


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast trace time passes: 2 is twice as fast as recorded. `None`: as fast as the deployment takes it."""

    ratio: Fraction | None

    @classmethod
    def parse(cls, text: str) -> Speed:
        """Read `max`, or a decimal number or fraction above 0. Raises ValueError with a sentence."""
        if text.strip().casefold() == "max":
            return cls(None)
        try:
            exact = Fraction(text.strip()) if "/" in text else Decimal(text.strip())
            # Compared before conversion: 1e999999999 is short as a decimal and half a gigabyte as a fraction.
            inside = Decimal("1e-6") <= exact <= 10**6 if isinstance(exact, Decimal) else 1 <= exact * 10**6 <= 10**12
        except (ValueError, ZeroDivisionError, InvalidOperation):
            raise ValueError(f"{text!r} is neither a number, a fraction such as 1/3, nor max") from None
        if not inside:
            raise ValueError(f"{text} is not between 0.000001 and 1000000; give a speed in that range, or max")
        return cls(Fraction(exact))

    def __str__(self) -> str:
        return "max" if self.ratio is None else f"{float(self.ratio):g}"

    def due_ns(self, offset_ns: int) -> int:
        """Return the due time, from the start of the run, of a request `offset_ns` into the trace."""
        if self.ratio is None:
            return 0
        return offset_ns * self.ratio.denominator // self.ratio.numerator


class Clock(Protocol):
    """The clock of a run, and its way to wait."""

    def now_ns(self) -> int: ...

    async def sleep_until(self, at_ns: int) -> None:
        """Return at `at_ns`, or as soon after as the machine can."""


class MonotonicClock:
    """CLOCK_MONOTONIC, which the stages' marks use too. A step of the wall clock does not affect it."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    async def sleep_until(self, at_ns: int) -> None:
        if at_ns > time.monotonic_ns():
            await rings(at_ns)


class Ceiling:
    """A limit on the requests in flight. A request that finds no room waits in a queue."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.in_flight = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def full(self) -> bool:
        return self.limit is not None and self.in_flight >= self.limit

    async def room(self) -> None:
        """Return when one more may be sent. The longest waiter goes first."""
        while self.full:
            room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(room)
            await room

    def enter(self) -> None:
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
        while self._waiters:
            room = self._waiters.popleft()
            if not room.done():  # a cancelled waiter needs no room
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
    """Call `send(index, delayed)` for each request at start_ns + due_ns[index], in order, without regard to earlier
    requests: an open loop.

    due_ns: ascending. Requests due at one instant are sent together. Only the ceiling can hold a request back. It, and
    the requests that come due while it waits, are then `delayed`. Cancel this task to stop sending: it never awaits
    between the decision to send and the send. idle(index, until_ns): is called when request `index` is the next and not
    due before `until_ns`, for work that must not delay a send.
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
