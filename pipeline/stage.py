"""What every stage process has: a runtime lock, an inbox, peers, perhaps a pool with its broker, and their upkeep."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
import zmq

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage, FerryError, PoolClosed, PoolFull
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.memory.cuda_driver import lost_context
from tensorferry.codecs.memory.cuda_vmm import NoFabric
from tensorferry.codecs.pool.pool import Pool, new_nonce
from tensorferry.codecs.publisher import Publisher
from tensorferry.codecs.reader import Reader
from tensorferry.codecs.transport import GPU_TRANSPORTS
from tensorferry.pipeline import broker, telemetry
from tensorferry.pipeline.channels import FrontDoor, Inbox, Outbox, open_context
from tensorferry.pipeline.config import Deployment, PoolSpec, device_of, mail_of, port_offset, ranks_of
from tensorferry.pipeline.gate import Gate
from tensorferry.pipeline.keys import DOOR, INBOX, ServerKeys
from tensorferry.pipeline.peer import Peer
from tensorferry.pipeline.peers import DOWNSTREAM, HandshakeRefused, Key, Peers
from tensorferry.pipeline.post import Post
from tensorferry.pipeline.runtime import Runtime
from tensorferry.pipeline.sockets import Context, Denial

log = structlog.get_logger()

RECYCLE_PERIOD_S = PoolSpec().recycle_s  #: unless the deployment file says otherwise
#: Counters that heartbeats tell too, for whoever watches a deployment without Prometheus.
TOLD = ("requests_ok", "requests_failed", "requests_busy")
ATTACH_S = 10.0  #: for a peer's pool to be mapped
ATTACH_AGAIN_S, LONGEST_ATTACH_AGAIN_S = 1.0, 60.0  #: until a next try of one that could not be; doubled each time
UPKEEP_S = 1.0  #: between two looks at what peers' elastic pools have retired, at most
FLUSH_S = 1.0  #: for a peer to take our last messages
LINGER_S = 0.2  #: the same for a process that is cancelled


@dataclass(frozen=True, slots=True)
class PoolShare:
    """A process's part of a budget."""

    nbytes: int
    slots: int
    inline_below_nbytes: int
    budget_key: str  #: the key of the deployment file that would make it larger


