"""Carries what pools and their consumers say to each other by message: where they share no pages, and when a connection
between them broke.

What is said, when, and how often is decided in `codecs/pool/elastic/mail.py`; here it is brought to the peer that it
is for. A letter that cannot be sent is as good as lost: it comes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tensorferry.codecs import messages as wire
from tensorferry.codecs.pool.elastic.mail import Letter
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.peers.handshake import Peers
from tensorferry.pipeline.peers.peer import Peer

#: Between two looks, with work in hand and without: a word that a GPU stores calls nobody.
LOOK_S, IDLE_LOOK_S = 0.001, 0.01


class Post:
    """Of one process: its pool's, if it has one, and that of the pools it reads."""

    def __init__(self, pool: Pool | None, reader: Reader, peers: Peers) -> None:
        self._pool, self._reader, self._peers = pool, reader, peers

    def hear(self, message: wire.Message) -> bool | None:
        """Take a message about a pool; None: it is not one. False: of no pool, or no consumer, that is known here."""
        match message:
            case wire.Chunks() | wire.Retired() | wire.Confirmed():
                self._reader.hear(message)
                return self._reader.knows(message)
            case wire.Released():
                if self._pool is None or not self._pool.knows(message):
                    return False
                answer = self._pool.hear(message)
                if answer is not None:
                    self._send(answer)
                return True
            case wire.Withdrawn(pool=pool, to=to, leases=leases):
                if to != self._reader.consumer:
                    return False
                self._reader.withdraw(pool, leases)
                return True
        return None

    def withdraw(self, peer: Peer) -> None:
        """Have a peer that lives give back what it was lent: its connection broke, so it may never hear of it."""
        if self._pool is not None and peer.column is not None:
            leases = self._pool.outstanding(peer.column)
            for start in range(0, len(leases), wire.MOST_TOLD):
                named = tuple(leases[start : start + wire.MOST_TOLD])
                self._peers.send(peer, wire.Withdrawn(self._pool.description.pool, peer.epoch, named))

    async def carry(self, is_busy: Callable[[], bool]) -> None:
        """Send what is to be said, for ever."""
        while True:
            self.send()
            await asyncio.sleep(LOOK_S if is_busy() else IDLE_LOOK_S)

    def send(self) -> None:
        """Send what is to be said now."""
        letters = self._reader.letters()
        if self._pool is not None:
            letters += self._pool.letters()
        for letter in letters:
            self._send(letter)

    def _send(self, letter: Letter) -> None:
        peer = self._peers.living(letter.to)
        if peer is not None:
            self._peers.send(peer, letter.message)
