"""The report of a replay: a table for people, and files for programs, which `result_folder` reads again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorferry.codecs.system.atomic_file import write_whole
from tensorferry.pipeline.recording.request import ASSUMED_OUTPUT_TOKENS, Drop, Image
from tensorferry.pipeline.telemetry.timeline import reached
from tensorferry.replay.results.summary import (
    DEGRADED_LATENESS_MS,
    UNSENT,
    Items,
    Reason,
    Summary,
    TraceSummary,
)
from tensorferry.replay.run.gauge_samples import Sample
from tensorferry.replay.run.sender import Outcome
from tensorferry.replay.workload.prepare import Invented

_encode = msgspec.json.Encoder().encode


# --- for programs --------------------------------------------------------------------------------------------


def write_report(
    folder: Path,
    summary: Summary,
    outcomes: Sequence[Outcome],
    drops: Sequence[Drop],
    start_ns: int,
    samples: Sequence[Sample] = (),
) -> None:
    """Write the files into `folder`, which is made if needed. Each file appears as a whole, the summary last."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (_encode(result) + b"\n" for result in results(outcomes, drops, start_ns))
    write_whole(folder / "results.jsonl", lines)
    write_whole(folder / "gauges.jsonl", (_encode(sample) + b"\n" for sample in samples))
    write_whole(folder / "summary.json", [msgspec.json.format(_encode(summary), indent=2), b"\n"])


def results(outcomes: Sequence[Outcome], drops: Sequence[Drop], start_ns: int) -> Iterator[dict[str, Any]]:
    """Return one object for each row read: first those sent, in the order of sending, then those dropped."""
    first_ns = min((o.request.request.at_ns for o in outcomes), default=0)
    for outcome in outcomes:
        request = outcome.request.request
        yield {
            "line": request.line,
            "turn": request.turn,
            "id": request.id,
            "status": outcome.status,
            "reason": outcome.reason,
            "problem": outcome.problem,
            "at_ms": (request.at_ns - first_ns) / 1e6,
            "intended_ms": outcome.intended_ns / 1e6,
            "sent_ms": outcome.sent_ns / 1e6,
            "done_ms": outcome.done_ns / 1e6,
            "latency_from_intended_ms": (outcome.done_ns - outcome.intended_ns) / 1e6,
            "latency_from_sent_ms": (outcome.done_ns - outcome.sent_ns) / 1e6,
            "delayed": outcome.delayed,
            "session": request.session,
            "waited": outcome.waited,
            "images": _sources(outcome.request.all_images),
            "prompt_tokens": outcome.prompt_tokens,
            "output_tokens": outcome.output_tokens,
            "items": [
                {
                    "rank": item.rank,
                    "grid": item.grid,
                    "rows": item.rows,
                    "transport": item.transport,
                    "nbytes": item.nbytes,
                    "digest": item.digest.hex(),
                }
                for item in outcome.items
            ],
            "marks_ms": {step: (at_ns - start_ns) / 1e6 for step, at_ns in reached(outcome.marks).items()},
        }
    for drop in drops:
        yield {"line": drop.line, "status": "dropped", "reason": drop.reason, "problem": drop.problem}


def _sources(images: Sequence[Image]) -> dict[str, int]:
    """Count where the bytes of a request's images came from."""
    data, files = sum(bool(image.data) for image in images), sum(bool(image.path) for image in images)
    return {"in_trace": data, "from_file": files, "invented": len(images) - data - files}


# --- for people ----------------------------------------------------------------------------------------------


def print_report(console: Console, summary: Summary) -> None:
    """Print the tables, then the dropped and failed requests, then the warnings."""
    console.print(_fact_table(summary, _rows(summary)))
    console.print(_time_table(summary))
    for note in maxima_notes(summary):
        console.print(note, markup=False, highlight=False)
    if summary.run.speed == "max":
        console.print("speed max has no schedule, so there are no intended times and no lateness")
    if summary.steps:
        console.print(_step_table(summary))
        for note in step_notes(summary):
            console.print(note, markup=False, highlight=False)
    for name, reasons in (("dropped", summary.dropped), ("failed", summary.failed)):
        for reason in reasons:
            console.print(_reason(name, reason), markup=False, highlight=False)
    for warning in warnings(summary):
        console.print(warning, style="bold red", markup=False, highlight=False)


