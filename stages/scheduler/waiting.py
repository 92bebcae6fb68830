"""What waits for an engine: by priority, and inside one priority fair between tenants by the work that they ask for.

Self-clocked fair queueing: each tenant's requests lie on a line of virtual time, as long as their costs, and the one
that ends first is next. The present is where the request that was taken last ends. A tenant that has nothing waiting
saves nothing up: its next request starts at the present.

Source: Golestani: A Self-Clocked Fair Queueing Scheme for Broadband Applications (INFOCOM 1994).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Cost(NamedTuple):
    """What a request asks of an engine."""

    tokens: int  #: of the prompt, and of the answer as long as it may become
    patches: int = 0  #: of its items

    @property
    def work(self) -> int:
        """What counts between tenants. At least 1, so that nothing is free."""
        return max(1, self.tokens + self.patches)


@dataclass(order=True, slots=True)
class _Entry(Generic[T]):
    priority: int
    end: int
    number: int  #: of equal ones the first that came
    tenant: str = field(compare=False)
    cost: Cost = field(compare=False)
    item: T = field(compare=False)


class Waiting(Generic[T]):
    """A queue of requests. `O(log n)` to put and to take; it knows nothing of engines, clocks or sockets."""

    def __init__(self) -> None:
        self._heap: list[_Entry[T]] = []
        self._numbers = count()
        self._now: dict[int, int] = {}  #: virtual time of each priority
        self._ends: dict[tuple[int, str], int] = {}  #: where the line of each tenant ends that has something waiting

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._heap)

    def put(self, item: T, *, priority: int = 0, tenant: str = "", cost: Cost) -> None:
        start = max(self._now.get(priority, 0), self._ends.get((priority, tenant), 0))
        end = self._ends[priority, tenant] = start + cost.work
        heappush(self._heap, _Entry(priority, end, next(self._numbers), tenant, cost, item))

    def first(self) -> tuple[T, Cost] | None:
        """The next one, which stays; None: nothing waits."""
        return (self._heap[0].item, self._heap[0].cost) if self._heap else None

    def take(self) -> T:
        """The next one. Raises IndexError when nothing waits."""
        entry = heappop(self._heap)
        self._now[entry.priority] = entry.end
        if self._ends[entry.priority, entry.tenant] == entry.end:  # nothing else of this tenant's waits
            del self._ends[entry.priority, entry.tenant]
        if not self._heap:
            self._now.clear()
        return entry.item

    def drop(self, gone: Callable[[T], bool]) -> int:
        """Forget those that `gone` says, and what they would have cost; how many."""
        before, kept = len(self._heap), [entry for entry in self._heap if not gone(entry.item)]
        if len(kept) == before:
            return 0
        self._heap = kept
        heapify(self._heap)
        self._ends = {}
        for entry in self._heap:
            key = (entry.priority, entry.tenant)
            self._ends[key] = max(entry.end, self._ends.get(key, 0))
        return before - len(self._heap)
