"""One attempt to encode jobs in a single call of the adapter, and which attempts follow if not all succeed.

A job is encoded at most three times, however many jobs are bad: in its batch, once more with the jobs that are not at
fault, and alone. So a batch that exceeds the memory fails no job that fits alone. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

J = TypeVar("J")


@dataclass(frozen=True, slots=True)
class Attempt(Generic[J]):
    """See the module."""

    jobs: Sequence[J]
    again: bool = False  #: a call with these jobs has failed

    def of(self, jobs: Sequence[J]) -> list[Attempt[J]]:
        """The same attempt with fewer jobs, before its call: the others were cancelled meanwhile."""
        return [Attempt(jobs, self.again)] if jobs else []

    def after_failure(self, innocent: Sequence[J], at_fault: Collection[J]) -> list[Attempt[J]]:
        """The attempts that follow a failed call.

        innocent: the jobs to encode again. at_fault: the jobs that the failure is known to be due to.
        """
        if not innocent:
            return []
        if at_fault and not self.again:
            return [Attempt(innocent, again=True)]
        return [Attempt([job], again=True) for job in innocent]
