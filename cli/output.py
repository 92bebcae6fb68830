"""The output that commands share: a console, and JSON for `--json`."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec
from rich.console import Console

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")


def console(plain_width: int = 110) -> Console:
    """Make a console for stdout. plain_width: columns of a report that goes to a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else plain_width)


def print_json(value: msgspec.Struct | dict[str, Any], *, err: bool = False) -> None:
    """Print a value as one indented JSON object."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2), err=err)
