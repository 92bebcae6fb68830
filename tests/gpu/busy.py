"""Work for a GPU that takes a given time."""

from __future__ import annotations

from typing import Any

CYCLES_A_MS = 2_000_000  #: at most; H200: 1.98 GHz


def keep_busy(torch: Any, ms: float) -> None:
    """Queue work of about this many milliseconds on torch's current stream; no host waits for it."""
    torch.cuda._sleep(int(ms * CYCLES_A_MS))