@dataclass(slots=True)
class Stage:
    """See the module. Made by `opened`; closed with its block."""

    deployment: Deployment
    origin: wire.Origin
    runtime: Runtime
    context: Context
    locks: ExitStack  #: closed last
    mends: list[Callable[[], bool]]  #: make socket files anew that were removed; True: it was
    channels: ExitStack  #: closed after the last task has ended
    inbox: Inbox
    peers: Peers
    post: Post
    reader: Reader
    publisher: Publisher
    counters: telemetry.Counters
    limits: Limits
    tasks: asyncio.TaskGroup
    device: int | None  #: the GPU this process works on, wherever its pool is; None: it needs none
    keys: ServerKeys | None  #: of `security.keys`
    in_flight: Callable[[], int] = field(default=lambda: 0)  #: set by the stage, for heartbeats
    numbers: Callable[[], Mapping[str, float]] = field(default=dict)  #: its own gauges, the same
    busy_since: Callable[[], float | None] = field(default=lambda: None)  #: monotonic; None: it has nothing to do
    on_mended: Callable[[Peer], None] = field(default=lambda peer: None)  #: see `mended`; set by the stage
    refusals: telemetry.Ration = field(default_factory=telemetry.Ration)  #: of log lines about them

    @property
    def epoch(self) -> int:
        return self.origin.epoch

    def hear(self, message: wire.Message) -> bool:
        """Take a message that is of no request; False: this process takes no such."""
        if self.peers.hear(message):
            return True
        known = self.post.hear(message)
        if known is False:
            self.counters.count("messages_of_strangers")
        return known is not None

    def refused(self, problem: BadMessage) -> None:
        """Count and log a message that this process does not take; it lives on."""
        self.counters.count("messages_refused")
        left_out = self.refusals.take()  # asked first: to make a line costs more than all the rest of a refusal
        if left_out is not None:
            log.warning("message_refused", problem=str(problem), **({"left_out": left_out} if left_out else {}))

    def front_door(self) -> FrontDoor:
        """Where clients come to this process, with the deployment's keys if it has some; closed with the channels."""
        address = self.runtime.listening(self.runtime.front_door(self.origin.rank))
        curve = None if self.keys is None else self.keys.bound(DOOR)
        door = FrontDoor(self.context, address, self.limits, self.refused, curve=curve, on_denied=self.denied)
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
        """A peer lives, and its connection broke: what it was sent last may never have come."""
        self.post.withdraw(peer)
        self.on_mended(peer)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A bug that one message brings out ends with that message, and not with the process."""
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
        """What this process says of itself in its heartbeats."""
        numbers: dict[str, float] = {f"drafts_{how}": count for how, count in self.publisher.drafts.items()}
        since = self.busy_since()
        numbers["busy_s"] = 0.0 if since is None else time.monotonic() - since
        numbers["in_flight"] = self.in_flight()
        numbers["proxies_stale"] = self.reader.stale
        numbers["peers_quarantined"] = sum(peer.state == "quarantined" for peer in self.peers)
        if self.publisher.pool is not None:
            statistics = self.publisher.pool.statistics()
            numbers |= {f"pool_{name}": getattr(statistics, name) for name in statistics.__struct_fields__}
        numbers |= self.numbers()
        for name, value in numbers.items():
            self.counters.gauge(name, value)
        numbers |= {name: self.counters.value(name) for name in TOLD}
        return tuple(wire.Gauge(name, value) for name, value in numbers.items())


def inboxes(deployment: Deployment, runtime: Runtime, *stages: str) -> dict[Key, str]:
    """The inbox address of every rank of these stages."""
    ranks = ranks_of(deployment)
    return {(stage, rank): runtime.inbox(stage, rank) for stage in stages for rank in range(ranks[stage])}


@asynccontextmanager
async def opened(deployment: Deployment, stage: str, rank: int, share: PoolShare | None = None) -> AsyncIterator[Stage]:
    """Everything a stage process needs, for the length of the block.

    share: what the stage's pool may have, None for a stage that hands no tensors on. With `transport: cpu`
    there is no pool all the same. The block is entered before peers are ready: see `Peers.wait_ready`.
    """
    assert deployment.transport != "auto", "decided by whoever starts the deployment"
    if deployment.transport == "cpu":
        share = None
    origin = wire.Origin(stage, rank, new_nonce())
    runtime = Runtime.of(deployment)
    telemetry.configure(deployment.telemetry, stage=stage, rank=rank)
    counters = telemetry.Counters(stage=stage, rank=str(rank))
    limits = Limits(inline_nbytes=deployment.limits.request_mb << 20)
    async with AsyncExitStack() as undo:
        locks = undo.enter_context(ExitStack())
        locks.enter_context(runtime.own(stage, rank))
        undo.callback(counters.close)
        if deployment.telemetry.prometheus_port is not None:
            counters.serve(deployment.telemetry.prometheus_port + port_offset(deployment, stage, rank))
        context = undo.enter_context(open_context())
        keys = None if deployment.security.keys is None else ServerKeys.read(deployment.security.keys)
        if keys is not None:
            undo.callback(Gate(context, keys, lambda: counters.count("connections_denied")).close)
        address = runtime.inbox(stage, rank)
        wide = keys if deployment.network.inboxes == "tcp" else None
        inbox = Inbox(
            context,
            runtime.listening(address),
            limits,
            lambda problem: self.refused(problem),
            curve=None if wide is None else wide.bound(INBOX),
            on_denied=lambda denial: self.denied(denial),
        )
        undo.callback(inbox.close)
        device = device_of(deployment, stage, rank)
        handles = deployment.pool.handle_cache
        reader = undo.enter_context(Reader(origin.epoch, device=device, cache_handles=handles))
        channels = undo.enter_context(ExitStack())  # they outlive the tasks, which send to their very end
        tasks = asyncio.TaskGroup()
        attaching: dict[int, asyncio.Task[None]] = {}
        curve = None if wide is None else wide.stage
        peers = Peers(
            origin,
            address,
            upstream=inboxes(deployment, runtime, *(name for name, takers in DOWNSTREAM.items() if stage in takers)),
            connect=lambda address, name: _connected(
                channels, Outbox(context, address, name, on_break=lambda: peers.lost(name), curve=curve)
            ),
            attach=lambda announcement: _attach(tasks, peers, reader, attaching, announcement),
            quarantine_s=deployment.timeouts.quarantine_s,
            capabilities=("pool", deployment.transport) if share is not None else (),
            needs=deployment.transport if deployment.transport in GPU_TRANSPORTS else "",
            on_mended=lambda peer: self.mended(peer),
            broker=runtime.broker,
            on_stranger=lambda: counters.count("messages_of_strangers"),
        )
        pool = None
        if share is not None:
            make = partial(Pool.create, share.nbytes, share.slots, producer=origin.epoch)
            memory = deployment.transport if deployment.transport in GPU_TRANSPORTS else "host"
            make = partial(make, memory=memory, device=device)
            if memory == "cuda_vmm":
                spec = deployment.pool
                make = partial(make, chunk_nbytes=spec.chunk_mb << 20)
                make = partial(make, idle_s=spec.idle_s, grow_wait_s=spec.grow_wait_ms / 1000)
                make = partial(make, mail=mail_of(deployment))
            pool = undo.enter_context(await _made(make))
        post = Post(pool, reader, peers)
        publisher = Publisher(
            pool,
            # From a GPU inline is the longer way, for tensors of any size.
            inline_below_nbytes=share.inline_below_nbytes if share is not None and device is None else 0,
            on_fallback=_FallbackWarning(counters, share),
        )
        self = Stage(
            deployment,
            origin,
            runtime,
            context,
            locks,
            [inbox.mend],
            channels,
            inbox,
            peers,
            post,
            reader,
            publisher,
            counters,
            limits,
            tasks,
            device,
            keys,
        )
        await undo.enter_async_context(tasks)
        upkeep = [tasks.create_task(_beat(self), name="heartbeat"), tasks.create_task(_forget(self), name="forgetter")]
        if mail_of(deployment) is not None:
            carrying = self.post.carry(lambda: self.in_flight() > 0)
            upkeep.append(tasks.create_task(carrying, name="post"))
        if pool is not None:
            path = runtime.broker(stage, rank)
            serving = broker.Broker(
                path,
                pool,
                on_admitted=peers.admitted,
                on_died=lambda origin, _: peers.died(origin),
                on_quarantined=lambda origin, _: peers.quarantined(origin),
                on_refused=lambda: counters.count("consumers_refused"),
            )
            await undo.enter_async_context(serving)
            self.mends.append(serving.mend)
            recycler = broker.recycle(pool, deployment.pool.recycle_s, serving.check_words)
            upkeep.append(tasks.create_task(recycler, name="recycler"))
            peers.announce(wire.Pool(origin, pool.description, path))
        peers.greet(inboxes(deployment, runtime, *DOWNSTREAM[stage]))
        log.info("started", epoch=origin.epoch)
        try:
            yield self
        finally:
            for task in (*upkeep, *attaching.values()):
                task.cancel()
        peers.tell(wire.Drained(origin))
        await asyncio.gather(*(peer.outbox.flush(FLUSH_S) for peer in peers))


async def _made(make: Callable[..., Pool]) -> Pool:
    """A pool, made beside the event loop, and not to the end if this process is cancelled meanwhile."""
    given_up = threading.Event()

    def go_on() -> None:
        if given_up.is_set():
            raise PoolClosed

    try:
        return await asyncio.to_thread(make, go_on=go_on)
    finally:
        given_up.set()


def _connected(channels: ExitStack, outbox: Outbox) -> Outbox:
    channels.callback(outbox.close, LINGER_S)
    return outbox


def _attach(
    tasks: asyncio.TaskGroup,
    peers: Peers,
    reader: Reader,
    attaching: dict[int, asyncio.Task[None]],
    announcement: wire.Pool,
) -> None:
    """Map a peer's pool beside everything else. attaching: the pools for which that is under way.

    What cannot be mapped now may be later, when there is memory again or a descriptor; the peer sends inline meanwhile.
    """
    pool, producer = announcement.description.pool, announcement.origin

    async def attach() -> None:
        said, pause_s = "", ATTACH_AGAIN_S
        while True:
            refusal = await _refusal(peers, reader, announcement)
            if refusal != said or not refusal:
                peers.attached(producer, refusal)
            if not refusal:
                return
            said = refusal
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_ATTACH_AGAIN_S)
            if peers.living(producer.epoch) is None:
                return

    if pool not in attaching:  # else it was announced again, and is answered when that is done
        attaching[pool] = tasks.create_task(attach(), name="attach")
        attaching[pool].add_done_callback(lambda _: attaching.pop(pool))


async def _refusal(peers: Peers, reader: Reader, announcement: wire.Pool) -> str:
    """Map a pool; why that cannot be done, empty: it has been."""
    pool = announcement.description.pool
    if pool in reader.pools:  # it was announced again
        return ""
    try:
        await broker.attach(announcement.broker, peers.origin, pool, reader, timeout_s=ATTACH_S)
    except NoFabric:  # it was chosen, and is never weakened
        raise
    except FerryError as problem:
        return str(problem) or type(problem).__name__
    except OSError as problem:  # descriptors have run out here
        return f"it cannot be reached: {problem.strerror}"
    return ""


async def _beat(stage: Stage) -> None:
    well = True
    while True:
        stage.peers.beat(stage.in_flight(), stage.gauges())
        try:
            _mend(stage)
            well = True
        except (FerryError, OSError, zmq.ZMQError) as problem:
            if well:
                log.error("runtime_directory_lost", problem=str(problem), remedy="nobody new can connect meanwhile")
            well = False
        await asyncio.sleep(stage.deployment.timeouts.heartbeat_s)


def _mend(stage: Stage) -> None:
    """Make anew what somebody has removed from the runtime directory, such as a cleaner of /tmp: whoever is started
    later looks for us there. Raises FerryError, OSError, ZMQError."""
    origin = stage.origin
    if not stage.runtime.lock(origin.stage, origin.rank).exists():
        stage.locks.enter_context(stage.runtime.own(origin.stage, origin.rank))
        log.warning("lock_file_made_again", directory=str(stage.runtime.directory))
    for mend in stage.mends:
        if mend():
            log.warning("socket_file_made_again", directory=str(stage.runtime.directory))


async def _forget(stage: Stage) -> None:
    """Unmap the pools of dead producers, as soon as no request that they had a part in can be left; and the chunks that
    the living have retired."""
    seen_at: dict[int, float] = {}
    while True:
        if stage.deployment.transport == "cuda_vmm":
            await _keep_up(stage)
        now = time.monotonic()
        seen_at = {pool: seen_at.get(pool, now) for pool in stage.reader.orphans()}
        for pool, at in seen_at.items():
            if now - at > stage.deployment.limits.request_timeout_s:
                await asyncio.to_thread(stage.reader.detach, pool)
                log.info("pool_forgotten", pool=pool)
        await asyncio.sleep(min(UPKEEP_S, stage.deployment.timeouts.heartbeat_s))


async def _keep_up(stage: Stage) -> None:
    try:
        await asyncio.to_thread(stage.reader.upkeep)
    except FerryError as problem:  # of one chunk; whoever needs it is told again
        stage.outlive(problem)
        stage.counters.count("chunks_unmapped")
        log.warning("chunk_not_mapped", problem=str(problem))


class _FallbackWarning:
    """Counts drafts the pool had no room for, and warns of the first."""

    def __init__(self, counters: telemetry.Counters, share: PoolShare | None) -> None:
        self._counters, self._share, self._warned = counters, share, False

    def __call__(self, full: PoolFull, pool: Pool) -> None:
        self._counters.count("pool_full_fallbacks")
        if not self._warned and self._share is not None:
            self._warned = True
            log.warning(
                "pool_full",
                tensor_nbytes=full.wanted_nbytes,
                longest_free_nbytes=full.longest_free_nbytes,
                free_slots=full.free_slots,
                pool_nbytes=pool.description.nbytes,
                remedy=f"sent inline; raise {self._share.budget_key} to keep such tensors in the pool",
            )
