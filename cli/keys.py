"""`tensorferry keys` makes the CURVE keys that let clients connect to a deployment over a network."""

from __future__ import annotations

from pathlib import Path

import click

from tensorferry.cli.values import Folder
from tensorferry.pipeline.channels.curve_keys import add_client, make_keys


@click.group()
def command() -> None:
    """Make the keys of a networked deployment and of its clients."""


@command.command()
@click.argument("folder", metavar="DIR", type=Folder())
def new(folder: Path) -> None:
    """Make DIR with new keys for a deployment and for one client on the same machine.

    Set security.keys to DIR. If DIR exists, the exit status is 2: keys are never replaced.
    """
    make_keys(folder)
    click.echo(f"made {click.format_filename(folder)}; set security.keys to it")


@command.command()
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("name")
@click.option("--out", required=True, type=Folder(), help="The client's new folder.")
def add(folder: Path, name: str, out: Path) -> None:
    """Let one more client connect to the deployment of DIR, under NAME, once that deployment is started again.

    Move the folder OUT to the client's machine over a private channel, and set security.keys to it there. To revoke the
    client's access, remove DIR/clients/NAME.key.
    """
    add_client(folder, name, out)
    click.echo(f"made {click.format_filename(out)} for {name}; start the deployment again to let it in")
