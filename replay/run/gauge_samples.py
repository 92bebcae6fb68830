"""Samples of the gauges of a deployment's processes, taken while a replay runs, for the report.

Tokenizers answer with their current numbers. Those of the other stages are from their last heartbeat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

import msgspec
import structlog

from tensorferry.codecs.messages import Member

log = structlog.get_logger()

EVERY_S = 0.25
#: Above this many samples every other one is dropped, and later ones are taken half as often. So a replay of a day
#: takes no more memory than one of an hour.
MOST_SAMPLES = 8192
#: The gauges that are kept, if a process has them.
KEPT = (
    "pool_capacity_nbytes",
    "pool_mapped_nbytes",
    "pool_lent_nbytes",
    "pool_lent_slots",
    "pool_refused",
    "encode_calls",
    "encoded_items",
    "cache_hits",
    "cache_misses",
)


class Sample(msgspec.Struct, frozen=True):
    """The gauges of one process at one time."""

    at_ms: float  #: since the start of the run
    process: str  #: such as tokenizer-0
    gauges: dict[str, float]


class PoolUse(msgspec.Struct, frozen=True):
    """One pool by its process's last report, counted from that process's start, even before an attached replay."""

    capacity_nbytes: int
    peak_lent_nbytes: int
    refused: int  #: how often it was too full, so that a tensor went inline


class Asked(Protocol):
    """A client that can ask a deployment for its members."""

    async def refresh(self, timeout_s: float = 5.0) -> list[Member]: ...


class Sampler:
    """A task that asks a deployment for its gauges, again and again."""

    def __init__(self, every_s: float = EVERY_S, most: int = MOST_SAMPLES) -> None:
        self._rounds: list[list[Sample]] = []  #: one for each answer
        self._every_s, self._most = every_s, most

    @property
    def samples(self) -> list[Sample]:
        """All samples, in the order of time."""
        return [sample for taken in self._rounds for sample in taken]

    async def run(self, client: Asked, start_ns: int) -> None:
        """Sample until cancelled. start_ns: of the run, on CLOCK_MONOTONIC."""
        while True:
            try:
                members = await client.refresh()
            except TimeoutError:  # the plots get a gap; the requests report the error
                log.info("gauges_unknown")
            else:
                self.take(members, time.monotonic_ns() - start_ns)
            await asyncio.sleep(self._every_s)

    def take(self, members: Iterable[Member], at_ns: int) -> None:
        """Keep the gauges of these members."""
        self._rounds.append([sample for member in members if (sample := _sample(member, at_ns / 1e6)).gauges])
        if len(self._rounds) > self._most:
            self._rounds = self._rounds[::2]
            self._every_s *= 2


def pool_use(members: Iterable[Member]) -> dict[str, PoolUse]:
    """Return the pools of a deployment, from the gauges in its processes' heartbeats."""
    pools = {}
    for member in members:
        gauges = {gauge.name.removeprefix("pool_"): int(gauge.value) for gauge in member.gauges}
        if all(name in gauges for name in PoolUse.__struct_fields__):
            numbers = (gauges[name] for name in PoolUse.__struct_fields__)
            pools[f"{member.stage}-{member.rank}"] = PoolUse(*numbers)
    return pools


def _sample(member: Member, at_ms: float) -> Sample:
    gauges = {gauge.name: gauge.value for gauge in member.gauges if gauge.name in KEPT}
    return Sample(at_ms, f"{member.stage}-{member.rank}", gauges)
