"""Which batches of an encoder rank are under way, and whether the next one may begin.

    Idle ── begun ──► Computing ── begun ──► Overlapping
      ▲                  │   ▲                    │
      └───── ended ──────┘   └────── ended ───────┘

`queued` says of the newest batch that all its GPU work is queued, so that only its results are awaited. The thread that
calls the adapter is then free. Everything here is pure: `Encoder` acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tensorferry.stages.encoder.embedding_cache import Content


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Jobs that were taken together, until each of them is answered."""

    began_s: float  #: of the monotonic clock
    contents: frozenset[Content] = frozenset()  #: what it encodes and the cache will then have; empty without a cache


@dataclass(frozen=True, slots=True)
class Idle:
    """No batch is under way."""


@dataclass(frozen=True, slots=True)
class Computing:
    """One batch is under way."""

    batch: Batch
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Overlapping:
    """Two batches are under way. All GPU work of the older one was queued before the newer one began."""

    older: Batch
    newer: Batch
    queued: bool = False


State = Idle | Computing | Overlapping


class Next(Enum):
    """Which batch may begin now."""

    ANY = "any"
    FULL = "full"  #: a batch that further jobs could join loses nothing by waiting for them
    NONE = "none"


def next_batch(state: State) -> Next:
    match state:
        case Idle():
            return Next.ANY
        case Computing(queued=True):
            return Next.FULL
        case _:
            return Next.NONE


def must_wait(state: State, contents: frozenset[Content]) -> bool:
    """Whether a batch under way encodes some of these contents, so that the cache will have them when it ends."""
    return any(batch.contents & contents for batch in under_way(state))


def under_way(state: State) -> tuple[Batch, ...]:
    """The batches under way, the oldest first."""
    match state:
        case Computing(batch):
            return (batch,)
        case Overlapping(older, newer):
            return (older, newer)
        case _:
            return ()


# --- transitions


def begun(state: State, batch: Batch) -> State:
    """Raises ValueError for a batch that `next_batch` does not allow."""
    match state:
        case Idle():
            return Computing(batch)
        case Computing(older, queued=True):
            return Overlapping(older, batch)
        case _:
            raise ValueError(f"no batch may begin while {state} is the state")


def queued(state: State, batch: Batch) -> State:
    """A batch has queued its GPU work. It says so again if its jobs are encoded again."""
    match state:
        case Computing(newest) if newest is batch:
            return Computing(newest, queued=True)
        case Overlapping(older, newest) if newest is batch:
            return Overlapping(older, newest, queued=True)
        case _:
            return state


def ended(state: State, batch: Batch) -> State:
    """Every job of a batch was answered. Raises ValueError for a batch that is not under way."""
    match state:
        case Computing(only) if only is batch:
            return Idle()
        case Overlapping(older, newer, is_queued) if older is batch:
            return Computing(newer, is_queued)
        case Overlapping(older, newer) if newer is batch:
            return Computing(older, queued=True)
        case _:
            raise ValueError(f"{batch} is not under way in {state}")
