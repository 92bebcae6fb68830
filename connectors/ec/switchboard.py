"""The scheduler's side, in the engine's core: the index, and the way to the ranks. Never waits.

All of it is called by the engine's loop. Each call first takes what the ranks have said.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import structlog

from tensorferry.codecs.errors import PeerBusy, PeerGone
from tensorferry.connectors.ec.consumer import LOCAL_WATER
from tensorferry.connectors.ec.index import Index
from tensorferry.connectors.ec.messages import Held, Here, LetGo, Refused, Take
from tensorferry.connectors.ec.post import Door
from tensorferry.connectors.ec.producer import sweep
from tensorferry.connectors.ec.settings import ENGINE, Settings
from tensorferry.pipeline.channels.zmq_link import open_context

log = structlog.get_logger()


def scheduler_address(settings: Settings, engine: str) -> str:
    """Where an engine's scheduler listens for its ranks. engine: a name that no other engine of this machine has."""
    return f"ipc://{Path(settings.folder) / blake2b(engine.encode(), digest_size=8).hexdigest()}{ENGINE}"


class Switchboard:
    """See the module. `close` it."""

    def __init__(self, settings: Settings, engine: str, ranks: int) -> None:
        """Raises DeploymentError."""
        settings.prepare()
        sweep(Path(settings.folder))
        address = scheduler_address(settings, engine)
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)  # of an engine of this name that was killed
        self.ranks = ranks
        self._context = open_context()
        self._door = Door.open(self._context, address, high_water=LOCAL_WATER)
        self._index = Index(ranks, settings.patience_s)
        self._peers: dict[int, bytes] = {}  # by rank

    def close(self) -> None:
        self._door.close()
        self._context.term()

    def need(self, request: str, items: Sequence[tuple[str, int]]) -> bool:
        """Whether all of a request's (item, rows) would load in this step. Else they are on their way."""
        self._listen()
        held = self._index.need(request, items, time.monotonic())
        self._speak()
        return held

    def is_held(self, name: str) -> bool:
        """Whether an item would load in this step. Takes nothing in: within a step the answer stays the same."""
        return self._index.is_held(name)

    def missing(self, request: str, name: str) -> bool:
        """See `Index.missing`."""
        return self._index.missing(request, name, time.monotonic())

    def allocated(self, name: str) -> None:
        self._index.allocated(name)

    def let_go(self, request: str, name: str) -> None:
        self._index.let_go(request, name)
        self._speak()

    def finished(self, request: str) -> None:
        self._index.finished(request)
        self._speak()

    def unavailable(self) -> dict[str, str]:
        """See `Index.unavailable`."""
        self._listen()
        return self._index.unavailable(time.monotonic())

    def step(self, runs: bool) -> tuple[list[str], list[tuple[str, int]]]:
        """See `Index.step`."""
        return self._index.step(runs)

    @property
    def claims(self) -> int:
        return self._index.claims

    def _listen(self) -> None:
        while (mail := self._door.take()) is not None:
            match mail.message:
                case Here(rank, ranks) if ranks == self.ranks and rank < ranks:
                    self._peers[rank] = mail.peer
                    for take in self._index.joined(time.monotonic()):
                        self._tell(rank, take)
                case Held(name, hold, rank, rows) if self._peers.get(rank) == mail.peer:
                    self._index.held(name, hold, rank, rows)
                case Refused(name, hold, rank, reason) if self._peers.get(rank) == mail.peer:
                    log.error("ec_item_refused", item=name, rank=rank, reason=reason)
                    self._index.refused(name, hold, reason)
                case _:
                    log.error("ec_message_refused", message=repr(mail.message)[:200], ranks=self.ranks)

    def _speak(self) -> None:
        for message in self._index.say():
            for rank in self._peers:
                self._tell(rank, message)

    def _tell(self, rank: int, message: Take | LetGo) -> None:
        try:
            self._door.send(self._peers[rank], message)
        except (PeerGone, PeerBusy) as problem:  # a rank that dies ends its engine; what it misses ends by patience
            log.error("ec_rank_not_told", rank=rank, problem=str(problem))
