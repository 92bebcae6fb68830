"""What a hand-off of GPU memory costs: `python -m benchmarks.gpu_handoff [--json FILE]`, on a machine with a GPU.

Two processes on one GPU, and on a peer GPU where there is one. *Copying*: the producer copies its tensor into the pool
and the consumer copies it out. *Borrow*: written in place and read where it lies. Times are of the host's monotonic
clock, which both processes share. Everything is measured in one run, beside raw copies of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Literal

import msgspec

from benchmarks import gpu_rival
from tensorferry.codecs.memory.cuda_driver import Driver
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.export import Attachment, Export
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import view_of

MIB = 1 << 20
WINDOW = 8
COPIES = 100  #: back to back
GpuMemory = Literal["cuda_ipc", "cuda_vmm"]
WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")
encode = msgspec.msgpack.encode
job_from = msgspec.msgpack.Decoder(tuple[str, Proxy | None]).decode


def receive(line: socket.socket) -> bytes:
    """Spin: waking an idle core costs as much as a hand-off."""
    while True:
        try:
            return line.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue


# --- the consumer


def consume(line: socket.socket) -> None:
    torch: Any = import_module("torch")
    torch.cuda.init()
    with Reader(device=torch.cuda.current_device()) as reader:
        packet, fds, _, _ = socket.recv_fds(line, 4096, 8, socket.MSG_CMSG_CLOEXEC)
        attachment, back = reader.attach(msgspec.msgpack.decode(packet, type=Export), fds)
        socket.send_fds(line, [encode(attachment)], back)
        for fd in back:
            os.close(fd)
        stream = torch.cuda.Stream()
        own = view_of(torch.empty(1, dtype=torch.uint8, device="cuda"))
        with torch.cuda.stream(stream):
            while packet := receive(line):
                task, proxy = job_from(packet)
                if proxy is None:
                    torch.cuda.synchronize()
                    line.send(b"done")
                    continue
                if own.shape != proxy.shape:
                    own = view_of(torch.empty(proxy.shape, dtype=torch.uint8, device="cuda"))
                while not reader.is_ready(proxy):
                    pass
                if task == "speed":
                    line.send(encode(_speeds(torch, reader, proxy, own, COPIES, stream)))
                    continue
                if task.endswith("copy"):
                    reader.copy(proxy, own)
                else:
                    with reader.open(proxy) as view:
                        view.torch()
                if task.startswith("one"):
                    stream.synchronize()
                    line.send(encode(time.monotonic_ns()))


def _speeds(torch: Any, reader: Reader, proxy: Proxy, own: Any, count: int, stream: Any) -> dict[str, float]:
    """GB/s of `count` copies out of the pool, of as many raw ones, and of raw ones straight from the mapping."""

    def timed(copy: Callable[[], object]) -> float:
        copy()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)  # so that the queue is full before the first one runs
        begin.record(stream)
        for _ in range(count):
            copy()
        end.record(stream)
        end.synchronize()
        return float(count * own.nbytes / begin.elapsed_time(end) / 1e6)

    other = torch.empty_like(own.torch())
    reader.copy(proxy, own)  # so that all of it is mapped
    imported = reader._pools[proxy.pool]
    memory = imported.memory

    def from_mapping() -> None:
        order = memory.order()
        memory.copy_out(proxy.offset, own.data, order)

    found = {}
    for _ in range(2):
        found = {
            "raw_local": timed(lambda: own.torch().copy_(other)),
            "raw_mapped": timed(from_mapping),
            "ours": timed(lambda: reader.copy(proxy, own)),
        }
    return found


# --- the producer


class Bench:
    """The producer, with its consumer at the other end of `line`."""

    def __init__(self, torch: Any, pool: Pool, line: socket.socket, column: int) -> None:
        self.torch, self.pool, self.line, self.column = torch, pool, line, column
        self.publisher = Publisher(pool)

    def publish(self, task: str, source: Any, copying: bool, count: int = 1) -> Proxy:
        nbytes = source.nbytes
        with self.publisher.draft([("uint8", (nbytes,))]) as draft:
            if copying:
                draft.views[0].torch().copy_(source, non_blocking=True)
            [proxy] = draft.dispatch(self.column, [], uses=count)
            assert isinstance(proxy, Proxy)
            self.line.send(encode((task, proxy)))
        return proxy

    def finish(self) -> None:
        self.line.send(encode(("", None)))
        receive(self.line)
        self.torch.cuda.synchronize()
        while self.pool.reclaim():
            pass

    def one_in_flight(self, source: Any, copying: bool, rounds: int) -> float:
        """Median microseconds from the source being ready to the consumer's host knowing that its tensor is."""
        times = []
        task = "one copy" if copying else "one borrow"
        for number in range(rounds):
            self.torch.cuda.current_stream().synchronize()
            started = time.monotonic_ns()
            self.publish(task, source, copying)
            ended = msgspec.msgpack.decode(receive(self.line), type=int)
            if number >= rounds // 10:
                times.append((ended - started) / 1e3)
            self.pool.reclaim()
        self.finish()
        return statistics.median(times)

    def pipelined(self, source: Any, copying: bool, items: int) -> float:
        """Items a second with as many in flight as the pool holds, from the first to the last read being done."""
        task = "copy" if copying else "borrow"
        for _ in range(50):
            self._next(task, source, copying)
        self.finish()
        started = time.monotonic()
        for _ in range(items):
            self._next(task, source, copying)
        self.finish()
        return items / (time.monotonic() - started)

    def _next(self, task: str, source: Any, copying: bool) -> None:
        while not self.pool.fits([source.nbytes]):
            pass
        self.publish(task, source, copying)

    def staging(self, source: Any, rounds: int) -> tuple[float, float]:
        """GB/s of a draft to the host through staging, and of a raw copy into page-locked memory."""
        torch, stream = self.torch, self.torch.cuda.current_stream()
        here = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
        ours, raw = [], []
        with self.pool.lease(self.pool.description.nbytes // 2):
            for _ in range(rounds):
                stream.synchronize()
                started = time.monotonic()
                here.copy_(source, non_blocking=True)
                stream.synchronize()
                raw.append(source.nbytes / (time.monotonic() - started) / 1e9)
                with self.publisher.draft([("uint8", (source.nbytes,))]) as draft:
                    stream.synchronize()
                    started = time.monotonic()
                    draft.stage()
                    while not draft.staged:
                        pass
                    draft.dispatch(None, [])
                    ours.append(source.nbytes / (time.monotonic() - started) / 1e9)
        self.finish()
        return statistics.median(ours), statistics.median(raw)

    def host_waits(self, source: Any, items: int) -> Counter[str]:
        """Driver calls of ours in the producer while so many items are handed over."""
        calls: Counter[str] = Counter()
        call = Driver.call

        def traced(self: Driver, name: str, *arguments: Any) -> Any:
            calls[name] += 1
            return call(self, name, *arguments)

        Driver.call = traced  # type: ignore[method-assign]
        try:
            for _ in range(items):
                self._next("copy", source, True)
        finally:
            Driver.call = call  # type: ignore[method-assign]
        self.finish()
        return calls


@contextmanager
def bench(torch: Any, memory: GpuMemory, nbytes: int, **environment: str) -> Iterator[Bench]:
    with Pool.create(nbytes, 256, memory=memory) as pool:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            command = [sys.executable, "-m", "benchmarks.gpu_handoff", "--consumer", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, **environment})
            theirs.close()
            try:
                export, fds = pool.export()
                socket.send_fds(ours, [encode(export)], fds)
                for fd in fds:
                    os.close(fd)
                packet, back, _, _ = socket.recv_fds(ours, 4096, 4, socket.MSG_CMSG_CLOEXEC)
                column = pool.admit(msgspec.msgpack.decode(packet, type=Attachment), back)
                with torch.cuda.stream(torch.cuda.Stream()):
                    yield Bench(torch, pool, ours, column)
            finally:
                process.kill()
                process.wait()


