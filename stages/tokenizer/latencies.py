"""How long a tokenizer's requests took lately, for its heartbeats."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

WINDOW_S = 60.0
MOST = 1024  #: requests that count; if the window has more, the latest ones
LOOK_S = 0.25  #: the numbers are computed again after so long, as many clients may ask


class Latencies:
    """The latencies of results within the last `WINDOW_S`. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, float]] = deque(maxlen=MOST)  # (when it was answered, ms)
        self._numbers: Mapping[str, float] = {}
        self._looked_s = -math.inf

    def add(self, now_s: float, ms: float) -> None:
        """Add the latency of a result."""
        self._taken.append((now_s, ms))

    def numbers(self, now_s: float) -> Mapping[str, float]:
        """The gauges: median and 99th percentile by nearest rank (0 without a request), and the number of requests.
        With fewer than 100 requests the p99 is the maximum."""
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
