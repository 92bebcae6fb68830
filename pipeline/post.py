"""Carries what pools and their consumers say to each other by message, where they share no pages.

What is said, when, and how often is decided in `codecs/pool/mail.py`; here it is brought to the peer that it is for. A
letter that cannot be sent is as good as lost: it comes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tensorferry.codecs import messages as wire
from tensorferry.codecs.pool.mail import Letter
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.reader import Reader
from tensorferry.pipeline.peers import Peers

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
        return None

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
