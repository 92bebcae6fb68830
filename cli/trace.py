"""`tensorferry trace` describes a recorded trace, and writes smaller or plainer traces from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import click
import msgspec
from rich.table import Table
from rich.text import Text

from tensorferry.cli.outfile import OutFile
from tensorferry.cli.output import console, json_option, print_json
from tensorferry.cli.tracefile import opened, reading_options, trace_argument, window_of, window_options
from tensorferry.cli.values import Real
from tensorferry.replay.trace.convert import convert, cut
from tensorferry.replay.trace.describe import Arrivals, Description, Spread, describe
from tensorferry.replay.trace.formats.token_counts import Keys
from tensorferry.replay.trace.selection import Selection
from tensorferry.replay.trace.trace_file import Recording, Tally
from tensorferry.replay.trace.window import Moment, Window

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group()
def command() -> None:
    """Describe, convert and cut recorded traces."""


def _share_option(function: _Command) -> _Command:
    return click.option(
        "--share",
        type=Real(0, 1, min_open=True),
        default=1.0,
        show_default=True,
        help="The share of conversations to keep. Each is kept whole, chosen by --seed.",
    )(function)


@command.command("describe")
@trace_argument
@reading_options
@json_option
def describe_command(trace: Path, rate: float | None, keys: Keys | None, seed: int, as_json: bool) -> None:
    """Describe TRACE: when its requests come, their tokens and images, and what a replay would invent."""
    recording = opened(trace, rate, keys, seed, scheduled=False)
    survey = recording.survey()
    with closing(recording.in_order(survey)) as requests:
        description = describe(recording, survey, requests)
    if as_json:
        print_json(description)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _rows(description, recording.scheduled):
        table.add_row(name, Text(value))
    console().print(table)


@command.command("convert")
@trace_argument
@click.argument("out", type=OutFile(or_stdout=True))
@reading_options
@window_options
@_share_option
@json_option
def convert_command(
    trace: Path,
    out: Path | BinaryIO,
    rate: float | None,
    keys: Keys | None,
    seed: int,
    start: Moment | None,
    end: Moment | None,
    share: float,
    as_json: bool,
) -> None:
    """Write TRACE to OUT in tensorferry's own format, in the order of time.

    OUT may be -, the standard output. The counts of rows then go to stderr.
    """
    recording = opened(trace, rate, keys, seed)
    survey = recording.survey()
    selection = _selection(recording, survey, window_of(start, end), share, seed)
    convert(recording, survey, selection, out)
    _report(survey, selection, out, as_json)


@command.command("cut")
@trace_argument
@click.argument("out", type=OutFile(or_stdout=True))
@reading_options
@window_options
@_share_option
@json_option
def cut_command(
    trace: Path,
    out: Path | BinaryIO,
    rate: float | None,
    keys: Keys | None,
    seed: int,
    start: Moment | None,
    end: Moment | None,
    share: float,
    as_json: bool,
) -> None:
    """Write a part of TRACE to OUT: its unchanged lines, without broken ones.

    OUT may be -, the standard output. The counts of rows then go to stderr.
    """
    recording = opened(trace, rate, keys, seed)
    survey = recording.survey()
    selection = _selection(recording, survey, window_of(start, end), share, seed)
    cut(recording, selection, out)
    _report(survey, selection, out, as_json)


class Written(msgspec.Struct, frozen=True):
    """The numbers of rows of a trace that were written, left out and dropped: read = kept + left + dropped."""

    out: str  #: the path as it was given; - is the standard output
    read: int
    kept: int
    left: int  #: outside the window or the share
    dropped: dict[str, int]


def _selection(recording: Recording, survey: Tally, window: Window, share: float, seed: int) -> Selection:
    start_ns, end_ns = recording.bounds_ns(window, survey.first_ns)
    return Selection(start_ns, end_ns, share, seed)


def _report(survey: Tally, selection: Selection, out: Path | BinaryIO, as_json: bool) -> None:
    beside = not isinstance(out, Path)  # the standard output carries the trace alone
    name = click.format_filename(out) if isinstance(out, Path) else "-"
    written = Written(name, survey.read, selection.kept, selection.left, dict(survey.dropped))
    if as_json:
        print_json(written, err=beside)
        return
    parts = f"{written.read} read = {written.kept} written + {written.left} left + {survey.dropped.total()} dropped"
    click.echo(f"{name}: {parts}", err=beside)
    for line in _dropped(written.dropped, [f"line {drop.line}: {drop.problem}" for drop in survey.named]):
        click.echo(f"dropped: {line}", err=beside)


def _rows(d: Description, scheduled: bool) -> Iterator[tuple[str, str]]:
    yield "trace", f"{Path(d.file).name}, {d.format}"
    yield "sha256", d.sha256
    dropped = sum(d.dropped.values())
    yield "rows", f"{d.rows} read = {d.requests} requests + {dropped} dropped"
    for line in _dropped(d.dropped, d.examples):
        yield "", line
    if scheduled:
        yield "times", f"{d.origin} to {d.end}: {d.span_s:.3f} s"
    else:
        yield "times", "none, only an order; give times with --rate, or replay at --speed max"
    if d.unit_decided:
        yield "", d.unit_decided
    if d.inversions:
        yield (
            "order",
            f"{d.inversions} rows are earlier than the row before, by at most {d.largest_fall_s:.3f} s; replay sorts",
        )
    if d.glued:
        yield "", "the trace looks like several recordings, each with its own start; sorted, they overlap"
    if scheduled:
        yield from _arrivals(d.arrivals)
    yield "prompt tokens", _spread(d.prompt_tokens)
    yield "output tokens", _spread(d.output_tokens)
    if d.images.count:
        known = ", ".join(f"{count} by {how}" for how, count in d.images.known_by.items())
        yield "images", f"{d.images.count} in {d.images.requests} requests; known {known}"
        yield "images a request", _spread(d.images.per_request)
        if d.images.tokens:
            yield "tokens an image", _spread(d.images.tokens)
    else:
        yield "images", "none"
    if d.sessions:
        thinks = f"; {d.sessions.think_times} think times" if d.sessions.think_times else ""
        yield (
            "sessions",
            f"{d.sessions.count} of {d.sessions.requests} requests; turns {_spread(d.sessions.turns)}{thinks}",
        )
    if d.blocks:
        share = f"{d.blocks.seen_before:.1%} seen before"
        yield "prefix blocks", f"{d.blocks.count}, {d.blocks.different} different ones: {share}"
    if d.notes:
        yield "noted", "\n".join(f"{count} {name.replace('_', ' ')}" for name, count in d.notes.items())
    yield "would be invented", "\n".join(f"{count} {what}" for what, count in d.invented.items()) or "nothing"


def _arrivals(a: Arrivals) -> Iterator[tuple[str, str]]:
    if a.per_s is None:
        return
    busiest = "".join(f"; busiest {stretch} {rate:.2f}" for stretch, rate in a.busiest_per_s.items())
    yield "requests/s", f"{a.per_s:.3f} on average{busiest}"
    told = [] if a.gap_cv is None else [f"CV of gaps {a.gap_cv:.2f}"]
    if a.dispersion:
        told.append("variance/mean of counts " + ", ".join(f"{r:.2f} in {s}" for s, r in a.dispersion.items()))
    yield "burstiness", "; ".join(told) + " (Poisson: 1.00)" if told else "-"
    yield "at once", f"at most {a.most_at_once} at the same instant"
    yield "longest silence", f"{a.longest_silence_s:.3f} s"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "the trace does not count them"
    return f"mean {spread.mean:.1f}, p50 {spread.p50}, p90 {spread.p90}, p99 {spread.p99}, max {spread.max}"


def _dropped(reasons: dict[str, int], examples: list[str]) -> Iterator[str]:
    if reasons:
        yield ", ".join(f"{count} x {reason}" for reason, count in reasons.items())
        yield from examples[:8]
