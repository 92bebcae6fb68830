"""The consumer's side, in each process that holds a rank of an engine: what came, copied out, until it is let go of.

The engine's scheduler, which may be another process, says what to `Take`; this rank looks whether it has the item, then
whether the engine has it in its own cache, and then asks all producers. It copies what comes at once, so that no
producer's pool waits for an engine, and a producer that dies afterwards takes nothing away.
`load` and `let_go` are called by the model's thread; all else is done by a thread with an event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog

from tensorferry.codecs.errors import FerryError, LeaseError, PeerGone
from tensorferry.codecs.messages import Inline, Origin, Payload
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import View, dtype_of
from tensorferry.connectors.ec.loop_thread import LoopThread
from tensorferry.connectors.ec.messages import (
    Enough,
    Held,
    Here,
    Item,
    LetGo,
    Model,
    Refused,
    Take,
    Want,
)
from tensorferry.connectors.ec.post import Dealer, Mail
from tensorferry.connectors.ec.settings import Settings
from tensorferry.connectors.ec.sources import Source, Sources
from tensorferry.pipeline.channels.zmq_link import open_context

log = structlog.get_logger()

READY_S = 0.0005  #: between looks at a lease that a GPU still writes
ORIGIN = "ec_consumer"
LOCAL_WATER = 1 << 17  #: messages that may wait for the scheduler, which may compute for seconds before it looks


class Landing(Protocol):
    """A tensor in memory of the engine's own, and the moment from which it may be read."""

    @property
    def tensor(self) -> Any: ...

    def join(self) -> None:
        """What the calling thread's current stream is given from now on comes after the copy."""


@dataclass(frozen=True, slots=True)
class HostLanding:
    tensor: Any

    def join(self) -> None:
        """Nothing: the host has copied it."""


@dataclass(frozen=True, slots=True)
class GpuLanding:
    tensor: Any
    copied: Any  #: a torch event

    def join(self) -> None:
        import torch

        torch.cuda.current_stream().wait_event(self.copied)


@dataclass(slots=True)
class Place:
    """An item that the scheduler has asked for."""

    hold: int
    until: float
    landing: Landing | None = None  #: None: it has not come
    reading: bool = False  #: one that came is being read


class Statistics(msgspec.Struct, frozen=True):
    """What a rank has, and has done."""

    held: int  #: items that are here
    wanted: int  #: items that are not
    producers: int  #: that may be asked
    by_proxy: int  #: items that were read where they lay
    inline: int
    unread: int  #: items that came and were not wanted any more
    lost: int  #: items that could not be read, and were asked for again


