"""`tensorferry compare` shows the results of several replays side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorferry.cli.outfile import OutFile
from tensorferry.cli.output import console, json_option, print_json
from tensorferry.codecs.system.atomic_file import write_whole
from tensorferry.replay.results.comparison import METRICS, Comparison, Group, compare, find_runs, grouped
from tensorferry.replay.results.html import charts
from tensorferry.replay.results.html.comparison import change_text, report, value_text

STYLES = {"better": "green", "worse": "red", "": ""}


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--html", type=OutFile(), help="Also write a page with plots.")
@json_option
def command(folders: tuple[Path, ...], html: Path | None, as_json: bool) -> None:
    """Compare the runs in FOLDERS, which `replay --out` or `sweep` wrote.

    Runs with equal settings are repeats. They share one row: the mean of their values, with its 95 % confidence
    interval. All rows are compared with the first one.
    """
    groups = grouped(find_runs(folders))
    comparison = compare(groups)
    if as_json:
        print_json(comparison)
    else:
        print_comparison(console(), comparison)
    if html is not None:
        write_comparison(html, groups, comparison, quiet=as_json)


def print_comparison(out: Console, comparison: Comparison) -> None:
    """Print a block for each metric, since columns for all of them do not fit on a terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("", "runs", "value [95 %]", "from the first", ""):
        table.add_column(head, justify="right" if head == "runs" else "left")
    for metric in METRICS:
        shown = [line for line in comparison.lines if metric.key in line.values]
        if not shown:
            continue
        table.add_row(Text(metric.name, "bold"))
        for line in shown:
            value = line.values[metric.key]
            cells = [line.name, str(len(line.folders)), value_text(metric, value.estimate), change_text(value)]
            table.add_row(*map(Text, cells), Text(value.verdict, STYLES[value.verdict]))
    out.print(table)
    for warning in comparison.warnings:
        out.print(warning, style="bold red", markup=False, highlight=False)


def write_comparison(path: Path, groups: Sequence[Group], comparison: Comparison, *, quiet: bool = False) -> None:
    """Write the page, or print why there is none where matplotlib is not installed."""
    if charts.installed():
        write_whole(path, [report(groups, comparison)])
        click.echo(f"wrote {click.format_filename(path)}", err=quiet)
    else:
        click.echo(
            f"did not write {click.format_filename(path)}: its plots need matplotlib; "
            "pip install 'tensorferry[report]'",
            err=quiet,
        )
