"""Requests that are over here, remembered for a while, so that what still arrives of them is dropped."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 65_536


class Tombstones:
    """The last `REMEMBERED` requests that ended, with the attempt that was the last."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[bytes, int] = OrderedDict()

    def add(self, request: bytes, attempt: int) -> None:
        """This attempt, and every older one, is over."""
        self._attempts[request] = max(attempt, self._attempts.get(request, attempt))
        self._attempts.move_to_end(request)
        if len(self._attempts) > REMEMBERED:
            self._attempts.popitem(last=False)

    def covers(self, request: bytes, attempt: int) -> bool:
        return attempt <= self._attempts.get(request, -1)
