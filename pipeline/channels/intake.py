"""The receiving half of a ZeroMQ channel: bounded batches, limits, and a callback for what is not a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.frames import Limits, decode
from tensorferry.pipeline.channels.interface import Received, Receiver
from tensorferry.pipeline.channels.zmq_link import Link, LinkChannel

BATCH = 64  #: messages taken in a row before other tasks have a turn


class Intake(LinkChannel, Receiver):
    """A `Receiver` over a link."""

    def __init__(
        self,
        link: Link,
        limits: Limits,
        on_refused: Callable[[BadMessage], None],
        *,
        routed: bool = False,
        named: bool = False,
    ) -> None:
        """routed: the first frame of a message says which client sent it. named: the gate has a name for each."""
        LinkChannel.__init__(self, link)
        self._limits, self._on_refused = limits, on_refused
        self._routed, self._named = routed, named
        self._taken_in_a_row = 0

    def receive_nowait(self) -> Received | None:
        for _ in range(BATCH):
            try:
                return self._take()
            except BadMessage as problem:
                self._on_refused(problem)
        return None

    async def receive(self) -> Received:
        while True:
            if self._taken_in_a_row >= BATCH:
                self._taken_in_a_row = 0
                await asyncio.sleep(0)  # other tasks have their turn before anything is taken
            self._taken_in_a_row += 1
            try:
                received = self._take()
            except BadMessage as problem:
                self._on_refused(problem)
                continue
            if received is not None:
                return received
            self._taken_in_a_row = 0
            await self._link.wait(zmq.POLLIN)

    def _take(self) -> Received | None:
        """The next message; None: nothing is there. Raises BadMessage for frames that were taken and are no message."""
        # One frame over the limit is kept, so that decode sees that the limit is passed.
        taken = self._link.receive(self._limits.frames + 1 + self._routed)
        if not taken:
            return None
        client = str(taken[-1].get("User-Id")) if self._named else ""
        peer = taken.pop(0).bytes if self._routed else b""
        # The lengths of the others are enough to refuse them: a thousand frames would be a thousand views for nothing.
        message, inline = decode([frame.buffer for frame in taken[:1]] + taken[1:], self._limits)
        return Received(message, [frame.buffer for frame in inline], peer, client)
