"""Progress of a replay on stderr: a bar on a terminal, else a line every few seconds. The report goes to stdout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from tensorferry.replay.run.sender import Snapshot

_PLAIN_EVERY_S = 5.0


@contextmanager
def preparing(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Give progress(done, total) for the images made before the run."""
    with _shown(console, "images made") as show:
        yield lambda done, total: show(done, total, "", done == total)


@contextmanager
def replaying(console: Console) -> Iterator[Callable[[Snapshot], None]]:
    """Give watch(snapshot) for the requests sent."""
    with _shown(console, "requests done") as show:

        def watch(s: Snapshot) -> None:
            details = f"{s.in_flight} in flight" + (f", {s.failed} failed" if s.failed else "")
            details += f", {s.delayed} delayed" if s.delayed else ""
            show(s.ok + s.failed, s.total, details, s.ok + s.failed == s.total)

        yield watch


@contextmanager
def _shown(console: Console, what: str) -> Iterator[Callable[[int, int, str, bool], None]]:
    """Give show(done, total, details, last)."""
    if not console.is_terminal:
        said_at = time.monotonic()

        def say(done: int, total: int, details: str, last: bool) -> None:
            nonlocal said_at
            if last or time.monotonic() - said_at >= _PLAIN_EVERY_S:
                said_at = time.monotonic()
                console.print(f"{what}: {done} of {total}" + (f", {details}" if details else ""), highlight=False)

        yield say
        return
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=None, said="", visible=False)

        def draw(done: int, total: int, details: str, last: bool) -> None:
            said = f"{done} of {total}" + (f", {details}" if details else "")
            progress.update(task, completed=done, total=total, said=said, visible=True)

        yield draw
