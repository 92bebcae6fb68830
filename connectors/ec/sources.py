"""A consumer rank's connections to producers: those that it finds in the folder, and those that it was told of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from tensorferry.codecs.errors import FerryError, PeerBusy
from tensorferry.codecs.messages import Origin
from tensorferry.codecs.pool.reader import Reader
from tensorferry.connectors.ec.messages import EC_VERSION, Enough, Hello, Item, Model, Want, Welcome, Withdrawn
from tensorferry.connectors.ec.post import Dealer, Mail
from tensorferry.connectors.ec.producer import listened_at
from tensorferry.connectors.ec.settings import PRODUCER, Settings
from tensorferry.pipeline.channels.curve_keys import CurveClient, client_keys
from tensorferry.pipeline.channels.zmq_link import Context
from tensorferry.pipeline.pools import broker

log = structlog.get_logger()

ATTACH_S = 10.0
IPC = "ipc://"


class Source:
    """One producer."""

    def __init__(self, dealer: Dealer) -> None:
        self.dealer = dealer
        self.address = dealer.peer
        self.epoch = 0  #: of the life that has welcomed us; 0: none yet
        self.pool = 0  #: that is mapped of it; 0: none
        self.serves = False  #: it may be asked


class Sources:
    """See the module."""

    def __init__(
        self,
        settings: Settings,
        context: Context,
        reader: Reader,
        origin: Origin,
        model: Model,
        tasks: asyncio.TaskGroup,
        *,
        on_item: Callable[[Mail, Item], None],
        on_source: Callable[[Source], None],
    ) -> None:
        """on_source: this producer may be asked; at first, when it is back, and again at every look."""
        self._settings, self._context, self._reader = settings, context, reader
        self._origin, self._model, self._tasks = origin, model, tasks
        self._on_item, self._on_source = on_item, on_source
        self._sources: dict[str, Source] = {}  # by address
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._elastic = False  # one of the pools is
        self._curve: CurveClient | None = client_keys(settings.keys) if settings.keys else None
        for address in settings.producers:
            self._open(address)

    def close(self) -> None:
        for source in self._sources.values():
            source.dealer.close()

    def __iter__(self) -> Iterator[Source]:
        """Those that may be asked."""
        return (source for source in self._sources.values() if source.serves)

    def ask(self, source: Source, message: Want | Enough) -> None:
        with suppress(PeerBusy):  # it is stopped; what is wanted is said again at the next look
            source.dealer.send(message)

    async def look(self) -> None:
        """Find new producers and forget those that have ended, again and again."""
        while True:
            found = sockets_in(self._settings.folder)
            for address, path in found.items():
                if address not in self._sources and listened_at(path):
                    self._open(address)
            for address, source in list(self._sources.items()):
                gone = address not in found or (not source.serves and not listened_at(found[address]))
                if gone and address.startswith(IPC):
                    await self._forget(source)
            for pool in self._reader.orphans():
                await asyncio.to_thread(self._reader.detach, pool)
            if self._elastic:
                await asyncio.to_thread(self._reader.upkeep)
            for source in self:
                self._on_source(source)
            await asyncio.sleep(self._settings.scan_s)

    def _open(self, address: str) -> None:
        curve = None if address.startswith(IPC) else self._curve
        dealer = Dealer.open(self._context, address, lambda: self._greet(source), curve)
        source = self._sources[address] = Source(dealer)
        self._greet(source)
        self._listeners[address] = self._tasks.create_task(self._listen(source), name=f"source {address}")

    async def _forget(self, source: Source) -> None:
        log.info("ec_producer_gone", address=source.address)
        self._listeners.pop(source.address).cancel()
        del self._sources[source.address]
        source.serves = False
        source.dealer.close()
        await asyncio.to_thread(self._reader.detach, source.pool)

    def _greet(self, source: Source) -> None:
        """At first, and whenever the connection has broken: what was said before may be lost."""
        source.serves = False
        with suppress(PeerBusy):
            source.dealer.send(Hello(EC_VERSION, self._origin, self._model))

    async def _listen(self, source: Source) -> None:
        while True:
            mail = await source.dealer.receive()
            match mail.message:
                case Welcome(to=to) as welcome if to == self._origin.epoch:
                    await self._welcomed(source, welcome)
                case Item() as item:
                    self._on_item(mail, item)
                case Withdrawn(pool, leases):
                    self._reader.withdraw(pool, leases)
                case _:
                    log.warning("ec_message_refused", kind=type(mail.message).__name__, address=source.address)

    async def _welcomed(self, source: Source, welcome: Welcome) -> None:
        refusal = welcome.refusal
        if not refusal and welcome.model != self._model:
            refusal = f"it has another model: {welcome.model}; here is {self._model}"
        if not refusal and welcome.version != EC_VERSION:
            refusal = f"it speaks version {welcome.version}; version {EC_VERSION} is spoken here"
        if refusal:
            log.error("ec_producer_refused", address=source.address, reason=refusal)
            return
        source.epoch = welcome.origin.epoch
        await self._map(source, welcome)
        source.serves = True
        self._on_source(source)

    async def _map(self, source: Source, welcome: Welcome) -> None:
        """Map its pool, where that is on this machine. What cannot be mapped makes it send inline."""
        if welcome.pool is None or welcome.broker is None or not source.address.startswith(IPC):
            return
        pool = welcome.pool.pool
        if pool in self._reader.pools:
            return
        try:
            await broker.attach(welcome.broker, self._origin, pool, self._reader, ATTACH_S)
        except (FerryError, OSError) as problem:
            log.warning("ec_pool_not_mapped", address=source.address, reason=str(problem), consequence="sent inline")
            return
        source.pool = pool
        self._elastic |= welcome.pool.memory == "cuda_vmm"


def sockets_in(folder: str) -> dict[str, Path]:
    """The files of producers' sockets, by address."""
    return {f"{IPC}{path}": path for path in Path(folder).glob(f"*{PRODUCER}")}
