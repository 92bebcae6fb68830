"""A broker's places for conversations, and who gives one up when all are taken.

A process attaches a pool in one conversation, so one that has several places and says nothing is stuck, or means harm.
When no place is free, the longest silent conversation of the process that has the most is ended. A conversation that is
its process's only one keeps its place until its deadline: it may be mapping a large pool.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SILENT_S = 0.5  #: from then on a conversation counts as silent; mapping a large pool takes a tenth of a second
DISTRUST_S = 5.0  #: for so long a process that had to give up a place gets no second one while all are taken


class Place:
    """One conversation's, of the process `pid`; 0: it cannot be seen from this PID namespace."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid, self.heard_at = pid, now
        self.given_up = False  #: to somebody else
        self._deadline: asyncio.Timeout | None = None

    @contextmanager
    def ends(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """The conversation is the block, and can be ended within it."""
        self._deadline = deadline
        try:
            yield
        finally:
            self._deadline = None

    def hear(self) -> None:
        """The peer has said something."""
        self.heard_at = asyncio.get_running_loop().time()

    @property
    def can_end(self) -> bool:
        return self._deadline is not None and not self.given_up

    def end(self) -> None:
        """As if its deadline were over."""
        assert self._deadline is not None
        self.given_up = True
        self._deadline.reschedule(0.0)


class Places:
    """See the module."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: set[Place] = set()
        self._distrusted: dict[int, float] = {}  # until when a process that had to give up a place gets no second one
        self._freed = asyncio.Event()

    async def take(self, pid: int) -> Place | None:
        """A place for a conversation with a process, as soon as there is one. None: it is to be refused, as all are
        taken, some by that process, and it has let one fall silent a moment ago."""
        clock = asyncio.get_running_loop().time
        while len(self._taken) >= self._most:
            if self._distrusted.get(pid, 0.0) > clock() and any(place.pid == pid for place in self._taken):
                return None
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._make_room(clock())):
                    await self._freed.wait()
        place = Place(pid, clock())
        self._taken.add(place)
        return place

    def give_back(self, place: Place) -> None:
        self._taken.discard(place)
        self._freed.set()

    def _make_room(self, now: float) -> float | None:
        """End a conversation, if there is one to be ended; else after how many seconds there may be. None: it is for
        the others to end."""
        if any(place.given_up for place in self._taken):  # it ends in a moment
            return None
        count = Counter(place.pid for place in self._taken)
        several = [place for place in self._taken if count[place.pid] > 1]
        silent = [place for place in several if place.can_end and now - place.heard_at >= SILENT_S]
        if not silent:  # also where none has begun yet
            return min((place.heard_at + SILENT_S - now for place in several), default=None)
        chosen = max(silent, key=lambda place: (count[place.pid], now - place.heard_at))
        self._distrusted = {pid: until for pid, until in self._distrusted.items() if until > now}
        self._distrusted[chosen.pid] = now + DISTRUST_S
        chosen.end()
        return None
