"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """Beside its place first, then renamed: nobody ever reads half a file, and what was there stays until then."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            file.writelines(chunks)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
