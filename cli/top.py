"""`tensorferry top` shows the processes of a running deployment, again and again."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tensorferry.cli.config import config_option, load_deployment, set_option
from tensorferry.cli.output import console
from tensorferry.cli.values import Real
from tensorferry.codecs.messages import Member
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.replay.results.report import size_text

_BAR = 12
_PLAIN_WIDTH = 130  #: columns of a table that goes to a file or a pipe
_WIDE = 120  #: a terminal with so many columns has room for everything
_NAME = 24  #: the most letters of a deployment's name that are shown
_HUNDRED = 100  #: the 99th percentile of fewer latencies is the longest of them
_STATES = {"ready": "green", "waiting": "yellow", "leaving": "yellow", "quarantined": "red", "gone": "red"}
#: By stage: the gauge that counts its work, and the word for that work.
_WORK = {"tokenizer": ("requests_ok", "requests"), "encoder": ("encoded_items", "items")}


class Look:
    """The processes of a deployment at one time, and their gauges by name."""

    def __init__(self, members: Sequence[Member], at_s: float) -> None:
        self.at_s = at_s
        self.members = members
        self.gauges = {_name(member): {gauge.name: gauge.value for gauge in member.gauges} for member in members}
        self.epochs = {_name(member): member.epoch for member in members}


@click.command()
@config_option
@set_option
@click.option(
    "--every", "every_s", type=Real(0.1, 86_400), default=1.0, show_default=True, help="The period, in seconds."
)
@click.option("--once", is_flag=True, help="Print one table, with the rates of one period, and end.")
def command(file: Path, settings: tuple[str, ...], every_s: float, once: bool) -> None:
    """Watch the running deployment of FILE: rates, latencies, requests in flight, queues, pools. Ctrl-C ends it.

    Rates cover the last period. Latencies cover the last minute, from a request's arrival to its answer. The numbers of
    encoders and schedulers are as old as their last heartbeat. The table fits 80 columns and 24 lines, and shows more
    from 120 columns on. A file or a pipe gets one table a period.
    """
    try:
        asyncio.run(_watch(load_deployment(file, settings), every_s, once))
    except KeyboardInterrupt:
        pass


async def _watch(deployment: Deployment, every_s: float, once: bool) -> None:
    out = console(_PLAIN_WIDTH)
    async with Client.connect(deployment, timeout_s=deployment.timeouts.start_s) as client:
        before = Look(await client.refresh(), time.monotonic())
        while once or not out.is_terminal:
            await asyncio.sleep(every_s)
            now = Look(await client.refresh(), time.monotonic())
            out.print(view(deployment.name, before, now, out.width))
            sys.stdout.flush()
            if once:
                return
            before = now
        now = before
        with Live(console=out, auto_refresh=False) as live:
            while True:
                shown = view(deployment.name, before, now, out.width, out.height)
                live.update(shown, refresh=True)
                await asyncio.sleep(every_s)
                before, now = now, Look(await client.refresh(), time.monotonic())


def view(name: str, before: Look, now: Look, width: int, height: int | None = None) -> RenderableType:
    """Draw a line for the whole deployment, and one for each process, for this many columns (80 or more) and lines.

    height: None for one line a process. If they do not fit, processes that are not ready come first.
    """
    wide = width >= _WIDE
    columns = [column for column in _COLUMNS if column.wide in (None, wide)]
    table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column.head, justify=column.justify, no_wrap=True)
    shown = now.members
    if height is not None and len(shown) > (most := max(1, height - _AROUND)):
        troubled_first = sorted(shown, key=lambda member: member.state == "ready")[:most]
        shown = [member for member in shown if member in troubled_first]
    for member in shown:
        row = Row(member, before, now)
        table.add_row(*(column.cell(row) for column in columns))
    notes = []
    if any(0 < now.gauges[_name(member)].get("latency_requests", 0) < _HUNDRED for member in shown):
        notes.append(f"* the longest latency, since there were fewer than {_HUNDRED} requests")
    if hidden := len(now.members) - len(shown):
        notes.append(f"{hidden} more processes are hidden; --once shows all")
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in (_summary(name, before, now), *notes)]
    return Group(lines[0], table, *lines[1:])


#: Lines that show no process: the summary, two of heads, two notes, and the cursor's.
_AROUND = 6


class Row:
    """The values of one process that its cells show."""

    def __init__(self, member: Member, before: Look, now: Look) -> None:
        self.member, self.name = member, _name(member)
        self.gauges = now.gauges[self.name]
        self.done_per_s = _per_s(member, before, now)


class Column(NamedTuple):
    """One column of the table. wide: for wide terminals alone, or for narrow ones alone; None: for both."""

    head: str
    cell: Callable[[Row], str | Text]
    justify: Literal["left", "right"] = "right"
    wide: bool | None = None


def _name(member: Member) -> str:
    return f"{member.stage}-{member.rank}"


def _whole(gauges: dict[str, float], name: str) -> str:
    return f"{gauges[name]:.0f}" if name in gauges else ""


def _per_s(member: Member, before: Look, now: Look) -> float | None:
    """Return the rate of a process's work, or None if it is unknown or not counted.

    Both counts are of one epoch, since a restarted process counts from zero.
    """
    process = _name(member)
    if member.stage not in _WORK or before.epochs.get(process) != member.epoch or now.at_s <= before.at_s:
        return None
    gauge, _ = _WORK[member.stage]
    done = now.gauges[process].get(gauge, 0.0) - before.gauges[process].get(gauge, 0.0)
    return done / (now.at_s - before.at_s)


def _rate(row: Row) -> str:
    return "" if row.done_per_s is None else f"{row.done_per_s:.1f}"


def _rate_of_what(row: Row) -> str:
    return "" if row.done_per_s is None else f"{row.done_per_s:.1f} {_WORK[row.member.stage][1]}"


def _uptime(row: Row) -> str:
    """Return the uptime in the largest unit of which there are two or more."""
    seconds = row.gauges.get("uptime_s")
    if seconds is None:
        return ""
    for unit, unit_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _latency(row: Row, name: str, mark: str = "") -> str:
    """Return a latency; `mark` follows it if it is one of fewer than a hundred."""
    requests = row.gauges.get("latency_requests", 0)
    return f"{row.gauges.get(name, 0.0):.0f}{mark if requests < _HUNDRED else ''}" if requests else ""


def _state(row: Row) -> Text:
    return Text(row.member.state, _STATES.get(row.member.state, ""))


def _share(row: Row) -> float | None:
    """Return the lent share of a process's pool, or None if it has no pool."""
    capacity = row.gauges.get("pool_capacity_nbytes", 0.0)
    return row.gauges.get("pool_lent_nbytes", 0.0) / capacity if capacity else None


