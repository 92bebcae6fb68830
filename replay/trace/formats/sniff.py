"""The recognition of a trace's format by its content, and the errors for files that are not traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.recording.request import BrokenRow
from tensorferry.replay.trace.exact_numbers import NS, number, wall_clock
from tensorferry.replay.trace.formats.base import Format
from tensorferry.replay.trace.formats.columns import DELIMITERS, read_header, split
from tensorferry.replay.trace.formats.json_lines import json_object
from tensorferry.replay.trace.formats.registry import AZURE_LLM, AZURE_LMM, CSV, FOREIGN, JSON, READABLE, Lines
from tensorferry.replay.trace.formats.times import CREATED, Times, decided, value_at
from tensorferry.replay.trace.formats.token_counts import Keys

#: Enough lines to skip a few broken ones at the start of a file.
HEAD_LINES = 64
#: Makes a new reader for each pass over the file.
Maker = Callable[[], Format]


def recognise(file: str, head: Sequence[tuple[int, str]], keys: Keys | None = None) -> Maker:
    """Recognise the format of a file that starts with these lines (number, text; none is blank).

    keys: the place of its times, if not that of the format (`Keys.time_alone`). Raises TraceError if the format is
    unknown, or a header is missing.
    """
    if not head:
        raise TraceError(file, None, "it is an empty file; name a trace")
    first_line, first = head[0]
    if first.lstrip()[0] == "{":
        return _json_format(file, head, keys)
    if first.lstrip()[0] == "[":
        raise TraceError(file, first_line, f"it is a JSON array; replay reads one object a line: {READABLE}")
    return _csv_format(file, first_line, first, keys)


def _json_format(file: str, head: Sequence[tuple[int, str]], keys: Keys | None) -> Maker:
    """Recognise a format by the keys of the first object that has known ones."""
    rows: list[dict[str, Any]] = []
    for _, text in head:
        try:
            rows.append(json_object(text))
        except BrokenRow:
            continue
    for row in rows:
        for kind in JSON:
            if kind.knows(row):
                return partial(kind.read, _times(file, kind, rows, keys))
    if not rows:
        start = "".join(text for _, text in head)
        for word, what in FOREIGN:
            if f'"{word}"' in start:
                raise TraceError(file, head[0][0], f"this looks like {what}; replay reads {READABLE}")
        problem = f"none of the first {len(head)} lines is a JSON object of its own"
        raise TraceError(file, head[0][0], f"{problem}; replay reads {READABLE}")
    there = ", ".join(sorted(rows[0])[:8])
    raise TraceError(
        file, head[0][0], f"objects with the keys {there[:200]} are no trace that replay knows; it reads {READABLE}"
    )


def _times(file: str, kind: Lines, rows: Sequence[dict[str, Any]], keys: Keys | None) -> Times | None:
    """Find the times in rows of a format, given the first rows. Raises TraceError if no unit can be found."""
    turns = (row["turns"] for row in rows if isinstance(row.get("turns"), list))
    rows = [*rows, *(turn for turn in chain.from_iterable(turns) if isinstance(turn, dict))]
    if keys is not None:
        return _chosen_times(file, kind, rows, keys)
    times = kind.times
    if times is None or (kind.optional and all(times.value(row) is None for row in rows)):
        there = (field for field in CREATED if any(value_at(row, field) is not None for row in rows))
        return next((decided(Times(field, NS, True), rows) for field in there), None)
    return decided(times, rows) if kind.decides else times


def _chosen_times(file: str, kind: Lines, rows: Sequence[dict[str, Any]], keys: Keys) -> Times:
    field = keys.time or (kind.times.field if kind.times is not None else "")
    if not field:
        problem = f"the format {kind.name} has no times; name their field, as in --keys time=FIELD,unit=s"
        raise TraceError(file, None, problem)
    if keys.unit_ns:
        told = decided(Times(field, keys.unit_ns), rows)
        return Times(field, keys.unit_ns, told.wall and told.unit_ns == keys.unit_ns)
    usual = kind.times.unit_ns if kind.times is not None else 0
    times = decided(Times(field, usual, usual is None), rows)
    if times.unit_ns == 0:
        problem = f"the numbers of {field} do not show their unit; say it, as in --keys time={field},unit=s"
        raise TraceError(file, None, problem)
    return times


def _csv_format(file: str, line: int, header: str, keys: Keys | None) -> Maker:
    """Recognise a format by the names in the header, under each delimiter in turn."""
    best: list[str] = []
    for delimiter in DELIMITERS:
        try:
            cells = [cell.strip() for cell in split(header, delimiter)]
        except BrokenRow:
            continue
        names = {cell.casefold() for cell in cells}
        for kind in CSV:
            if kind.known_by.casefold() in names:
                if keys is not None:
                    unit_ns = keys.unit_ns or kind.unit_ns
                    kind = msgspec.structs.replace(kind, time=keys.time or kind.time, unit_ns=unit_ns)
                read_header(file, kind, cells, delimiter, line)  # raises now rather than at the first pass
                return lambda kind=kind, cells=cells, delimiter=delimiter: read_header(  # type: ignore[misc]
                    file, kind, cells, delimiter, line
                )
        best = max(best, cells, key=len)
    if len(best) == 6 and best[3] in ("Gamma", "Weibull", ""):
        problem = "it has the statistics of a ServeGen client; give the file its own name, chunk-<i>-trace.csv,"
        raise TraceError(file, line, f"{problem} beside chunk-<i>-dataset.json, or the folder of both (docs/traces.md)")
    if _is_data(best):
        columns = {len(kind.required): kind.required for kind in (AZURE_LLM, AZURE_LMM)}.get(len(best))
        advice = f", such as {','.join(columns)}" if columns else ""
        raise TraceError(
            file, line, f"it has no header, since the first line is data; add a line of column names{advice}"
        )
    raise TraceError(file, line, f"it is not a trace that replay knows; replay reads {READABLE}")


def _is_data(cells: list[str]) -> bool:
    """Return whether these cells are values instead of names: the first is a time or a number."""
    if len(cells) < 2:
        return False
    try:
        wall_clock(cells[0], "")
    except BrokenRow:
        try:
            number(cells[0], "")
        except BrokenRow:
            return False
    return True
