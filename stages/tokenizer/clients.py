"""The clients that a tokenizer worker knows. They are told of changes among the processes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import PeerBusy, PeerGone
from tensorferry.pipeline.channels.interface import Door
from tensorferry.pipeline.telemetry.counters import Counters

log = structlog.get_logger()

MOST_OWED = 1024  #: outcomes that wait for a client to have room for them
MOST_CLIENTS = 4096  #: that are told of changes; one that is forgotten says Hello again


class Clients:
    """Remembers clients that say Hello, until they say Drained or cannot be reached."""

    def __init__(self, door: Door, members: Callable[[], wire.Members], silent_s: float, counters: Counters) -> None:
        """members: what they are told. silent_s: after so long without a greeting it is seen whether one is there."""
        self._door, self._members, self._silent_s, self._counters = door, members, silent_s, counters
        self._owed: dict[bytes, deque[wire.Message]] = {}  # outcomes, by client
        self._known: dict[bytes, float] = {}  # when each was last known to be there, the longest ago first

    def greeted(self, client: bytes) -> None:
        """Remember a client that said Hello, and probe the two that were silent longest."""
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
        """Send Members to all clients."""
        for client in list(self._known):
            self.answer(client, self._members())

    def is_there(self, client: bytes) -> bool:
        return self.answer(client, self._members())

    def is_gone(self, client: bytes, heard_s: float) -> bool:
        """Whether a client's connection has ended. A client that was heard within `heard_s` is not probed.

        A client that connects again gets another name. A client that lives and does not read is not gone.
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

    def offer(self, client: bytes, delta: wire.Delta) -> bool:
        """False: its queue is full, and nothing was sent. What one that is gone would have got is dropped."""
        try:
            self._door.send_nowait(client, delta)
        except PeerBusy:
            return False
        except PeerGone:
            self.left(client)
        return True

    def pay(self) -> None:
        """Send the outcomes that clients had no room for, as far as they have room now."""
        for client, owed in list(self._owed.items()):
            while owed:
                try:
                    self._door.send_nowait(client, owed[0])
                except PeerBusy:
                    break
                except PeerGone as problem:
                    self._undeliverable(owed.popleft(), problem)
                else:
                    owed.popleft()
            if not owed:
                del self._owed[client]

    def answer(self, client: bytes, message: wire.Message) -> bool:
        """False: there is nobody to take it. An outcome for which its client has no room is sent by `pay`."""
        try:
            self._door.send_nowait(client, message)
        except PeerBusy as problem:
            if isinstance(message, wire.Members):  # the next one says all that this one did
                return True
            owed = self._owed.setdefault(client, deque())
            if len(owed) >= MOST_OWED:
                self._undeliverable(message, problem)
                return False
            owed.append(message)
        except PeerGone as problem:
            self.left(client)
            if isinstance(message, wire.Members):  # a client that only asks for the state may leave early
                log.debug("client_left", problem=str(problem))
                return False
            self._undeliverable(message, problem)
            return False
        return True

    def _undeliverable(self, message: wire.Message, problem: PeerGone | PeerBusy) -> None:
        self._counters.count("answers_undeliverable")
        log.warning("answer_undeliverable", message=type(message).__name__, problem=str(problem))
