"""What a tokenizer worker has taken on, and whether it takes more: in requests, items and bytes.

The bounds of the whole pipeline: encoders and schedulers hold what tokenizers have sent them, so the sum over all
workers is the most that can wait anywhere. Beyond them a client hears `busy`, with the key and a time to try again.
"""

from __future__ import annotations

from tensorferry.codecs.errors import FerryError
from tensorferry.pipeline.config import MIB, LimitsSpec


class Overload(FerryError):
    """There is no room for one more request now; `reason` names the limit."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Load:
    """The load of one worker. A request that is alone is always taken: its own limits are others."""

    def __init__(self, limits: LimitsSpec) -> None:
        self._limits = limits
        self._taken: dict[object, tuple[int, int]] = {}
        self.items = self.nbytes = 0

    def take(self, key: object, items: int, nbytes: int) -> None:
        """Book a request under a key of its own. nbytes: of its message. Raises Overload, having booked nothing."""
        limits = self._limits
        if len(self._taken) >= limits.in_flight_requests:
            raise Overload(f"{len(self._taken)} requests in flight (limits.in_flight_requests)")
        self._check(bool(self._taken), items, nbytes)
        self._taken[key] = items, nbytes
        self.items += items
        self.nbytes += nbytes

    def grow(self, key: object, nbytes: int) -> None:
        """Book what a request turns out to need beyond its message: its pixel tensors. Raises Overload, as `take`."""
        self._check(len(self._taken) > 1, 0, nbytes)
        items, known = self._taken[key]
        self._taken[key] = items, known + nbytes
        self.nbytes += nbytes

    def give_back(self, key: object) -> None:
        """A request is over."""
        items, nbytes = self._taken.pop(key)
        self.items -= items
        self.nbytes -= nbytes

    def _check(self, others: bool, items: int, nbytes: int) -> None:
        limits = self._limits
        if others and self.items + items > limits.in_flight_items:
            raise Overload(f"{self.items} items in flight, {items} more would come (limits.in_flight_items)")
        if others and self.nbytes + nbytes > limits.in_flight_mb * MIB:
            mib = f"{self.nbytes / MIB:.1f} MiB in flight, {nbytes / MIB:.1f} more would come"
            raise Overload(f"{mib} (limits.in_flight_mb)")
