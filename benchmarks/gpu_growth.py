"""What growing and shrinking cost a pool: `python -m benchmarks.gpu_growth [--json FILE]`, on a machine with a GPU.

Chunks are made and mapped by the same code that pools use, in one process: the consumer's mapping is one of its own, as
in any other. Times are medians of the host's monotonic clock. HBM is what the driver says is in use, by whomever.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tensorferry.codecs.memory.cuda_vmm import VmmImport, VmmSegment
from tensorferry.codecs.memory.memory import GpuHandle, Handle
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader

MIB = 1 << 20
SIZES_MIB = (2, 16, 64, 256)
POSITIONS = 4
REQUESTS, REQUEST_NBYTES, WINDOW = 10_000, 8 * MIB, 8
TIMES = 100
PATIENCE_S = 20.0


def held(torch: Any) -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def timed(act: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.monotonic_ns()
    act()
    return (time.monotonic_ns() - started) / 1e6


class Life:
    """The steps of chunks' lives, with a producer's memory and a consumer's."""

    def __init__(self, torch: Any, nbytes: int) -> None:
        self._torch, self._nbytes = torch, nbytes
        self.producer = VmmSegment.create(POSITIONS * nbytes, 0, nbytes)
        gpu = self.producer.handle()
        assert isinstance(gpu, GpuHandle)
        self.consumer = VmmImport.attach(gpu, POSITIONS * nbytes, nbytes, ordinal=0)

    def lead(self, position: int) -> dict[str, float]:
        """One life: milliseconds of each step."""
        handles: list[Handle] = []
        return {
            "make": timed(lambda: handles.append(self.producer.grow(position))),
            "map by a consumer": timed(lambda: self.consumer.map(position, handles[0])),
            "first write": timed(lambda: self._write(position)),
            "unmap": timed(lambda: self.producer.shrink(position)),
            "drop": timed(lambda: self.consumer.unmap(position)),
        }

    def _write(self, position: int) -> None:
        self.producer.lend(position * self._nbytes, self._nbytes, self.producer.order()).fill_(1)
        self._torch.cuda.synchronize()

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()


def chunk(torch: Any, nbytes: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each step in a chunk's life, and of all before it can be read."""
    with closing(Life(torch, nbytes)) as life:
        lives = [life.lead(number % POSITIONS) for number in range(rounds)]
    found = {step: statistics.median(times[step] for times in lives) for step in lives[0]}
    found["until it can be read"] = found["make"] + found["map by a consumer"] + found["first write"]
    return found


def wait_until(condition: Callable[[], bool]) -> float:
    """Seconds that it took."""
    started, pause = time.monotonic(), threading.Event()
    while not condition():
        assert time.monotonic() - started < PATIENCE_S, "it never happened"
        pause.wait(0.002)
    return time.monotonic() - started


class Shop:
    """A pool and its consumer in one process."""

    def __init__(self, pool: Pool, reader: Reader) -> None:
        self.pool, self.reader = pool, reader
        self.column = pool.admit(*reader.attach(*pool.export()))
        self.publisher = Publisher(pool)

    def publish(self, nbytes: int) -> Proxy | None:
        """None: there was no room."""
        with self.publisher.draft([("uint8", (nbytes,))]) as draft:
            if draft.transport == "inline":
                return None
            [proxy] = draft.dispatch(self.column, [])
        assert isinstance(proxy, Proxy)
        return proxy

    def is_idle(self) -> bool:
        """Whether the spare is all that is left."""
        while self.pool.reclaim():
            pass
        self.reader.upkeep()
        now = self.pool.statistics()
        return now.mapped_nbytes == self.pool.description.chunk_nbytes and not now.retiring_nbytes


def steady(torch: Any) -> dict[str, float]:
    """A stream of requests with so many in flight: how many waited for growth, or found no room."""
    with Pool.create(1024 * MIB, 256, memory="cuda_vmm") as pool, Reader(device=0) as reader:
        shop = Shop(pool, reader)
        in_flight: deque[Proxy] = deque()
        for _ in range(REQUESTS):
            if len(in_flight) == WINDOW:
                reader.acknowledge(in_flight.popleft())
            if (proxy := shop.publish(REQUEST_NBYTES)) is not None:
                in_flight.append(proxy)
        while in_flight:
            reader.acknowledge(in_flight.popleft())
        torch.cuda.synchronize()
        found = pool.statistics()
    return {"waited for growth": found.growth_waits, "found no room": found.refused, "chunks": found.grown}


def there_and_back(torch: Any) -> dict[str, float]:
    """To the budget and back so many times: what is left of it."""
    before_pool = held(torch)
    with (
        Pool.create(1024 * MIB, 256, memory="cuda_vmm", idle_s=0.02, grow_wait_s=5.0) as pool,
        Reader(device=0) as reader,
    ):
        shop = Shop(pool, reader)
        chunks = pool.description.nbytes // pool.description.chunk_nbytes

        def once() -> None:
            proxies = [shop.publish(pool.description.chunk_nbytes) for _ in range(chunks)]
            torch.cuda.synchronize()
            for proxy in proxies:
                assert proxy is not None, "there was no room"
                reader.acknowledge(proxy)
            wait_until(shop.is_idle)

        once()
        idle, before = held(torch), belongings()
        started = time.monotonic()
        for _ in range(TIMES):
            once()
        took = time.monotonic() - started
        after = belongings()
        return {
            "HBM of an idle pool, MiB": (idle - before_pool) / MIB,
            "s a time": took / TIMES,
            "HBM more, MiB": (held(torch) - idle) / MIB,
            "descriptors more": after[0] - before[0],
            "address space more, MiB": (after[1] - before[1]) / MIB,
        }


def idling(torch: Any) -> dict[str, float]:
    """A pool as it comes, from its budget to its spare: how long that takes after the last lease."""
    with Pool.create(1024 * MIB, 256, memory="cuda_vmm", grow_wait_s=5.0) as pool, Reader(device=0) as reader:
        shop = Shop(pool, reader)
        proxy = shop.publish(1024 * MIB)
        assert proxy is not None
        torch.cuda.synchronize()
        reader.acknowledge(proxy)
        return {"s from the last acknowledgement to the spare alone": wait_until(shop.is_idle)}


def belongings() -> tuple[int, int]:
    """Descriptors, and bytes of address space."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="write the numbers there too")
    parser.add_argument("--rounds", type=int, default=100, help="chunks of each size")
    options = parser.parse_args()
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    found: dict[str, float] = {}
    for size in SIZES_MIB:
        chunk(torch, size * MIB, POSITIONS)  # what comes first is slow
        for name, value in chunk(torch, size * MIB, options.rounds).items():
            found[f"chunk of {size} MiB: {name}, ms"] = value
    parts = {
        f"{REQUESTS:,} requests of {REQUEST_NBYTES // MIB} MiB, {WINDOW} in flight": steady,
        f"1 GiB, {TIMES} times there and back": there_and_back,
        "1 GiB": idling,
    }
    for title, measure in parts.items():
        for name, value in measure(torch).items():
            found[f"{title}: {name}"] = value
    for name, value in found.items():
        print(f"{name:80} {value:,.3f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
