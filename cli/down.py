"""`tensorferry down`: stop a running deployment, wherever it was started, and wait until it has ended."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import click

from tensorferry.cli.config import load_deployment, set_option
from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.config import Deployment, ranks_of
from tensorferry.pipeline.runtime import Runtime
from tensorferry.pipeline.supervisor import CANCEL_S, DRAIN_ORDER, KILL_S

Process = tuple[str, int]  #: its name, and a pidfd


@click.command()
@click.option("--config", "file", required=True, type=click.Path(path_type=Path), help="The deployment file.")
@set_option
@click.option("--now", is_flag=True, help="Cancel what is in flight, rather than finish it.")
def command(file: Path, settings: tuple[str, ...], now: bool) -> None:
    """Drain the running deployment of a file, and wait for its end: its supervisor, or stages started by hand.

    Exit status: 0 it has ended, or was not running; 1 it has not ended in time; 2 wrong usage or deployment file.
    """
    deployment = load_deployment(file, settings)
    runtime = Runtime.of(deployment)
    with ExitStack() as held:
        ended = 0
        for group in _groups(deployment):
            found: list[Process] = []
            for stage, rank in group:
                pidfd = runtime.pidfd(stage, rank)
                if pidfd is not None:
                    held.callback(os.close, pidfd)
                    found.append(("its supervisor" if stage == "deployment" else f"{stage}-{rank}", pidfd))
            _end(found, deployment, now)
            ended += len(found)
    click.echo(f"{deployment.name} has ended" if ended else f"{deployment.name} is not running")


def _groups(deployment: Deployment) -> list[list[tuple[str, int]]]:
    """Who is asked at once, first the supervisor, which ends its stages itself; then whom it did not start."""
    ranks = ranks_of(deployment)
    return [[("deployment", 0)], *([(stage, rank) for rank in range(ranks[stage])] for stage in DRAIN_ORDER)]


def _end(processes: list[Process], deployment: Deployment, now: bool) -> None:
    """Raises DeploymentError for those that do not end in time."""
    # The second signal cancels; twice the same would be one, where the first is not handled yet.
    signals = (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,)
    for _, pidfd in processes:
        for number in signals:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
    patience_s = (0.0 if now else deployment.timeouts.drain_s) + CANCEL_S + KILL_S
    until = time.monotonic() + patience_s
    late = [name for name, pidfd in processes if not _ends(pidfd, until - time.monotonic())]
    if late:
        hint = "its log says where it is stuck" if now else "`down --now` cancels what is in flight"
        raise DeploymentError(f"{', '.join(late)} has not ended within {patience_s:g} s; {hint}")


def _ends(pidfd: int, within_s: float) -> bool:
    return bool(select.select([pidfd], [], [], max(0.0, within_s))[0])
