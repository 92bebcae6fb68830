"""How fast traces are read, and what of them is held in memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.results import Outcome, Scale, Verdict, measurement
from tensorferry.replay.trace.loaded_trace import read_trace
from tensorferry.replay.trace.trace_file import Recording, Tally

_READ_ROWS = 200_000
_LONG_ROWS = 10_000_000
_SHORT_SHARE = 10  #: the file that memory is compared with has a tenth of the rows
_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
_STEP_US = 180_000  #: of AzureLLMInferenceTrace_conv: 5.5 requests a second
_IN_ORDER = 100_000  #: so many rows are read after the index is there
_MIB = 1 << 20
#: The index itself, and while it is sorted an order of 8 bytes, a column of 8 and what the sort keeps.
INDEX_NBYTES, SORTING_NBYTES = 24, 20


def reading(scale: Scale) -> Outcome:
    """Rows a second of Azure CSV: streamed, and held in the order of time."""
    streamed, held = list[float](), list[float]()
    with TemporaryDirectory(prefix="ferry-") as folder:
        path = Path(folder, "azure.csv")
        rows = _write(path, scale.of(_READ_ROWS))
        for _ in range(max(1, scale.rounds // 4)):
            started = time.perf_counter()
            Recording(path).survey()
            streamed.append(rows / (time.perf_counter() - started))
            started = time.perf_counter()
            read_trace(path)
            held.append(rows / (time.perf_counter() - started))
    found = (measurement("streamed", "rows/s", streamed), measurement("held and sorted", "rows/s", held))
    verdicts = (
        Verdict.of("streamed: at least 200,000 rows/s", found[0].p50, ">=", 200_000),
        Verdict.of("held and sorted: at least 200,000 rows/s", found[1].p50, ">=", 200_000),
    )
    return Outcome("reading", f"Read {_READ_ROWS:,} rows of Azure CSV", found, verdicts)


def memory(scale: Scale) -> Outcome:
    """The most that reading a file holds, of a long one and of one a tenth as long, each in a process of its own."""
    rows = scale.of(_LONG_ROWS)
    peaks: dict[tuple[str, int], float] = {}
    with TemporaryDirectory(prefix="ferry-") as folder:
        for count in (rows // _SHORT_SHARE, rows):
            for order in ("sorted", "unsorted"):
                path = Path(folder, order)
                _write(path, count, swapped=order == "unsorted")
                peaks[order, count] = _peak_nbytes(path)
                path.unlink()
    found, verdicts = [], []
    more = rows - rows // _SHORT_SHARE
    for order, limit in (("sorted", 1), ("unsorted", INDEX_NBYTES + SORTING_NBYTES)):
        short, long = peaks[order, rows // _SHORT_SHARE], peaks[order, rows]
        a_row = (long - short) / more
        found += [
            measurement(f"{order}, {rows // _SHORT_SHARE:,} rows", "MiB", [short / _MIB]),
            measurement(f"{order}, {rows:,} rows", "MiB", [long / _MIB], details={"nbytes": a_row}),
        ]
        measured = a_row if scale.shrink == 1 else None
        verdicts.append(Verdict.of(f"{order}: at most {limit} bytes a further row, at the peak", measured, "<=", limit))
    return Outcome("trace-memory", "Peak memory of reading a trace in the order of time", tuple(found), tuple(verdicts))


def _write(path: Path, rows: int, *, swapped: bool = False) -> int:
    """A file as Azure's of 2024. swapped: its second half comes first."""
    with path.open("w", encoding="ascii") as file:
        file.write(_HEADER)
        halves = (range(rows // 2, rows), range(rows // 2)) if swapped else (range(rows),)
        for half in halves:
            file.writelines(_lines(half))
    return rows


def _lines(numbers: range) -> Iterator[str]:
    for number in numbers:
        seconds, us = divmod(number * _STEP_US, 1_000_000)
        minutes, second = divmod(seconds, 60)
        hours, minute = divmod(minutes, 60)
        days, hour = divmod(hours, 24)
        date = f"2024-{1 + days // 28 % 12:02}-{1 + days % 28:02}"
        yield f"{date} {hour:02}:{minute:02}:{second:02}.{us:06}+00:00,{number % 8000 + 1},{number % 500 + 1}\n"


def _peak_nbytes(path: Path) -> int:
    command = [sys.executable, "-c", f"from benchmarks.traces import hold_least; hold_least({str(path)!r})"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return int(said.stdout)


def hold_least(path: str) -> None:
    """Read a trace in the order of time and print by how many bytes memory grew at most. Run in its own process."""
    Recording(Path(path))  # whatever is made once
    before = _resident("VmRSS")
    recording = Recording(Path(path))
    survey: Tally = recording.survey()
    with closing(recording.in_order(survey)) as requests:
        last_ns = 0
        for request in islice(requests, _IN_ORDER):
            assert request.at_ns >= last_ns
            last_ns = request.at_ns
    print(_resident("VmHWM") - before)


def _resident(name: str) -> int:
    """Source: proc(5), /proc/PID/status, in kB. VmHWM is of this program alone, unlike getrusage's after a fork."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{name}:"))
