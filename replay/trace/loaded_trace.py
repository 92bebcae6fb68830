"""A recorded trace, read once: its requests in time order, and every row that could not be used."""

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
    sha256: str  #: of the file as it lies there
    format: str
    wall: bool  #: whether `at_ns` counts from 1970 (a date) or from the trace's own start
    read: int  #: rows; always len(requests) + len(drops)
    requests: list[Request]  #: in time order; equal times in file order
    drops: list[Drop]  #: in file order
    inversions: int  #: rows that lay before an earlier one in the file, and were sorted
    notes: dict[str, int]  #: things that were kept as they are and are worth knowing, counted
    outside: int = 0  #: good rows before --start or from --end on; not among those read
    glued: bool = False  #: as if several recordings followed each other, each from its own start
    drawn: bool = False  #: drawn from statistics, not recorded
    rate: float | None = None  #: requests a second that were given to it, as it says no times
    folder: Path | None = None  #: what its images' paths are relative to; None: the folder of `path`

    @property
    def origin_ns(self) -> int:
        """The time of the first kept request: the trace is replayed from there."""
        return self.requests[0].at_ns if self.requests else 0

    @property
    def span_ns(self) -> int:
        """From the first request to the last."""
        return self.requests[-1].at_ns - self.origin_ns if self.requests else 0

    @property
    def origin(self) -> str:
        """The first request's time, for people."""
        if not self.requests:
            return "none"
        return wall_text(self.origin_ns) if self.wall else f"{self.origin_ns / NS:.3f} s"


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read a trace of any known format; with `limit`, its first so many rows (in the order of the file).

    A broken row is dropped, with its reason. Raises TraceError, naming file and line, for what is no trace.
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
    """Hold the requests of a window of a trace in memory; with `limit`, of its first so many rows.

    failures: whether requests that were recorded as failed (no output token) are kept. strict: refuses rows that
    are out of order rather than sorting them. Raises TraceError.
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
        raise TraceError(str(recording.path), None, f"a trace of the format {recording.name} without a single row")
    if strict and tally.inversions:
        problem = f"earlier than the row before it, as {tally.inversions} rows are; without --strict they are sorted"
        raise TraceError(str(recording.path), tally.first_inversion, problem)
    requests.sort(key=attrgetter("at_ns"))  # stable: what shares an instant keeps the order of the file
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
