"""`tensorferry plan`: how large the tokenizers' pools must be for a trace, by their ledger alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorferry.cli.config import load_deployment, set_option
from tensorferry.cli.outfile import OutFile
from tensorferry.cli.replay import PLAIN_WIDTH
from tensorferry.cli.tracefile import trace_argument
from tensorferry.codecs.errors import ConfigError, ReportError
from tensorferry.codecs.system.atomic_file import write_whole
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.replay.plan.forecast import MOST_MB, Plan, Rules, Visit, forecast, plan
from tensorferry.replay.plan.page import report
from tensorferry.replay.plan.pool_stays import Measured, measured
from tensorferry.replay.results.html import charts
from tensorferry.replay.results.report import size_text
from tensorferry.replay.results.result_folder import Run, read_run
from tensorferry.replay.trace.text_lines import Source

_BAR = 40


@click.command()
@trace_argument
@click.option("--config", "file", required=True, type=click.Path(path_type=Path), help="The deployment file.")
@set_option
@click.option(
    "--measured",
    "folder",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A replay's --out folder: TRACE as it ran here, best with a large pool.",
)
@click.option("--html", type=OutFile(), help="Write a page with the plot too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(trace: Path, file: Path, settings: tuple[str, ...], folder: Path, html: Path | None, as_json: bool) -> None:
    """Say which pool.budget_mb keeps fallbacks under 1 % and under 0.1 % for TRACE.

    The run in the folder of --measured says when each item came and how long it kept its place.
    """
    deployment = load_deployment(file, settings)
    if deployment.transport == "cpu":
        raise ConfigError(str(file), None, "transport", "cpu has no pools to plan; use another")
    run = read_run(folder)
    times = _times_of(run, trace, deployment)
    rules = rules_of(deployment)
    found = plan(times.visits, rules)
    caveats = list(_caveats(times, run.summary.requests.read))
    answers = [*_answers(found), _check(run, times.visits, rules), *caveats]
    if as_json:
        for caveat in caveats:
            click.echo(caveat, err=True)
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        print_plan(Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH), found, answers)
    if html is not None:
        if not charts.installed():
            raise ReportError(str(html), "plots need matplotlib: pip install 'tensorferry[report]'")
        write_whole(html, [report(found, f"{trace.name}: how large its pools must be", answers)])
        click.echo(f"wrote {click.format_filename(html)}", err=as_json)


def rules_of(deployment: Deployment) -> Rules:
    """What of a deployment its pools go by, but for their size."""
    pool = deployment.pool
    wait_ns = pool.wait_ms * 1_000_000 if pool.when_full == "wait" else 0
    return Rules(deployment.tokenizer.workers, pool.slots, wait_ns)


def print_plan(console: Console, found: Plan, answers: list[str]) -> None:
    """The curve as bars, then the answers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("pool.budget_mb", justify="right")
    table.add_column("fallbacks", justify="right")
    table.add_column("")
    most = max((point.share for point in found.curve), default=0.0)
    for point in found.curve:
        bar = "█" * round(_BAR * point.share / most) if most else ""
        table.add_row(str(point.budget_mb), f"{point.share:.2%}", Text(bar, "blue"))
    console.print(table)
    for answer in answers:
        console.print(answer, markup=False, highlight=False)


def _answers(found: Plan) -> Iterator[str]:
    for share, budget_mb in (("1 %", found.under_1_percent_mb), ("0.1 %", found.under_01_percent_mb)):
        if budget_mb is None:
            yield f"Fallbacks stay above {share} whatever the budget: pool.slots run out."
        else:
            yield f"Fallbacks under {share}: pool.budget_mb={budget_mb}."
    yield f"At most {size_text(found.peak_nbytes)} would be lent at once."


def _check(run: Run, visits: list[Visit], rules: Rules) -> str:
    """The run itself, beside what is said of its own budget: whoever doubts the rest can start here."""
    budget_mb = _budget_mb(run)
    said = forecast(visits, rules, budget_mb)
    had = sum(run.fell_back(item) for row in run.ok for item in row.items)
    share = had / said.items if said.items else 0.0
    return f"The run itself had pool.budget_mb={budget_mb} and {share:.2%} fallbacks; by this plan {said.share:.2%}."


def _budget_mb(run: Run) -> int:
    """What a run's pools had. Raises ReportError where its settings do not say."""
    pool = run.summary.run.config.get("pool")
    budget_mb = pool.get("budget_mb") if isinstance(pool, dict) else None
    if not isinstance(budget_mb, int) or not 1 <= budget_mb <= MOST_MB:
        raise ReportError(str(run.folder / "summary.json"), "run.config has no pool.budget_mb that a pool can have")
    return budget_mb


def _caveats(times: Measured, read: int) -> Iterator[str]:
    """What the plan does not cover of the requests read; what the run did not record, and what was taken instead."""
    if len(times.visits) < read:
        yield (
            f"Planned {len(times.visits)} of the {read} requests read: the others have no item for a pool, cannot be "
            "sent, or were not ok in the run."
        )
    if times.until_collected:
        yield (
            f"Of {times.until_collected} of {times.items} items the run does not say when they were read; they are "
            "taken to stay until their request was collected, which is longer, so less may be enough."
        )
    if times.unplanned:
        yield (
            f"Of {times.unplanned} of {len(times.visits)} requests it does not say when they asked for room; they are "
            "taken to ask as they came."
        )


def _times_of(run: Run, trace: Path, deployment: Deployment) -> Measured:
    """Raises ReportError for a run of another trace, or without pools."""
    if run.summary.trace.sha256 != Source(trace).sha256():
        raise ReportError(str(run.folder), f"it is of another trace than {trace}; replay this one")
    if run.summary.run.pooled_from_nbytes is None:
        raise ReportError(
            str(run.folder), "it ran without pools (transport: cpu); replay with the transport to plan for"
        )
    return measured(run, deployment.tokenizer.workers)
