"""A stage process's parts, made in order, and its loops beside the block that does the work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.pipeline.channels.interface import Network
from tensorferry.pipeline.deployment.spec import Deployment, mail_of
from tensorferry.pipeline.peers.handshake import DOWNSTREAM
from tensorferry.pipeline.pools.own_pool import PoolShare
from tensorferry.pipeline.process.heartbeat import beat, forget
from tensorferry.pipeline.process.stage import Stage, inboxes

log = structlog.get_logger()

FLUSH_S = 1.0  #: for a peer to take our last messages


@asynccontextmanager
async def opened(
    deployment: Deployment, stage: str, rank: int, share: PoolShare | None = None, network: Network | None = None
) -> AsyncIterator[Stage]:
    """Open everything that a stage process needs, and close it with the block.

    share: the size of the stage's pool; None for a stage that hands no tensors on. With `transport: cpu` no stage has
    a pool. network: makes the channels; None: ZeroMQ sockets. The block is entered before peers are ready: see
    `Peers.wait_ready`.
    """
    assert deployment.transport != "auto", "the command that starts the deployment decides it"
    if deployment.transport == "cpu":
        share = None
    async with AsyncExitStack() as undo:
        self = Stage(deployment, stage, rank, share is not None, undo, network)
        if share is None:
            self.lend(None, Publisher(None))
        else:
            pool = undo.enter_context(await share.make(deployment, self.origin, self.device))
            self.lend(pool, share.publisher(pool, self.device, self.counters))
        await undo.enter_async_context(self.tasks)
        loops = [beat(self), forget(self)]
        if mail_of(deployment) is not None:
            loops.append(self.post.carry(lambda: self.work.in_flight() > 0))
        if self.publisher.pool is not None:
            loops.append(await self.hand_out(self.publisher.pool, undo))
        with self.running(*loops):
            self.peers.greet(inboxes(deployment, self.runtime, *DOWNSTREAM[stage]))
            log.info("started", epoch=self.epoch)
            try:
                yield self
            finally:
                self.attaching.cancel()
        await self.peers.leave(FLUSH_S)
