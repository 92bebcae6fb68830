"""The load of a tokenizer worker, in requests, items and bytes, and its limits; and the rate of each client.

These limits bound the whole pipeline: encoders and schedulers hold only what tokenizers have sent them. Beyond a limit,
the client gets `busy` with the limit's key and a time to try again.
"""

from __future__ import annotations

import math

from tensorferry.codecs.errors import FerryError
from tensorferry.pipeline.deployment.spec import MIB, LimitsSpec

RETRY_MS = 200  #: after which a client that got `busy` tries again, unless a better time is known
BURST_S = 1.0  #: a client that was quiet may send the requests of so long at once


class Overload(FerryError):
    """There is no room for another request now; `reason` names the limit."""

    def __init__(self, reason: str, retry_ms: int = RETRY_MS) -> None:
        super().__init__(reason, retry_ms)
        self.reason, self.retry_ms = reason, retry_ms

    def __str__(self) -> str:
        return self.reason


class Load:
    """The load of one worker. A request that is alone always has room: other limits bound the size of one request."""

    def __init__(self, limits: LimitsSpec) -> None:
        self._limits = limits
        self._taken: dict[object, tuple[int, int]] = {}
        self.items = self.nbytes = 0

    def take(self, key: object, items: int, nbytes: int) -> None:
        """Add a request under a key of its own. nbytes: of its message. Raises Overload, and adds nothing then."""
        limits = self._limits
        if len(self._taken) >= limits.in_flight_requests:
            raise Overload(f"{len(self._taken)} requests in flight (limits.in_flight_requests)")
        self._check(bool(self._taken), items, nbytes)
        self._taken[key] = items, nbytes
        self.items += items
        self.nbytes += nbytes

    def grow(self, key: object, nbytes: int) -> None:
        """Add what a request needs beyond its message: its tensors. Raises Overload, as `take`."""
        self._check(len(self._taken) > 1, 0, nbytes)
        items, known = self._taken[key]
        self._taken[key] = items, known + nbytes
        self.nbytes += nbytes

    def give_back(self, key: object) -> None:
        """Remove a request."""
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

    Source: ITU-T I.371, annex A, in its virtual scheduling form. A client that was quiet for `BURST_S` is
    forgotten, because its number says nothing more.
    """

    def __init__(self, per_s: int | None) -> None:
        """per_s: None for no limit."""
        self._per_s = per_s
        self._due: dict[object, float] = {}  # client -> when its burst is whole again
        self._most = 1024  # entries, before quiet clients are forgotten

    def __len__(self) -> int:
        """How many clients it remembers."""
        return len(self._due)

    def take(self, client: object, now: float) -> None:
        """Count a request. now: monotonic seconds. Raises Overload with the time to wait, and counts nothing then."""
        if self._per_s is None:
            return
        due = max(self._due.get(client, now), now) + 1 / self._per_s
        early_s = due - now - BURST_S
        if early_s > 1e-6:  # a rounding error is no reason
            reason = f"this client sends more than {self._per_s} requests a second (limits.client_requests_per_s)"
            raise Overload(reason, math.ceil(early_s * 1000))
        self._due[client] = due
        if len(self._due) > self._most:
            self._due = {client: due for client, due in self._due.items() if due > now}
            self._most = max(1024, 2 * len(self._due))
