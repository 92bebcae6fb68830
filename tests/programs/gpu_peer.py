"""The other process of the GPU tests: `gpu_peer.py DESCRIPTOR`, with commands and answers as in peer.py.

Never synchronises a stream, save in the commands that say what they found.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.messages import Chunks, Confirmed, Proxy, Retired
from tensorferry.codecs.pool.export import Attachment, Export
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import View, view_of

DEADLINE_S = 60.0
encode = msgspec.msgpack.encode
proxy_from = msgspec.msgpack.Decoder(Proxy).decode
job_from = msgspec.msgpack.Decoder(tuple[Proxy, int]).decode


class Commands:
    def __init__(self) -> None:
        self.fds: list[int] = []  # with the command, then with the answer
        self._undo = ExitStack()
        self._reader = Reader()
        self._pool: Pool | None = None

    def start(self, device: int | None = None, cache_handles: bool = True) -> int:
        """A new reader; the number of GPUs seen here."""
        self._reader.close()
        self._reader = Reader(device=device, cache_handles=cache_handles)
        self._stream = torch.cuda.Stream()
        self._bad = torch.zeros((), dtype=torch.int64, device="cuda")
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.device_count()

    # --- as a consumer

    def attach(self, export: bytes) -> bytes:
        attachment, self.fds = self._reader.attach(msgspec.msgpack.decode(export, type=Export), self.fds)
        return encode(attachment)

    def detach(self, pool: int) -> None:
        self._reader.detach(pool)

    def upkeep(self) -> None:
        self._reader.upkeep()

    def acknowledge(self, payload: bytes) -> None:
        self._reader.acknowledge(proxy_from(payload))

    def read(self, payload: bytes) -> tuple[str, tuple[int, ...], str]:
        proxy = proxy_from(payload)
        self._await(proxy)
        with self._reader.open(proxy) as view:
            tensor = view.torch()
            found = hashlib.blake2b(tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes(), digest_size=16)
            return view.dtype, tuple(tensor.shape), found.hexdigest()

    def consume(self, count: int, early: bool, straight: bool) -> int:
        """Read `count` jobs of (proxy, byte) from the line that came with the command, each twice with other work in
        between; how many had another byte anywhere. early: read after the block, as nobody may. straight: copy them
        into memory of our own."""
        [fd] = self.fds
        self.fds = []
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        with socket.socket(fileno=fd) as line, torch.cuda.stream(torch.cuda.Stream()):
            own = None
            for _ in range(count):
                proxy, byte = job_from(line.recv(4096))
                self._await(proxy)
                if straight:
                    own = own_like(proxy) if own is None or own.shape != proxy.shape else own
                    self._reader.copy(proxy, own)
                    bad += (own.torch() != byte).any()
                    continue
                with self._reader.open(proxy) as view:
                    tensor = view.torch()
                    if not early:
                        bad += (tensor != byte).any()
                        torch.cuda._sleep(20_000)
                        bad += (tensor != byte).any()
                if early:
                    torch.cuda._sleep(1_000_000)
                    bad += (tensor != byte).any()
        return int(bad.item())

    def exchange(self, told: list[bytes], jobs: list[tuple[bytes, int]]) -> list[bytes]:
        """Hear what a pool without shared pages says, read these (proxy, byte); what is to be said to it now."""
        for message in told:
            self._reader.hear(msgspec.msgpack.decode(message, type=Chunks | Retired | Confirmed))
        with torch.cuda.stream(self._stream):
            for payload, byte in jobs:
                with self._reader.open(proxy_from(payload)) as view:
                    self._bad += (view.torch() != byte).any()
        return [encode(letter.message) for letter in self._reader.letters()]

    def wrong(self) -> int:
        """How many jobs of exchanges had another byte anywhere."""
        self._stream.synchronize()
        return int(self._bad.item())

    def hog(self, payload: bytes) -> None:
        """Open it, queue a second of reads, and end the block: acknowledged in a second."""
        proxy = proxy_from(payload)
        self._await(proxy)
        with self._reader.open(proxy) as view:
            sink = torch.empty_like(view.torch())
            for _ in range(200):
                torch.cuda._sleep(10_000_000)
                sink.copy_(view.torch())

    def busy(self, ms: int) -> None:
        """Queue so much other work."""
        for _ in range(ms):
            torch.cuda._sleep(2_000_000)

    def _await(self, proxy: Proxy) -> None:
        until = time.monotonic() + DEADLINE_S
        while not self._reader.is_ready(proxy):
            assert time.monotonic() < until, "not ready in time"

    # --- as a producer

    def create(self, nbytes: int, slots: int, options: dict[str, Any]) -> None:
        """options: memory, and what else `Pool.create` is to be told."""
        self._pool = self._undo.enter_context(Pool.create(nbytes, slots, **options))

    def export(self) -> bytes:
        assert self._pool is not None
        export, self.fds = self._pool.export()
        return encode(export)

    def admit(self, attachment: bytes) -> int:
        assert self._pool is not None
        fds, self.fds = self.fds, []
        return self._pool.admit(msgspec.msgpack.decode(attachment, type=Attachment), fds)

    def publish(self, column: int, nbytes: int, byte: int, busy_ms: int) -> bytes:
        """Write it behind so much other work, and dispatch it at once."""
        with Publisher(self._pool).draft([("uint8", (nbytes,))]) as draft:
            self.busy(busy_ms)
            draft.views[0].torch().fill_(byte)
            return encode(draft.dispatch(column, [])[0])

    def demand(self, nbytes: int) -> None:
        """Have the pool grow for so much, and do not wait for it."""
        assert self._pool is not None
        self._pool.growing([nbytes])

    def out(self) -> int:
        assert self._pool is not None
        self._pool.strike_dead()
        while self._pool.reclaim():
            pass
        return self._pool.statistics().lent_slots

    # --- forks

    def nvidia_descriptors_of_a_forked_child(self) -> tuple[int, int]:
        """How many this process has, and how many a child that it forks."""
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.write(theirs, bytes([nvidia_descriptors()]))
            os._exit(0)
        os.close(theirs)
        found = os.read(ours, 1)[0]
        os.close(ours)
        os.waitpid(child, 0)
        return nvidia_descriptors(), found

    def reset(self) -> None:
        self._reader.close()
        self._reader = Reader()
        self._undo.close()
        self._pool = None


def own_like(proxy: Proxy) -> View:
    return view_of(torch.empty(proxy.shape, dtype=torch.uint8, device="cuda"))


def nvidia_descriptors() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(Path("/proc/self/fd") / name).startswith("/dev/nvidia")
        except OSError:
            continue
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
            except (FerryError, AssertionError, RuntimeError, OSError) as problem:
                answer = type(problem).__name__, str(problem)
                commands.fds = []
            socket.send_fds(caller, [encode(answer)], commands.fds)
            for fd in commands.fds:
                os.close(fd)
    commands.reset()


main()
