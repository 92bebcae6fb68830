"""How long a tokenizer's requests took lately, for its heartbeats."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

WINDOW_S = 60.0
MOST = 1024  #: requests that are looked at; of more in the window, the latest
LOOK_S = 0.25  #: for so long the numbers of a look hold: many clients may ask


class Latencies:
    """Of the requests answered with a result within `WINDOW_S`. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, float]] = deque(maxlen=MOST)  # (when it was answered, ms)
        self._numbers: Mapping[str, float] = {}
        self._looked_s = -math.inf

    def add(self, now_s: float, ms: float) -> None:
        """A request was answered after so long."""
        self._taken.append((now_s, ms))

    def numbers(self, now_s: float) -> Mapping[str, float]:
        """The gauges: median and 99th percentile by nearest rank, each a latency that there was, 0 where there was
        none; and of how many requests. Of fewer than 100 the p99 is the longest."""
        if now_s - self._looked_s >= LOOK_S:
            while self._taken and now_s - self._taken[0][0] > WINDOW_S:
                self._taken.popleft()
            sizes = sorted(ms for _, ms in self._taken)
            self._numbers = {
                "latency_p50_ms": _ranked(sizes, 0.5),
                "latency_p99_ms": _ranked(sizes, 0.99),
                "latency_requests": len(sizes),
            }
            self._looked_s = now_s
        return self._numbers


def _ranked(ordered: list[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
