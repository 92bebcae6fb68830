"""What the tests of elastic pools share."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tensorferry.codecs.memory.cuda_vmm import VmmSegment
from tensorferry.codecs.memory.memory import Handle
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.elastic.chunk_imports import ChunksHere
from tensorferry.codecs.pool.elastic.growth import Growth
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader

MIB = 1 << 20


CHUNK = 2 * MIB  #: the stub's granularity


IDLE_S = 0.02


FOREVER_S = 1000.0


WAIT_S = 20.0  #: for growth, in tests that are not about how long it takes


Peer = Any  #: conftest.Peer


Stub = Any  #: conftest.Stub


Until = Callable[..., None]


Pages = Any  #: conftest.Pages


encode = msgspec.msgpack.encode


Create = Callable[..., Pool]


def connect_here(pool: Pool, reader: Reader) -> int:
    return pool.admit(*reader.attach(*pool.export()))


def some(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def digest(data: Any) -> str:
    return hashlib.blake2b(bytes(data), digest_size=16).hexdigest()


def publish(pool: Pool, column: int, data: np.ndarray[Any, Any]) -> Proxy:
    with Publisher(pool).publish(data) as draft:
        [proxy] = draft.dispatch(column, [])
    assert isinstance(proxy, Proxy), "there was no room"
    return proxy


def fill(pool: Pool, column: int, count: int, nbytes: int = CHUNK) -> list[bytes]:
    return [encode(publish(pool, column, some(nbytes, seed))) for seed in range(count)]


def mapped(pool: Pool) -> int:
    """Chunks that leases may lie in."""
    return pool.statistics().mapped_nbytes // CHUNK


def retiring(pool: Pool) -> int:
    return pool.statistics().retiring_nbytes // CHUNK


def growth_of(pool: Pool) -> Growth:
    assert pool.growth is not None
    return pool.growth


def idle_after(pool: Pool, idle_s: float) -> None:
    """Give idle chunks back after so long from now on."""
    growth_of(pool).idle_s = idle_s


def shrink_to(pool: Pool, until: Until, retiring_chunks: int | None = None) -> None:
    """Wait until the spare is all that is mapped, and this much retired; then shrink no more."""
    idle_after(pool, IDLE_S)
    until(lambda: is_at(pool, 1, retiring_chunks))
    idle_after(pool, FOREVER_S)


def look_again(pool: Pool, until: Until) -> None:
    """Have the pool's thread see whether anything is wanted."""
    growing = growth_of(pool)
    done = growing.rounds
    growing.look()
    until(lambda: growing.rounds != done)


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Chunks take until the end of the block to come; set once one is on its way."""
    grow, begun, go_on = VmmSegment.grow, threading.Event(), threading.Event()

    def slowly(segment: VmmSegment, position: int) -> Handle:
        begun.set()
        assert go_on.wait(WAIT_S * 3)
        return grow(segment, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VmmSegment, "grow", slowly)
        try:
            yield begun
        finally:
            go_on.set()


def is_at(pool: Pool, mapped_chunks: int | None, retiring_chunks: int | None = None) -> bool:
    """Whether it has so many chunks, after a pass to take back what was acknowledged."""
    while pool.reclaim():
        pass
    there = mapped(pool) == mapped_chunks if mapped_chunks is not None else True
    return there and (retiring_chunks is None or retiring(pool) == retiring_chunks)


def here(reader: Reader, pool: Pool) -> ChunksHere:
    """The chunks that a reader of this process has."""
    return reader.chunks(pool.description.pool)


def mapped_here() -> set[str]:
    """Where this process has chunks mapped. Source: proc(5)."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[0] for line in lines if "memfd:stub-chunk" in line}


def physical(*pids: int) -> int:
    """Chunks of memory that these processes have mapped or hold a descriptor of. Source: proc(5)."""
    inodes: set[int] = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
            if "memfd:stub-chunk" in line:
                inodes.add(int(line.split()[4]))
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                path = f"/proc/{pid}/fd/{name}"
                if "memfd:stub-chunk" in os.readlink(path):
                    inodes.add(os.stat(path).st_ino)
            except FileNotFoundError:
                continue
    return len(inodes)


def out(pool: Pool) -> int:
    pool.reclaim()
    return pool.statistics().lent_slots


def calls(stub_cuda: Any) -> list[str]:
    """What the driver was asked since the last time, in order."""
    found = [call for call, result in stub_cuda.calls() if result == "ok"]
    (stub_cuda.folder / "calls.log").write_text("")
    return found
