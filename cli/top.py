"""`tensorferry top`: a running deployment as it is now, process by process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tensorferry.cli.config import load_deployment, set_option
from tensorferry.cli.values import Real
from tensorferry.codecs.messages import Member
from tensorferry.pipeline.client import Client
from tensorferry.pipeline.config import Deployment
from tensorferry.pipeline.replay.report import size_text

_BAR = 12
_PLAIN_WIDTH = 130  #: of a table that goes to a file or a pipe
_STATES = {"ready": "green", "waiting": "yellow", "leaving": "yellow", "quarantined": "red", "gone": "red"}
#: What a process of each stage has done, by the gauge that counts it.
_WORK = {"tokenizer": ("requests_ok", "requests"), "encoder": ("encoded_items", "items")}


class Look:
    """The processes of a deployment at one time, and their gauges by name."""

    def __init__(self, members: Sequence[Member], at_s: float) -> None:
        self.at_s = at_s
        self.members = members
        self.gauges = {_name(member): {gauge.name: gauge.value for gauge in member.gauges} for member in members}
        self.epochs = {_name(member): member.epoch for member in members}


@click.command()
@click.option("--config", "file", required=True, type=click.Path(path_type=Path), help="The deployment file.")
@set_option
@click.option("--every", "every_s", type=Real(0.1, 86_400), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Print it once, with the rates of one period, and end.")
def command(file: Path, settings: tuple[str, ...], every_s: float, once: bool) -> None:
    """Watch the running deployment of FILE: rates, requests in flight, pools and fallbacks. Ctrl-C ends it.

    Rates are of the last period; what encoders and schedulers say is as old as their last heartbeat. To a file or a
    pipe goes one table a period, below the other.
    """
    try:
        asyncio.run(_watch(load_deployment(file, settings), every_s, once))
    except KeyboardInterrupt:
        pass


async def _watch(deployment: Deployment, every_s: float, once: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    async with Client.connect(deployment, timeout_s=deployment.timeouts.start_s) as client:
        before = Look(await client.refresh(), time.monotonic())
        while once or not console.is_terminal:
            await asyncio.sleep(every_s)
            now = Look(await client.refresh(), time.monotonic())
            console.print(view(deployment.name, before, now))
            sys.stdout.flush()
            if once:
                return
            before = now
        with Live(view(deployment.name, before, before), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(every_s)
                now = Look(await client.refresh(), time.monotonic())
                live.update(view(deployment.name, before, now), refresh=True)
                before = now


def view(name: str, before: Look, now: Look) -> Table:
    """A line for each process."""
    table = Table(title=Text(name), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("process", no_wrap=True)
    table.add_column("")
    for head in ("in flight", "a second", "pool"):
        table.add_column(head, justify="right")
    table.add_column("", no_wrap=True)
    for head in ("fallbacks", "failed", "busy", "cache hits"):
        table.add_column(head, justify="right")
    for member in now.members:
        process = _name(member)
        gauges = now.gauges[process]
        table.add_row(
            Text(process),
            Text(member.state, _STATES.get(member.state, "")),
            _whole(gauges, "in_flight"),
            _rate(member, before, now),
            *_pool(gauges),
            Text(_whole(gauges, "drafts_pool_full"), "red" if gauges.get("drafts_pool_full") else ""),
            *(
                _whole(gauges, name) if member.stage == "tokenizer" else ""
                for name in ("requests_failed", "requests_busy")
            ),
            _hits(gauges),
        )
    return table


def _name(member: Member) -> str:
    return f"{member.stage}-{member.rank}"


def _whole(gauges: dict[str, float], name: str) -> str:
    return f"{gauges[name]:.0f}" if name in gauges else ""


def _rate(member: Member, before: Look, now: Look) -> str:
    """Of the same life of a process: another one counts from zero."""
    process = _name(member)
    if member.stage not in _WORK or before.epochs.get(process) != member.epoch or now.at_s <= before.at_s:
        return ""
    gauge, what = _WORK[member.stage]
    done = now.gauges[process].get(gauge, 0.0) - before.gauges[process].get(gauge, 0.0)
    return f"{done / (now.at_s - before.at_s):.1f} {what}"


def _pool(gauges: dict[str, float]) -> tuple[str, Text]:
    capacity = gauges.get("pool_capacity_nbytes", 0.0)
    if not capacity:
        return "", Text()
    lent = gauges.get("pool_lent_nbytes", 0.0)
    filled = round(_BAR * min(1.0, lent / capacity))
    style = "red" if lent > 0.9 * capacity else "blue"
    bar = Text("█" * filled, style).append("░" * (_BAR - filled), "dim")
    return f"{size_text(int(lent))} of {size_text(int(capacity))}", bar


def _hits(gauges: dict[str, float]) -> str:
    hits, misses = gauges.get("cache_hits"), gauges.get("cache_misses")
    return f"{hits / (hits + misses):.0%}" if hits is not None and misses is not None and hits + misses else ""
