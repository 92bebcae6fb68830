"""`tensorferry down`: stop a running deployment, wherever it was started, and wait until it has ended."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import click

from tensorferry.cli.config import load_deployment, set_option
from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.deployment.spec import Deployment, ranks_of
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.supervisor import CANCEL_S, DRAIN_ORDER, KILL_S
from tensorferry.pipeline.process.tether import is_stopped, supervisor_of

Group = list[tuple[str, int]]  #: stages and ranks


class Process(NamedTuple):
    """One that is to end."""

    name: str
    pid: int
    pidfd: int


@click.command()
@click.option("--config", "file", required=True, type=click.Path(path_type=Path), help="The deployment file.")
@set_option
@click.option("--now", is_flag=True, help="Cancel what is in flight, rather than finish it.")
def command(file: Path, settings: tuple[str, ...], now: bool) -> None:
    """Drain the running deployment of a file, and wait for its end: its supervisor, or stages started by hand.

    Exit status: 0 it has ended, or was not running; 1 it has not ended in time, or runs and cannot be told to end; 2
    wrong usage or deployment file.
    """
    deployment = load_deployment(file, settings)
    runtime = Runtime.of(deployment)
    with ExitStack() as held:
        supervisor = _found(runtime, [("deployment", 0)], held)
        _end(supervisor, deployment, now)
        groups = [_found(runtime, group, held) for group in _groups(deployment)]
        for process in (process for group in groups for process in group):
            _check_unsupervised(process, deployment)
        for group in groups:
            _end(group, deployment, now)
        ended = any((supervisor, *groups))
    click.echo(f"{deployment.name} has ended" if ended else f"{deployment.name} is not running")


def _groups(deployment: Deployment) -> list[Group]:
    """Whom no supervisor has started, by who is asked at once."""
    ranks = ranks_of(deployment)
    return [[(stage, rank) for rank in range(ranks[stage])] for stage in DRAIN_ORDER]


def _found(runtime: Runtime, group: Group, held: ExitStack) -> list[Process]:
    """Those who run. Raises DeploymentError where somebody does and his lock file does not say who."""
    found = []
    for stage, rank in group:
        name = "its supervisor" if stage == "deployment" else f"{stage}-{rank}"
        owner, pidfd = runtime.owner(stage, rank), runtime.pidfd(stage, rank)
        if owner is not None and pidfd is not None:
            held.callback(os.close, pidfd)
            found.append(Process(name, owner.pid, pidfd))
        elif runtime.is_held(stage, rank):
            pids = " ".join(map(str, runtime.holders(stage, rank)))
            says = f"says {owner}, which is no process here" if owner else "does not say by whom (was the disk full?)"
            remedy = f"kill -TERM {pids}" if pids else "stop it where it was started"
            raise DeploymentError(
                f"deployment {runtime.name!r} is running: {runtime.lock(stage, rank)} ({name}) is held, and {says}; "
                f"to end it: {remedy}"
            )
    return found


def _check_unsupervised(process: Process, deployment: Deployment) -> None:
    """Raises DeploymentError for a stage that its supervisor would start again."""
    supervisor = supervisor_of(process.pid)
    if supervisor is not None:
        raise DeploymentError(
            f"deployment {deployment.name!r} is running: {process.name} has a supervisor, process {supervisor}, whose "
            f"lock file was removed. It makes that again within {deployment.timeouts.heartbeat_s:g} s "
            f"(timeouts.heartbeat_s) unless the disk is full: try again then, or end it: kill -TERM {supervisor}"
        )


def _end(processes: list[Process], deployment: Deployment, now: bool) -> None:
    """Raises DeploymentError for those that do not end in time."""
    # The second signal cancels; twice the same would be one, where the first is not handled yet.
    signals = (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,)
    for process in processes:
        for number in signals:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process.pidfd, number)
    patience_s = (0.0 if now else deployment.timeouts.drain_s) + CANCEL_S + KILL_S
    until = time.monotonic() + patience_s
    late = [process for process in processes if not _ends(process.pidfd, until - time.monotonic())]
    if late:
        names = ", ".join(f"{process.name} (process {process.pid})" for process in late)
        hint = "its log says where it is stuck" if now else "`down --now` cancels what is in flight"
        stopped = " ".join(str(process.pid) for process in late if is_stopped(process.pid))
        if stopped:
            hint = f"stopped by a signal: kill -CONT {stopped} has it go on, and kill -KILL {stopped} ends it at once"
        raise DeploymentError(f"{names} has not ended within {patience_s:g} s; {hint}")


def _ends(pidfd: int, within_s: float) -> bool:
    return bool(select.select([pidfd], [], [], max(0.0, within_s))[0])
