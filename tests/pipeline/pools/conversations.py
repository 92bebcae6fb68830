"""What the tests of brokers share: callbacks that note, and one end of a raw conversation."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tensorferry.codecs.messages import Origin
from tensorferry.codecs.pool.pool import Pool
from tensorferry.pipeline.channels.readable_fd import readable
from tensorferry.pipeline.pools.broker import Broker
from tensorferry.pipeline.pools.fd_conversation import (
    Said,
)

PROGRAMS = Path(__file__).parents[2] / "programs"
DEADLINE_S = 20.0
SLOTS = 64
ORIGIN = Origin("scheduler", 3, 77)

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.Decoder(Said).decode


@dataclass
class Heard:
    """What a broker told its owner."""

    admitted: list[tuple[Origin, int]] = field(default_factory=list)
    died: list[tuple[Origin, int]] = field(default_factory=list)

    def broker(self, path: str, pool: Pool, **options: Any) -> Broker:
        return Broker(
            path,
            pool,
            on_admitted=lambda origin, column: self.admitted.append((origin, column)),
            on_died=lambda origin, column: self.died.append((origin, column)),
            **options,
        )


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.002)


class Raw:
    """One end of a conversation that says whatever it likes."""

    def __init__(self, made: socket.socket) -> None:
        made.setblocking(False)
        self.socket = made

    @classmethod
    def to(cls, path: str) -> Raw:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.connect(path)
        return cls(made)

    def close(self) -> None:
        self.socket.close()

    def say(self, message: Said | bytes, fds: list[int] | None = None) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        socket.send_fds(self.socket, [data], fds or [])

    async def hear(self) -> tuple[Said | None, list[int]]:
        """The next message, None at the end, with descriptors."""
        async with asyncio.timeout(DEADLINE_S):
            await readable(self.socket.fileno())
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, 8192, 8, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None, []
        return (decode(data) if data else None), fds