def _percent(row: Row) -> Text:
    share = _share(row)
    return Text() if share is None else Text(f"{share:.0%}", "red" if share > _FULL else "")


def _pool(row: Row) -> str:
    if _share(row) is None:
        return ""
    return f"{size_text(int(row.gauges['pool_lent_nbytes']))} of {size_text(int(row.gauges['pool_capacity_nbytes']))}"


def _bar(row: Row) -> Text:
    share = _share(row)
    if share is None:
        return Text()
    filled = round(_BAR * min(1.0, share))
    return Text("█" * filled, "red" if share > _FULL else "blue").append("░" * (_BAR - filled), "dim")


def _fallbacks(row: Row) -> Text:
    return Text(_whole(row.gauges, "drafts_pool_full"), "red" if row.gauges.get("drafts_pool_full") else "")


def _of_tokenizer(name: str) -> Callable[[Row], str]:
    return lambda row: _whole(row.gauges, name) if row.member.stage == "tokenizer" else ""


def _hits(hits: float, misses: float) -> str:
    return f"{hits / (hits + misses):.0%}" if hits + misses else ""


def _summary(name: str, before: Look, now: Look) -> str:
    """Describe the deployment in a line that rarely exceeds 80 letters."""
    rows = [Row(member, before, now) for member in now.members]
    ready = sum(row.member.state == "ready" for row in rows)

    def total(gauge: str) -> float:
        return sum(row.gauges.get(gauge, 0.0) for row in rows)

    short = name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
    per_s = sum(row.done_per_s or 0.0 for row in rows if row.member.stage == "tokenizer")
    said = f"{short}: {ready} of {len(rows)} ready, {per_s:.1f} requests/s"
    failed_and_busy = f"{total('requests_failed'):.0f} failed, {total('requests_busy'):.0f} busy"
    hits = _hits(total("cache_hits"), total("cache_misses"))
    return f"{said}, {failed_and_busy}" + (f", {hits} cache hits" if hits else "")


_FULL = 0.9  #: a pool with a larger lent share is shown in red
_COLUMNS = (
    Column("process", lambda row: row.name, "left"),
    Column("state", _state, "left"),
    Column("up", _uptime),
    Column("in\nflight", lambda row: _whole(row.gauges, "in_flight")),
    Column("queue", lambda row: _whole(row.gauges, "queued")),
    Column("done\n/s", _rate, wide=False),
    Column("a second", _rate_of_what, wide=True),
    Column("p50\nms", lambda row: _latency(row, "latency_p50_ms")),
    Column("p99\nms", lambda row: _latency(row, "latency_p99_ms", "*")),
    Column("pool", _percent, wide=False),
    Column("pool", _pool, wide=True),
    Column("", _bar, "left", wide=True),
    Column("fall-\nbacks", _fallbacks),
    Column("failed", _of_tokenizer("requests_failed"), wide=True),
    Column("busy", _of_tokenizer("requests_busy"), wide=True),
    Column(
        "cache\nhits", lambda row: _hits(row.gauges.get("cache_hits", 0), row.gauges.get("cache_misses", 0)), wide=True
    ),
)
