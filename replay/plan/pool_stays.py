"""The times at which a run's items came to the tokenizers' pools, and how long they kept their places.

An item keeps its place until the encoder rank has read it. A call of the model copies its items together as it begins.
An item that is alone in its call is encoded in place, so it is read when the call ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from tensorferry.codecs.errors import ReportError
from tensorferry.pipeline.telemetry.timeline import READ
from tensorferry.replay.plan.forecast import Stay, Visit
from tensorferry.replay.results.result_folder import Row, Run

MS = 1_000_000


class Measured(NamedTuple):
    """The stays of a run's items, and how many of them are known only in part."""

    visits: list[Visit]
    items: int  #: how many were in a pool, or should have been
    until_collected: int  #: those without a time of reading; they are assumed to stay until `collected`
    unplanned: int  #: requests that are assumed to have asked for room when they were `received`


def measured(run: Run, workers: int) -> Measured:
    """Return the visits of a run's requests that were ok.

    If a run lacks the time at which an item was read, or a request planned, the nearest mark outside the stay counts,
    so no stay is planned too short. Raises ReportError if the run has no request with an item for a pool, or lacks
    those marks too.
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
                # The scheduler, not an encoder, reads embeddings that came with the request.
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
    """Return the worker of each of the wanted rows. The client gives a request to the worker with the fewest."""
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
