"""A run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: requests are slices, gauges are counters.

Source: "Trace Event Format", Google, in its JSON object form: complete events (X) and counters (C), in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

import msgspec

from tensorferry.replay.results.result_folder import Row, Run
from tensorferry.replay.results.time_series import sampled, slowest, spans

MOST_REQUESTS = 2000
SLOWEST = 100  #: so many of the slowest are always among them

_REQUESTS, _GAUGES = 1, 2  # process ids of this file, which has no real ones


def perfetto(run: Run) -> Iterator[bytes]:
    """Encode the file, piece by piece."""
    encode = msgspec.json.Encoder().encode
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    for number, event in enumerate(_events(run)):
        yield (b",\n" if number else b"") + encode(event)
    yield b"\n]}\n"


def _events(run: Run) -> Iterator[dict[str, Any]]:
    for process, name in ((_REQUESTS, "requests"), (_GAUGES, "gauges")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for lane, row in _in_lanes(run, _chosen(run)):
        yield from _slices(run, row, lane)
    for sample in run.samples:
        for name, value in sample.gauges.items():
            yield {
                "ph": "C",
                "name": f"{sample.process} {name}",
                "pid": _GAUGES,
                "tid": 0,
                "ts": sample.at_ms * 1e3,
                "args": {"value": value},
            }


def _chosen(run: Run) -> list[Row]:
    """Choose all requests if there are few; else the slowest, and an even sample of the others."""
    if len(run.rows) <= MOST_REQUESTS:
        return run.rows
    chosen = {(row.line, row.turn) for row in slowest(run, SLOWEST)}
    chosen |= {(row.line, row.turn) for row in sampled(run.rows, MOST_REQUESTS - SLOWEST)}
    return [row for row in run.rows if (row.line, row.turn) in chosen]


def _in_lanes(run: Run, rows: list[Row]) -> Iterator[tuple[int, Row]]:
    """Give each request a lane of its own while it lasts: slices of one thread must nest, but requests overlap."""
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    lanes = 0
    for row in sorted(rows, key=lambda row: spans(run, row)[0].start_ms):
        start_ms = spans(run, row)[0].start_ms
        while taken and taken[0][0] <= start_ms:
            heappush(free, heappop(taken)[1])
        if free:
            lane = heappop(free)
        else:
            lanes += 1
            lane = lanes
        heappush(taken, (row.done_ms, lane))
        yield lane, row


def _slices(run: Run, row: Row, lane: int) -> Iterator[dict[str, Any]]:
    parts = spans(run, row)
    place = f"{row.line}.{row.turn}" if row.turn else str(row.line)
    told = {
        "id": row.id,
        "status": row.status,
        "reason": row.reason,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
        "items": len(row.items),
        "fallbacks": sum(map(run.fell_back, row.items)),
    }
    where = {"ph": "X", "pid": _REQUESTS, "tid": lane}
    start_ms = parts[0].start_ms
    yield where | {"name": f"line {place}", "ts": start_ms * 1e3, "dur": (row.done_ms - start_ms) * 1e3, "args": told}
    for part in parts:
        yield where | {"name": part.name, "ts": part.start_ms * 1e3, "dur": (part.end_ms - part.start_ms) * 1e3}