class Consumer:
    """See the module. `close` it."""

    def __init__(
        self, settings: Settings, model: Model, scheduler: str, *, rank: int, ranks: int, device: int | None = None
    ) -> None:
        """scheduler: the ipc address of this engine's scheduler. device: the GPU to have items on, as torch counts;
        None: the host. Raises DeploymentError, and what keys or a GPU raise."""
        self._settings, self._model, self._device = settings, model, device
        self._scheduler_address, self._rank, self._ranks = scheduler, rank, ranks
        settings.prepare()
        self._places: dict[str, Place] = {}
        self.cache: Mapping[str, Any] = {}  #: the engine's own, by item; the model's thread sets it
        self._by_proxy = self._inline = self._unread = self._lost = 0
        with ExitStack() as undo:
            self._reader = undo.enter_context(Reader(device=device))
            self._origin = Origin(ORIGIN, rank, self._reader.consumer)
            self._tasks: asyncio.TaskGroup | None = None
            self._sources: Sources | None = None
            self._scheduler: Dealer | None = None
            self._thread = LoopThread("ec-consumer", self._serve)
            undo.callback(self._thread.close)
            self._stack = undo.pop_all()

    def close(self) -> None:
        self._stack.close()

    # --- the model's thread

    def load(self, name: str) -> Any:
        """The tensor of an item that the scheduler knows to be held, of shape (rows, width)."""
        landing = self._places[name].landing
        assert landing is not None, f"{name} is not here"
        landing.join()
        return landing.tensor

    def let_go(self, name: str, hold: int) -> None:
        """Forget an item, unless it was asked for anew since."""
        self._thread.call(self._forget, LetGo(name, hold))

    def statistics(self) -> Statistics:
        places = list(self._places.values())
        held = sum(place.landing is not None for place in places)
        return Statistics(
            held=held,
            wanted=len(places) - held,
            producers=0 if self._sources is None else len(list(self._sources)),
            by_proxy=self._by_proxy,
            inline=self._inline,
            unread=self._unread,
            lost=self._lost,
        )

    # --- the loop's thread

    async def _serve(self, started: Callable[[], None]) -> None:
        async with AsyncExitStack() as stack:
            context = stack.enter_context(open_context())
            scheduler = self._scheduler = Dealer.open(context, self._scheduler_address, high_water=LOCAL_WATER)
            stack.callback(scheduler.close)
            scheduler.send(Here(self._rank, self._ranks))
            stack.callback(self._leave)
            tasks = self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
            sources = self._sources = Sources(
                self._settings,
                context,
                self._reader,
                self._origin,
                self._model,
                tasks,
                on_item=self._came,
                on_source=self._ask_for_all,
            )
            tasks.create_task(sources.look(), name="look")
            started()
            while True:
                mail = await scheduler.receive()
                match mail.message:
                    case Take() as take:
                        self._take(take)
                    case LetGo() as let_go:
                        self._forget(let_go)
                    case _:
                        log.warning("ec_message_refused", kind=type(mail.message).__name__, address=scheduler.peer)

    def _leave(self) -> None:
        """When all tasks have ended."""
        if self._sources is not None:
            self._sources.close()

    def _take(self, take: Take) -> None:
        place = self._places.get(take.name)
        if place is None:
            place = self._places[take.name] = Place(take.hold, 0.0)
        place.hold, place.until = take.hold, time.monotonic() + take.left_ms / 1000
        if place.landing is None:
            cached = self.cache.get(take.name)
            if cached is not None:
                place.landing = HostLanding(cached)  # the model's thread made it, on whatever stream it reads it
        if place.landing is not None:
            self._say_held(take.name, place)
            return
        assert self._sources is not None
        for source in self._sources:
            self._sources.ask(source, Want((take.name,), take.left_ms))

    def _forget(self, let_go: LetGo) -> None:
        place = self._places.get(let_go.name)
        if place is None or place.hold != let_go.hold:
            return
        del self._places[let_go.name]
        if place.landing is None and self._sources is not None:
            for source in self._sources:
                self._sources.ask(source, Enough((let_go.name,)))

    def _ask_for_all(self, source: Source) -> None:
        """A producer is new or back, or was asked a while ago."""
        assert self._sources is not None
        now = time.monotonic()
        for name, place in self._places.items():
            if place.landing is None and not place.reading and place.until > now:
                self._sources.ask(source, Want((name,), max(1, round(1000 * (place.until - now)))))

    def _came(self, mail: Mail, item: Item) -> None:
        place = self._places.get(item.name)
        if place is None or place.landing is not None or place.reading:
            self._unread += 1
            self._acknowledge(item.payload)
            return
        if self._is_ready(item.payload):
            self._read(item, mail.frames)
            return
        place.reading = True
        assert self._tasks is not None
        self._tasks.create_task(self._read_when_ready(place, item, mail.frames), name="read")

    async def _read_when_ready(self, place: Place, item: Item, frames: object) -> None:
        while not self._is_ready(item.payload):  # noqa: ASYNC110
            await asyncio.sleep(READY_S)
        place.reading = False
        if self._places.get(item.name) is place:
            self._read(item, ())
        else:
            self._acknowledge(item.payload)

    def _is_ready(self, payload: Payload) -> bool:
        try:
            return isinstance(payload, Inline) or self._reader.is_ready(payload)
        except FerryError:
            return True  # reading it says what is wrong

    def _read(self, item: Item, frames: object) -> None:
        """Copy an item out and say so; or say why it cannot be used, or ask for it again if it is lost."""
        place, payload = self._places[item.name], item.payload
        try:
            problem = self._problem_of(payload)
            if problem:
                self._acknowledge(payload)
                self._tell(Refused(item.name, place.hold, self._rank, problem))
                return
            place.landing = self._landed(payload, frames)
        except (LeaseError, PeerGone) as lost:  # withdrawn, or never written: it is asked for again at the next look
            self._lost += 1
            log.warning("ec_item_lost", item=item.name, problem=str(lost))
            return
        except FerryError as bad:
            self._tell(Refused(item.name, place.hold, self._rank, f"{type(bad).__name__}: {bad}"[:1024]))
            return
        if isinstance(payload, Inline):
            self._inline += 1
        else:
            self._by_proxy += 1
        self._say_held(item.name, place)
        assert self._sources is not None
        for source in self._sources:
            self._sources.ask(source, Enough((item.name,)))

    def _problem_of(self, payload: Payload) -> str:
        """What is wrong with the shape or dtype of an item; empty: nothing."""
        dtype, shape = dtype_of(payload.dtype), payload.shape
        model = self._model
        if len(shape) != 2 or not shape[0] or not shape[1] or shape[1] % model.width:
            return f"an output of shape {shape}; (rows, width) is due, the width a multiple of {model.width}"
        if dtype != model.dtype:
            return f"an output of {dtype}; this engine computes with {model.dtype}"
        return ""

    def _landed(self, payload: Payload, frames: Any) -> Landing:
        """A copy of what lies there, in memory that is ours; the payload is released."""
        into = View.empty(dtype_of(payload.dtype), payload.shape, self._device)
        self._reader.copy(payload, into, frames)
        if self._device is None:
            return HostLanding(into.torch())
        import torch

        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return GpuLanding(into.torch(), copied)

    def _acknowledge(self, payload: Payload) -> None:
        try:
            self._reader.acknowledge(payload)
        except FerryError as problem:  # over already
            log.info("ec_not_acknowledged", problem=str(problem))

    def _say_held(self, name: str, place: Place) -> None:
        assert place.landing is not None
        self._tell(Held(name, place.hold, self._rank, int(place.landing.tensor.shape[0])))

    def _tell(self, message: Held | Refused) -> None:
        assert self._scheduler is not None
        self._scheduler.send(message)
