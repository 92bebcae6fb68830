"""A recorded trace, read once: its requests in time order, and every row that could not be used."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import closing
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path

import msgspec

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.replay.request import BrokenRow, Drop, Request
from tensorferry.pipeline.replay.sniff import HEAD_LINES, recognise
from tensorferry.pipeline.replay.source import read_lines
from tensorferry.pipeline.replay.values import NS, wall_text

#: Of each reason, how many dropped rows keep their sentence; a file may have a million of them.
NAMED_PER_REASON = 5


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
    file = str(path)
    requests: list[Request] = []
    drops: list[Drop] = []
    named: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    read = inversions = 0
    with closing(read_lines(path)) as lines:
        rows = ((number, line) for number, line in lines if line.strip())  # a blank line is no row
        head = list(islice(rows, HEAD_LINES))
        form = recognise(file, head)
        for number, line in chain(head, rows):
            if number < form.first_line:
                continue
            if limit is not None and read >= limit:
                break
            read += 1
            try:
                request = form.parse(_valid(line), number)
            except BrokenRow as broken:
                named[broken.reason] += 1
                kept = named[broken.reason] <= NAMED_PER_REASON
                drops.append(Drop(number, broken.reason, broken.problem if kept else ""))
                continue
            if requests and request.at_ns < requests[-1].at_ns:
                inversions += 1
            notes.update(_notes(request))
            requests.append(request)
    if not read:
        raise TraceError(file, None, f"a {form.name} trace without a single row")
    requests.sort(key=attrgetter("at_ns"))  # stable: what shares an instant keeps the order of the file
    with path.open("rb") as raw:
        sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
    return Trace(path, sha256, form.name, form.wall, read, requests, drops, inversions, dict(notes))


def _valid(line: str) -> str:
    """The line, if it was UTF-8 (`read_lines` lets other bytes through as lone surrogates)."""
    if not line.isascii():
        try:
            line.encode()
        except UnicodeEncodeError:
            raise BrokenRow("not_utf8", "not UTF-8 text") from None
    return line


def _notes(request: Request) -> list[str]:
    notes = []
    if not request.output_tokens:
        notes.append("no_output_tokens")
    if request.blocks and len(request.blocks) * request.block_tokens < (request.text_tokens or 0):
        notes.append("fewer_block_ids_than_tokens")
    return notes
