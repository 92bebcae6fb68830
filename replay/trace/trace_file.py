"""A trace file, which is recognised once, read in several passes, and never held in memory.

A file in the order of time is streamed. Another file is read through an index of 24 bytes a row: time, offset and line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.recording.request import BrokenRow, Drop, Request
from tensorferry.replay.trace.exact_numbers import NS, wall_text
from tensorferry.replay.trace.formats.base import Format, Parsed
from tensorferry.replay.trace.formats.servegen import CLIENT, Clients
from tensorferry.replay.trace.formats.sniff import HEAD_LINES, Maker, recognise
from tensorferry.replay.trace.formats.times import Times
from tensorferry.replay.trace.formats.token_counts import Keys, LengthRows
from tensorferry.replay.trace.text_lines import Source
from tensorferry.replay.trace.window import Window

#: How many dropped rows of each reason keep their sentence, since a file may have a million of them.
NAMED_PER_REASON = 5
#: The most turns in a line of AIPerf's multi_turn, since the index packs line and turn in eight bytes.
MAX_TURNS = 1 << 16
#: The latest time, since times have eight bytes in the index. Dates may go up to the year 2261.
MAX_AT_NS = 92 * 10**17

Dropped = Callable[[Drop], None]


class Tally(msgspec.Struct):
    """The counts of one pass so far."""

    read: int = 0  #: rows; always those kept + those dropped
    kept: int = 0
    inversions: int = 0  #: rows that are earlier than the row before them
    first_inversion: int = 0  #: the line of the first of them
    largest_fall_ns: int = 0  #: the most by which one is earlier
    first_ns: int = 0  #: the earliest
    last_ns: int = 0  #: the latest
    linked: int = 0  #: requests that name their predecessor
    dropped: Counter[str] = msgspec.field(default_factory=Counter)  #: by reason
    named: list[Drop] = msgspec.field(default_factory=list)  #: the first few of each reason
    notes: Counter[str] = msgspec.field(default_factory=Counter)  #: peculiarities that were kept, by name

    @property
    def span_ns(self) -> int:
        return self.last_ns - self.first_ns

    @property
    def glued(self) -> bool:
        """Whether the file looks like several recordings, each with its own start. Sorted, they overlap."""
        return 0 < self.inversions <= 16 and self.largest_fall_ns * 2 > self.span_ns


class Recording:
    """A trace of any known format.

    rate: requests a second for a trace without times, evenly spaced; a trace with times refuses it. keys: the keys by
    which a JSON trace of any kind is read, or, with `time_alone`, the place of the times in any trace. seed: for drawn
    requests, such as those of ServeGen's clients.
    """

    def __init__(self, path: Path, *, rate: float | None = None, keys: Keys | None = None, seed: int = 0) -> None:
        """Raises TraceError, with file and line, if it is not a trace."""
        self.path = path
        self._source = Source(path)
        self._clients = [file for file in self._source.files if CLIENT.fullmatch(file.name)]
        self._make: Maker
        if self._clients:
            if keys is not None:
                problem = "its requests are drawn from statistics, so no row has a time; leave --keys out"
                raise TraceError(str(path), None, problem)
            clients = Clients(self._clients, seed)
            self._make = lambda: clients
        elif keys is not None and not keys.time_alone:
            self._make = partial(LengthRows, keys, Times(keys.time, keys.unit_ns))
        else:
            self._make = _recognised(path, self._source.files, keys)
        form = self._make()
        self.name, self.wall, self.timed = form.name, form.wall, form.timed
        self.decided = form.decided  #: a sentence, if the numbers decided the unit of its times
        self.header = self._line(form.first_line - 1) if form.first_line > 1 else b""  #: of a CSV file
        if rate is not None and form.timed:
            raise TraceError(
                str(path),
                None,
                f"a trace of the format {form.name} has times of its own, so it takes no rate; leave --rate out",
            )
        self.rate = rate
        self._every_ns = None if rate is None else NS / rate

    @property
    def folder(self) -> Path:
        """The base of relative image paths."""
        return self._source.folder

    def holds(self, file: Path) -> bool:
        """Return whether a file is the trace, or one of its parts."""
        return file.exists() and any(file.samefile(part) for part in self._source.files)

    @property
    def scheduled(self) -> bool:
        """Whether its requests have times, recorded or from a rate."""
        return self.timed or self._every_ns is not None

    @property
    def drawn(self) -> bool:
        """Whether its requests are drawn from statistics instead of recorded."""
        return bool(self._clients)

    def sha256(self) -> str:
        return self._source.sha256()

    def time_text(self, at_ns: int) -> str:
        """Write one of its times for people."""
        return wall_text(at_ns) if self.wall else f"{at_ns / NS:.3f} s"

    def requests(
        self, tally: Tally, dropped: Dropped = lambda drop: None, *, limit: int | None = None
    ) -> Generator[Request]:
        """Read the requests of all rows, or of the first `limit`, in file order. The caller closes it.

        `tally` is updated. dropped: is called with each broken row. Raises TraceError.
        """
        for _, request in self._pass(self._make(), tally, dropped, limit):
            yield request

    def lines(self, tally: Tally) -> Generator[tuple[bytes, list[Request]]]:
        """Read each line with a request, without its end, and its requests. The caller closes the generator."""
        form = self._make()
        assert not isinstance(form, Clients)
        here: list[Request] = []
        with self._source.seekable() as lines:
            last: int | None = None
            for offset, request in self._pass(form, tally, lambda drop: None, None):
                if last is not None and offset != last:
                    yield lines.at(last).rstrip(b"\r\n"), here
                    here = []
                last = offset
                here.append(request)
            if last is not None:
                yield lines.at(last).rstrip(b"\r\n"), here

    def bounds_ns(self, window: Window, first_ns: int) -> tuple[int | None, int | None]:
        """Convert a window to the trace's clock. Raises TraceError if the window has dates, but the trace has none."""
        if window.absolute and not self.wall:
            problem = f"a trace of the format {self.name} has no dates; give times from its start, such as 90s"
            raise TraceError(str(self.path), None, problem)
        start_ns, end_ns = window.bounds_ns(first_ns)
        if start_ns is not None and end_ns is not None and end_ns <= start_ns:
            problem = f"--end, {self.time_text(end_ns)}, is not after --start, {self.time_text(start_ns)}"
            raise TraceError(str(self.path), None, problem)
        return start_ns, end_ns

    def survey(self) -> Tally:
        """Make one whole pass. Raises TraceError if there is no row, or no usable one."""
        tally = Tally()
        for _ in self.requests(tally):
            pass
        if not tally.read:
            raise TraceError(str(self.path), None, f"it is a trace of the format {self.name} without a row")
        if not tally.kept:
            raise TraceError(str(self.path), None, nothing_usable(tally.read, tally.dropped, tally.named))
        return tally

    def in_order(self, survey: Tally) -> Generator[Request]:
        """Read its requests in the order of time, equal times in file order. survey: the result of `survey`."""
        if not survey.inversions:
            yield from self.requests(Tally())
            return
        form = self._make()
        # The survey has counted the rows, so the index has its size before it is filled.
        index = np.empty((3, survey.kept), np.int64)
        for row, (offset, request) in enumerate(self._pass(form, Tally(), lambda drop: None, None)):
            index[:, row] = request.at_ns, offset, request.line * MAX_TURNS + request.turn
        order = np.argsort(index[0], kind="stable")
        for column in index:
            column[:] = column[order]
        del order
        with self._source.seekable() as lines:
            for at_ns, offset, place in zip(*map(memoryview, index), strict=True):  # type: ignore[arg-type]
                number, turn = divmod(place, MAX_TURNS)
                parsed = form.parse(str(lines.at(offset), "utf-8").rstrip("\r\n"), number)
                if not isinstance(parsed, Request):
                    parsed = next(one for one in parsed if isinstance(one, Request) and one.turn == turn)
                # The time in a row may be relative to that of another row.
                yield parsed if parsed.at_ns == at_ns else msgspec.structs.replace(parsed, at_ns=at_ns)

    def _line(self, wanted: int) -> bytes:
        with closing(self._source.lines()) as lines:
            return next(line.rstrip(b"\r\n") for number, _, line in lines if number == wanted)

    def _pass(self, form: Format, tally: Tally, dropped: Dropped, limit: int | None) -> Iterator[tuple[int, Request]]:
        """Read (offset of its line, request)."""
        last_ns = None
        for offset, parsed in self._rows(form):
            for one in (parsed,) if isinstance(parsed, Request | Drop) else parsed:
                if limit is not None and tally.read >= limit:
                    return
                tally.read += 1
                if isinstance(one, Drop):
                    dropped(self._count(tally, one))
                    continue
                if self._every_ns is not None:
                    one = msgspec.structs.replace(one, at_ns=one.at_ns + round((tally.read - 1) * self._every_ns))
                at_ns = one.at_ns
                if not -MAX_AT_NS < at_ns < MAX_AT_NS:
                    dropped(self._count(tally, Drop(one.line, "out_of_range", "its time is centuries from the start")))
                    continue
                if last_ns is None:
                    tally.first_ns = tally.last_ns = at_ns
                elif at_ns < last_ns:
                    tally.inversions += 1
                    tally.first_inversion = tally.first_inversion or one.line
                    tally.largest_fall_ns = max(tally.largest_fall_ns, last_ns - at_ns)
                    tally.first_ns = min(tally.first_ns, at_ns)
                if at_ns > tally.last_ns:
                    tally.last_ns = at_ns
                last_ns = at_ns
                tally.kept += 1
                if one.parent:
                    tally.linked += 1
                if self.decided:
                    tally.notes["time_unit_by_its_numbers"] += 1
                if one.notes or one.blocks or not one.output_tokens:
                    tally.notes.update(_notes(one))
                yield offset, one

    def _rows(self, form: Format) -> Iterator[tuple[int, Parsed | Drop]]:
        """Read (offset, content) of each line that is a row, broken or not."""
        if isinstance(form, Clients):
            yield from ((0, row) for row in form.rows())
            return
        parse, first_line = form.parse, form.first_line
        with closing(self._source.lines()) as lines:
            for number, offset, raw in lines:
                if number < first_line:
                    continue
                try:
                    line = str(raw, "utf-8").rstrip("\r\n")
                    if not line or line.isspace():  # a blank line is no row
                        continue
                    yield offset, parse(line, number)
                except UnicodeDecodeError:
                    yield offset, Drop(number, "not_utf8", "not UTF-8 text")
                except BrokenRow as broken:
                    yield offset, Drop(number, broken.reason, broken.problem)

    def _count(self, tally: Tally, drop: Drop) -> Drop:
        """Count a drop. Returns it, with its sentence if it is among the first of its reason."""
        tally.dropped[drop.reason] += 1
        if tally.dropped[drop.reason] > NAMED_PER_REASON:
            return Drop(drop.line, drop.reason, "")
        named = Drop(drop.line, drop.reason, self._source.place(drop.line) + drop.problem)
        tally.named.append(named)
        return named


