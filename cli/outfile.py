"""Output paths of commands. A path that cannot be written is refused before the work begins."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from tensorferry.codecs.errors import OutputError
from tensorferry.codecs.system.atomic_file import destination
from tensorferry.replay.results.out_folder import RUN_FILES, Proof, new_folder_beside, require_free


class OutFile(click.Path):
    """A path at which a file can be made or replaced. A run's own files are refused, since they belong together."""

    def __init__(self, *, or_stdout: bool = False) -> None:
        """or_stdout: `-` means the standard output, a BinaryIO."""
        super().__init__(dir_okay=False, path_type=Path)
        self._or_stdout = or_stdout

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-" and self._or_stdout:
            return sys.stdout.buffer
        path = Path(value)
        try:
            place = destination(path)
        except (OutputError, ValueError) as problem:  # ValueError: a null byte
            self.fail(str(problem), param, ctx)
        if place.name in RUN_FILES and (place.parent / "summary.json").exists():
            self.fail(f"{path} belongs to the run in {place.parent}; name another file", param, ctx)
        return path


class OutFolder(click.Path):
    """A folder that exists and can be written to, or that can be made. It is not made yet, since the command's input
    may turn out to be unusable."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        try:
            place = path.absolute()
            while not place.exists():
                place = place.parent
        except (OSError, ValueError) as problem:  # ValueError: a null byte
            self.fail(f"{path}: {problem.strerror if isinstance(problem, OSError) else problem}", param, ctx)
        if not place.is_dir():
            self.fail(f"{path}: {place} is not a folder; name a path in a folder", param, ctx)
        if not os.access(place, os.W_OK | os.X_OK):
            self.fail(
                f"{path}: {place} is not writable (permission denied, or read-only); name another folder", param, ctx
            )
        return path


overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace the results of an earlier replay or sweep in --out."
)


def require_free_folder(folder: Path, proof: Proof, *, overwrite: bool) -> None:
    """Raise BadParameter if the results cannot be put at the path of --out."""
    try:
        require_free(folder, proof, overwrite=overwrite)
    except OutputError as problem:
        raise click.BadParameter(str(problem), param_hint="--out") from None


def make_place(folder: Path) -> None:
    """Make the parent folders of --out. Raises BadParameter if no folder can be made in them."""
    try:
        new_folder_beside(folder).rmdir()
    except OutputError as problem:
        raise click.BadParameter(str(problem), param_hint="--out") from None