def print_plan(console: Console, summary: Summary) -> None:
    """Print what a run would do. `summary`: of a run that has sent nothing."""
    s = summary
    unsent = sum(reason.count for reason in s.dropped if reason.reason == UNSENT)
    rows = [("trace", trace_text(s)), ("sha256", s.trace.sha256), ("run", how_text(s)), *_session_rows(s)]
    rows += [
        ("requests", f"{s.requests.read} read = {unsent} to send + {s.requests.read - unsent} dropped"),
        ("payload", f"sha256 {s.run.payload_sha256}"),
        ("invented", invented_text(s.invented, s.trace)),
    ]
    console.print(_fact_table(s, rows))
    for reason in s.dropped:
        if reason.reason != UNSENT:
            console.print(_reason("dropped", reason), markup=False, highlight=False)
    for warning in warnings(s):
        console.print(warning, style="bold red", markup=False, highlight=False)
    console.print("this was a dry run: nothing was started and nothing was sent")


def _fact_table(summary: Summary, rows: Iterable[tuple[str, str]]) -> Table:
    # Text, not str: a table reads "[...]" in a string as markup, and file names may contain that.
    title = Text(f"{Path(summary.trace.file).name} ({summary.trace.format}) through {summary.run.deployment}")
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def trace_text(s: Summary) -> str:
    notes = [f"{count} {name.replace('_', ' ')}" for name, count in s.trace.notes.items()]
    if s.trace.inversions:
        notes.append(f"{s.trace.inversions} rows out of order, sorted")
    if s.trace.outside:
        notes.append(f"{s.trace.outside} rows outside --start and --end")
    if s.trace.drawn:
        notes.append("requests drawn from statistics, not recorded")
    return f"starts at {s.trace.origin}, spans {s.trace.span_s:.3f} s" + "".join(f"; {n}" for n in notes)


def how_text(s: Summary) -> str:
    speed = "as fast as possible" if s.run.speed == "max" else f"speed {s.run.speed}"
    ceiling = "no ceiling" if s.run.concurrency is None else f"at most {s.run.concurrency} in flight"
    return f"{speed}, {ceiling}, seed {s.run.seed}, transport {s.run.transport}"


def _rows(s: Summary) -> Iterator[tuple[str, str]]:
    yield "trace", trace_text(s)
    yield "run", f"{how_text(s)}, {s.run.duration_s:.3f} s"
    yield from _session_rows(s)
    r = s.requests
    yield "requests", f"{r.read} read = {r.sent} sent + {r.dropped} dropped; sent = {r.ok} ok + {r.failed} failed"
    if r.delayed:
        yield "", f"{r.delayed} delayed by the ceiling of {s.run.concurrency}"
    p = s.per_second
    rates = [("scheduled", p.scheduled), ("sent", p.sent), ("ok", p.ok)]
    said = ", ".join(f"{rate:.2f} {name}" for name, rate in rates if rate is not None)
    window = "" if p.window_s is None else f", over {p.window_s:.3f} s"
    yield "requests/s", said + window if said else "-"
    yield "items", _items(s.items)
    if s.items.fallbacks is not None:
        away = s.items.fallbacks
        yield "fallbacks", f"{away.items} items ({size_text(away.nbytes)}) went inline because a pool had no room"
    pools = [
        f"{name} {size_text(pool.peak_lent_nbytes)} of {size_text(pool.capacity_nbytes)}"
        + (f", full {pool.refused} times" if pool.refused else "")
        for name, pool in s.pools.items()
    ]
    yield "pool peak", "\n".join(pools) or "no pools"
    yield "invented", invented_text(s.invented, s.trace)


def _session_rows(s: Summary) -> Iterator[tuple[str, str]]:
    """Describe the session mode, but only if there are later turns: without them all modes are equal."""
    if s.run.sessions == "clock" or not s.run.following:
        return
    means = {"wait": "at their time, once the turn before is answered", "think": "their think time after that answer"}
    yield "sessions", f"{s.run.sessions}: {s.run.following} turns {means[s.run.sessions]}"
    if s.requests.waited:
        yield "", f"{s.requests.waited} were later than recorded, since they waited for the turn before"
    if s.run.guessed_think_times:
        yield "", f"{s.run.guessed_think_times} think times include the recorded answer, whose length is unknown"


def _items(items: Items) -> str:
    if not items.count:
        return "none"
    ways = [f"{c.items} by {transport} ({size_text(c.nbytes)})" for transport, c in items.by_transport.items()]
    return f"{items.count}, {items.rows} embeddings: {', '.join(ways)}"


