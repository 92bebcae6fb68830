"""How long to wait before what has failed is tried again."""

from __future__ import annotations


def backoff_s(first_s: float, longest_s: float, waits: int) -> float:
    """Seconds: `first_s`, doubled for each of the `waits` before this one (0 or more), and never above `longest_s`."""
    return min(first_s * 2.0 ** min(waits, 64), longest_s)  # from 2 ** 1024 on no float is large enough
