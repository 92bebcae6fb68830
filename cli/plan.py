"""`tensorferry plan` says how large the tokenizers' pools must be for a trace. It runs the pools' ledger alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorferry.cli.config import config_option, load_deployment, set_option
from tensorferry.cli.outfile import OutFile
from tensorferry.cli.output import console, json_option, print_json
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
@config_option
@set_option
@click.option(
    "--measured",
    "folder",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The --out folder of a replay of TRACE, best one with a large pool.",
)
@click.option("--html", type=OutFile(), help="Also write a page with the plot.")
@json_option
def command(trace: Path, file: Path, settings: tuple[str, ...], folder: Path, html: Path | None, as_json: bool) -> None:
    """Say which pool.budget_mb keeps fallbacks under 1 % and under 0.1 % for TRACE.

    The run in the folder of --measured gives the time at which each item arrived and how long it kept its place.
    """
    deployment = load_deployment(file, settings)
    if deployment.transport == "cpu":
        raise ConfigError(str(file), None, "transport", "cpu has no pools to plan; use shm, cuda_ipc or cuda_vmm")
    run = read_run(folder)
    times = _times_of(run, trace, deployment)
    rules = rules_of(deployment)
    found = plan(times.visits, rules)
    caveats = [*_limited(run), *_caveats(times, run.summary.requests.read)]
    answers = [*_answers(found), _check(run, times.visits, rules), *caveats]
    if as_json:
        for caveat in caveats:
            click.echo(caveat, err=True)
        print_json(found)
    else:
        print_plan(console(), found, answers)
    if html is not None:
        if not charts.installed():
            raise ReportError(str(html), "plots need matplotlib: pip install 'tensorferry[report]'")
        write_whole(html, [report(found, f"{trace.name}: how large its pools must be", answers)])
        click.echo(f"wrote {click.format_filename(html)}", err=as_json)


def rules_of(deployment: Deployment) -> Rules:
    """Return the settings of a deployment's pools, without their size."""
    pool = deployment.pool
    wait_ns = pool.wait_ms * 1_000_000 if pool.when_full == "wait" else 0
    return Rules(deployment.tokenizer.workers, pool.slots, wait_ns)


def print_plan(out: Console, found: Plan, answers: list[str]) -> None:
    """Print the curve as bars, then the answers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("pool.budget_mb", justify="right")
    table.add_column("fallbacks", justify="right")
    table.add_column("")
    most = max((point.share for point in found.curve), default=0.0)
    for point in found.curve:
        bar = "█" * round(_BAR * point.share / most) if most else ""
        table.add_row(str(point.budget_mb), f"{point.share:.2%}", Text(bar, "blue"))
    out.print(table)
    for answer in answers:
        out.print(answer, markup=False, highlight=False)


def _answers(found: Plan) -> Iterator[str]:
    for share, budget_mb in (("1 %", found.under_1_percent_mb), ("0.1 %", found.under_01_percent_mb)):
        if budget_mb is None:
            yield f"Fallbacks stay above {share} with any budget, since pool.slots run out; raise pool.slots."
        else:
            yield f"Fallbacks under {share}: pool.budget_mb={budget_mb}."
    yield f"At most {size_text(found.peak_nbytes)} would be lent at once."


def _check(run: Run, visits: list[Visit], rules: Rules) -> str:
    """Set the run's own fallbacks beside those that the plan gives for its budget."""
    budget_mb = _budget_mb(run)
    said = forecast(visits, rules, budget_mb)
    had = sum(run.fell_back(item) for row in run.ok for item in row.items)
    share = had / said.items if said.items else 0.0
    return f"The run itself had pool.budget_mb={budget_mb} and {share:.2%} fallbacks; the plan says {said.share:.2%}."


def _budget_mb(run: Run) -> int:
    """Return the pool.budget_mb of a run. Raises ReportError if its settings have none."""
    pool = run.summary.run.config.get("pool")
    budget_mb = pool.get("budget_mb") if isinstance(pool, dict) else None
    if not isinstance(budget_mb, int) or not 1 <= budget_mb <= MOST_MB:
        raise ReportError(str(run.folder / "summary.json"), "run.config has no pool.budget_mb that a pool can have")
    return budget_mb


def _limited(run: Run) -> Iterator[str]:
    """Say if a run replayed only a part of its trace, since its plan then covers only that part."""
    setup, outside = run.summary.run, run.summary.trace.outside
    parts = [] if setup.limit is None else [f"--limit {setup.limit}"]
    parts += [f"a window that left out {outside} requests"] if outside else []
    if parts:
        read = run.summary.requests.read
        yield f"The run replayed only a part of the trace ({' and '.join(parts)}): {read} requests were read."


def _caveats(times: Measured, read: int) -> Iterator[str]:
    """Name the requests that the plan leaves out, and the times that it assumes because the run lacks them."""
    if len(times.visits) < read:
        yield (
            f"The plan covers {len(times.visits)} of the {read} requests read. The others have no item for a pool, "
            "cannot be sent, or were not ok in the run."
        )
    if times.until_collected:
        yield (
            f"The run does not say when {times.until_collected} of {times.items} items were read. The plan assumes "
            "that they stay until their request is collected, which is longer, so a smaller budget may be enough."
        )
    if times.unplanned:
        yield (
            f"The run does not say when {times.unplanned} of {len(times.visits)} requests asked for room. The plan "
            "assumes that they asked when they arrived."
        )


def _times_of(run: Run, trace: Path, deployment: Deployment) -> Measured:
    """Return the times of a run's items. Raises ReportError for a run of another trace, or without pools."""
    if run.summary.trace.sha256 != Source(trace).sha256():
        raise ReportError(str(run.folder), f"it is a run of another trace than {trace}; replay that trace")
    if run.summary.run.pooled_from_nbytes is None:
        raise ReportError(
            str(run.folder), "it ran without pools (transport: cpu); replay with the transport to plan for"
        )
    return measured(run, deployment.tokenizer.workers)
