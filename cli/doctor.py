"""`tensorferry doctor` says which transports work on this machine, which do not, and what would change that."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tensorferry.cli.config import load_deployment, placing, set_option
from tensorferry.cli.output import console, json_option, print_json
from tensorferry.cli.transport import wanted_by
from tensorferry.codecs.errors import ConfigError
from tensorferry.codecs.machine.advice import Check, checkup
from tensorferry.codecs.machine.facts import Facts
from tensorferry.codecs.machine.probe import gather
from tensorferry.codecs.machine.transport import (
    TRANSPORTS,
    Decision,
    Refusal,
    Transport,
    Wanted,
    decide,
    not_yet,
    obstacle,
)
from tensorferry.pipeline.deployment.load import require_available
from tensorferry.pipeline.deployment.spec import Deployment

_PLAIN_WIDTH = 130  #: columns of a report that goes to a file or a pipe


class Verdict(msgspec.Struct, frozen=True):
    """Whether a transport works, why or why not, and what would change that."""

    ok: bool
    reason: str
    remedy: str = ""


class Choice(msgspec.Struct, frozen=True):
    """The outcome of a deployment file's transport on this machine."""

    file: str
    wanted: str
    ok: bool
    transport: str  #: "" if it does not work
    reason: str
    refusals: tuple[Refusal, ...] = ()  #: of the transports that `auto` prefers to this one


class Report(msgspec.Struct, frozen=True):
    """The output of `--json`."""

    ok: bool
    transports: dict[Transport, Verdict]
    checks: tuple[Check, ...]
    facts: Facts
    deployment: Choice | None = None


@click.command()
@json_option
@click.option(
    "--config", "file", type=click.Path(path_type=Path), help="Check the transport of this deployment file too."
)
@set_option
@click.pass_context
def command(ctx: click.Context, as_json: bool, file: Path | None, settings: tuple[str, ...]) -> None:
    """Say which transports work on this machine, and why the others do not.

    Each transport is tried: processes share memory and read it, on the GPU too, and end with this command. No
    deployment is needed. Exit status: 0 if a transport with a pool works (with --config, the one that the file asks
    for), else 1.
    """
    if settings and file is None:
        raise click.UsageError("--set changes a deployment file; name the file with --config")
    deployment = load_deployment(file, settings) if file is not None else None
    with placing(file, settings) if file is not None else nullcontext():
        report = examine(gather(os.environ), deployment, str(file))
    if as_json:
        print_json(report)
    else:
        _print(console(_PLAIN_WIDTH), report)
    ctx.exit(0 if report.ok else 1)


def examine(facts: Facts, deployment: Deployment | None = None, file: str = "") -> Report:
    """Judge the transports by these facts.

    They are judged for the given deployment, or else for one on a single node whose model has opted in to everything.
    """
    wanted = Wanted(opted_in=True) if deployment is None else wanted_by(deployment)
    transports: dict[Transport, Verdict] = {rung: _verdict(rung, wanted, facts) for rung in TRANSPORTS}
    if deployment is None:
        pools = any(verdict.ok for rung, verdict in transports.items() if rung != "cpu")
        return Report(pools, transports, checkup(facts), facts)
    choice = _choice(deployment, wanted, facts, file)
    return Report(choice.ok, transports, checkup(facts), facts, choice)


def _verdict(rung: Transport, wanted: Wanted, facts: Facts) -> Verdict:
    if (refusal := obstacle(rung, wanted, facts)) is not None:
        return Verdict(False, refusal.reason, refusal.remedy)
    if (refusal := not_yet(rung)) is not None:
        return Verdict(False, f"this machine can, but {refusal.reason}", refusal.remedy)
    return Verdict(True, _PROOF[rung])


_PROOF: dict[Transport, str] = {
    "cpu": "it needs nothing: tensors travel inside messages",
    "shm": "sealed memory was made, passed over a socket, mapped and read",
    "cuda_ipc": "GPU memory was allocated, exported, opened by a second process and read",
    "cuda_vmm": "a GPU memory chunk was made, exported, imported by a second process and read",
}


def _choice(deployment: Deployment, wanted: Wanted, facts: Facts, file: str) -> Choice:
    """Decide as `up` and `start` do."""
    refusals: tuple[Refusal, ...] = ()
    try:
        decision: Decision = decide(wanted, facts)
        refusals = decision.refusals
        require_available(deployment)
    except ConfigError as problem:
        return Choice(file, wanted.transport, False, "", problem.problem, refusals)
    return Choice(file, wanted.transport, True, decision.transport, decision.reason, decision.refusals)


def _print(out: Console, report: Report) -> None:
    transports = Table("transport", "", "why", "what to do", title="Transports", title_justify="left", show_lines=True)
    for rung, verdict in report.transports.items():
        transports.add_row(rung, _mark(verdict.ok), verdict.reason, verdict.remedy)
    checks = Table("looked at", "", "found", "what to do, or what it means", title="Machine", title_justify="left")
    for check in report.checks:
        checks.add_row(check.name, _mark(check.ok), check.found, check.advice)
    out.print(transports, checks, highlight=False, markup=False)
    if report.deployment is not None:
        choice = report.deployment
        outcome = f"gets {choice.transport}: {choice.reason}" if choice.ok else choice.reason
        text = f"{choice.file} asks for {choice.wanted}; {outcome}"
        out.print(text, highlight=False, markup=False, soft_wrap=True)


def _mark(ok: bool | None) -> str:
    """Return the text of a check's outcome; None means that nothing here needs it."""
    return "-" if ok is None else "ok" if ok else "NO"
