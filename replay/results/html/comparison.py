"""The page that compares groups of runs."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.replay.results.comparison import METRICS, Comparison, Group, Metric, Value, pooled_latencies
from tensorferry.replay.results.confidence import Estimate
from tensorferry.replay.results.html import charts, page
from tensorferry.replay.results.html.page import Figure, Table


def report(groups: Sequence[Group], comparison: Comparison) -> bytes:
    """Make the page. Raises ReportError without matplotlib."""
    first = groups[0].runs[0].summary
    runs = sum(len(group.runs) for group in groups)
    title = f"{len(groups)} ways to run {first.trace.file.rpartition('/')[2]}"
    lead = f"{runs} runs; values are means of runs with 95 % intervals; changes are from the first row"
    return page.document(
        "comparison.html",
        title,
        lead,
        comparison.warnings,
        values=_table(comparison),
        figures=[_distributions(groups), *_intervals(comparison)],
        runs=_runs(groups),
    )


def value_text(metric: Metric, estimate: Estimate) -> str:
    """Write a number with its interval: `1.20 s [1.10, 1.31]`."""
    scale, unit, digits = {"s": (1.0, "s", 3), "1/s": (1.0, "/s", 2), "%": (100.0, "%", 2)}[metric.unit]
    value = f"{estimate.value * scale:.{digits}f} {unit}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{estimate.low * scale:.{digits}f}, {estimate.high * scale:.{digits}f}]"


def change_text(value: Value) -> str:
    """Write the change from the first group; empty for that group."""
    if value.change is None:
        return ""
    change = value.change
    known = "" if change.low is None or change.high is None else f" [{change.low:+.1%}, {change.high:+.1%}]"
    return f"{change.value:+.1%}{known}"


def _table(comparison: Comparison) -> Table:
    rows: list[list[object]] = []
    for metric in METRICS:
        lines = [line for line in comparison.lines if metric.key in line.values]
        for number, line in enumerate(lines):
            value = line.values[metric.key]
            change = change_text(value)
            cells = [
                value_text(metric, value.estimate),
                page.Marked(change, value.verdict) if value.verdict else change,
            ]
            rows.append(["" if number else metric.name, line.name, len(line.folders), *cells, value.verdict])
    return Table(("", "with", "runs", "value [95 %]", "from the first", ""), rows, said=(1,))


def _distributions(groups: Sequence[Group]) -> Figure:
    curves = {group.name: pooled_latencies(group) for group in groups}
    explained = "The share of the requests of all runs that were answered within the time below."
    return page.plot("latency", "How long requests took", explained, charts.distributions(curves))


def _intervals(comparison: Comparison) -> list[Figure]:
    figures = []
    for metric in METRICS:
        shown = {
            line.name: _scaled(metric, line.values[metric.key].estimate)
            for line in comparison.lines
            if metric.key in line.values
        }
        if any(high for _, _, high in shown.values()):
            height = 0.9 + 0.45 * len(shown)
            drawn = charts.intervals(shown, "%" if metric.unit == "%" else "", seconds=metric.unit == "s")
            explained = "More is better." if metric.more_is_better else "Less is better."
            figures.append(page.plot(metric.key.replace("_", "-"), metric.name, explained, drawn, height=height))
    return figures


def _scaled(metric: Metric, estimate: Estimate) -> tuple[float, float, float]:
    scale = 100.0 if metric.unit == "%" else 1.0
    low = estimate.value if estimate.low is None else estimate.low
    high = estimate.value if estimate.high is None else estimate.high
    return low * scale, estimate.value * scale, high * scale


def _runs(groups: Sequence[Group]) -> Table:
    rows = [
        [
            group.name,
            str(run.folder),
            run.summary.requests.ok,
            run.summary.requests.sent,
            f"{run.summary.run.duration_s:.1f}",
            run.summary.run.date or "-",
            run.summary.machine.host if run.summary.machine is not None else "-",
        ]
        for group in groups
        for run in group.runs
    ]
    return Table(("", "folder", "ok", "sent", "s", "date", "host"), rows, said=(1, 5, 6))
