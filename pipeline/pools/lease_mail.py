"""Sends the messages between pools and their consumers: where they share no pages, and after a connection between them
broke.

`codecs/pool/elastic/mail.py` decides what is sent, when, and how often. This module sends it to the right peer. A
letter that cannot be sent counts as lost: it is repeated.
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

#: Between two looks, with requests in flight and without: nothing signals a word that a GPU stores.
LOOK_S, IDLE_LOOK_S = 0.001, 0.01


class Post:
    """The messages of one process: about its own pool, if it has one, and about the pools that it reads."""

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
        """Ask a living peer to give its leases back: its connection broke, so it may never have received them."""
        if self._pool is not None and peer.column is not None:
            leases = self._pool.outstanding(peer.column)
            for start in range(0, len(leases), wire.MOST_TOLD):
                named = tuple(leases[start : start + wire.MOST_TOLD])
                self._peers.send(peer, wire.Withdrawn(self._pool.description.pool, peer.epoch, named))

    async def carry(self, is_busy: Callable[[], bool]) -> None:
        """Send the letters that are due, for ever."""
        while True:
            self.send()
            await asyncio.sleep(LOOK_S if is_busy() else IDLE_LOOK_S)

    def send(self) -> None:
        """Send the letters that are due now."""
        letters = self._reader.letters()
        if self._pool is not None:
            letters += self._pool.letters()
        for letter in letters:
            self._send(letter)

    def _send(self, letter: Letter) -> None:
        peer = self._peers.living(letter.to)
        if peer is not None:
            self._peers.send(peer, letter.message)
