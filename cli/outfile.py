"""What is said of a file that a command is to write, before it begins the work of which that file is the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tensorferry.codecs.errors import OutputError
from tensorferry.pipeline.replay.whole import destination


class OutFile(click.Path):
    """A path at which a file can be made, or replaced."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        try:
            destination(path)
        except (OutputError, ValueError) as problem:  # ValueError: a null byte
            self.fail(str(problem), param, ctx)
        return path
