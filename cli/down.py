"""`tensorferry down` stops a running deployment, no matter where it was started, and waits until it has ended."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import click

from tensorferry.cli.config import config_option, load_deployment, set_option
from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.deployment.spec import Deployment, ranks_of
from tensorferry.pipeline.process.child import KILL_S
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.supervisor import CANCEL_S, DRAIN_ORDER
from tensorferry.pipeline.process.tether import is_stopped, supervisor_of

Group = list[tuple[str, int]]  #: (stage, rank) of each process


class Process(NamedTuple):
    """A process that is to end."""

    name: str
    pid: int
    pidfd: int


@click.command()
@config_option
@set_option
@click.option("--now", is_flag=True, help="Cancel the requests in flight instead of finishing them.")
def command(file: Path, settings: tuple[str, ...], now: bool) -> None:
    """Drain the running deployment of a file, and wait until its supervisor, or its stages started by hand, have ended.

    Exit status: 0 it has ended, or was not running; 1 it did not end in time, or could not be told to end; 2 wrong
    usage or deployment file.
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
    """Return the stages as groups in the order in which they are told to end, each group at once."""
    ranks = ranks_of(deployment)
    return [[(stage, rank) for rank in range(ranks[stage])] for stage in DRAIN_ORDER]


def _found(runtime: Runtime, group: Group, held: ExitStack) -> list[Process]:
    """Return the processes that run. Raises DeploymentError if a lock file is held but does not name its process."""
    found = []
    for stage, rank in group:
        name = "its supervisor" if stage == "deployment" else f"{stage}-{rank}"
        owner, pidfd = runtime.owner(stage, rank), runtime.pidfd(stage, rank)
        if owner is not None and pidfd is not None:
            held.callback(os.close, pidfd)
            found.append(Process(name, owner.pid, pidfd))
        elif runtime.is_held(stage, rank):
            pids = " ".join(map(str, runtime.holders(stage, rank)))
            says = (
                f"names {owner}, which is no process here"
                if owner
                else "does not name its process (was the disk full?)"
            )
            remedy = f"kill -TERM {pids}" if pids else "stop it where it was started"
            raise DeploymentError(
                f"deployment {runtime.name!r} is running: {runtime.lock(stage, rank)} ({name}) is held, but {says}; "
                f"to end it: {remedy}"
            )
    return found


def _check_unsupervised(process: Process, deployment: Deployment) -> None:
    """Raise DeploymentError if the process has a supervisor, which would start it again."""
    supervisor = supervisor_of(process.pid)
    if supervisor is not None:
        raise DeploymentError(
            f"deployment {deployment.name!r} is running: {process.name} has a supervisor, process {supervisor}, whose "
            f"lock file was removed. The supervisor makes it again within {deployment.timeouts.heartbeat_s:g} s "
            f"(timeouts.heartbeat_s) unless the disk is full: try again then, or end it: kill -TERM {supervisor}"
        )


def _end(processes: list[Process], deployment: Deployment, now: bool) -> None:
    """Tell the processes to end, and wait. Raises DeploymentError, which names those that do not end in time."""
    # The second signal cancels. It differs from the first because two equal pending signals arrive as one.
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
        hint = "its log says where it is stuck" if now else "`down --now` cancels the requests in flight"
        stopped = " ".join(str(process.pid) for process in late if is_stopped(process.pid))
        if stopped:
            hint = f"a signal has stopped it: kill -CONT {stopped} resumes it, and kill -KILL {stopped} ends it at once"
        raise DeploymentError(f"{names} has not ended within {patience_s:g} s; {hint}")


def _ends(pidfd: int, within_s: float) -> bool:
    return bool(select.select([pidfd], [], [], max(0.0, within_s))[0])
