"""Which format a trace is, told by what is in it; and kind words for those that replay does not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.replay.azure import DELIMITERS, IMAGES, REQUIRED, Azure, split
from tensorferry.pipeline.replay.jsonl import Mooncake, Own, ServeGen, json_object
from tensorferry.pipeline.replay.request import BrokenRow, Request
from tensorferry.pipeline.replay.values import number, wall_clock

#: Enough lines to see past a few broken ones at the start of a file.
HEAD_LINES = 64
READABLE = "tensorferry JSONL, Azure LLM and LMM CSV, Mooncake JSONL, ServeGen JSONL (see docs/traces.md)"


class Format(Protocol):
    """How the rows of one kind of trace are read."""

    @property
    def name(self) -> str: ...

    @property
    def wall(self) -> bool:
        """Whether its times are dates, rather than time since some start."""

    @property
    def first_line(self) -> int:
        """The number of the first line that is a row."""

    def parse(self, line: str, number: int, /) -> Request:
        """The request on that line. Raises BrokenRow."""


def recognise(file: str, head: Sequence[tuple[int, str]]) -> Format:
    """The format of a file that starts with these lines (number, text; none of them blank).

    Raises TraceError: nothing we know, a known trace that replay does not read, or no header.
    """
    if not head:
        raise TraceError(file, None, "an empty file")
    first_line, first = head[0]
    if first.lstrip()[0] == "{":
        return _json_format(file, head)
    if first.lstrip()[0] == "[":
        raise TraceError(file, first_line, f"a JSON array; replay reads one object a line: {READABLE}")
    return _csv_format(file, first_line, first)


def _json_format(file: str, head: Sequence[tuple[int, str]]) -> Format:
    """By the keys of the first object that says something. Bailian's keys contain Mooncake's, with seconds for
    milliseconds and 16 tokens a block for 512, so the foreign formats are ruled out first."""
    rows = []
    for line, text in head:
        try:
            rows.append((line, json_object(text)))
        except BrokenRow:
            continue
    for line, row in rows:
        if "at_ms" in row:
            return Own()
        if foreign := _foreign(row):
            raise TraceError(file, line, f"this looks like {foreign}, which replay does not read; it reads {READABLE}")
        if "input_length" in row:
            return Mooncake()
        data = row.get("data")
        if isinstance(data, dict) and ("text_tokens" in data or "image_tokens" in data):
            return ServeGen()
    if not rows:
        problem = f"none of the first {len(head)} lines is a JSON object of its own"
        raise TraceError(file, head[0][0], f"{problem}; replay reads {READABLE}")
    keys = ", ".join(sorted(rows[0][1])[:8])
    raise TraceError(
        file, rows[0][0], f"objects with the keys {keys[:200]} are no trace that replay knows; it reads {READABLE}"
    )


def _foreign(row: dict[str, Any]) -> str | None:
    """The name of a recorded format that is known and not read."""
    event = row.get("event")
    if "captureData" in row:
        return "a SageMaker Data Capture log"
    if isinstance(event, dict) and "schema" in event:
        return "a Dynamo request trace"
    if "chat_id" in row and "parent_chat_id" in row:
        return "a Qwen-Bailian trace (its times are seconds, Mooncake's milliseconds)"
    if isinstance(row.get("hash_ids"), dict):
        return "a RAGPulse trace"
    if "custom_id" in row and "body" in row:
        return "an OpenAI batch file (it has no times)"
    if "turns" in row:
        return "an AIPerf multi_turn file"
    if any(key in row for key in ("messages", "payload", "text_input")):
        return "an AIPerf mooncake_trace with literal prompts"
    if "prompt" in row or "content" in row:
        return "a vLLM custom dataset (it has no times)"
    if "image" in row or "text" in row:
        return "an AIPerf single_turn file"
    return None


def _csv_format(file: str, line: int, header: str) -> Format:
    """By the names in the header, under whichever delimiter makes them appear."""
    best: list[str] = []
    for delimiter in DELIMITERS:
        try:
            cells = [cell.strip() for cell in split(header, delimiter)]
        except BrokenRow:
            continue
        names = {cell.casefold() for cell in cells}
        if "contexttokens" in names or IMAGES.casefold() in names:
            return _azure(file, line, cells, delimiter)
        if foreign := _foreign_csv(names):
            raise TraceError(file, line, f"this looks like {foreign}, which replay does not read; it reads {READABLE}")
        best = max(best, cells, key=len)
    if len(best) == 6 and best[3] in ("Gamma", "Weibull", ""):
        problem = "these are ServeGen's statistics of a client; run its generator and write each request as JSON"
        raise TraceError(file, line, f"{problem} (docs/traces.md)")
    if _is_data(best):
        columns = {3: REQUIRED, 4: (REQUIRED[0], IMAGES, *REQUIRED[1:])}.get(len(best))
        advice = f", such as {','.join(columns)}" if columns else ""
        raise TraceError(file, line, f"no header: the first line is data already. Add a line of column names{advice}")
    raise TraceError(file, line, f"not a trace that replay knows; it reads {READABLE}")


def _azure(file: str, line: int, cells: list[str], delimiter: str) -> Azure:
    names = [cell.casefold() for cell in cells]
    for name in (*REQUIRED, IMAGES):
        if names.count(name.casefold()) > 1:
            raise TraceError(file, line, f"the column {name} is there twice")
        if name.casefold() not in names and name != IMAGES:
            raise TraceError(file, line, f"no column {name}; an Azure trace has {', '.join(REQUIRED)}")
    return Azure(cells, delimiter, line)


def _foreign_csv(names: set[str]) -> str | None:
    if "request tokens" in names:
        return "a BurstGPT trace"
    if "arrived_at" in names:
        return "a Vidur trace"
    return None


def _is_data(cells: list[str]) -> bool:
    """Whether these cells are values rather than names: a time or a number comes first."""
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