def host_pool(torch: Any, rounds: int) -> dict[str, Any]:
    """GB/s of a GPU writing into a pool of host memory, and of one copying out of it, each beside a raw pinned copy."""
    source = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    here = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(source)
    into = view_of(there)
    stream = torch.cuda.current_stream()
    found: dict[str, list[float]] = {"to": [], "raw to": [], "from": [], "raw from": []}

    def timed(name: str, copy: Callable[[], object]) -> None:
        stream.synchronize()
        started = time.monotonic()
        copy()
        stream.synchronize()
        found[name].append(source.nbytes / (time.monotonic() - started) / 1e9)

    with Pool.create(source.nbytes, 8, device=0) as pool, Reader(device=0) as reader:
        column = pool.admit(*reader.attach(*pool.export()))
        for _ in range(rounds):
            timed("raw to", lambda: here.copy_(source, non_blocking=True))
            timed("raw from", lambda: there.copy_(here, non_blocking=True))
            with Publisher(pool).draft([("uint8", (source.nbytes,))]) as draft:
                [view] = draft.views
                timed("to", partial(view.torch().copy_, source, non_blocking=True))
                [proxy] = draft.dispatch(column, [])
            assert isinstance(proxy, Proxy)
            while not reader.is_ready(proxy):
                pass
            timed("from", partial(reader.copy, proxy, into))
            pool.reclaim()
    to, raw_to, out, raw_out = (statistics.median(speeds) for speeds in found.values())
    return {
        "64 MiB into a host pool, GB/s (ours, raw pinned)": (to, raw_to),
        "64 MiB out of a host pool, GB/s (ours, raw pinned)": (out, raw_out),
    }


