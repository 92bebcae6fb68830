"""When items come to tokenizers' pools and how long they keep their place: as a run has shown, or by given times.

An item keeps its place until the encoder rank has read it: as the call of the model begins, which copies what it takes
together; or where an item is alone in its call, as that ends, since it is then encoded where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import msgspec

from tensorferry.codecs.errors import ReportError
from tensorferry.pipeline.telemetry.timeline import READ
from tensorferry.replay.plan.forecast import Stay, Visit
from tensorferry.replay.results.result_folder import Row, Run

MS = 1_000_000


class Measured(NamedTuple):
    """What a run says of its items' stays, and of how many it says less than it could."""

    visits: list[Visit]
    items: int  #: that were in a pool, or should have been
    until_collected: int  #: of these, whose encoder has not said when it read them: kept until `collected`, it is taken
    unplanned: int  #: requests that are taken to have asked for room when they were `received`


def measured(run: Run, workers: int) -> Measured:
    """The visits of a run's requests, of those that were ok.

    Where it was not recorded when an item was read, or a request planned, the nearest mark around that counts: the stay
    is then longer than it was, and so is never planned too short. Raises ReportError where the run has no request with
    an item for a pool, or lacks those marks too.
    """
    rows = [row for row in run.ok if any(map(run.pooled, row.items))]
    if not rows:
        raise ReportError(str(run.folder), "none of its requests had an item for a pool, so there is nothing to plan")
    doors = _doors(run.rows, rows, workers)
    visits: list[Visit] = []
    items = until_collected = unplanned = 0
    try:
        for row, worker in zip(rows, doors, strict=True):
            marks = row.marks_ms
            unplanned += "planned" not in marks
            asked_ms = marks["planned"] if "planned" in marks else marks["received"]
            stays: list[Stay] = []
            for item in filter(run.pooled, row.items):
                read = f"{READ}{item.rank}"
                # Embeddings that came with the request are read by the scheduler.
                until_collected += item.rank >= 0 and read not in marks
                left_ms = marks[read] if read in marks else marks["collected"]
                stays.append(Stay(item.nbytes, max(0, round((left_ms - asked_ms) * MS))))
            items += len(stays)
            visits.append(Visit(round(asked_ms * MS), worker, tuple(stays)))
    except KeyError as missing:
        problem = f"it lacks the times of {missing} for line {row.line}; replay again with this version"
        raise ReportError(str(run.folder), problem) from None
    return Measured(visits, items, until_collected, unplanned)


def _doors(sent: Sequence[Row], wanted: Sequence[Row], workers: int) -> Iterable[int]:
    """Which worker each of the wanted rows went to: the client gives a request to the one with the fewest."""
    in_flight: list[list[float]] = [[] for _ in range(workers)]
    chosen: dict[tuple[int, int], int] = {}
    for row in sent:
        for ends in in_flight:
            while ends and ends[0] <= row.sent_ms:
                heappop(ends)
        worker = min(range(workers), key=lambda one: len(in_flight[one]))
        heappush(in_flight[worker], row.done_ms)
        chosen[row.line, row.turn] = worker
    return [chosen[row.line, row.turn] for row in wanted]


# --- by given times ---------------------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """A request as it comes: its items by bytes of features, and by patches."""

    at_ns: int
    request: bytes
    nbytes: tuple[int, ...]
    patches: tuple[int, ...]


class Stations(msgspec.Struct, frozen=True):
    """What serves requests, and how fast: its times grow with patches."""

    workers: int
    threads: int  #: of each worker
    ranks: int
    batch_patches: int
    least_nbytes: int  #: items of fewer bytes go inline by themselves
    processing_ns: float  #: a patch, in one thread
    encoding_ns: float  #: a patch, in one rank


class _Job(NamedTuple):
    """A request's items for one rank."""

    at_ns: int
    arrival: int
    items: tuple[int, ...]


#: (request, patches of its items, ranks) -> the place in `ranks` of each item's owner.
Owners = Callable[[bytes, Sequence[int], Sequence[int]], Sequence[int]]


def given(arrivals: Sequence[Arrival], stations: Stations, owners: Owners) -> list[Visit]:
    """What would come of these requests: first come, first served, by a worker's threads and then by each rank."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.at_ns)
    threads = [[0] * stations.threads for _ in range(stations.workers)]
    for free in threads:
        heapify(free)
    workers: list[int] = []
    jobs: list[list[_Job]] = [[] for _ in range(stations.ranks)]
    for number, arrival in enumerate(ordered):
        worker = min(range(stations.workers), key=lambda one: sum(max(0, at - arrival.at_ns) for at in threads[one]))
        workers.append(worker)
        done_ns = arrival.at_ns
        for patches in arrival.patches:
            end_ns = max(heappop(threads[worker]), arrival.at_ns) + round(patches * stations.processing_ns)
            heappush(threads[worker], end_ns)
            done_ns = max(done_ns, end_ns)
        places = owners(arrival.request, arrival.patches, range(stations.ranks))
        for rank in set(places):
            jobs[rank].append(_Job(done_ns, number, tuple(i for i, place in enumerate(places) if place == rank)))
    read: dict[tuple[int, int], int] = {}
    for of_rank in jobs:
        read |= _read(sorted(of_rank), ordered, stations)
    return [
        Visit(arrival.at_ns, worker, _stays(arrival, number, read, stations.least_nbytes))
        for number, (arrival, worker) in enumerate(zip(ordered, workers, strict=True))
    ]


def _stays(arrival: Arrival, number: int, read: dict[tuple[int, int], int], least_nbytes: int) -> tuple[Stay, ...]:
    items = enumerate(arrival.nbytes)
    return tuple(Stay(nbytes, read[number, i] - arrival.at_ns) for i, nbytes in items if nbytes >= least_nbytes)


def _read(jobs: Sequence[_Job], arrivals: Sequence[Arrival], stations: Stations) -> dict[tuple[int, int], int]:
    """When one rank has read each item, by (arrival, item)."""
    read: dict[tuple[int, int], int] = {}
    free_ns = place = 0
    while place < len(jobs):
        start_ns = max(free_ns, jobs[place].at_ns)
        batch: list[tuple[int, int]] = []
        patches = 0
        while place < len(jobs) and jobs[place].at_ns <= start_ns:
            job = jobs[place]
            more = sum(arrivals[job.arrival].patches[item] for item in job.items)
            if batch and patches + more > stations.batch_patches:
                break
            batch += [(job.arrival, item) for item in job.items]
            patches += more
            place += 1
        free_ns = start_ns + round(patches * stations.encoding_ns)
        read |= dict.fromkeys(batch, free_ns if len(batch) == 1 else start_ns)
    return read
