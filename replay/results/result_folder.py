"""The reader of `replay --out` folders. Pages, comparisons and plans are made from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from tensorferry.codecs.errors import ReportError
from tensorferry.replay.results.summary import Summary
from tensorferry.replay.run.gauge_samples import Sample

T = TypeVar("T")


class ItemRow(msgspec.Struct, frozen=True):
    """The facts of a request's item that reports use."""

    rank: int
    grid: tuple[int, int, int]
    transport: str
    nbytes: int


class Row(msgspec.Struct, frozen=True):
    """A line of results.jsonl. Only the first three are set for a dropped row. Times are milliseconds from the start of
    the run."""

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
    """The results of one replay."""

    folder: Path
    summary: Summary
    rows: list[Row]  #: the requests sent, in the order of sending
    samples: list[Sample]

    @property
    def ok(self) -> list[Row]:
        return [row for row in self.rows if row.status == "ok"]

    @property
    def scheduled(self) -> bool:
        """Whether its requests had due times."""
        return self.summary.run.speed != "max"

    def latency_ms(self, row: Row) -> float:
        """Return the latency from the intended time, or from the send if there was no schedule."""
        return row.done_ms - (row.intended_ms if self.scheduled else row.sent_ms)

    def fell_back(self, item: ItemRow) -> bool:
        """Return whether it went inline because a pool had no room."""
        least = self.summary.run.pooled_from_nbytes
        return least is not None and item.transport == "inline" and item.nbytes >= least

    def pooled(self, item: ItemRow) -> bool:
        """Return whether it went, or should have gone, through a pool."""
        return item.transport != "inline" or self.fell_back(item)


def read_run(folder: Path) -> Run:
    """Read a run. Raises ReportError, which names the file, if `replay --out` did not write it so.

    All data belong to one run, even if another run replaces the folder meanwhile.
    """
    try:
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    except OSError as problem:
        raise _unreadable(folder, problem) from None
    try:
        return _read(folder, descriptor)
    finally:
        os.close(descriptor)


def _read(folder: Path, descriptor: int) -> Run:
    summary = msgspec.json.Decoder(Summary)
    path = folder / "summary.json"
    try:
        decoded = summary.decode(_bytes(path, descriptor))
    except msgspec.MsgspecError as problem:
        problem_text = f"this version of tensorferry cannot read it as the summary of a replay: {problem}"
        raise ReportError(str(path), problem_text) from None
    results = folder / "results.jsonl"
    rows = [row for row in _lines(results, descriptor, msgspec.json.Decoder(Row)) if row.status != "dropped"]
    if len(rows) != decoded.requests.sent:
        fewer = f"it has {len(rows)} requests, and summary.json beside it says {decoded.requests.sent} were sent"
        raise ReportError(str(results), fewer)
    samples = _lines(folder / "gauges.jsonl", descriptor, msgspec.json.Decoder(Sample))
    return Run(folder, decoded, rows, samples)


def _bytes(path: Path, folder: int) -> bytes:
    """Read the file of that name in an open folder."""
    try:
        with open(os.open(path.name, os.O_RDONLY, dir_fd=folder), "rb") as file:
            return file.read()
    except OSError as problem:
        raise _unreadable(path, problem) from None


def _unreadable(path: Path, problem: OSError) -> ReportError:
    advice = "name a folder that `replay --out` wrote"
    return ReportError(str(path), f"{problem.strerror or problem}; {advice}")


def _lines(path: Path, folder: int, decoder: msgspec.json.Decoder[T]) -> list[T]:
    found: list[T] = []
    for number, line in enumerate(_bytes(path, folder).splitlines(), 1):
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as problem:
            raise ReportError(f"{path}:{number}", str(problem)) from None
    return found
