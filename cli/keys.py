"""`tensorferry keys`: the CURVE keys that let clients into a deployment on a network."""

from __future__ import annotations

from pathlib import Path

import click

from tensorferry.cli.values import Folder
from tensorferry.pipeline.channels.curve_keys import add_client, make_keys


@click.group()
def command() -> None:
    """Make the keys of a deployment on a network, and of its clients."""


@command.command()
@click.argument("folder", metavar="DIR", type=Folder())
def new(folder: Path) -> None:
    """Make DIR with new keys for a deployment and for one client on the same machine.

    Set security.keys to it. Exit status 2 where DIR exists: keys are never replaced.
    """
    make_keys(folder)
    click.echo(f"made {click.format_filename(folder)}; set security.keys to it")


@command.command()
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("name")
@click.option("--out", required=True, type=Folder(), help="The client's new folder.")
def add(folder: Path, name: str, out: Path) -> None:
    """Let one more client into the deployment of DIR, known there by NAME; it is heard once that was started again.

    Move the folder OUT to the client's machine by a way that nobody listens to, and set security.keys to it there. To
    shut the client out again, remove DIR/clients/NAME.key.
    """
    add_client(folder, name, out)
    click.echo(f"made {click.format_filename(out)} for {name}; start the deployment again to let it in")
