"""How far an elastic pool's growth has come, and what has failed in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from tensorferry.codecs.memory.cuda_driver import lost_context

REFUSED_S = 1.0  #: how long growing or shrinking that has failed is not tried again


@dataclass(frozen=True, slots=True)
class GrowthState:
    """The growth thread alone writes it: after each step it puts a new state in the old one's place, under the pool's
    lock."""

    grown: int = 0  #: chunks that were mapped
    retired: int = 0  #: chunks that were given back
    refused: int = 0  #: times that the GPU had no memory
    failed: int = 0  #: times that anything else went wrong, but a lost context
    first_problem: Exception | None = None  #: the first of those
    lost: Exception | None = None  #: the problem that cost this process its GPU
    came_ns: int = 0  #: when the last chunk was mapped
    grow_from_ns: int = 0  #: when growing may be tried again
    shrink_from_ns: int = 0  #: when unmapping may be tried again
    stuck: frozenset[int] = (
        frozenset()
    )  #: positions whose retired chunk could not be unmapped, so that it is still here

    def came(self, now_ns: int) -> GrowthState:
        """A chunk was mapped."""
        return replace(self, grown=self.grown + 1, came_ns=now_ns)

    def gave_back(self, position: int) -> GrowthState:
        """A retired chunk was unmapped."""
        return replace(self, retired=self.retired + 1, stuck=self.stuck - {position})

    def without_memory(self) -> GrowthState:
        """The GPU had no memory for a chunk."""
        return replace(self, refused=self.refused + 1, grow_from_ns=_later_ns())

    def after(self, problem: Exception) -> GrowthState:
        """Something else went wrong in a step: growing waits."""
        return replace(self, grow_from_ns=_later_ns())._with(problem)

    def stuck_at(self, position: int, problem: Exception) -> GrowthState:
        """A retired chunk could not be unmapped: shrinking waits."""
        return replace(self, stuck=self.stuck | {position}, shrink_from_ns=_later_ns())._with(problem)

    def _with(self, problem: Exception) -> GrowthState:
        if lost_context(problem) is not None:
            return replace(self, lost=problem)
        return replace(self, failed=self.failed + 1, first_problem=self.first_problem or problem)


def _later_ns() -> int:
    """When a step that has just failed may be tried again, of time.monotonic_ns()."""
    return time.monotonic_ns() + int(REFUSED_S * 1e9)
