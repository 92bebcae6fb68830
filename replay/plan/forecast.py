"""The fallbacks that a tokenizers' pool of another size would have had: the pool's own ledger runs on known times.

Nothing is sent and no memory is allocated. A run says how long each item keeps its place. That time is the same for
every budget, although an item that goes inline takes a little longer to send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

import msgspec
import numpy as np

from tensorferry.codecs.errors import PoolFull
from tensorferry.codecs.pool.ledger import Grant, Ledger

MIB = 1 << 20
MOST_MB = (1 << 20) - 1  #: a proxy's offset is below 1 TiB
_POINTS = 24  #: how many budgets are tried for the curve
_ENDED, _OVERDUE, _CAME = 0, 1, 2  # in this order at one instant: room is made before it is asked for


class Stay(NamedTuple):
    """An item's place in a pool."""

    nbytes: int
    kept_ns: int  #: from when its request asked for room


class Visit(NamedTuple):
    """A request that asks for room for all of its items at once."""

    at_ns: int
    worker: int  #: the tokenizer worker, each with a pool of its own
    stays: tuple[Stay, ...]  #: one for each item that is large enough for a pool


class Rules(msgspec.Struct, frozen=True):
    """The settings of a deployment's tokenizer pools, without their size."""

    workers: int
    slots: int
    wait_ns: int = 0  #: the longest time that a request waits for room; 0: items go inline at once


class Forecast(msgspec.Struct, frozen=True):
    """The outcome of one budget."""

    budget_mb: int
    items: int
    fallbacks: int  #: items that would have gone inline because no pool had room
    peak_nbytes: int  #: the most bytes that would have been lent at once, in all pools together

    @property
    def share(self) -> float:
        return self.fallbacks / self.items if self.items else 0.0


def forecast(visits: Sequence[Visit], rules: Rules, budget_mb: int) -> Forecast:
    """Run the ledger with a budget, in MiB for all workers together. visits: in any order."""
    pools = [_Pool(budget_mb // rules.workers * MIB, rules.slots) for _ in range(rules.workers)]
    waiting: list[deque[tuple[int, Visit]]] = [deque() for _ in pools]
    number = count()
    events: list[tuple[int, int, int, Visit | tuple[int, Grant]]] = []
    events += [(visit.at_ns, _CAME, next(number), visit) for visit in visits]
    heapify(events)
    fallbacks = lent = peak = 0

    def take(visit: Visit, now_ns: int) -> None:
        nonlocal fallbacks, lent, peak
        for stay in visit.stays:
            grant = pools[visit.worker].lend(stay.nbytes)
            if grant is None:
                fallbacks += 1
                continue
            heappush(events, (now_ns + stay.kept_ns, _ENDED, next(number), (visit.worker, grant)))
            lent += grant.nbytes
        peak = max(peak, lent)

    while events:
        now_ns, kind, _, subject = heappop(events)
        if isinstance(subject, Visit):
            line = waiting[subject.worker]
            if kind == _OVERDUE:  # it goes now, unless it has gone before
                overdue = [entry for entry in line if entry[1] is subject]
                for entry in overdue:
                    line.remove(entry)
                    take(subject, now_ns)
            elif not rules.wait_ns or pools[subject.worker].fits(subject):
                take(subject, now_ns)
            else:
                line.append((now_ns, subject))
                heappush(events, (now_ns + rules.wait_ns, _OVERDUE, next(number), subject))
            continue
        worker, grant = subject
        pools[worker].end(grant)
        lent -= grant.nbytes
        for entry in list(waiting[worker]):
            if pools[worker].fits(entry[1]):
                waiting[worker].remove(entry)
                take(entry[1], now_ns)
    return Forecast(budget_mb, sum(len(visit.stays) for visit in visits), fallbacks, peak)


class _Pool:
    """A ledger whose leases `end` ends, since nobody acknowledges them."""

    def __init__(self, nbytes: int, slots: int) -> None:
        self._ledger = Ledger(nbytes, slots)
        self._ready = np.zeros(slots, np.uint32)
        self._ended = 0

    def lend(self, nbytes: int) -> Grant | None:
        self._reclaim()
        try:
            grant = self._ledger.lend(nbytes)
        except PoolFull:
            return None
        self._ledger.settle(grant)
        return grant

    def fits(self, visit: Visit) -> bool:
        self._reclaim()
        return self._ledger.fits(stay.nbytes for stay in visit.stays)

    def end(self, grant: Grant) -> None:
        self._ready[grant.slot] = grant.generation
        self._ended += 1

    def _reclaim(self) -> None:
        while self._ended:
            self._ended -= len(self._ledger.reclaim(self._ready, {}))


class Plan(msgspec.Struct, frozen=True):
    """The budgets that are enough, in MiB for all workers together."""

    curve: list[Forecast]  #: by budget, from one that holds the largest item to one that holds everything
    under_1_percent_mb: int | None  #: the least with fallbacks under 1 %; None: slots run out first
    under_01_percent_mb: int | None  #: the least with fallbacks under 0.1 %
    peak_nbytes: int  #: the most bytes lent at once if there is room for everything


def plan(visits: Sequence[Visit], rules: Rules) -> Plan:
    """Try budgets, and find the least ones by bisection.

    Bisection assumes that a larger pool never has more fallbacks. That holds but for a few items, since the places of
    free holes depend on earlier items.
    """
    most = forecast(visits, rules, MOST_MB)  # a ledger of any size costs nothing
    peak_nbytes = most.peak_nbytes
    largest = max((stay.nbytes for visit in visits for stay in visit.stays), default=0)
    least_mb = rules.workers * max(1, -(-largest // MIB))
    enough_mb = max(least_mb, -(-peak_nbytes // MIB))
    while enough_mb < MOST_MB and forecast(visits, rules, enough_mb).fallbacks > most.fallbacks:  # holes, and workers
        enough_mb = min(MOST_MB, enough_mb + -(-enough_mb // 8))
    tried = {budget_mb: forecast(visits, rules, budget_mb) for budget_mb in _spread(least_mb, enough_mb)}

    def least(share: float) -> int | None:
        good = [budget_mb for budget_mb, found in tried.items() if found.share < share]
        if not good:
            return None
        high = min(good)
        low = max((budget_mb for budget_mb in tried if budget_mb < high), default=high - 1)
        while high - low > 1:
            middle = (low + high) // 2
            tried[middle] = forecast(visits, rules, middle)
            low, high = (low, middle) if tried[middle].share < share else (middle, high)
        return high

    one, tenth = least(0.01), least(0.001)
    return Plan([tried[budget_mb] for budget_mb in sorted(tried)], one, tenth, peak_nbytes)


def _spread(least_mb: int, most_mb: int) -> list[int]:
    """Return budgets with equal ratios between them, both ends included."""
    spread: list[int] = np.unique(np.geomspace(least_mb, most_mb, _POINTS).round().astype(int)).tolist()
    return spread
