"""Traces in CSV with one request a row. Columns are found by the names in the header, never by position."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence

import msgspec

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.recording.request import (
    MAX_ID_CHARACTERS,
    MAX_IMAGES,
    MAX_OUTPUT_TOKENS,
    MAX_TOKENS,
    BrokenRow,
    Image,
    Request,
)
from tensorferry.replay.trace.exact_numbers import NS, WallClocks, nanoseconds, number, whole
from tensorferry.replay.trace.formats.times import moment

DELIMITERS = ",;\t"
_UNKNOWN = Image()


class Columns(msgspec.Struct, frozen=True):
    """The columns of a CSV trace and their meaning. Names are compared without case."""

    name: str
    known_by: str  #: the column that no other format has
    time: str
    prompt: str  #: tokens of text, or of text and images if there are `images`
    output: str
    unit_ns: int | None = None  #: of the time; None: a date
    images: str = ""
    session: str = ""
    took_s: str = ""  #: seconds from the arrival to the end of the answer

    @property
    def required(self) -> list[str]:
        return [column for column in (self.time, self.images, self.prompt, self.output) if column]


class ColumnRows:
    """The rows below one header."""

    timed = True
    decided = ""

    def __init__(self, columns: Columns, header: Sequence[str], delimiter: str, line: int) -> None:
        """header: the cells of the header line, with all of `columns.required` among them; line: its number."""
        self.name, self.wall = columns.name, columns.unit_ns is None
        self.first_line = line + 1
        self._columns, self._width, self._delimiter = columns, len(header), delimiter
        index = {cell.strip().casefold(): at for at, cell in enumerate(header)}
        self._time, self._prompt, self._output = (
            index[column.casefold()] for column in (columns.time, columns.prompt, columns.output)
        )
        self._images, self._session, self._took = (
            index.get(column.casefold()) if column else None
            for column in (columns.images, columns.session, columns.took_s)
        )
        self._dates = WallClocks(columns.time)
        self._zoned: bool | None = None  #: whether the first good row names its zone
        self._at_ns: Callable[[str], int] = self._date if columns.unit_ns is None else self._elapsed

    def parse(self, line: str, number_of_line: int) -> Request:
        """Read the request of one row. Raises BrokenRow."""
        cells = split(line, self._delimiter)
        if len(cells) != self._width:
            raise BrokenRow("field_count", f"it has {len(cells)} fields; the header has {self._width}")
        columns = self._columns
        at_ns = self._at_ns(cells[self._time])
        images = 0 if self._images is None else _count(cells[self._images], columns.images, MAX_IMAGES)
        prompt = _count(cells[self._prompt], columns.prompt, MAX_TOKENS)
        output = _count(cells[self._output], columns.output, MAX_OUTPUT_TOKENS)
        if not prompt and not images:
            raise BrokenRow("empty", "it has neither tokens nor images")
        if self._session is None and self._took is None:
            if not images:  # most rows
                return Request(line=number_of_line, at_ns=at_ns, output_tokens=output, text_tokens=prompt)
            shared = (_UNKNOWN,) * images
            return Request(line=number_of_line, at_ns=at_ns, output_tokens=output, context_tokens=prompt, images=shared)
        session = "" if self._session is None else cells[self._session].strip()
        took = "" if self._took is None else cells[self._took].strip()
        return Request(
            line=number_of_line,
            at_ns=at_ns,
            output_tokens=output,
            text_tokens=None if images else prompt,
            context_tokens=prompt if images else None,
            images=(_UNKNOWN,) * images,
            session=session[:MAX_ID_CHARACTERS],
            took_ns=nanoseconds(number(took, columns.took_s), columns.took_s, NS) if took else None,
        )

    def _date(self, cell: str) -> int:
        try:
            at_ns, zoned = self._dates.read(cell)
        except BrokenRow as problem:
            if problem.reason != "bad_time" or not cell.strip().replace(".", "", 1).isdigit():
                raise
            remedy = f"; if it is a number, say its unit: --keys time={self._columns.time},unit=s"
            raise BrokenRow("bad_time", f"{problem.problem}{remedy}") from None
        if zoned is not self._zoned:
            if self._zoned is not None:
                raise BrokenRow("mixed_zones", "some rows name a time zone and some do not, so they cannot be compared")
            self._zoned = zoned
        return at_ns

    def _elapsed(self, cell: str) -> int:
        assert self._columns.unit_ns is not None
        return moment(number(cell, self._columns.time), self._columns.time, self._columns.unit_ns)


def _count(cell: str, name: str, most: int) -> int:
    if len(cell) < 6 and cell.isdigit() and cell.isascii():  # nearly all counts, which are below every limit but one
        count = int(cell)
        if count <= most:
            return count
    return whole(number(cell, name), name, most)


def read_header(file: str, kind: Columns, cells: Sequence[str], delimiter: str, line: int) -> ColumnRows:
    """Make the reader of the rows. Raises TraceError if a column is missing or occurs twice."""
    names = [cell.casefold() for cell in cells]
    for column in kind.required:
        if names.count(column.casefold()) > 1:
            raise TraceError(file, line, f"the column {column} occurs twice")
        if column.casefold() not in names:
            raise TraceError(
                file, line, f"it has no column {column}; the format {kind.name} has {', '.join(kind.required)}"
            )
    return ColumnRows(kind, cells, delimiter, line)


def split(line: str, delimiter: str) -> list[str]:
    """Split one line into cells. A quoted cell ends on its own line, so a stray quote breaks that line alone.

    Raises BrokenRow (bad_csv).
    """
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error as problem:
        raise BrokenRow("bad_csv", f"not CSV: {problem}") from None