def invented_text(i: Invented, trace: TraceSummary) -> str:
    number_only = f"images: size and picture (the trace has only their number), sizes as {i.image_model}"
    said = [
        (i.images_of_modelled_size, number_only),
        (i.images_of_given_tokens, "images: picture, of a size chosen for the recorded tokens"),
        (i.images_off_their_tokens, "of them with another number of tokens than recorded"),
        (i.images_of_given_size, "images: picture, of the recorded size"),
        (i.prompts, "prompts: token ids (the trace has only their number)"),
        (i.answers, "prompts: the answers of the turns before, as token ids"),
        (trace.notes.get("output_tokens_assumed", 0), f"requests: output length, {ASSUMED_OUTPUT_TOKENS} tokens"),
        (trace.notes.get("number_of_images_assumed", 0), "requests: number of images, 1"),
        (i.prompts_without_text, "prompts: no text, as the images take all of the recorded tokens"),
    ]
    lines = [f"{count} {what}" for count, what in said if count]
    if trace.rate is not None:
        lines.append(f"all times: {trace.rate:g} requests a second, evenly")
    if i.images_of_modelled_size or i.images_of_given_tokens or i.images_of_given_size:
        lines.append(f"pictures: {i.different_images} different ones, from {', '.join(i.photos)}")
    return "\n".join(lines) or "nothing"


def _time_table(s: Summary) -> Table:
    table = Table(title="times, ms", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("of each request", no_wrap=True)
    for head in ("p50", "p90", "p99", "max"):
        table.add_column(head, justify="right")
    for row in time_rows(s):
        table.add_row(*row)
    return table


def time_rows(s: Summary) -> Iterator[list[str]]:
    """Return the name, p50, p90, p99 and max in ms of each time of a request."""
    times = [("latency from actual send", s.latency_ms.from_sent)]
    if s.run.speed != "max":
        times.insert(0, ("latency from intended time", s.latency_ms.from_intended))
        times.append(("lateness of sending", s.lateness_ms))
    for name, q in times:
        yield [name, *(["-"] * 4 if q is None else [f"{value:.2f}" for value in (q.p50, q.p90, q.p99, q.max)])]


def maxima_notes(s: Summary) -> Iterator[str]:
    """Name the percentiles of all requests that are their maximum, because there are too few requests."""
    for what, q in (("latencies", s.latency_ms.from_sent), ("sends", s.lateness_ms)):
        if q is not None and q.maxima:
            *others, last = q.maxima
            names = f"{', '.join(others)} and {last}" if others else last
            yield f"{names} of {q.count} {what} {'are' if others else 'is'} their maximum"


def step_notes(s: Summary) -> Iterator[str]:
    """Say the same for the steps."""
    if any("p99" in step.since_sent.maxima for step in s.steps):
        yield "steps: p99 of fewer than 100 requests is their maximum"


def _step_table(summary: Summary) -> Table:
    table = Table(title="steps, ms", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("step", no_wrap=True)
    for head in (
        "requests",
        "p50 after the send",
        "p99 after the send",
        "p50 after the step before",
        "p99 after the step before",
    ):
        table.add_column(head, justify="right")
    for step in summary.steps:
        whole, part = step.since_sent, step.since_previous
        values = (f"{v:.2f}" for v in (whole.p50, whole.p99, part.p50, part.p99))
        table.add_row(Text(step.step), str(step.requests), *values)
    return table


def _reason(name: str, reason: Reason) -> str:
    return f"{name}: {reason.count} x {reason.reason} ({'; '.join(reason.examples)})"


def warnings(s: Summary) -> Iterator[str]:
    if s.run.degraded:
        yield (
            f"DEGRADED: sends were late by more than {DEGRADED_LATENESS_MS:g} ms at p99; "
            "this load is not the recorded one"
        )
    if s.trace.glued:
        yield "the trace looks like several recordings, each with its own start; sorted, they overlap"
    if s.run.interrupted:
        yield "interrupted: sending stopped before the trace ended"
    if s.run.error:
        yield f"the deployment failed: {s.run.error}"


def size_text(nbytes: int) -> str:
    if nbytes < 1 << 10:
        return f"{nbytes} B"
    return f"{nbytes / 1024:.1f} KiB" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.1f} MiB"
