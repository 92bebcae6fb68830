"""Conversations in a replay: which request follows which, and when it is due.

A recorded conversation can be replayed in three ways. No way suits every question, so a run says which one it used:

| mode    | a later turn is due                                         | keeps                              |
|---------|-------------------------------------------------------------|------------------------------------|
| `clock` | at its recorded time, independent of the turn before        | the recorded load                  |
| `wait`  | at its recorded time, but not before the answer it replies to | the load where answers keep up   |
| `think` | its user's think time after the answer it replies to        | the users, who wait for slow ones  |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from tensorferry.pipeline.recording.request import Request
from tensorferry.replay.run.schedule import Speed

Mode = Literal["clock", "wait", "think"]
MODES: tuple[Mode, ...] = get_args(Mode)


def natural_mode(requests: Sequence[Request]) -> Mode:
    """Return the mode that suits a trace: `think` if turns have a delay instead of a time, else `clock`."""
    return "think" if any(request.think_ns is not None for request in requests) else "clock"


class Turns:
    """Due times of the requests of one run, in nanoseconds from its start."""

    def __init__(self, requests: Sequence[Request], mode: Mode, speed: Speed) -> None:
        """requests: in the order of time."""
        self.mode = mode
        self._requests, self._speed = requests, speed
        self._first_ns = requests[0].at_ns if requests else 0
        self._before: list[int | None] = [None] * len(requests)
        self._after: dict[int, list[int]] = {}
        if mode != "clock":
            self._link()

    @property
    def starting(self) -> list[int]:
        """The requests that depend on the clock alone, in the order in which they are due."""
        return [index for index, before in enumerate(self._before) if before is None]

    @property
    def following(self) -> int:
        """How many requests depend on the one before."""
        return len(self._before) - len(self.starting)

    @property
    def guessed(self) -> int:
        """How many of them have no recorded think time, in the mode `think`. The gap since the turn before takes its
        place, which includes the answer to that turn."""
        if self.mode != "think":
            return 0
        pairs = zip(self._requests, self._before, strict=True)
        turns = ((turn, self._requests[before]) for turn, before in pairs if before is not None)
        return sum(turn.think_ns is None and earlier.took_ns is None for turn, earlier in turns)

    def clock_ns(self, index: int) -> int:
        """Return when a request is due by its recorded time alone."""
        return self._speed.due_ns(self._requests[index].at_ns - self._first_ns)

    def answered(self, index: int, done_ns: int) -> list[tuple[int, int]]:
        """Return (due, request) of those that follow a request, which was answered, or failed, at `done_ns`."""
        return [(self._due_ns(later, index, done_ns), later) for later in self._after.get(index, ())]

    def _due_ns(self, index: int, before: int, done_ns: int) -> int:
        if self.mode == "wait":
            return max(done_ns, self.clock_ns(index))
        turn, earlier = self._requests[index], self._requests[before]
        think_ns = turn.think_ns
        if think_ns is None:
            think_ns = max(0, turn.at_ns - earlier.at_ns - (earlier.took_ns or 0))
        return done_ns + self._speed.due_ns(think_ns)

    def _link(self) -> None:
        by_id: dict[str, int] = {}
        by_session: dict[str, int] = {}
        for index, request in enumerate(self._requests):
            before = by_id.get(request.parent) if request.parent else by_session.get(request.session)
            if before is not None:
                self._before[index] = before
                self._after.setdefault(before, []).append(index)
            if request.id:
                by_id[request.id] = index
            if request.session:
                by_session[request.session] = index
