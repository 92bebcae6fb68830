"""A recorded trace in memory: its requests in the order of time, and every unusable row."""

from __future__ import annotations

from contextlib import closing
from operator import attrgetter
from pathlib import Path

import msgspec

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.recording.request import Drop, Request
from tensorferry.replay.trace.exact_numbers import NS, wall_text
from tensorferry.replay.trace.selection import Selection
from tensorferry.replay.trace.trace_file import Recording, Tally
from tensorferry.replay.trace.window import Window


class Trace(msgspec.Struct, frozen=True):
    path: Path
    sha256: str  #: of the file's bytes, as stored
    format: str
    wall: bool  #: whether `at_ns` counts from 1970 (a date), or else from the trace's own start
    read: int  #: rows; always len(requests) + len(drops)
    requests: list[Request]  #: in the order of time; equal times in the order of the file
    drops: list[Drop]  #: in the order of the file
    inversions: int  #: rows that were earlier than the row before them, and were sorted
    notes: dict[str, int]  #: counts of peculiarities that were kept, by name
    outside: int = 0  #: good rows outside --start and --end; not among those read
    glued: bool = False  #: whether it looks like several recordings, each with its own start
    drawn: bool = False  #: drawn from statistics, not recorded
    rate: float | None = None  #: requests a second that --rate gave to a trace without times
    folder: Path | None = None  #: the base of its relative image paths; None: the folder of `path`

    @property
    def origin_ns(self) -> int:
        """The time of the first kept request, from which the trace is replayed."""
        return self.requests[0].at_ns if self.requests else 0

    @property
    def span_ns(self) -> int:
        """The time from the first request to the last."""
        return self.requests[-1].at_ns - self.origin_ns if self.requests else 0

    @property
    def origin(self) -> str:
        """The first request's time, for people."""
        if not self.requests:
            return "none"
        return wall_text(self.origin_ns) if self.wall else f"{self.origin_ns / NS:.3f} s"


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read a trace of any known format, or its first `limit` rows in the order of the file.

    A broken row is dropped, with its reason. Raises TraceError, with file and line, if the file is not a trace.
    """
    return load(Recording(path), limit=limit)


def load(
    recording: Recording,
    *,
    window: Window | None = None,
    limit: int | None = None,
    failures: bool = True,
    strict: bool = False,
) -> Trace:
    """Load the requests of a window of a trace, or of its first `limit` rows.

    failures: keep requests that were recorded as failed (no output token). strict: refuse rows that are out of order
    instead of sorting them. Raises TraceError.
    """
    tally, drops, requests = Tally(), list[Drop](), list[Request]()
    outside = 0
    selection = Selection()
    if window is not None and not window.whole:
        selection.start_ns, selection.end_ns = recording.bounds_ns(window, recording.survey().first_ns)
    with closing(recording.requests(tally, drops.append, limit=limit)) as rows:
        for request in rows:
            if not selection.within(request.at_ns):
                outside += 1
            elif not failures and not request.output_tokens:
                drops.append(Drop(request.line, "recorded_failure", "no output token was recorded"))
            else:
                requests.append(request)
    if not tally.read:
        raise TraceError(str(recording.path), None, f"it is a trace of the format {recording.name} without a row")
    if strict and tally.inversions:
        problem = (
            f"it is earlier than the row before it, as {tally.inversions} rows are; without --strict they are sorted"
        )
        raise TraceError(str(recording.path), tally.first_inversion, problem)
    requests.sort(key=attrgetter("at_ns"))  # stable: equal times keep the order of the file
    return Trace(
        recording.path,
        recording.sha256(),
        recording.name,
        recording.wall,
        tally.read - outside,
        requests,
        drops,
        tally.inversions,
        dict(tally.notes),
        outside,
        tally.glued,
        recording.drawn,
        recording.rate,
        recording.folder,
    )
