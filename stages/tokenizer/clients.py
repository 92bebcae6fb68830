"""The clients that a tokenizer worker knows: they are told what changes, and one that died has said no good-bye."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import islice

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import PeerBusy, PeerGone
from tensorferry.pipeline.channels.interface import Door
from tensorferry.pipeline.telemetry.counters import Counters

log = structlog.get_logger()

MOST_CLIENTS = 4096  #: that are told of changes; one that is forgotten greets again, and some leave without a word


class Clients:
    """See the module."""

    def __init__(self, door: Door, members: Callable[[], wire.Members], silent_s: float, counters: Counters) -> None:
        """members: what they are told. silent_s: after so long without a greeting it is seen whether one is there."""
        self._door, self._members, self._silent_s, self._counters = door, members, silent_s, counters
        self._known: dict[bytes, float] = {}  # when each was last known to be there, the longest ago first

    def greeted(self, client: bytes) -> None:
        """Remember a client, and look after the two that were silent longest."""
        now, members = time.monotonic(), self._members()
        silent = [known for known, at in islice(self._known.items(), 2) if at < now - self._silent_s]
        for known in (*silent, client):
            self._known.pop(known, None)
            if self.answer(known, members):
                self._known[known] = now
        if len(self._known) > MOST_CLIENTS:
            del self._known[next(iter(self._known))]

    def left(self, client: bytes) -> None:
        self._known.pop(client, None)

    def tell(self) -> None:
        """Tell all of them who is there now."""
        for client in list(self._known):
            self.answer(client, self._members())

    def is_there(self, client: bytes) -> bool:
        return self.answer(client, self._members())

    def is_gone(self, client: bytes, heard_s: float) -> bool:
        """Whether a client has left without a word. One that was heard within `heard_s` is not asked.

        Its connection has ended, then, and nobody can be answered through it: who connects again is another. One that
        lives and does not read is there.
        """
        if self._known.get(client, -math.inf) > time.monotonic() - heard_s:
            return False
        try:
            self._door.send_nowait(client, self._members())
        except PeerGone:
            self.left(client)
            return True
        except PeerBusy:
            return False
        return False

    def answer(self, client: bytes, message: wire.Message) -> bool:
        """False: there is nobody to take it."""
        try:
            self._door.send_nowait(client, message)
        except (PeerGone, PeerBusy) as problem:
            self.left(client)
            if isinstance(message, wire.Members):  # no answer: who only looks how we are does not stay for all we say
                log.debug("client_left", problem=str(problem))
                return False
            self._counters.count("answers_undeliverable")
            log.warning("answer_undeliverable", message=type(message).__name__, problem=str(problem))
            return False
        return True
