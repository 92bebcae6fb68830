"""Option types that commands share. A value out of bounds is refused with the option's name."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

import click


class Real(click.FloatRange):
    """A finite number within bounds. click's own ranges let NaN pass, and without an upper bound infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return super().convert(number, param, ctx)


class Words(click.types.StringParamType):
    """Text that can be sent, so UTF-8."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError as problem:  # bytes of an argument that are not UTF-8 became surrogates
            self.fail(f"it is not UTF-8 from character {problem.start} on; give UTF-8 text", param, ctx)
        return text


class Folder(click.Path):
    """A folder by its path. The empty path, which Python takes for the current folder, is refused."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("'' is not a path; name a folder", param, ctx)
        return super().convert(value, param, ctx)


class InFile(click.Path):
    """A regular file to read, which has its bytes at once, and an end."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not stat.S_ISREG(path.stat().st_mode):
            self.fail(f"{path} is not a regular file; name a file with the data", param, ctx)
        return path
