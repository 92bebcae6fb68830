"""Requests that are over here, remembered for a while, so that what still arrives of them is dropped."""

from __future__ import annotations

import time
from collections import OrderedDict

REMEMBERED = 65_536


class Tombstones:
    """The requests that ended lately, `REMEMBERED` of them at most, with the attempt that was the last."""

    def __init__(self, request_timeout_s: float) -> None:
        """request_timeout_s: no request has a later deadline, so twice that is remembered: what comes still later is
        late whoever remembers it. Without an end the books would grow for minutes, and look like a leak."""
        self._for_s = 2 * request_timeout_s
        self._attempts: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # and when it ended, the oldest first

    def __len__(self) -> int:
        return len(self._attempts)

    def add(self, request: bytes, attempt: int) -> None:
        """This attempt, and every older one, is over."""
        now = time.monotonic()
        self._attempts[request] = max(attempt, self._last(request)), now
        self._attempts.move_to_end(request)
        while len(self) > REMEMBERED or next(iter(self._attempts.values()))[1] < now - self._for_s:
            self._attempts.popitem(last=False)

    def covers(self, request: bytes, attempt: int) -> bool:
        return attempt <= self._last(request)

    def _last(self, request: bytes) -> int:
        known = self._attempts.get(request)
        return -1 if known is None else known[0]
