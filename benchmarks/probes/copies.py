"""What a hand-over of 8 MiB costs two processes that share a GPU, by how the copies are asked for.

`python -m benchmarks.probes.copies`: the first process copies into memory that the second has open and stores a word
behind the copy; the second sees the word, copies out and stores its own. Microseconds a round, and GB/s of copies back
to back in one process alone. `words`: no copy at all. `overlap`: asked not to compete with compute, to see whether the
copy engines take it, for which two processes need not take turns. `after a kernel`: the first process fills its source
by a kernel each round, as a processor would.
"""

from __future__ import annotations

import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from tensorferry.codecs.memory.cuda_driver import Driver

MIB = 1 << 20
ROUNDS = 300
WORDS_NBYTES = 4096
WAYS = ("words", "memcpy", "overlap", "2d")


class Side:
    """A context, a stream and the words of both processes."""

    def __init__(self, fd: int) -> None:
        self.cuda = Driver.load()
        self._context = self.cuda.call("cuDevicePrimaryCtxRetain", 0)
        self.cuda.call("cuCtxPushCurrent", self._context)
        self.stream = self.cuda.stream()
        self._mapping = mmap.mmap(fd, WORDS_NBYTES)
        self.words = np.frombuffer(self._mapping, np.uint32)
        self.address = self.cuda.register(self.words.ctypes.data, WORDS_NBYTES, read_only=False)

    def copy(self, way: str, into: int, source: int, nbytes: int) -> None:
        if way == "memcpy":
            self.cuda.copy(into, source, nbytes, self.stream)
        elif way == "2d":
            bindings = self.cuda._cuda
            how = bindings.CUDA_MEMCPY2D()
            how.srcMemoryType = how.dstMemoryType = bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
            how.srcDevice, how.dstDevice = source, into
            how.srcPitch = how.dstPitch = 1 << 16
            how.WidthInBytes, how.Height = (1 << 16) - 512, max(1, nbytes >> 16)
            self.cuda.call("cuMemcpy2DAsync", how, self.stream)
        elif way == "overlap":
            bindings = self.cuda._cuda
            how = bindings.CUmemcpyAttributes()
            how.srcAccessOrder = bindings.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            how.flags = int(bindings.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
            pointer = bindings.CUdeviceptr
            self.cuda.call(
                "cuMemcpyBatchAsync", [pointer(into)], [pointer(source)], [nbytes], 1, [how], [0], 1, self.stream
            )

    def store(self, word: int, value: int) -> None:
        self.cuda.write_word(self.stream, self.address + 4 * word, value)

    def wait(self, word: int, value: int) -> None:
        until = time.monotonic() + 10
        while self.words[word] != value:
            if time.monotonic() > until:
                raise TimeoutError(f"word {word} is {self.words[word]}, not {value}")


def second(line: socket.socket, fd: int) -> None:
    side = Side(fd)
    pool = side.cuda.ipc_open(line.recv(64))
    own = side.cuda.allocate(64 * MIB)
    line.send(b"!")
    while packet := line.recv(64):
        way, nbytes, first, count = packet.decode().split()
        for value in range(int(first), int(first) + int(count)):
            side.wait(0, value)
            side.copy(way, own, pool, int(nbytes))
            side.store(1, value)


def main() -> None:
    if len(sys.argv) > 1:
        with socket.socket(fileno=int(sys.argv[1])) as line:
            second(line, int(sys.argv[2]))
        return
    fd = os.memfd_create("probe")
    os.ftruncate(fd, WORDS_NBYTES)
    side = Side(fd)
    cuda = side.cuda
    source, pool = cuda.allocate(64 * MIB), cuda.allocate(64 * MIB)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "benchmarks.probes.copies", str(theirs.fileno()), str(fd)]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno(), fd])
    theirs.close()
    ours.send(cuda.ipc_export(pool))
    ours.recv(1)
    value = 0

    def rounds(way: str, nbytes: int, kernel: bool) -> float:
        nonlocal value
        ours.send(f"{way} {nbytes} {value + 1} {ROUNDS}".encode())
        times = []
        for _ in range(ROUNDS):
            value += 1
            if kernel:
                cuda.call("cuMemsetD8Async", source, value % 256, nbytes, side.stream)
                cuda.synchronize(side.stream)
            started = time.monotonic_ns()
            side.copy(way, pool, source, nbytes)
            side.store(0, value)
            side.wait(1, value)
            times.append((time.monotonic_ns() - started) / 1e3)
        return statistics.median(times)

    def alone(way: str, nbytes: int) -> float:
        def run(count: int) -> float:
            cuda.synchronize(side.stream)
            started = time.monotonic()
            for _ in range(count):
                side.copy(way, pool, source, nbytes)
            cuda.synchronize(side.stream)
            return time.monotonic() - started

        run(10)
        return nbytes * 200 / run(200) / 1e9

    asked: list[tuple[str, Callable[[], float]]] = []
    for way in WAYS:
        for mib in (0.0625, 1, 8, 64):
            nbytes = int(mib * MIB)
            asked.append((f"{way:8} {mib:7} MiB, alone, GB/s", lambda way=way, n=nbytes: alone(way, n)))  # type: ignore[misc]
            asked.append((f"{way:8} {mib:7} MiB, a round, us", lambda way=way, n=nbytes: rounds(way, n, False)))  # type: ignore[misc]
        asked.append((f"{way:8}       8 MiB, a round after a kernel, us", lambda way=way: rounds(way, 8 * MIB, True)))  # type: ignore[misc]
    for name, ask in asked:
        try:
            print(f"{name:50} {ask():10.1f}", flush=True)
        except Exception as problem:
            print(f"{name:50} {problem}", flush=True)
    ours.close()
    process.wait(10)


if __name__ == "__main__":
    main()
