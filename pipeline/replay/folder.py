"""The folder of `replay --out`, read again: what pages, comparisons and predictions are made of."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from tensorferry.codecs.errors import ReportError
from tensorferry.pipeline.replay.gauges import Sample
from tensorferry.pipeline.replay.summary import Summary

T = TypeVar("T")


class ItemRow(msgspec.Struct, frozen=True):
    """An item of a request, as far as reports use it."""

    rank: int
    grid: tuple[int, int, int]
    transport: str
    nbytes: int


class Row(msgspec.Struct, frozen=True):
    """A line of results.jsonl. Of a row that was dropped only the first three are set; times are milliseconds from
    the start of the run."""

    line: int
    status: str  #: ok, failed, dropped
    reason: str = ""
    turn: int = 0
    id: str = ""
    intended_ms: float = 0.0
    sent_ms: float = 0.0
    done_ms: float = 0.0
    delayed: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    items: tuple[ItemRow, ...] = ()
    marks_ms: dict[str, float] = {}  #: when each step was reached, in the order of time


class Run(msgspec.Struct, frozen=True):
    """All that one replay left."""

    folder: Path
    summary: Summary
    rows: list[Row]  #: of what was sent, in the order of sending
    samples: list[Sample]

    @property
    def ok(self) -> list[Row]:
        return [row for row in self.rows if row.status == "ok"]

    @property
    def scheduled(self) -> bool:
        """Whether its requests had times at which they were due."""
        return self.summary.run.speed != "max"

    def latency_ms(self, row: Row) -> float:
        """From the intended time; from the send, where there was no schedule."""
        return row.done_ms - (row.intended_ms if self.scheduled else row.sent_ms)

    def fell_back(self, item: ItemRow) -> bool:
        """Whether it went inline for want of room in a pool."""
        least = self.summary.run.pooled_from_nbytes
        return least is not None and item.transport == "inline" and item.nbytes >= least

    def pooled(self, item: ItemRow) -> bool:
        """Whether it went, or should have gone, through a pool."""
        return item.transport != "inline" or self.fell_back(item)


def read_run(folder: Path) -> Run:
    """Raises ReportError, naming the file, for what `replay --out` of this version has not written, or not so."""
    summary = msgspec.json.Decoder(Summary)
    path = folder / "summary.json"
    try:
        decoded = summary.decode(_bytes(path))
    except msgspec.MsgspecError as problem:
        problem_text = f"not the summary of a replay by this version of tensorferry: {problem}"
        raise ReportError(str(path), problem_text) from None
    results = folder / "results.jsonl"
    rows = [row for row in _lines(results, msgspec.json.Decoder(Row)) if row.status != "dropped"]
    if len(rows) != decoded.requests.sent:
        fewer = f"it has {len(rows)} requests, and summary.json beside it says {decoded.requests.sent} were sent"
        raise ReportError(str(results), fewer)
    samples = _lines(folder / "gauges.jsonl", msgspec.json.Decoder(Sample))
    return Run(folder, decoded, rows, samples)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        advice = "name a folder that `replay --out` has written"
        raise ReportError(str(path), f"{problem.strerror or problem}; {advice}") from None


def _lines(path: Path, decoder: msgspec.json.Decoder[T]) -> list[T]:
    found: list[T] = []
    for number, line in enumerate(_bytes(path).splitlines(), 1):
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as problem:
            raise ReportError(f"{path}:{number}", str(problem)) from None
    return found
