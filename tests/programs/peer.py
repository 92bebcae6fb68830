"""The other process of the pool's contract tests: does what it is asked to over a UNIX socket.

`peer.py DESCRIPTOR`: every packet is msgpack of (command, arguments), perhaps with descriptors; every answer is
("ok", value) or (class of the error, its text). Ends when the other side closes. Never imports torch.
"""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from tensorferry.codecs.messages import Chunks, Confirmed, Payload, Proxy, Retired
from tensorferry.codecs.pool.export import Attachment, Export
from tensorferry.codecs.pool.pool import Lease, Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES, View

encode = msgspec.msgpack.encode


def digest(view: View) -> str:
    return hashlib.blake2b(view.data.tobytes(), digest_size=16).hexdigest()


class Commands:
    """One method a command; a descriptor of the caller's is ours to close."""

    def __init__(self) -> None:
        self.fds: list[int] = []  # with the command, then with the answer
        self._start()

    def _start(self) -> None:
        self._all = ExitStack()
        self._reader = self._all.enter_context(Reader())
        self._held = self._all.enter_context(ExitStack())
        self._pool: Pool | None = None
        self._view: View | None = None
        self._lease: Lease | None = None
        self._copy: View | None = None

    # --- any

    def belongings(self) -> tuple[int, int, int]:
        """(descriptors, memfd mappings, modules of torch)."""
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        torch = sum(name.partition(".")[0] == "torch" for name in sys.modules)
        return len(os.listdir("/proc/self/fd")), maps.count("/memfd:"), torch

    def run_short_of_descriptors(self, short: bool) -> None:
        """From now on open no more of them, or as many as at first."""
        now = 3 if short else 1024  # the least number that a new one may not have
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def reset(self) -> None:
        self._view = self._copy = self._lease = None
        self._all.close()
        self._start()

    # --- as a consumer

    def attach(self, export: bytes) -> bytes:
        described = msgspec.msgpack.decode(export, type=Export)
        attachment, self.fds = self._reader.attach(described, self.fds)
        return encode(attachment)

    def detach(self, pool: int) -> None:
        self._reader.detach(pool)

    def upkeep(self) -> None:
        self._reader.upkeep()

    def letters(self) -> list[bytes]:
        """What is to be told to producers now."""
        return [encode(letter.message) for letter in self._reader.letters()]

    def hear(self, message: bytes) -> None:
        self._reader.hear(msgspec.msgpack.decode(message, type=Chunks | Retired | Confirmed))

    def read(self, payload: bytes, frames: list[bytes] = []) -> tuple[str, tuple[int, ...], str]:  # noqa: B006
        """Open it, look, and release it: (dtype, shape, digest)."""
        with self._reader.open(decode(payload), frames) as view:
            return view.dtype, view.shape, digest(view)

    def materialise(self, payload: bytes) -> None:
        """Copy it into memory of our own, and release it."""
        with self._reader.open(decode(payload)) as view:
            self._copy = View.empty(view.dtype, view.shape)
            self._copy.copy_from(view)

    def look_at_copy(self) -> str:
        assert self._copy is not None
        return digest(self._copy)

    def borrow(self, payload: bytes) -> None:
        """Open it, and keep it open."""
        self._view = self._held.enter_context(self._reader.open(decode(payload)))

    def look_at_borrowed(self) -> str:
        assert self._view is not None
        return digest(self._view)

    def give_back(self) -> None:
        self._view = None
        self._held.close()

    def fail_inside(self, payload: bytes) -> None:
        with self._reader.open(decode(payload)):
            raise ArithmeticError("as asked")

    def store_into(self, payload: bytes) -> None:
        with self._reader.open(decode(payload)) as view:
            view.data[0] = 255

    def acknowledge(self, payload: bytes) -> None:
        self._reader.acknowledge(decode(payload))

    def is_ready(self, payload: bytes) -> bool:
        proxy = decode(payload)
        assert isinstance(proxy, Proxy)
        return self._reader.is_ready(proxy)

    # --- as a producer

    def create(self, nbytes: int, slots: int, options: dict[str, Any] = {}) -> None:  # noqa: B006
        self._pool = self._all.enter_context(Pool.create(nbytes, slots, **options))

    def export(self) -> bytes:
        assert self._pool is not None
        export, self.fds = self._pool.export()
        return encode(export)

    def admit(self, attachment: bytes) -> int:
        assert self._pool is not None
        fds, self.fds = self.fds, []
        return self._pool.admit(msgspec.msgpack.decode(attachment, type=Attachment), fds)

    def publish(self, column: int, data: bytes) -> bytes:
        publisher = Publisher(self._pool, inline_below_nbytes=0)
        with publisher.draft([("uint8", (len(data),))]) as draft:
            draft.views[0].numpy()[:] = bytearray(data)
            return encode(draft.dispatch(column, [])[0])

    def begin(self, nbytes: int) -> bytes:
        """Lease and do not write: the proxy of bytes that are not ready."""
        assert self._pool is not None
        self._lease = self._held.enter_context(self._pool.lease(nbytes))
        slot, generation, offset, _ = self._lease.grant
        return encode(Proxy(self._pool.description.pool, slot, generation, offset, CODES["uint8"], (nbytes,)))


def decode(payload: bytes) -> Payload:
    found: Payload = msgspec.msgpack.decode(payload, type=Payload)
    return found


def main() -> None:
    commands = Commands()
    with socket.socket(fileno=int(sys.argv[1])) as caller:
        while True:
            data, commands.fds, _, _ = socket.recv_fds(caller, 1 << 20, 16, socket.MSG_CMSG_CLOEXEC)
            if not data:
                break
            name, arguments = msgspec.msgpack.decode(data)
            answer: tuple[str, Any]
            try:
                answer = "ok", getattr(commands, name)(*arguments)
            except Exception as problem:
                answer = type(problem).__name__, str(problem)
                commands.fds = []
            socket.send_fds(caller, [encode(answer)], commands.fds)
            for fd in commands.fds:
                os.close(fd)
    commands.reset()


main()
