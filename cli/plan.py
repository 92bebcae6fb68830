"""`tensorferry plan`: how large the tokenizers' pools must be for a trace, by their ledger alone."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorferry.cli.config import load_deployment, placing, set_option
from tensorferry.cli.outfile import OutFile
from tensorferry.cli.replay import PLAIN_WIDTH, Sizer, speed_option
from tensorferry.cli.tracefile import media_option, opened, reading_options, trace_argument, window_options
from tensorferry.cli.values import Real
from tensorferry.codecs.errors import ConfigError, ReportError
from tensorferry.codecs.system.atomic_file import write_whole
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.replay.plan.forecast import MOST_MB, Plan, Rules, Visit, forecast, plan
from tensorferry.replay.plan.page import report
from tensorferry.replay.plan.pool_stays import Arrival, Measured, Stations, given
from tensorferry.replay.plan.pool_stays import measured as visits_of_run
from tensorferry.replay.results.html import charts
from tensorferry.replay.results.report import size_text
from tensorferry.replay.results.result_folder import Run, read_run
from tensorferry.replay.run.schedule import Speed
from tensorferry.replay.trace.formats.token_counts import Keys
from tensorferry.replay.trace.loaded_trace import load
from tensorferry.replay.trace.trace_file import Recording
from tensorferry.replay.trace.window import Moment, Window
from tensorferry.replay.workload.image_models import image_model
from tensorferry.replay.workload.photos import load_photos
from tensorferry.replay.workload.prepare import prepare
from tensorferry.replay.workload.token_ids import TokenSource
from tensorferry.stages.assignment import owners
from tensorferry.stages.processors.base import BadMedia, Processor
from tensorferry.stages.processors.registry import make_processor

_BAR = 40
_OF_THE_RUN = ("speed", "start", "end", "limit")  #: options that a replay had already


@click.command()
@trace_argument
@click.option("--config", "file", required=True, type=click.Path(path_type=Path), help="The deployment file.")
@set_option
@click.option(
    "--measured",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A replay's --out folder: TRACE as it ran here, best with a large pool.",
)
@click.option("--processing-ms", type=Real(0, 1e6), help="Of 1,000 patches in a thread, without --measured.")
@click.option("--encoding-ms", type=Real(0, 1e6), help="Of 1,000 patches in a rank, without --measured.")
@speed_option
@reading_options
@window_options
@click.option("--limit", type=click.IntRange(min=1), help="Read only the first so many rows.")
@media_option
@click.option("--html", type=OutFile(), help="Write a page with the plot too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(
    ctx: click.Context,
    trace: Path,
    file: Path,
    settings: tuple[str, ...],
    measured: Path | None,
    processing_ms: float | None,
    encoding_ms: float | None,
    speed: Speed,
    rate: float | None,
    keys: Keys | None,
    seed: int,
    start: Moment | None,
    end: Moment | None,
    limit: int | None,
    media_roots: tuple[Path, ...],
    html: Path | None,
    as_json: bool,
) -> None:
    """Say which pool.budget_mb keeps fallbacks under 1 % and under 0.1 % for TRACE.

    How long items keep their place comes from a run (--measured), or from given times (--processing-ms and
    --encoding-ms). With --measured the run's own speed and window count.
    """
    deployment = load_deployment(file, settings)
    if deployment.transport == "cpu":
        raise ConfigError(str(file), None, "transport", "cpu has no pools to plan; use another")
    recording = opened(trace, rate, keys, seed)
    run, less = None, list[str]()
    if measured is not None:
        if processing_ms is not None or encoding_ms is not None:
            raise click.UsageError(
                "--measured has the times already; leave --processing-ms and --encoding-ms away", ctx
            )
        given_too = [name for name in _OF_THE_RUN if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE]
        if given_too:
            names = ", ".join(f"--{name}" for name in given_too)
            raise click.UsageError(f"--measured is a run that had its own {names}; leave that away", ctx)
        run = read_run(measured)
        times = _as_measured(run, recording, deployment)
        visits, read, less = times.visits, run.summary.requests.read, list(_less_known(times))
    elif processing_ms is None or encoding_ms is None:
        raise click.UsageError("say how long things take: --measured DIR, or --processing-ms and --encoding-ms", ctx)
    elif speed.ratio is None:
        raise click.BadParameter("a plan needs times, and max has none", ctx, param_hint="--speed")
    else:
        stations = _stations(deployment, processing_ms, encoding_ms)
        with placing(file, settings):
            processor = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)
        arrivals, read = _arrivals(recording, processor, speed, Window(start, end), limit, seed, media_roots)
        visits = given(
            arrivals,
            stations,
            lambda request, patches, ranks: owners("balanced", request, patches, [b""] * len(patches), ranks),
        )
    if len(visits) < read:
        less.insert(0, _left_out(len(visits), read, "or were not ok in the run" if run is not None else "or fail"))
    rules = rules_of(deployment)
    found = plan(visits, rules)
    answers = list(_answers(found))
    if run is not None:
        answers.append(_check(run, visits, rules))
    answers += less
    if as_json:
        for caveat in less:
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


def _left_out(planned: int, read: int, failed: str) -> str:
    """What a plan does not cover."""
    return (
        f"Planned {planned} of the {read} requests read: the others have no item for a pool, cannot be sent, {failed}."
    )


def _less_known(times: Measured) -> Iterator[str]:
    """What the run did not record, and what was taken in its place."""
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


def _as_measured(run: Run, recording: Recording, deployment: Deployment) -> Measured:
    if run.summary.trace.sha256 != recording.sha256():
        raise ReportError(str(run.folder), f"it is of another trace than {recording.path}; replay this one")
    if run.summary.run.pooled_from_nbytes is None:
        raise ReportError(
            str(run.folder), "it ran without pools (transport: cpu); replay with the transport to plan for"
        )
    return visits_of_run(run, deployment.tokenizer.workers)


def _stations(deployment: Deployment, processing_ms: float, encoding_ms: float) -> Stations:
    """Times are of 1,000 patches, so a millisecond is a thousand nanoseconds a patch."""
    return Stations(
        deployment.tokenizer.workers,
        deployment.tokenizer.threads,
        deployment.encoder.ranks,
        deployment.encoder.batch_patches,
        deployment.pool.inline_below_kb << 10,
        processing_ms * 1000,
        encoding_ms * 1000,
    )


def _arrivals(
    recording: Recording,
    processor: Processor,
    speed: Speed,
    window: Window,
    limit: int | None,
    seed: int,
    roots: Sequence[Path],
) -> tuple[list[Arrival], int]:
    """What a replay would send, as far as pools are concerned; and how many requests were read for it."""
    arrivals: list[Arrival] = []
    trace = load(recording, window=window, limit=limit)
    model = image_model("modserve", seed)
    sizer, tokens = Sizer(processor), TokenSource(1, (), seed)
    prepared = prepare(trace, load_photos(None), sizer, tokens, seed=seed, model=model, roots=roots)
    sizes: dict[int, tuple[int, int]] = {}  # by identity: equal images are one object
    for one in prepared.requests:
        for image in one.images:
            if id(image) not in sizes:
                try:
                    item = processor.plan(image)
                except BadMedia:  # its request fails, in the deployment as here
                    sizes[id(image)] = 0, 0
                else:
                    sizes[id(image)] = item.nbytes, item.patches
        nbytes, patches = [sizes[id(image)][0] for image in one.images], [sizes[id(image)][1] for image in one.images]
        if patches and all(patches):
            request = hashlib.blake2b(str(one.request.place).encode(), digest_size=16).digest()
            due_ns = speed.due_ns(one.request.at_ns - trace.origin_ns)
            arrivals.append(Arrival(due_ns, request, tuple(nbytes), tuple(patches)))
    return arrivals, trace.read
