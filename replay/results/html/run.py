"""The page report.html, which shows one run, and all that is needed to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tensorferry.pipeline.deployment.yaml_file import emit
from tensorferry.pipeline.telemetry.timeline import SPANS
from tensorferry.replay.results import time_series
from tensorferry.replay.results.html import charts, page
from tensorferry.replay.results.html.page import Figure, Table
from tensorferry.replay.results.report import (
    how_text,
    invented_text,
    maxima_notes,
    size_text,
    step_notes,
    time_rows,
    trace_text,
    warnings,
)
from tensorferry.replay.results.result_folder import Row, Run
from tensorferry.replay.results.summary import Quantiles, Step, Summary

SLOWEST = 12
STEP_HEAD = (
    "part of the path",
    "until the step",
    "requests",
    "p50 after the step before",
    "p99 after the step before",
    "p50 after the send",
    "p99 after the send",
)
SLOW_HEAD = ("request", "took, ms", "most of it, ms", "prompt tokens", "items", "fallbacks")
_LAYER_POINTS = 240


def report(run: Run) -> bytes:
    """Make the page. Raises ReportError without matplotlib."""
    s = run.summary
    title = f"{Path(s.trace.file).name} through {s.run.deployment}"
    bins = time_series.Bins.of(max(s.run.duration_s, 1e-3))
    shown = bool(run.rows)
    return page.document(
        "run.html",
        title,
        f"{trace_text(s)}; {how_text(s)}",
        warnings(s),
        tiles=_first(s),
        latency=_latency(run, bins) if shown else None,
        load=_load(run, bins) if shown else None,
        pools=_pools(run, bins) if shown and s.run.pooled_from_nbytes is not None else None,
        stages=_stages(run) if shown else None,
        problems=_problems(s),
        command=shlex.join(s.run.command),
        facts=_facts(s),
        config=emit(s.run.config),
    )


def _first(s: Summary) -> Iterator[tuple[str, str]]:
    r = s.requests
    yield f"ok of {r.sent} sent", str(r.ok)
    latency = s.latency_ms.from_intended or s.latency_ms.from_sent
    if latency is not None:
        yield "latency p50", charts.duration_text(latency.p50 / 1e3)
        yield f"latency p99{_only(latency)}", charts.duration_text(latency.p99 / 1e3)
    rates = {"scheduled": s.per_second.scheduled, "sent": s.per_second.sent, "ok": s.per_second.ok}
    for what, rate in rates.items():
        if rate is not None:
            yield f"requests {what} a second", f"{rate:.2f}"
    if s.items.fallbacks is not None:
        yield f"of {s.items.count} items fell back to inline", str(s.items.fallbacks.items)
    if s.lateness_ms is not None:
        yield f"late sends, p99{_only(s.lateness_ms)}", charts.duration_text(s.lateness_ms.p99 / 1e3)


def _latency(run: Run, bins: time_series.Bins) -> dict[str, object]:
    s = run.summary
    latencies = time_series.latencies(run)
    from_sent = np.array([row.done_ms - row.sent_ms for row in run.ok]) / 1e3
    curves, since = {"from the send": from_sent}, ", from the send"
    if run.scheduled:
        curves, since = {"from the intended time": latencies, **curves}, ""
    when = time_series.seconds(run.ok, "intended_ms" if run.scheduled else "sent_ms")
    p50, p99 = time_series.quantiles_over_time(bins, when, latencies, (0.5, 0.99))
    figures = [
        page.plot(
            "latency",
            "How long requests took",
            f"The share of requests answered within the time below{since}; dotted: 50, 90 and 99 %.",
            charts.distributions(curves),
        ),
        page.plot(
            "latency-over-time",
            "Latency over the run",
            f"The latency of the requests that were due in each {charts.duration_text(bins.width_s)}; "
            "the p99 of fewer than 100 requests is their maximum.",
            charts.lines(bins.edges_s, {"p50": p50, "p99": p99}, "", seconds=True, stepped=True),
        ),
    ]
    times = Table(("of each request", "p50", "p90", "p99", "max"), list(time_rows(s)), caption="times, ms")
    return {"figures": figures, "times": times, "notes": maxima_notes(s)}


def _load(run: Run, bins: time_series.Bins) -> list[Figure]:
    ok, failed = run.ok, [row for row in run.rows if row.status != "ok"]
    counts = {
        "sent": bins.counts(time_series.seconds(run.rows, "sent_ms")),
        "ok": bins.counts(time_series.seconds(ok, "done_ms")),
    }
    if run.scheduled:
        counts = {"due": bins.counts(time_series.seconds(run.rows, "intended_ms")), **counts}
    if failed:
        counts["failed"] = bins.counts(time_series.seconds(failed, "done_ms"))
    rates = {name: values / bins.width_s for name, values in counts.items()}
    at_s = np.linspace(0, max(run.summary.run.duration_s, 1e-3), _LAYER_POINTS)
    where = time_series.whereabouts(run, at_s)
    most = max((values.max() for values in where.values()), default=0.0)
    where = {name: values for name, values in where.items() if values.max() >= most / 30}  # smaller ones are invisible
    return [
        page.plot(
            "rates",
            "Requests a second",
            f"The rates in each {charts.duration_text(bins.width_s)} of the run.",
            charts.lines(bins.edges_s, rates, "", stepped=True),
        ),
        page.plot(
            "whereabouts",
            "Where requests were",
            "The requests in flight, by the part of their path.",
            charts.layers(at_s, where, "requests"),
        ),
    ]


def _pools(run: Run, bins: time_series.Bins) -> dict[str, object]:
    s = run.summary
    figures = []
    lent = time_series.occupancy(run)
    if lent:
        figures.append(
            page.plot(
                "occupancy",
                "How full pools were",
                "The lent share of each pool: tokenizers' four times a second, encoders' by heartbeat.",
                charts.traces(
                    {
                        process: (at_s, 100 * nbytes / np.maximum(capacity, 1))
                        for process, (at_s, nbytes, capacity) in lent.items()
                    },
                    "%",
                    s.run.duration_s,
                    limit=100,
                ),
            )
        )
    pooled, fell_back = time_series.fallbacks(run, bins)
    figures.append(
        page.plot(
            "fallbacks",
            "How items travelled",
            "Items that are large enough for a pool; a fallback went inline because the pool had no room.",
            charts.columns(bins, {"by pool": pooled, "fallback": fell_back}, "items"),
        )
    )
    rows = [
        [name, size_text(pool.capacity_nbytes), size_text(pool.peak_lent_nbytes), pool.refused]
        for name, pool in s.pools.items()
    ]
    head = ("pool of", "size", "most ever lent", "times full")
    return {"figures": figures, "sizes": Table(head, rows)}


def _stages(run: Run) -> dict[str, object]:
    """Show where the time goes in all requests, and in the slowest."""
    steps, rows = run.summary.steps, time_series.slowest(run, SLOWEST)
    figures, slow = [], None
    if steps:
        lengths = {
            SPANS.get(step.step, step.step): (step.since_previous.p50 / 1e3, step.since_previous.p99 / 1e3)
            for step in steps
        }
        figures.append(
            page.plot(
                "stages",
                "Where the time goes",
                "The time from one step to the next, over the requests that were ok.",
                charts.bars(lengths, ("p50", "p99")),
                height=0.7 + 0.3 * len(lengths),
            )
        )
    if rows:
        ways = {_place(row): time_series.spans(run, row) for row in rows}
        figures.append(
            page.plot(
                "slowest",
                "The slowest requests",
                "Each starts at its due time, and is named by its line in the trace.",
                charts.timelines(ways),
                height=1.3 + 0.23 * len(rows),
            )
        )
        slow = Table(SLOW_HEAD, [_slow(run, row, ways[_place(row)]) for row in rows], caption="the slowest")
    taken = Table(STEP_HEAD, list(map(_step, steps)), caption="steps, ms") if steps else None
    return {"figures": figures, "steps": taken, "notes": step_notes(run.summary), "slowest": slow}


def _step(step: Step) -> list[object]:
    part, whole = step.since_previous, step.since_sent
    times = (f"{value:.2f}" for value in (part.p50, part.p99, whole.p50, whole.p99))
    return [SPANS.get(step.step, step.step), step.step, step.requests, *times]


def _slow(run: Run, row: Row, way: Sequence[time_series.Span]) -> list[object]:
    longest = max(way, key=lambda span: span.end_ms - span.start_ms)
    most = f"{longest.name} {longest.end_ms - longest.start_ms:.1f}"
    fallbacks = sum(map(run.fell_back, row.items))
    return [_place(row), f"{run.latency_ms(row):.1f}", most, row.prompt_tokens, len(row.items), fallbacks]


def _problems(s: Summary) -> Table | None:
    reasons = [(name, reason) for name, all_of in (("failed", s.failed), ("dropped", s.dropped)) for reason in all_of]
    if not reasons:
        return None
    rows = [[name, reason.reason, reason.count, "; ".join(reason.examples)] for name, reason in reasons]
    return Table(("", "reason", "count", "such as"), rows, said=(1, 3))


def _facts(s: Summary) -> Iterator[tuple[str, str]]:
    """Return the facts that a repetition needs, and how much of the run was real."""
    yield "trace", f"{s.trace.file}\n{s.trace.format}, sha256 {s.trace.sha256}"
    yield "requests", f"{s.requests.read} read = {s.requests.sent} sent + {s.requests.dropped} dropped"
    yield "payload", f"sha256 {s.run.payload_sha256}"
    yield "invented", invented_text(s.invented, s.trace)
    if s.run.date:
        yield "date", s.run.date
    yield "tensorferry", s.tensorferry
    if s.machine is not None:
        yield from s.machine.facts()


def _place(row: Row) -> str:
    return f"line {row.line}.{row.turn}" if row.turn else f"line {row.line}"


def _only(q: Quantiles) -> str:
    return ", the maximum" if "p99" in q.maxima else ""