def measure(torch: Any, memory: GpuMemory, scale: float) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def some(number: int) -> int:
        return max(20, int(number * scale))

    small = torch.ones(8 * MIB, dtype=torch.uint8, device="cuda")
    large = torch.ones(36 * MIB, dtype=torch.uint8, device="cuda")
    huge = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    ways = {"copying": True, "borrow": False}
    with bench(torch, memory, WINDOW * small.nbytes) as it:
        for name, copying in ways.items():
            it.one_in_flight(small, copying, 50)
            found[f"8 MiB one in flight, {name}, us"] = it.one_in_flight(small, copying, some(1000))
        for name, copying in ways.items():
            found[f"8 MiB pipelined window 8, {name}, items/s"] = it.pipelined(small, copying, some(10_000))
        found["driver calls of 100 items"] = dict(it.host_waits(small, 100))
        found["host waits"] = sum(found["driver calls of 100 items"].get(name, 0) for name in WAITS)
    with bench(torch, memory, 1024 * MIB) as it:
        for name, copying in ways.items():
            found[f"36 MiB pipelined pool 1 GiB, {name}, items/s"] = it.pipelined(large, copying, some(5000))
        for source in (huge, torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")):
            it.publish("speed", source, True, 1 + 2 * (1 + COPIES))
            found[f"{source.nbytes // MIB} MiB same GPU, GB/s"] = msgspec.msgpack.decode(receive(it.line))
            it.finish()
        found["proxy bytes"] = len(encode(it.publish("borrow", small, False)))
        it.finish()
    with bench(torch, memory, 64 * MIB) as it:
        found["64 MiB staged to host, GB/s (ours, raw pinned)"] = it.staging(huge, 20)
    if torch.cuda.device_count() > 1:
        with bench(torch, memory, 1024 * MIB, CUDA_VISIBLE_DEVICES="1") as it:
            it.publish("speed", huge, True, 1 + 2 * (1 + COPIES))
            found["64 MiB peer GPU, GB/s"] = msgspec.msgpack.decode(receive(it.line))
            it.finish()
        with bench(torch, memory, WINDOW * small.nbytes, CUDA_VISIBLE_DEVICES="1") as it:
            found["8 MiB one in flight, peer GPU, us"] = it.one_in_flight(small, True, some(1000))
            found["8 MiB pipelined window 8, peer GPU, items/s"] = it.pipelined(small, True, some(10_000))
    return {f"{memory}, {name}": value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--consumer", type=int, help="of this program's own use")
    kinds = ["cuda_ipc", "cuda_vmm"]
    parser.add_argument("--memory", choices=kinds, nargs="+", default=kinds, help="of our pools; both by default")
    parser.add_argument("--json", help="write the numbers there too")
    parser.add_argument("--peer", metavar="DIR", help="where the incumbent's wheel was unpacked: measure its pools too")
    parser.add_argument("--rounds", type=int, default=3, help="of taking turns; medians of them are printed")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rounds")
    options = parser.parse_args()
    if options.consumer is not None:
        with socket.socket(fileno=options.consumer) as line:
            consume(line)
        return
    torch: Any = import_module("torch")
    runs: list[Callable[[], dict[str, Any]]] = [
        partial(measure, torch, memory, options.scale) for memory in options.memory
    ]
    if options.peer:
        runs.append(partial(gpu_rival.measure, torch, options.peer, options.scale))
    rounds = [run() for _ in range(options.rounds) for run in runs]
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for one in [*rounds[: len(runs)], host_pool(torch, 20)]:
        found |= one
    for name, value in found.items():
        if isinstance(value, float):  # taking turns, so that neither is measured on the warmer machine
            found[name] = statistics.median(each[name] for each in rounds if name in each)
    for name, value in found.items():
        print(f"{name:66} {value if not isinstance(value, float) else f'{value:,.1f}'}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
