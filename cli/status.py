"""`tensorferry status` says which processes of a deployment run, are ready or are stuck. It sends no request."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tensorferry.cli.config import config_option, load_deployment, set_option
from tensorferry.cli.values import Real
from tensorferry.codecs.errors import DeploymentError
from tensorferry.codecs.messages import Member
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.spec import Deployment, ranks_of
from tensorferry.pipeline.process.lock_owner import Owner
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.tether import is_stopped

NOT_WELL = 3


class Health(msgspec.Struct, frozen=True):
    """The state of one process."""

    process: str
    #: As in `Member`. A process that no tokenizer reports is `starting`, `silent` (it runs all the same) or `gone`.
    #: `stuck`: it is ready, but has been at the same work for longer than any request may take.
    state: str
    pid: int | None  #: None: it does not run on this machine
    since: str  #: UTC, ISO 8601; empty: it does not run
    in_flight: int
    busy_s: float  #: how long it has been at its current work


@click.command()
@config_option
@set_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of a table.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Real(0, 86_400, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds to wait for the tokenizers.",
)
@click.pass_context
def command(ctx: click.Context, file: Path, settings: tuple[str, ...], as_json: bool, timeout_s: float) -> None:
    """Show the state of every process of the running deployment of a file.

    The tokenizers report their own state, and that of the others by their heartbeats. A `ready` process has loaded what
    it needs, reaches all processes downstream of it, and finishes its work; a `stuck` one does not finish. A `silent`
    process runs, but no tokenizer reports it: it is stopped, it hangs, or no tokenizer answers.

    Exit status: 0 all are ready, 3 some are not; 1 the deployment is not running; 2 wrong usage or deployment file.
    """
    deployment = load_deployment(file, settings)
    found = health(deployment, asyncio.run(_asked(deployment, timeout_s)))
    runtime = Runtime.of(deployment)
    if all(process.state == "gone" for process in found) and not runtime.is_held("deployment", 0):
        afar = "" if runtime.network is None else ", or does not answer this machine"
        raise DeploymentError(f"deployment {deployment.name!r} is not running{afar}; start it with `tensorferry up`")
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        Console().print(_table(found))
    ctx.exit(0 if all(process.state == "ready" for process in found) else NOT_WELL)


async def _asked(deployment: Deployment, timeout_s: float) -> list[Member]:
    async with Client.connect(deployment, timeout_s=timeout_s, wait=False) as client:
        return client.members()


def health(deployment: Deployment, members: list[Member]) -> list[Health]:
    """Return the state of every process that the deployment should have, in order. members: those reported."""
    runtime = Runtime.of(deployment)
    known = {(member.stage, member.rank): member for member in members}
    found = []
    for stage, ranks in ranks_of(deployment).items():
        for rank in range(ranks):
            member = known.get((stage, rank), Member(stage, rank, 0, "gone"))
            gauges = {gauge.name: gauge.value for gauge in member.gauges}
            busy_s = gauges.get("busy_s", 0.0)
            pidfd = runtime.pidfd(stage, rank)
            owner = None if pidfd is None else runtime.owner(stage, rank)
            if pidfd is not None:
                os.close(pidfd)
            state = member.state
            if state == "gone" and (owner is not None or runtime.is_held(stage, rank)):
                state = _unheard(deployment, runtime, owner, (stage, rank) in known)
            stuck = member.state == "ready" and busy_s > deployment.limits.request_timeout_s
            found.append(
                Health(
                    f"{stage}-{rank}",
                    "stuck" if stuck else state,
                    owner.pid if owner else None,
                    owner.started_at if owner else "",
                    int(gauges.get("in_flight", 0)),
                    round(busy_s, 3),
                )
            )
    return found


def _unheard(deployment: Deployment, runtime: Runtime, owner: Owner | None, told: bool) -> str:
    """Return the state of a process that runs, but that no tokenizer reports. told: a tokenizer answers."""
    if owner is None or is_stopped(owner.pid):
        return "silent"
    if told:
        return "starting"  # a process that had been ready would be quarantined
    age_s = (datetime.now(UTC) - datetime.fromisoformat(owner.started_at)).total_seconds()
    opened = any(runtime.has_door(rank) for rank in range(deployment.tokenizer.workers))
    return "starting" if age_s < deployment.timeouts.start_s and not opened else "silent"


def _table(found: list[Health]) -> Table:
    table = Table("process", "state", "pid", "since", "in flight", "busy for", box=None, padding=(0, 2, 0, 0))
    for process in found:
        pid = "-" if process.pid is None else str(process.pid)
        busy = f"{process.busy_s:.1f} s" if process.busy_s else "-"
        table.add_row(process.process, process.state, pid, process.since or "-", str(process.in_flight), busy)
    return table
