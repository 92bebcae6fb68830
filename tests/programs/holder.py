"""A consumer that holds what it is told to: `holder.py DESCRIPTOR`, of a UNIX socket.

Every packet is msgpack of (command, arguments), perhaps with descriptors, and is answered with (error class or "",
value), perhaps with descriptors. Any number of leases may be open, by number.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.export import Export
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import View

decode = msgspec.msgpack.Decoder(Proxy).decode


class Holder:
    def __init__(self) -> None:
        self.fds: list[int] = []
        self.reader = Reader()
        self.blocks: dict[int, tuple[AbstractContextManager[View], View]] = {}

    def attach(self, export: bytes) -> bytes:
        attachment, self.fds = self.reader.attach(msgspec.msgpack.decode(export, type=Export), self.fds)
        return msgspec.msgpack.encode(attachment)

    def detach(self, pool: int) -> None:
        self.reader.detach(pool)

    def open(self, number: int, proxy: bytes) -> None:
        block = self.reader.open(decode(proxy))
        self.blocks[number] = block, block.__enter__()

    def look(self, number: int) -> str:
        return hashlib.blake2b(self.blocks[number][1].data, digest_size=16).hexdigest()

    def end(self, number: int, fails: bool) -> None:
        block, _ = self.blocks.pop(number)
        swallowed = block.__exit__(ArithmeticError, ArithmeticError(), None) if fails else block.__exit__(*[None] * 3)
        assert not swallowed

    def acknowledge(self, proxy: bytes) -> None:
        self.reader.acknowledge(decode(proxy))

    def stale(self) -> int:
        return self.reader.stale

    def store(self, pool: int, slot: int, word: int) -> None:
        """What no consumer may do: write any word into its acknowledgement page."""
        self.reader._pools[pool].acks.acknowledge(slot, word)


def main() -> None:
    holder = Holder()
    with socket.socket(fileno=int(sys.argv[1])) as caller:
        while True:
            data, holder.fds, _, _ = socket.recv_fds(caller, 1 << 16, 16, socket.MSG_CMSG_CLOEXEC)
            if not data:
                break
            command, *arguments = msgspec.msgpack.decode(data)
            answer: tuple[str, Any]
            try:
                answer = "", getattr(holder, command)(*arguments)
            except Exception as problem:
                answer = type(problem).__name__, str(problem)
                holder.fds = []
            socket.send_fds(caller, [msgspec.msgpack.encode(answer)], holder.fds)
            for fd in holder.fds:
                os.close(fd)


main()
