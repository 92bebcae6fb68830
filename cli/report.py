"""`tensorferry report`: the pages of a replay's folder, also where the replay itself could not make them."""

from __future__ import annotations

from pathlib import Path

import click

from tensorferry.pipeline.replay.folder import read_run
from tensorferry.pipeline.replay.html import charts
from tensorferry.pipeline.replay.html.run import report
from tensorferry.pipeline.replay.perfetto import perfetto
from tensorferry.pipeline.replay.whole import write_whole


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(folder: Path) -> None:
    """Make report.html and perfetto.json in the FOLDER that `replay --out` has written.

    For a machine without matplotlib: take the folder to one that has it.
    """
    write_pages(folder)


def write_pages(folder: Path) -> None:
    """From the files that are there: report.html where matplotlib is, and perfetto.json. Says what it wrote."""
    run = read_run(folder)
    write_whole(folder / "perfetto.json", perfetto(run))
    if charts.installed():
        write_whole(folder / "report.html", [report(run)])
        click.echo(f"wrote {click.format_filename(folder / 'report.html')}, and the numbers behind it beside it")
        return
    click.echo(
        f"wrote the numbers to {click.format_filename(folder)}, and no report.html: its plots need matplotlib. "
        f"pip install 'tensorferry[report]', then: tensorferry report {click.format_filename(folder)}"
    )
