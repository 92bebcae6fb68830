"""`tensorferry sweep` replays one trace through several versions of a deployment, repeatedly, and compares them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from tensorferry import __version__
from tensorferry.cli import replay
from tensorferry.cli.compare import print_comparison, write_comparison
from tensorferry.cli.config import config_option, load_deployment
from tensorferry.cli.outfile import OutFolder, make_place, overwrite_option, require_free_folder
from tensorferry.cli.output import console
from tensorferry.cli.tracefile import opened, trace_argument
from tensorferry.codecs.system.atomic_file import write_whole
from tensorferry.pipeline.process.tether import signal_when_parent_dies
from tensorferry.replay.results.comparison import compare, find_runs, grouped
from tensorferry.replay.results.out_folder import filled, in_use
from tensorferry.replay.results.result_folder import read_run

#: A replay's exit statuses, best first: ok, DEGRADED, some failed, none ok, wrong usage, could not run.
_BY_HARM = (0, 5, 3, 4, 2, 1)


class Cell(msgspec.Struct, frozen=True):
    """One version of the deployment."""

    settings: tuple[str, ...]  #: KEY=VALUE
    folder: str

    @property
    def name(self) -> str:
        return " ".join(self.settings) or "as it is"


def alternatives(setting: str) -> list[str]:
    """Split `pool.budget_mb=256,512` into two settings. Commas in brackets, braces and quotes do not separate.

    Raises ValueError with a sentence.
    """
    key, equals, values = setting.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{setting!r} is not KEY=VALUE,VALUE...; write a key, =, and the values to try")
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
    """Return every combination of the settings' values, in their written order. Raises ValueError."""
    combined = itertools.product(*map(alternatives, settings))
    return [Cell(chosen, f"{number:02}") for number, chosen in enumerate(combined, 1)]


@click.command()
@trace_argument
@config_option
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE,VALUE...",
    help="A setting and the values to try. If repeated, all combinations are tried.",
)
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each combination.")
@click.option("--out", required=True, type=OutFolder(), help="A new or empty folder for the results.")
@overwrite_option
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    trace: Path,
    file: Path,
    settings: tuple[str, ...],
    repeat: int,
    out: Path,
    overwrite: bool,
    options: tuple[str, ...],
) -> None:
    """Replay TRACE through a deployment with every combination of settings, and compare.

    OPTIONS after -- are passed to every replay: tensorferry sweep TRACE --config FILE --set pool.budget_mb=256,512
    --out DIR -- --speed 2. Each run is a process of its own. Every combination has its first run before any has its
    second, so that a change of the machine affects all of them.

    The exit status is the worst one of the replays.
    """
    require_free_folder(out, "sweep.json", overwrite=overwrite)
    try:
        versions = cells(settings)
    except ValueError as problem:
        raise click.BadParameter(str(problem), ctx, param_hint="--set") from None
    for version in versions:
        load_deployment(file, version.settings, plugins=True)  # a mistake in any version ends the sweep before it runs
    _check_options(ctx, trace, file, out, options)
    make_place(out)
    with filled(out, "sweep.json", overwrite=overwrite) as empty:
        made = {"tensorferry": __version__, "command": ["tensorferry", *sys.argv[1:]]}
        write_whole(empty / "sweep.json", [msgspec.json.format(msgspec.json.encode(made), indent=2), b"\n"])
    statuses: list[int] = []
    turns = list(itertools.product(range(1, repeat + 1), versions))
    with in_use(out, "sweep.json") as descriptor:
        for number, (turn, version) in enumerate(turns, 1):
            folder = out / version.folder / str(turn)
            click.echo(f"run {number} of {len(turns)}: {version.name}, repeat {turn}: ", nl=False)
            status, interrupted = _replay(trace, file, version, folder, options, descriptor)
            statuses.append(status)
            click.echo(_outcome(status, folder))
            if interrupted:
                click.echo("interrupted: no further runs")
                break
        if any(out.glob("*/*/summary.json")):
            groups = grouped(find_runs([out]))
            comparison = compare(groups)
            print_comparison(console(), comparison)
            write_comparison(out / "compare.html", groups, comparison)
    ctx.exit(max(statuses, key=lambda status: _BY_HARM.index(status) if status in _BY_HARM else len(_BY_HARM)))


def _check_options(ctx: click.Context, trace: Path, file: Path, out: Path, options: Sequence[str]) -> None:
    """Raise the errors that each replay would for its options or the trace, and UsageError for the sweep's own."""
    chosen = replay.command.make_context("replay", _asked(trace, file, (), out, options)).params
    own = {"--config": chosen["file"] != file, "--out": chosen["out"] != out, "--set": chosen["settings"] != ()}
    own |= {f"--{key.replace('_', '-')}": chosen[key] for key in ("attach", "dry_run", "overwrite")}
    for option, given in own.items():
        if given:
            problem = "the sweep sets it for each run; options of the sweep come before --"
            raise click.UsageError(f"{option} cannot be passed to every replay: {problem}", ctx)
    opened(trace, chosen["rate"], chosen["keys"], chosen["seed"], scheduled=chosen["speed"].ratio is not None)


def _asked(trace: Path, file: Path, settings: Sequence[str], folder: Path, options: Sequence[str]) -> list[str]:
    """Return the arguments of one replay."""
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    return [str(trace), "--config", str(file), *chosen, "--out", str(folder), *options]


def _replay(
    trace: Path, file: Path, version: Cell, folder: Path, options: Sequence[str], descriptor: int
) -> tuple[int, bool]:
    """Make one run, whose output goes to a file beside its folder.

    Returns its exit status, and whether Ctrl-C or SIGTERM ended it early. descriptor: the lock on the sweep's folder,
    which this run holds too.
    """
    folder.parent.mkdir(exist_ok=True)
    asked = ["replay", *_asked(trace, file, version.settings, folder, options)]
    with _log_of(folder).open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "tensorferry", *asked],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(descriptor,),
            preexec_fn=partial(_end_with, os.getpid()),  # a sweep has one thread
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
                except KeyboardInterrupt:  # the replay gets it too, stops sending, and reports what it has
                    interrupted = True
        finally:
            signal.signal(signal.SIGTERM, before)


def _end_with(sweep_pid: int) -> None:
    """In the replay's process: it is terminated when the sweep is gone, however that ended."""
    signal_when_parent_dies(signal.SIGTERM)
    if os.getppid() != sweep_pid:  # it ended before that call
        os.kill(os.getpid(), signal.SIGTERM)


def _log_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def _outcome(status: int, folder: Path) -> str:
    if not (folder / "summary.json").exists():
        return f"it did not run (exit status {status}); see {click.format_filename(_log_of(folder))}"
    s = read_run(folder).summary
    latency = s.latency_ms.from_intended or s.latency_ms.from_sent
    if latency is None:
        return f"{s.requests.ok} ok of {s.requests.sent}"
    only = " (the maximum)" if "p99" in latency.maxima else ""
    return f"{s.requests.ok} ok of {s.requests.sent}, p50 {latency.p50:.1f} ms, p99 {latency.p99:.1f} ms{only}"
