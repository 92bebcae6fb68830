"""`tensorferry report` makes the pages of a replay's folder, also if the replay itself could not make them."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tensorferry.codecs.errors import ReportError
from tensorferry.codecs.system.atomic_file import write_whole
from tensorferry.replay.results.html import charts
from tensorferry.replay.results.html.run import report
from tensorferry.replay.results.perfetto import perfetto
from tensorferry.replay.results.result_folder import read_run


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(folder: Path) -> None:
    """Make report.html and perfetto.json in the FOLDER that `replay --out` wrote.

    If the replay's machine has no matplotlib, copy the folder to a machine that has it.
    """
    say_pages(folder, has_page=write_pages(folder))


def write_pages(folder: Path) -> bool:
    """Write perfetto.json and, if matplotlib is installed, report.html from the files of a run.

    Returns whether report.html was written. Raises ReportError if another run has replaced the folder meanwhile.
    """
    before = folder.stat()
    run = read_run(folder)
    has_page = charts.installed()
    page = [report(run)] if has_page else []
    if not os.path.samestat(before, folder.stat()):
        raise ReportError(str(folder), "another run has replaced it meanwhile; try again")
    write_whole(folder / "perfetto.json", perfetto(run))
    if has_page:
        write_whole(folder / "report.html", page)
    return has_page


def say_pages(folder: Path, *, has_page: bool) -> None:
    """Print what was written to a folder."""
    if has_page:
        click.echo(f"wrote {click.format_filename(folder / 'report.html')}, and the numbers behind it beside it")
        return
    click.echo(
        f"wrote the numbers to {click.format_filename(folder)}, but no report.html: its plots need matplotlib. "
        f"pip install 'tensorferry[report]', then run: tensorferry report {click.format_filename(folder)}"
    )
