"""`tensorferry sweep`: one trace through a deployment in several versions of it, several times, and which is best."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console

from tensorferry.cli import replay
from tensorferry.cli.compare import print_comparison, write_comparison
from tensorferry.cli.config import load_deployment
from tensorferry.cli.outfile import OutFolder, make_folder
from tensorferry.cli.replay import PLAIN_WIDTH
from tensorferry.cli.tracefile import opened, trace_argument
from tensorferry.pipeline.replay.comparison import compare, find_runs, grouped
from tensorferry.pipeline.replay.folder import read_run

#: From the best to the worst of a replay's exit statuses: could not be run, none ok, some failed, DEGRADED.
_BY_HARM = (0, 5, 3, 4, 2, 1)


class Cell(msgspec.Struct, frozen=True):
    """One version of the deployment."""

    settings: tuple[str, ...]  #: KEY=VALUE
    folder: str

    @property
    def name(self) -> str:
        return " ".join(self.settings) or "as it is"


def alternatives(setting: str) -> list[str]:
    """`pool.budget_mb=256,512` as two settings. Commas in brackets, braces and quotes separate nothing.

    Raises ValueError with a sentence.
    """
    key, equals, values = setting.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{setting!r} is not KEY=VALUE,VALUE")
    return [f"{key.strip()}={value}" for value in _split(values)]


def _split(values: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for place, one in enumerate(values):
        if quote:
            quote = "" if one == quote else quote
        elif one in "'\"":
            quote = one
        elif one in "[{":
            depth += 1
        elif one in "]}":
            depth -= 1
        elif one == "," and not depth:
            yield values[start:place].strip()
            start = place + 1
    yield values[start:].strip()


def cells(settings: Sequence[str]) -> list[Cell]:
    """Every combination of the settings' values, in the order in which they are written. Raises ValueError."""
    combined = itertools.product(*map(alternatives, settings))
    return [Cell(chosen, f"{number:02}") for number, chosen in enumerate(combined, 1)]


@click.command()
@trace_argument
@click.option("--config", "file", required=True, type=click.Path(path_type=Path), help="The deployment file.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE,VALUE...",
    help="A setting and the values it is to have in turn. Repeatable; then all combinations.",
)
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each combination.")
@click.option("--out", required=True, type=OutFolder(), help="A new or empty folder.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    trace: Path,
    file: Path,
    settings: tuple[str, ...],
    repeat: int,
    out: Path,
    options: tuple[str, ...],
) -> None:
    """Replay TRACE through a deployment with every combination of settings, and compare.

    OPTIONS after -- are those of every replay: tensorferry sweep TRACE --config FILE --set pool.budget_mb=256,512
    --out DIR -- --speed 2. Each run is a process of its own, and every combination has its first run before any has
    its second, so that a machine that changes changes all of them.

    Exit status: the worst of the replays'.
    """
    try:
        versions = cells(settings)
    except ValueError as problem:
        raise click.BadParameter(str(problem), ctx, param_hint="--set") from None
    for version in versions:
        load_deployment(file, version.settings, plugins=True)  # all of them are sound before the first one runs
    _check_options(ctx, trace, file, out, options)
    make_folder(out)
    if any(out.iterdir()):
        raise click.BadParameter(f"{out} is not empty", ctx, param_hint="--out")
    statuses: list[int] = []
    turns = list(itertools.product(range(1, repeat + 1), versions))
    for number, (turn, version) in enumerate(turns, 1):
        folder = out / version.folder / str(turn)
        click.echo(f"run {number} of {len(turns)}: {version.name}, repeat {turn}: ", nl=False)
        status, interrupted = _replay(trace, file, version, folder, options)
        statuses.append(status)
        click.echo(_outcome(status, folder))
        if interrupted:
            click.echo("interrupted: no further runs")
            break
    if any(out.glob("*/*/summary.json")):
        groups = grouped(find_runs([out]))
        comparison = compare(groups)
        print_comparison(Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH), comparison)
        write_comparison(out / "compare.html", groups, comparison)
    ctx.exit(max(statuses, key=lambda status: _BY_HARM.index(status) if status in _BY_HARM else len(_BY_HARM)))


def _check_options(ctx: click.Context, trace: Path, file: Path, out: Path, options: Sequence[str]) -> None:
    """Raise what every replay would for its options or the trace; UsageError for options that are the sweep's own."""
    chosen = replay.command.make_context("replay", _asked(trace, file, (), out, options)).params
    own = {"--config": chosen["file"] != file, "--out": chosen["out"] != out, "--set": chosen["settings"] != ()}
    own |= {"--attach": chosen["attach"], "--dry-run": chosen["dry_run"]}
    for option, given in own.items():
        if given:
            problem = "a sweep starts each, in a folder of its own; give --config, --set and --out before the --"
            raise click.UsageError(f"{option} cannot be an option of every replay: {problem}", ctx)
    opened(trace, chosen["rate"], chosen["keys"], chosen["seed"], scheduled=chosen["speed"].ratio is not None)


def _asked(trace: Path, file: Path, settings: Sequence[str], folder: Path, options: Sequence[str]) -> list[str]:
    """The arguments of one replay."""
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    return [str(trace), "--config", str(file), *chosen, "--out", str(folder), *options]


def _replay(trace: Path, file: Path, version: Cell, folder: Path, options: Sequence[str]) -> tuple[int, bool]:
    """One run, its output in a file; its exit status, and whether it was to end early, by Ctrl-C or SIGTERM."""
    folder.mkdir(parents=True)
    asked = ["replay", *_asked(trace, file, version.settings, folder, options)]
    with (folder / "replay.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "tensorferry", *asked], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        interrupted = False

        def pass_on(number: int, frame: object) -> None:
            nonlocal interrupted
            interrupted = True
            child.send_signal(number)

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            while True:
                try:
                    return child.wait(), interrupted
                except KeyboardInterrupt:  # the replay got it too: it stops sending, and reports what it has
                    interrupted = True
        finally:
            signal.signal(signal.SIGTERM, before)


def _outcome(status: int, folder: Path) -> str:
    if not (folder / "summary.json").exists():
        return f"not run (exit status {status}); see {click.format_filename(folder / 'replay.log')}"
    s = read_run(folder).summary
    latency = s.latency_ms.from_intended or s.latency_ms.from_sent
    if latency is None:
        return f"{s.requests.ok} ok of {s.requests.sent}"
    only = " (the maximum)" if "p99" in latency.maxima else ""
    return f"{s.requests.ok} ok of {s.requests.sent}, p50 {latency.p50:.1f} ms, p99 {latency.p99:.1f} ms{only}"
