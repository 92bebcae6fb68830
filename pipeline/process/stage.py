"""The parts of each stage process: a runtime lock, an inbox, peers, and perhaps a pool with its broker."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.frames import Buffer, Limits
from tensorferry.codecs.machine.transport import GPU_TRANSPORTS
from tensorferry.codecs.memory.cuda_driver import lost_context
from tensorferry.codecs.pool.pool import Pool, new_nonce
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.channels.channels import ZmqNetwork
from tensorferry.pipeline.channels.curve_keys import ServerKeys
from tensorferry.pipeline.channels.interface import Denial, Door, Network, Received, Sender
from tensorferry.pipeline.deployment.spec import Deployment, device_of, port_offset, ranks_of
from tensorferry.pipeline.peers.handshake import DOWNSTREAM, HandshakeRefused, Key, Peers
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.pools.attach import Attaching
from tensorferry.pipeline.pools.broker import Broker, recycle
from tensorferry.pipeline.pools.lease_mail import Post
from tensorferry.pipeline.process.running_settings import Settings
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.work import NoWork, Work
from tensorferry.pipeline.telemetry import logs
from tensorferry.pipeline.telemetry.counters import Counters

log = structlog.get_logger()

#: Counters that heartbeats carry too, for those who watch a deployment without Prometheus.
TOLD = ("requests_ok", "requests_failed", "requests_busy")
LINGER_S = 0.2  #: for a peer to take our last messages, where a process is cancelled
#: Messages of a request, each for one life of its receiver.
OF_REQUESTS = (
    wire.Encode | wire.Admit | wire.Embeddings | wire.Cancel | wire.Collected | wire.Delta | wire.Done | wire.Failed
)
#: Which of them a stage takes from its peers; all others are refused, whoever they are for.
TAKEN = {
    "tokenizer": (wire.Collected, wire.Delta, wire.Done, wire.Failed),
    "encoder": (wire.Encode, wire.Cancel),
    "scheduler": (wire.Admit, wire.Embeddings, wire.Cancel),
}


class Stage:
    """See the module. Made by `start_stage.opened`; closed with its block."""

    post: Post
    publisher: Publisher

    def __init__(
        self,
        deployment: Deployment,
        stage: str,
        rank: int,
        lends: bool,
        undo: AsyncExitStack,
        network: Network | None = None,
    ) -> None:
        """Make everything but the pool. lends: whether it will have one. undo: closes what is made here.

        network: makes its channels; None: ZeroMQ sockets.
        """
        self.deployment, self.origin = deployment, wire.Origin(stage, rank, new_nonce())
        self.runtime = Runtime.of(deployment)
        self.device = device_of(deployment, stage, rank)  #: the GPU it works on, wherever its pool is; None: none
        self.limits = Limits(inline_nbytes=deployment.limits.request_mb << 20)
        logs.configure(deployment.telemetry, stage=stage, rank=rank)
        self.counters = Counters(stage=stage, rank=str(rank))
        self._began_s = time.monotonic()
        self.refusals = logs.Ration()  #: of log lines about them
        self.work: Work = NoWork()  #: see `serve`
        self.locks = undo.enter_context(ExitStack())
        self.locks.enter_context(self.runtime.own(stage, rank))
        self.settings = Settings(deployment, self.runtime, stage, rank)
        undo.callback(self.counters.close)
        if deployment.telemetry.prometheus_port is not None:
            self.counters.serve(deployment.telemetry.prometheus_port + port_offset(deployment, stage, rank))
        self._network = undo.enter_context(self._sockets()) if network is None else network
        inbox = self.runtime.listening(self.runtime.inbox(stage, rank))
        self.inbox = self._network.inbox(inbox, self.limits, self.refused, self.denied)
        undo.callback(self.inbox.close)
        self.mends = [self.inbox.mend]  #: make socket files anew that were removed; True: it was
        cached = deployment.pool.handle_cache
        self.reader = undo.enter_context(Reader(self.epoch, device=self.device, cache_handles=cached))
        self.channels = undo.enter_context(ExitStack())  #: they outlive the tasks, which send to their very end
        self.tasks = asyncio.TaskGroup()
        self.attaching = Attaching(self.reader, self.tasks)
        self.peers = self._peers(lends)

    def _sockets(self) -> ZmqNetwork:
        deployment = self.deployment
        keys = None if deployment.security.keys is None else ServerKeys.read(deployment.security.keys)
        over_tcp = deployment.network.inboxes == "tcp"
        return ZmqNetwork(keys, over_tcp, lambda: self.counters.count("connections_denied"))

    def _peers(self, lends: bool) -> Peers:
        transport, stage = self.deployment.transport, self.origin.stage
        givers = [name for name, takers in DOWNSTREAM.items() if stage in takers]
        return Peers(
            self.origin,
            self.runtime.inbox(stage, self.origin.rank),
            upstream=inboxes(self.deployment, self.runtime, *givers),
            connect=self._outbox,
            attach=lambda announcement: self.attaching.begin(announcement, self.peers),
            quarantine_s=self.deployment.timeouts.quarantine_s,
            capabilities=("pool", transport) if lends else (),
            needs=transport if transport in GPU_TRANSPORTS else "",
            on_mended=self.mended,
            broker=self.runtime.broker,
            on_unknown=lambda: self.counters.count("messages_unknown_peer"),
        )

    def _outbox(self, address: str, name: str) -> Sender:
        outbox = self._network.outbox(address, name, lambda: self.peers.lost(name))
        self.channels.callback(outbox.close, LINGER_S)
        return outbox

    def lend(self, pool: Pool | None, publisher: Publisher) -> None:
        """Set the pool and its publisher; None: the stage has no pool, and its tensors are sent inline."""
        self.publisher, self.post = publisher, Post(pool, self.reader, self.peers)

    async def hand_out(self, pool: Pool, undo: AsyncExitStack) -> Coroutine[Any, Any, None]:
        """Hand the pool out to whoever reads it, and announce it; returns what has to run meanwhile."""
        stage, rank = self.origin.stage, self.origin.rank
        serving = Broker(
            self.runtime.broker(stage, rank),
            pool,
            on_admitted=self.peers.admitted,
            on_died=lambda origin, _: self.peers.died(origin),
            on_quarantined=lambda origin, _: self.peers.quarantined(origin),
            on_refused=lambda: self.counters.count("consumers_refused"),
        )
        await undo.enter_async_context(serving)
        self.mends.append(serving.mend)
        self.peers.announce(wire.Pool(self.origin, pool.description, self.runtime.broker(stage, rank)))

        def check() -> None:
            serving.check_words()
            self.check_growth(pool)

        return recycle(pool, self.deployment.pool.recycle_s, check)

    def check_growth(self, pool: Pool) -> None:
        """See whether an elastic pool still grows and shrinks. A lost GPU ends the process."""
        if (problem := pool.check_growth()) is not None:
            self.outlive(problem)
            log.error("growth_failed", exc_info=problem, remedy="it is tried again; pool_growth_failed counts on")

    @property
    def epoch(self) -> int:
        return self.origin.epoch

    async def serve(self, work: Work) -> None:
        """Take the messages of peers, for ever. `work` takes those of requests, and its numbers go into heartbeats."""
        self.work = work
        await self.receive(self.inbox, lambda received: self.take(received.message, received.frames))

    async def receive(self, channel: AsyncIterable[Received], take: Callable[[Received], None]) -> None:
        """Take the messages of a channel, for ever. An exception that one message causes ends with that message."""
        async for received in channel:
            with self.alone():
                take(received)
            del received  # else its frames stay in use while the next is waited for

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> None:
        """Take a message of a peer, or count why not. A message for a previous epoch of this process is dropped."""
        taken = isinstance(message, TAKEN[self.origin.stage])
        if taken and isinstance(message, OF_REQUESTS) and message.to != self.epoch:
            self.counters.count("messages_stale_epoch")
        elif not self.work.take(message, frames) and not self.hear(message):
            article = "an" if self.origin.stage == "encoder" else "a"
            self.refused(BadMessage(f"{article} {self.origin.stage} takes no {type(message).__name__}"))

    def hear(self, message: wire.Message) -> bool:
        """Take a message that is of no request; False: this process takes no messages of this kind."""
        if self.peers.hear(message):
            return True
        known = self.post.hear(message)
        if known is False:
            self.counters.count("messages_unknown_peer")
        return known is not None

    def refused(self, problem: BadMessage) -> None:
        """Count and log a message that this process does not take; it lives on."""
        self.counters.count("messages_refused")
        suppressed = self.refusals.take()  # asked first: to make a line costs more than all the rest of a refusal
        if suppressed is not None:
            log.warning("message_refused", problem=str(problem), **({"suppressed": suppressed} if suppressed else {}))

    def front_door(self) -> Door:
        """Where clients come to this process, with the deployment's keys if it has some; closed with the channels."""
        address = self.runtime.listening(self.runtime.front_door(self.origin.rank))
        door = self._network.front_door(address, self.limits, self.refused, self.denied)
        self.channels.callback(door.close, LINGER_S)
        self.mends.append(door.mend)
        return door

    def denied(self, denial: Denial) -> None:
        """Count and log a connection that was refused before a message of it was read."""
        self.counters.count("connections_denied")
        log.warning("connection_denied", reason=denial.reason)

    def outlive(self, problem: BaseException) -> None:
        """End the process at once if a problem has cost it its GPU: nothing on it can succeed, nor be waited for.

        Its peers see it die, and its requests fail; theirs go on.
        """
        if (lost := lost_context(problem)) is not None:
            log.critical("gpu_lost", problem=str(lost).partition("\n")[0])
            sys.stderr.flush()
            os._exit(1)

    def mended(self, peer: Peer) -> None:
        """Withdraw a peer's leases: it lives, but its connection broke, so the last messages to it may be lost."""
        self.post.withdraw(peer)
        self.work.connection_mended(peer)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Log and count an exception that one message causes, so that it does not end the process."""
        try:
            yield
        except (HandshakeRefused, asyncio.CancelledError):
            raise
        except Exception as problem:
            self.outlive(problem)
            self.counters.count("messages_crashed")
            log.exception("message_crashed")

    @contextmanager
    def running(self, *loops: Coroutine[Any, Any, None]) -> Iterator[None]:
        """Run these beside the block; they are cancelled with it, and the block with them if one fails."""
        tasks = [self.tasks.create_task(loop) for loop in loops]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    def gauges(self) -> tuple[wire.Gauge, ...]:
        """The numbers of this process for its heartbeats."""
        numbers: dict[str, float] = {f"drafts_{how}": count for how, count in self.publisher.drafts.items()}
        since = self.work.busy_since()
        numbers["busy_s"] = 0.0 if since is None else time.monotonic() - since
        numbers["in_flight"] = self.work.in_flight()
        numbers["uptime_s"] = time.monotonic() - self._began_s
        numbers["proxies_stale"] = self.reader.stale
        numbers["peers_quarantined"] = sum(peer.state == "quarantined" for peer in self.peers)
        if self.publisher.pool is not None:
            statistics = self.publisher.pool.statistics()
            numbers |= {f"pool_{name}": getattr(statistics, name) for name in statistics.__struct_fields__}
        numbers |= self.work.gauges()
        for name, value in numbers.items():
            self.counters.gauge(name, value)
        numbers |= {name: self.counters.value(name) for name in TOLD}
        return tuple(wire.Gauge(name, float(value)) for name, value in numbers.items())


def inboxes(deployment: Deployment, runtime: Runtime, *stages: str) -> dict[Key, str]:
    """The inbox address of every rank of these stages."""
    ranks = ranks_of(deployment)
    return {(stage, rank): runtime.inbox(stage, rank) for stage in stages for rank in range(ranks[stage])}
