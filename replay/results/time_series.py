"""The course of a run over time, as numbers for plots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tensorferry.pipeline.telemetry.timeline import READ, SPANS
from tensorferry.replay.results.result_folder import Row, Run

Floats = npt.NDArray[np.float64]

MOST_BINS = 90
MOST_POINTS = 400  #: points of a line, more than a screen shows of a small plot
_WIDTHS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)

ARRIVAL, FAILED, UNSENT = "answer", "failed later", "not sent yet"


class Span(msgspec.Struct, frozen=True):
    """A part of a request's path."""

    name: str
    start_ms: float
    end_ms: float


class Bins(msgspec.Struct, frozen=True):
    """Equal intervals of a run."""

    width_s: float
    edges_s: Floats

    @classmethod
    def of(cls, duration_s: float, most: int = MOST_BINS) -> Bins:
        """Make at most `most` of them, with a round width."""
        wanted = duration_s / most
        width = next((width for width in _WIDTHS_S if width >= wanted), _WIDTHS_S[-1] * np.ceil(wanted / _WIDTHS_S[-1]))
        count = max(1, int(np.ceil(duration_s / width)))
        return cls(float(width), np.linspace(0.0, count * float(width), count + 1))

    @property
    def count(self) -> int:
        return len(self.edges_s) - 1

    def place(self, times_s: Floats) -> npt.NDArray[np.intp]:
        """Return the bin of each time. A time outside all bins is in the nearest one."""
        return np.clip((times_s / self.width_s).astype(np.intp), 0, self.count - 1)

    def counts(self, times_s: Floats, weights: Floats | None = None) -> Floats:
        return np.bincount(self.place(times_s), weights, minlength=self.count).astype(np.float64)


def seconds(rows: Sequence[Row], name: str) -> Floats:
    """Return one time of each row, such as sent_ms, in seconds."""
    return np.array([getattr(row, name) for row in rows], np.float64) / 1e3


def latencies(run: Run) -> Floats:
    """Return the latencies in seconds of the requests that were ok, in the order of sending."""
    return np.array([run.latency_ms(row) for row in run.ok], np.float64) / 1e3


def distribution(values: Floats) -> tuple[Floats, Floats]:
    """Return values, and the share of all values that are at most as large. Points are thinned; both ends are kept."""
    ordered = np.sort(values)
    places = _evenly(len(ordered), MOST_POINTS)
    return ordered[places], (places + 1) / len(ordered)


def quantiles_over_time(bins: Bins, times_s: Floats, values: Floats, shares: Sequence[float]) -> list[Floats]:
    """Return, for each share, the quantile of every bin (nearest rank; NaN if the bin is empty)."""
    places = bins.place(times_s)
    found = np.full((len(shares), bins.count), np.nan)
    for place in np.unique(places):
        found[:, place] = np.quantile(values[places == place], shares, method="inverted_cdf")
    return list(found)


def spans(run: Run, row: Row) -> list[Span]:
    """Return the consecutive parts of a request's path, from its due time to its answer."""
    found: list[Span] = []
    if run.scheduled and row.sent_ms > row.intended_ms:
        found.append(Span(UNSENT, row.intended_ms, row.sent_ms))
    at_ms = row.sent_ms
    for step, end_ms in row.marks_ms.items():
        if step.startswith(READ):
            continue
        found.append(Span(SPANS.get(step, step), at_ms, max(at_ms, end_ms)))
        at_ms = max(at_ms, end_ms)
    found.append(Span(ARRIVAL if row.status == "ok" else FAILED, at_ms, max(at_ms, row.done_ms)))
    return found


def whereabouts(run: Run, at_s: Floats) -> dict[str, Floats]:
    """Count the requests on each part of their path at these times."""
    starts: defaultdict[str, list[float]] = defaultdict(list)
    ends: defaultdict[str, list[float]] = defaultdict(list)
    for row in run.rows:
        for span in spans(run, row):
            starts[span.name].append(span.start_ms)
            ends[span.name].append(span.end_ms)
    at_ms = at_s * 1e3
    return {name: _passed(starts[name], at_ms) - _passed(ends[name], at_ms) for name in in_order(starts)}


def in_order(names: Iterable[str]) -> list[str]:
    """Sort parts of the path by their order on it. Unknown names come last."""
    known = [UNSENT, *SPANS.values(), FAILED]
    given = list(dict.fromkeys(names))
    return [name for name in known if name in given] + [name for name in given if name not in known]


def occupancy(run: Run) -> dict[str, tuple[Floats, Floats, Floats]]:
    """Return, for each process with a pool, times in seconds, bytes lent, and the pool's capacity in bytes."""
    found: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for sample in run.samples:
        gauges = sample.gauges
        if "pool_lent_nbytes" in gauges and "pool_capacity_nbytes" in gauges:
            found[sample.process].append(
                (sample.at_ms / 1e3, gauges["pool_lent_nbytes"], gauges["pool_capacity_nbytes"])
            )
    columns = {process: np.array(rows, np.float64).T for process, rows in sorted(found.items())}
    return {process: (at_s, lent, capacity) for process, (at_s, lent, capacity) in columns.items()}


def fallbacks(run: Run, bins: Bins) -> tuple[Floats, Floats]:
    """Count the items of each bin that went through a pool, and that fell back to inline, by time of hand-over."""
    times: tuple[list[float], list[float]] = [], []
    for row in run.rows:
        at_s = row.marks_ms.get("processed", row.sent_ms) / 1e3
        for item in row.items:
            if run.pooled(item):
                times[run.fell_back(item)].append(at_s)
    pooled, fell_back = (bins.counts(np.array(at_s, np.float64)) for at_s in times)
    return pooled, fell_back


def slowest(run: Run, count: int) -> list[Row]:
    """Return the slowest of the requests that were ok, the slowest first."""
    return sorted(run.ok, key=run.latency_ms, reverse=True)[:count]


def sampled(rows: Sequence[Row], most: int) -> list[Row]:
    """Return an even sample of at most `most` rows, both ends included."""
    return [rows[place] for place in _evenly(len(rows), most)]


def _evenly(count: int, most: int) -> npt.NDArray[np.intp]:
    """Return at most `most` places of `count`, evenly, both ends included."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.intp))


def _passed(times_ms: list[float], at_ms: Floats) -> Floats:
    return np.searchsorted(np.sort(np.array(times_ms, np.float64)), at_ms, side="right").astype(np.float64)
