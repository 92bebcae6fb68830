"""What the books of a pool cost: a lease's whole life, and looking for leases that have ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from benchmarks.results import Outcome, Scale, Verdict, measurement
from tensorferry.codecs.messages import Payload
from tensorferry.codecs.pool.ledger import Ledger, Words
from tensorferry.codecs.pool.lending import RECLAIM_AT_ONCE
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader

GRANULE_NBYTES = 256
SLOTS = 8192
FEW, MANY = 10, 4096  #: leases in flight
HOLES = 2000  #: free ranges


def leases(scale: Scale) -> Outcome:
    """Publish, acknowledge and reclaim: does it matter what else is in the pool?"""
    few, many = "10 in flight", "4,096 in flight"
    one, holes = "one free range", "2,000 free ranges"
    with ExitStack() as undo:
        lives = {
            few: _in_flight(undo, FEW),
            many: _in_flight(undo, scale.of(MANY)),
            one: _with_holes(undo, 1),
            holes: _with_holes(undo, HOLES),
        }
        for life in lives.values():
            life.turn()
        times: dict[str, list[float]] = {name: [] for name in lives}
        for number in range(scale.rounds * 10):
            for name in lives if number % 2 == 0 else reversed(lives):
                times[name].append(lives[name].turn())
    found = Outcome(
        "leases",
        "Publish, acknowledge and reclaim a lease, 64 at a time",
        tuple(measurement(name, "us", values) for name, values in times.items()),
    )
    crowded, holed = found.of(many).p50 / found.of(few).p50, found.of(holes).p50 / found.of(one).p50
    verdicts = (
        Verdict.of("4,096 leases in flight: at most 1.5 times 10", crowded, "<=", 1.5),
        Verdict.of("2,000 free ranges: at most 1.5 times one", holed, "<=", 1.5),
    )
    return Outcome(found.name, found.title, found.measurements, verdicts)


def scan(scale: Scale) -> Outcome:
    """A pass over 4,096 leases that eight consumers have not acknowledged, and one over leases that all have."""
    slots, consumers = 4096, 8
    ledger = Ledger(slots * GRANULE_NBYTES, slots, granule=GRANULE_NBYTES)
    columns = [ledger.admit() for _ in range(consumers)]
    ready = np.zeros(slots, np.uint32)
    for _ in range(slots):
        grant = ledger.lend(GRANULE_NBYTES)
        ledger.dispatch(grant, columns)
        ledger.settle(grant)
        ready[grant.slot] = grant.generation
    nothing = {column: np.zeros(slots, np.uint32) for column in columns}
    everything = {column: ready.copy() for column in columns}
    idle = [_pass_us(ledger, ready, nothing, 0) for _ in range(scale.rounds * 25)]
    busy = [_pass_us(ledger, ready, everything, RECLAIM_AT_ONCE) for _ in range(min(slots // RECLAIM_AT_ONCE, 25))]
    found = (measurement("none free", "us", idle), measurement("64 freed", "us", busy))
    verdicts = (
        Verdict.of("none free: at most 200 us", found[0].p50, "<=", 200),
        Verdict.of("a pass frees at most 64", RECLAIM_AT_ONCE, "<=", 64),
    )
    return Outcome("scan", "Scan 4,096 leases of eight consumers", found, verdicts)


def _pass_us(ledger: Ledger, ready: Words, acks: Mapping[int, Words], ended: int) -> float:
    started = time.perf_counter_ns()
    found = ledger.reclaim(ready, acks, RECLAIM_AT_ONCE)
    elapsed_us = (time.perf_counter_ns() - started) / 1e3
    assert len(found) == ended
    return elapsed_us


class _Life:
    """A pool and its one consumer in this process, and leases in flight, oldest first."""

    def __init__(self, undo: ExitStack) -> None:
        self.pool = undo.enter_context(Pool.create(2 * SLOTS * GRANULE_NBYTES, SLOTS))
        self.reader = undo.enter_context(Reader())
        self.publisher = Publisher(self.pool, inline_below_nbytes=0)
        export, fds = self.pool.export()
        attachment, sent = self.reader.attach(export, fds)
        self._column = self.pool.admit(attachment, sent)
        self.in_flight: deque[Payload] = deque()

    def publish(self) -> None:
        with self.publisher.draft([("uint8", (GRANULE_NBYTES,))]) as draft:
            self.in_flight.append(draft.dispatch(self._column, [])[0])

    def turn(self) -> float:
        """Publish as many as one pass reclaims, acknowledge the oldest, reclaim: microseconds a lease."""
        started = time.perf_counter_ns()
        for _ in range(RECLAIM_AT_ONCE):
            self.publish()
        for _ in range(RECLAIM_AT_ONCE):
            self.reader.acknowledge(self.in_flight.popleft())
        ended = self.pool.reclaim()
        assert ended == RECLAIM_AT_ONCE
        return (time.perf_counter_ns() - started) / 1e3 / RECLAIM_AT_ONCE


def _in_flight(undo: ExitStack, leases: int) -> _Life:
    """A pool with so many leases in flight."""
    life = _Life(undo)
    for _ in range(leases):
        life.publish()
    return life


def _with_holes(undo: ExitStack, free_ranges: int) -> _Life:
    """A pool in which HOLES leases stay out, lying so that there is one free range, or HOLES of a lease's size."""
    life = _in_flight(undo, 2 * HOLES)
    payloads = list(life.in_flight)
    life.in_flight.clear()
    for payload in payloads[1::2] if free_ranges > 1 else payloads[HOLES:]:
        life.reader.acknowledge(payload)
    while life.pool.reclaim():
        pass
    assert life.pool.statistics().free_ranges == free_ranges
    return life
