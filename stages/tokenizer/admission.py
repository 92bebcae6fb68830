"""What a tokenizer worker has taken on, and whether it takes more: in requests, items and bytes.

The bounds of the whole pipeline: encoders and schedulers hold what tokenizers have sent them, so the sum over all
workers is the most that can wait anywhere. Beyond them a client hears `busy`, with the key and a time to try again; so
does one that asks more often than each client may.
"""

from __future__ import annotations

import math

from tensorferry.codecs.errors import FerryError
from tensorferry.pipeline.deployment.spec import MIB, LimitsSpec

RETRY_MS = 200  #: hint to clients that were told `busy`, where nothing better is known
BURST_S = 1.0  #: a client that was quiet may send at once what it may send in so long


class Overload(FerryError):
    """There is no room for one more request now; `reason` names the limit."""

    def __init__(self, reason: str, retry_ms: int = RETRY_MS) -> None:
        super().__init__(reason, retry_ms)
        self.reason, self.retry_ms = reason, retry_ms

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


class Rate:
    """How often each client may submit, by the generic cell rate algorithm: one number a client.

    Source: ITU-T I.371, annex A, in its virtual scheduling form. Clients that were quiet for `BURST_S` are forgotten,
    which changes nothing.
    """

    def __init__(self, per_s: int | None) -> None:
        """per_s: None for as often as they like."""
        self._per_s = per_s
        self._due: dict[object, float] = {}  # client -> when it will have been quiet for long enough to start anew
        self._most = 1024  # entries, before the quiet ones are looked for

    def __len__(self) -> int:
        """How many clients it remembers."""
        return len(self._due)

    def take(self, client: object, now: float) -> None:
        """now: seconds, monotonic. Raises Overload, with the time to wait, having booked nothing."""
        if self._per_s is None:
            return
        due = max(self._due.get(client, now), now) + 1 / self._per_s
        early_s = due - now - BURST_S
        if early_s > 1e-6:  # what is left of rounding is no reason
            reason = f"this client sends more than {self._per_s} requests a second (limits.client_requests_per_s)"
            raise Overload(reason, math.ceil(early_s * 1000))
        self._due[client] = due
        if len(self._due) > self._most:
            self._due = {client: due for client, due in self._due.items() if due > now}
            self._most = max(1024, 2 * len(self._due))
