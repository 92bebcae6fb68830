"""Trying something step by step: the step that failed becomes a Trial, and all that was taken is given back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.machine.facts import Trial


class Failed(Exception):
    """A step of a trial did not do what it should have."""

    def __init__(self, step: str, problem: str) -> None:
        super().__init__(step, problem)
        self.step, self.problem = step, problem


def tried(attempt: Callable[[], None]) -> Trial:
    """The outcome of an attempt that raises Failed where it fails; a bug in it is raised."""
    try:
        attempt()
    except Failed as failed:
        return Trial(False, failed.step, failed.problem)
    return Trial(True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """What fails within the block failed at this step."""
    try:
        yield
    except OSError as problem:
        raise Failed(name, problem.strerror or str(problem)) from None
    except FerryError as problem:
        raise Failed(name, str(problem)) from None


def quietly(undo: Callable[..., None], *arguments: int) -> None:
    """Give back what a trial took. That this fails, too, says nothing new: the process ends soon, and all goes."""
    try:
        undo(*arguments)
    except FerryError as problem:
        print(f"tensorferry: probe: {problem}", file=sys.stderr)
