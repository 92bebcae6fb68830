"""A process's part of a pool's budget: its pool, made of the deployment's kind of memory, and its publisher."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from functools import partial

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import PoolClosed, PoolFull
from tensorferry.codecs.machine.transport import GPU_TRANSPORTS
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.pipeline.deployment.spec import Deployment, mail_of
from tensorferry.pipeline.telemetry.counters import Counters

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PoolShare:
    """See the module."""

    nbytes: int
    slots: int
    inline_below_nbytes: int
    budget_key: str  #: the key of the deployment file that would make it larger

    async def make(self, deployment: Deployment, origin: wire.Origin, device: int | None) -> Pool:
        """The pool, made beside the event loop, and not to the end if this process is cancelled meanwhile."""
        transport, spec = deployment.transport, deployment.pool
        make = partial(Pool.create, self.nbytes, self.slots, producer=origin.epoch, device=device)
        if transport in GPU_TRANSPORTS:
            make = partial(make, memory=transport)
        if transport == "cuda_vmm":
            make = partial(make, chunk_nbytes=spec.chunk_mb << 20, mail=mail_of(deployment))
            make = partial(make, idle_s=spec.idle_s, grow_wait_s=spec.grow_wait_ms / 1000)
        given_up = threading.Event()

        def go_on() -> None:
            if given_up.is_set():
                raise PoolClosed

        try:
            return await asyncio.to_thread(make, go_on=go_on)
        finally:
            given_up.set()

    def publisher(self, pool: Pool, device: int | None, counters: Counters) -> Publisher:
        """device: the GPU that the tensors come from; from there inline is the longer way, for those of any size."""
        below = self.inline_below_nbytes if device is None else 0
        return Publisher(pool, inline_below_nbytes=below, on_fallback=FallbackWarning(counters, self.budget_key))


class FallbackWarning:
    """Counts drafts the pool had no room for, and warns of the first."""

    def __init__(self, counters: Counters, budget_key: str) -> None:
        self._counters, self._budget_key, self._warned = counters, budget_key, False

    def _key(self, full: PoolFull) -> str:
        """What there was too little of."""
        return self._budget_key if full.free_slots else self._budget_key.replace("budget_mb", "slots")

    def __call__(self, full: PoolFull, pool: Pool) -> None:
        self._counters.count("pool_full_fallbacks")
        if not self._warned:
            self._warned = True
            log.warning(
                "pool_full",
                tensor_nbytes=full.wanted_nbytes,
                longest_free_nbytes=full.longest_free_nbytes,
                free_slots=full.free_slots,
                pool_nbytes=pool.description.nbytes,
                remedy=f"sent inline; raise {self._key(full)} to keep such tensors in the pool",
            )
