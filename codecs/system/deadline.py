"""A moment by which a wait ends."""

from __future__ import annotations

import time


class Deadline:
    """Begins to run when it is made."""

    def __init__(self, wait_s: float) -> None:
        self._at_s = time.monotonic() + wait_s

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self._at_s - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.left_s == 0.0
