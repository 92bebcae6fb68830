"""Requests that have finished here, remembered for a while, so that late messages of them are dropped."""

from __future__ import annotations

import time
from collections import OrderedDict

REMEMBERED = 65_536


class FinishedRequests:
    """The requests that finished lately, `REMEMBERED` of them at most, each with its last attempt."""

    def __init__(self, request_timeout_s: float) -> None:
        """request_timeout_s: no request has a later deadline. Twice that time is remembered, because a later message
        is known as late by its deadline. Without an end the memory would grow for minutes, and look like a leak."""
        self._for_s = 2 * request_timeout_s
        self._attempts: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # and when it finished, the oldest first

    def __len__(self) -> int:
        return len(self._attempts)

    def add(self, request: bytes, attempt: int) -> None:
        """This attempt, and every older one, has finished."""
        now = time.monotonic()
        self._attempts[request] = max(attempt, self._last(request)), now
        self._attempts.move_to_end(request)
        while len(self) > REMEMBERED or next(iter(self._attempts.values()))[1] < now - self._for_s:
            self._attempts.popitem(last=False)

    def is_finished(self, request: bytes, attempt: int) -> bool:
        """Whether this attempt, or a later one, finished lately."""
        return attempt <= self._last(request)

    def _last(self, request: bytes) -> int:
        known = self._attempts.get(request)
        return -1 if known is None else known[0]
