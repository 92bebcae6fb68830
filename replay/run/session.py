"""A replay through one deployment, with interrupts and the failure of the deployment."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

import structlog

from tensorferry.codecs.errors import FerryError, leaves
from tensorferry.codecs.messages import Member
from tensorferry.replay.run.gauge_samples import PoolUse, Sampler, pool_use
from tensorferry.replay.run.sender import Replay, Submitter, Watch

log = structlog.get_logger()


class Connected(Submitter, Protocol):
    """A client that can also ask for the members of the deployment."""

    async def refresh(self, timeout_s: float = 5.0) -> list[Member]: ...


class Session:
    """One `replay` through one deployment. Its results are kept however it ends, so that a report can be made."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.pools: dict[str, PoolUse] = {}
        self.sampler = Sampler()
        self.error = ""  #: the error that ended the run early

    async def carry_out(
        self,
        deployment: AbstractAsyncContextManager[Connected],
        *,
        heartbeat_s: float,
        watch: Watch = lambda snapshot: None,
    ) -> None:
        """Run the replay through a deployment, which is ready once its block is entered.

        The first SIGINT or SIGTERM stops the sending, a second one gives up the requests in flight. Raises FerryError,
        perhaps in a group, only if the deployment failed before the clock started.
        """
        try:
            async with deployment as client:
                with _interruptible(self.replay, client):
                    async with self._sampled(client):
                        await self.replay.run(client, watch)
                    self.pools = await _pools(client, heartbeat_s)
        except* FerryError as group:
            if not self.replay.start_ns:
                raise
            self.error = "; ".join(dict.fromkeys(map(str, leaves(group))))
            self.replay.abandon(None, "deployment_failed", self.error)

    @asynccontextmanager
    async def _sampled(self, client: Connected) -> AsyncIterator[None]:
        """Sample the deployment's gauges while the block runs."""

        async def sample() -> None:
            await self.replay.started.wait()
            await self.sampler.run(client, self.replay.start_ns)

        sampling = asyncio.create_task(sample())
        try:
            yield
        finally:
            sampling.cancel()
            await asyncio.wait([sampling])


@contextmanager
def _interruptible(replay: Replay, client: Submitter) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if not replay.interrupted:
            log.info("stopping", sent=len(replay.outcomes), unsent=len(replay.unsent))
            replay.stop()
        else:
            replay.abandon(client)

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _pools(client: Connected, heartbeat_s: float) -> dict[str, PoolUse]:
    """Ask for the pools' numbers after one more heartbeat, which includes the end of the run."""
    try:
        await asyncio.sleep(heartbeat_s)
        return pool_use(await client.refresh())
    except TimeoutError:
        log.warning("pool_use_unknown")
        return {}
