"""The producer's side, in one process: it keeps outputs for a while, and sends them to whoever asks.

`put` is called by the thread that made an output; all else is done by a thread with an event loop. An output lies in
the pool from `put` on, so that nothing is copied when it is asked for. What finds no room there lies in private memory
and travels inline.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq

from tensorferry.codecs.errors import PeerBusy, PeerGone
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.messages import MOST_TOLD, Origin
from tensorferry.codecs.pool.pool import Pool, new_nonce
from tensorferry.codecs.pool.publisher import Draft, Publisher
from tensorferry.codecs.tensors import view_of
from tensorferry.connectors.ec.kept import Kept
from tensorferry.connectors.ec.loop_thread import LoopThread
from tensorferry.connectors.ec.messages import EC_VERSION, Enough, Hello, Item, Model, Want, Welcome, Withdrawn
from tensorferry.connectors.ec.post import Door, Mail
from tensorferry.connectors.ec.settings import ENGINE, PRODUCER, Settings
from tensorferry.pipeline.channels.curve_keys import DOOR, ServerKeys
from tensorferry.pipeline.channels.zap_gate import Gate
from tensorferry.pipeline.channels.zmq_link import open_context
from tensorferry.pipeline.pools.broker import Broker, recycle

log = structlog.get_logger()

RECYCLE_S = 0.05  #: how often leases that came back are looked for
UPKEEP_S = 0.5  #: how often kept outputs and wishes are looked at for their age
STAGED_S = 0.0005  #: between looks at a copy out of GPU memory
KEPT_EIGHTHS = 7  #: of the budget; the rest is for outputs that were forgotten while somebody still reads them
SWEEP_S = 60.0  #: a socket's file that is younger may be of a process that is about to listen


class Statistics(msgspec.Struct, frozen=True):
    """What a producer has, and has done."""

    kept: int  #: outputs
    kept_nbytes: int
    lent: int  #: leases of outputs that are not kept any more, which somebody still reads
    wanted: int  #: outputs that somebody waits for
    consumers: int  #: ranks that read the pool
    sent: int  #: items by proxy
    sent_inline: int
    pool_full: int  #: outputs that found no room in the pool


@dataclass(eq=False, slots=True)
class Output:
    """One output that is kept. Its draft's block is open until it is forgotten."""

    name: str
    draft: Draft
    block: ExitStack
    told: set[int] = field(default_factory=set)  #: columns


@dataclass(slots=True)
class Peer:
    """A consumer's rank."""

    door: Door
    identity: bytes
    origin: Origin