def nothing_usable(read: int, reasons: Mapping[str, int], drops: Sequence[Drop]) -> str:
    """Write the error of a trace without a usable row: the count of each reason, and the first few rows."""
    counted = ", ".join(f"{count} x {reason}" for reason, count in reasons.items())
    named = "".join(f"; line {drop.line}: {drop.problem}" for drop in drops[:NAMED_PER_REASON] if drop.problem)
    return f"none of its {read} rows can be used: {counted}{named}"


def _recognised(path: Path, files: Sequence[Path], keys: Keys | None) -> Maker:
    """Recognise the one format of all files. Later files may lack the header. Raises TraceError with the file."""
    found: tuple[Maker, Format, Path, str] | None = None
    for file in files:
        head = _head(file)
        if len(files) > 1 and not file.stat().st_size:  # writers of parts leave empty marker files
            continue
        try:
            make = recognise(str(file), head, keys)
        except TraceError:
            if found is not None and _reads(found[0](), head):
                continue
            raise
        form, first = make(), head[0][1].strip()
        if found is None:
            found = make, form, file, first
            continue
        _, other, before, header = found
        if form.name != other.name:
            problem = (
                f"it has the format {form.name}, but {before} has {other.name}; a folder is one trace of one format"
            )
            raise TraceError(str(file), None, problem)
        if form.first_line > 1 and first != header:
            raise TraceError(str(file), head[0][0], f"its columns differ from those of {before}; a folder is one trace")
    if found is None:
        raise TraceError(str(path), None, "it is a folder of empty files; name a trace")
    return found[0]


def _head(file: Path) -> list[tuple[int, str]]:
    """Read the first lines of a file that are not blank, with their numbers."""
    with closing(Source(file).lines()) as lines:
        texts = ((number, str(line, "utf-8", "surrogateescape")) for number, _, line in lines)
        return list(islice(((number, text) for number, text in texts if text and not text.isspace()), HEAD_LINES))


def _reads(form: Format, head: Sequence[tuple[int, str]]) -> bool:
    """Return whether any of these lines is a row of a format."""
    for number, text in head:
        with suppress(BrokenRow):
            form.parse(text.rstrip("\r\n"), number)
            return True
    return False


def _notes(request: Request) -> list[str]:
    notes = list(request.notes)
    if not request.output_tokens:
        notes.append("no_output_tokens")
    if request.blocks and len(request.blocks) * request.block_tokens < (request.text_tokens or 0):
        notes.append("fewer_block_ids_than_tokens")
    return notes