class Producer:
    """See the module. `close` it."""

    def __init__(self, settings: Settings, model: Model, *, device: int | None = None) -> None:
        """device: the GPU that outputs lie on, as torch counts; None: the host's memory.

        Raises DeploymentError, and what `Pool.create` raises.
        """
        self._settings, self._model = settings, model
        folder = settings.prepare()
        sweep(folder)
        self.epoch = new_nonce()
        name = secrets.token_hex(8)
        self._address, self._broker_path = f"ipc://{folder}/{name}{PRODUCER}", str(folder / f"{name}.pool")
        self._origin = Origin("ec_producer", 0, self.epoch)
        self._lock = threading.Lock()  # of `_kept` and all outputs in it
        self._kept: Kept[Output] = Kept((settings.budget_mb << 20) * KEPT_EIGHTHS // 8)
        self._wishes: dict[str, dict[int, float]] = {}  # by output and consumer's epoch: until when
        self._peers: dict[int, Peer] = {}  # by epoch
        self._columns: dict[int, int] = {}  # by epoch, of those that read the pool
        self._sent = self._sent_inline = self._pool_full = 0
        self._stack = ExitStack()
        with ExitStack() as undo:
            self._pool = self._make_pool(device)
            if self._pool is not None:
                undo.callback(self._pool.close)
            self._publisher = Publisher(
                self._pool,
                inline_below_nbytes=settings.inline_below_kb << 10 if device is None else 0,
                on_fallback=lambda full, pool: self._fell_back(),
            )
            undo.callback(self._forget_all)
            self._tasks: asyncio.TaskGroup | None = None
            self._thread = LoopThread("ec-producer", self._serve)
            undo.callback(self._thread.close)
            self._stack = undo.pop_all()

    def close(self) -> None:
        """Forget everything; consumers keep what they have read."""
        self._stack.close()

    # --- the model's thread

    def put(self, name: str, tensor: Any) -> bool:
        """Keep a copy of an output, and send it to those who wait for it; False: it is kept already.

        Never waits. tensor: torch, numpy or View. On a GPU the copy is queued on the current stream. Raises
        UnsupportedDtype, BadTensor, and what a lost GPU raises.
        """
        view = view_of(tensor)
        with self._lock:
            if name in self._kept:
                return False
            gone = self._kept.room_for(view.nbytes)
        for output in gone:
            output.block.close()
        draft = self._publisher.publish(view)
        with ExitStack() as undo:
            undo.enter_context(draft)
            draft.complete()
            output = Output(name, draft, undo.pop_all())
        with self._lock:
            self._kept.add(name, output, view.nbytes, time.monotonic())
        self._thread.call(self._made, name)
        return True

    def has(self, name: str) -> bool:
        """Whether an output is kept."""
        with self._lock:
            return name in self._kept

    def statistics(self) -> Statistics:
        with self._lock:
            kept, kept_nbytes = len(self._kept), self._kept.nbytes
            in_pool = sum(output.draft.transport != "inline" for output in self._kept)
            lent = 0 if self._pool is None else self._pool.statistics().lent_slots - in_pool
        return Statistics(
            kept=kept,
            kept_nbytes=kept_nbytes,
            lent=lent,
            wanted=len(self._wishes),
            consumers=len(self._columns),
            sent=self._sent,
            sent_inline=self._sent_inline,
            pool_full=self._pool_full,
        )

    def _fell_back(self) -> None:
        self._pool_full += 1
        if self._pool_full == 1:
            log.warning("ec_pool_full", remedy="sent inline; raise budget_mb to keep such outputs in the pool")

    def _make_pool(self, device: int | None) -> Pool | None:
        settings = self._settings
        if settings.memory == "none":
            return None
        nbytes, epoch = settings.budget_mb << 20, self.epoch
        if settings.memory == "shm":
            return Pool.create(nbytes, settings.slots, device=device, producer=epoch)
        return Pool.create(nbytes, settings.slots, memory=settings.memory, device=device, producer=epoch)

    def _forget_all(self) -> None:
        with self._lock:
            for output in self._kept.room_for(self._kept.budget_nbytes + 1):
                output.block.close()

    # --- the loop's thread

    async def _serve(self, started: Callable[[], None]) -> None:
        settings = self._settings
        async with AsyncExitStack() as stack:
            context = stack.enter_context(open_context())
            doors = [Door.open(context, self._address)]
            stack.callback(doors[0].close)
            if settings.listen:
                keys = ServerKeys.read(settings.keys) if settings.keys else None
                if keys is not None:
                    stack.callback(Gate(context, keys, lambda: None).close)
                curve = None if keys is None else keys.bound(DOOR)
                doors.append(Door.open(context, settings.listen, curve))
                stack.callback(doors[1].close)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            self._tasks = tasks
            mends = [door.mend for door in doors]
            if self._pool is not None:
                broker = Broker(self._broker_path, self._pool, self._admitted, self._died)
                await stack.enter_async_context(broker)
                mends.append(broker.mend)
                tasks.create_task(recycle(self._pool, RECYCLE_S, broker.check_words), name="recycle")
            tasks.create_task(self._upkeep(mends), name="upkeep")
            for door in doors:
                tasks.create_task(self._answer(door), name="door")
            started()
            await asyncio.Event().wait()

    async def _answer(self, door: Door) -> None:
        while True:
            mail = await door.receive()
            if isinstance(mail.message, Hello):
                self._welcome(door, mail.peer, mail.message)
                continue
            peer = next(
                (peer for peer in self._peers.values() if (peer.door, peer.identity) == (door, mail.peer)), None
            )
            if peer is not None:
                self._hear(peer, mail)

    def _welcome(self, door: Door, identity: bytes, hello: Hello) -> None:
        refusal = refusal_of(hello, self._model)
        origin = hello.origin
        pool = self._pool
        welcome = Welcome(
            version=EC_VERSION,
            origin=self._origin,
            to=origin.epoch,
            model=self._model,
            pool=None if pool is None else pool.description,
            broker=None if pool is None else self._broker_path,
            refusal=refusal,
        )
        with suppress(PeerGone, PeerBusy):  # then it says hello again
            door.send(identity, welcome)
        if refusal:
            log.warning("ec_consumer_refused", rank=origin.rank, reason=refusal)
            return
        self._peers[origin.epoch] = Peer(door, identity, origin)
        for name in list(self._wishes):  # it wishes anew
            self._wish_ends(name, origin.epoch)
        column = self._columns.get(origin.epoch)
        if pool is not None and column is not None:  # the connection broke
            lost = pool.outstanding(column)
            for start in range(0, len(lost), MOST_TOLD):
                with suppress(PeerGone, PeerBusy):
                    door.send(identity, Withdrawn(pool.description.pool, tuple(lost[start : start + MOST_TOLD])))

    def _hear(self, peer: Peer, mail: Mail) -> None:
        match mail.message:
            case Want(items, left_ms):
                until = time.monotonic() + left_ms / 1000
                for name in items:
                    self._wishes.setdefault(name, {})[peer.origin.epoch] = until
                for name in items:
                    self._made(name)
            case Enough(items):
                for name in items:
                    self._wish_ends(name, peer.origin.epoch)
            case _:
                log.warning("ec_message_refused", kind=type(mail.message).__name__, rank=peer.origin.rank)

    def _wish_ends(self, name: str, epoch: int) -> None:
        wishes = self._wishes.get(name, {})
        wishes.pop(epoch, None)
        if not wishes:
            self._wishes.pop(name, None)

    def _made(self, name: str) -> None:
        """Send an output that is kept to all who wait for it."""
        now = time.monotonic()
        for epoch, until in list(self._wishes.get(name, {}).items()):
            peer = self._peers.get(epoch)
            if peer is None or until < now:
                self._wish_ends(name, epoch)
            elif not self._send(name, peer):
                assert self._tasks is not None
                self._tasks.create_task(self._send_staged(name, peer), name="staging")

    async def _send_staged(self, name: str, peer: Peer) -> None:
        """From a GPU, inline: as soon as its bytes are in the host's memory."""
        while not self._send(name, peer):  # noqa: ASYNC110
            await asyncio.sleep(STAGED_S)

    def _send(self, name: str, peer: Peer) -> bool:
        """Whether all that can be done now is done; False: look again soon."""
        epoch = peer.origin.epoch
        if epoch not in self._wishes.get(name, ()):
            return True
        column = self._columns.get(epoch)
        with self._lock:
            output = self._kept.get(name)
            if output is None:
                return True
            if column is not None and column in output.told:
                output = self._renewed(output)
            if not output.draft.prepared(column):
                return False
            frames: list[Buffer] = []
            [payload] = output.draft.dispatch(column, frames)
            try:
                peer.door.send(peer.identity, Item(name, payload), frames)
            except (PeerGone, PeerBusy) as problem:  # it asks again when it is back; or at the next look
                output.draft.retract(None if frames else column)
                if isinstance(problem, PeerGone) and self._peers.get(epoch) is peer:
                    del self._peers[epoch]
                return True
            self._kept.read(name, time.monotonic())
            if frames:
                self._sent_inline += 1
            else:
                assert column is not None
                output.told.add(column)
                self._sent += 1
        self._wish_ends(name, epoch)
        return True

    def _renewed(self, old: Output) -> Output:
        """The same bytes under a new lease: the old one was sent to this peer, and cannot be sent to it twice."""
        draft = self._publisher.publish(*old.draft.views)
        with ExitStack() as undo:
            undo.enter_context(draft)
            draft.complete()
            new = Output(old.name, draft, undo.pop_all())
        self._kept.forget(old.name)
        self._kept.add(new.name, new, draft.nbytes, time.monotonic())
        old.block.close()
        return new

    async def _upkeep(self, mends: Sequence[Callable[[], bool]]) -> None:
        while True:
            await asyncio.sleep(UPKEEP_S)
            for mend in mends:
                with suppress(OSError, zmq.ZMQError):  # the folder is gone; at the next look it may be back
                    mend()
            now = time.monotonic()
            with self._lock:
                old = self._kept.older(now - self._settings.keep_s)
            for output in old:
                output.block.close()
            for name in list(self._wishes):
                self._made(name)  # what could not be sent before; and wishes end here
            problem = None if self._pool is None else self._pool.check_growth()
            if problem is not None:
                log.error("ec_pool_cannot_grow", problem=str(problem))

    def _admitted(self, origin: Origin, column: int) -> None:
        self._columns[origin.epoch] = column

    def _died(self, origin: Origin, column: int) -> None:
        self._columns.pop(origin.epoch, None)
        self._peers.pop(origin.epoch, None)
        log.info("ec_consumer_died", rank=origin.rank)


def refusal_of(hello: Hello, model: Model) -> str:
    """Why a consumer is not served; empty: it is."""
    if hello.version != EC_VERSION:
        return f"encoder outputs by version {hello.version}; version {EC_VERSION} is spoken here"
    differences = [
        f"{what} {theirs!r}, here {ours!r}"
        for what in Model.__struct_fields__
        if (theirs := getattr(hello.model, what)) != (ours := getattr(model, what))
    ]
    return f"another model: {'; '.join(differences)}" if differences else ""


def sweep(folder: Path) -> None:
    """Remove the sockets of engines that have ended without a word."""
    for path in [*folder.glob(f"*{PRODUCER}"), *folder.glob(f"*{ENGINE}")]:
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > SWEEP_S and not listened_at(path):
                for left in (path, path.with_suffix(".pool")):
                    left.unlink(missing_ok=True)


def listened_at(path: Path) -> bool:
    """Whether somebody listens at a UNIX socket's file."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
    return True
