"""Whether a killed consumer's GPU work is over when its process is proven dead, also on a peer GPU.

`python -m benchmarks.probes.drain`: a consumer copies out of memory of GPU 0 again and again, on GPU 0 and then on
GPU 1 where there is one, and stores a number behind each copy; it is killed in the middle. From the moment its
descriptor (pidfd) says that it is dead, the number must not change: then nothing reads the memory any more.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time

import numpy as np

from tensorferry.codecs.memory.cuda_driver import Driver

MIB = 1 << 20
KILLS = 10
COPIES = 20_000
STARTED = 50  #: copies, before it is killed
WATCH_S = 1.0
DEADLINE_S = 30.0
WORDS_NBYTES = 4096


def consume(line: socket.socket, fd: int, device: int) -> None:
    cuda = Driver.load()
    with cuda.context(device), mmap.mmap(fd, WORDS_NBYTES) as mapping:
        word = cuda.register(np.frombuffer(mapping, np.uint32).ctypes.data, WORDS_NBYTES, read_only=False)
        pool, own, stream = cuda.ipc_open(line.recv(64)), cuda.allocate(64 * MIB), cuda.stream()
        for number in range(1, COPIES):
            cuda.copy(own, pool, 64 * MIB, stream)
            cuda.write_word(stream, word, number)
        cuda.synchronize(stream)


def kill_one(cuda: Driver, pool: int, device: int) -> tuple[float, bool]:
    """Milliseconds from the kill to the proof of death, and whether the number changed after it."""
    fd = os.memfd_create("probe")
    os.ftruncate(fd, WORDS_NBYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mmap.mmap(fd, WORDS_NBYTES) as mapping, ours:
        words = np.frombuffer(mapping, np.uint32)
        command = [sys.executable, "-m", "benchmarks.probes.drain", str(theirs.fileno()), str(fd), str(device)]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno(), fd])
        theirs.close()
        pidfd = os.pidfd_open(process.pid)
        ours.send(cuda.ipc_export(pool))
        until = time.monotonic() + DEADLINE_S
        while words[0] < STARTED:
            if time.monotonic() > until or process.poll() is not None:
                raise TimeoutError(f"{words[0]} copies within {DEADLINE_S} s")
        killed = time.monotonic()
        process.send_signal(signal.SIGKILL)
        if not select.select([pidfd], [], [], DEADLINE_S)[0]:
            raise TimeoutError(f"alive {DEADLINE_S} s after the kill")
        last, proven = int(words[0]), time.monotonic()
        late = False
        while time.monotonic() < proven + WATCH_S:
            late = late or int(words[0]) != last
        process.wait()
        os.close(pidfd)
        os.close(fd)
        del words
    return (proven - killed) * 1e3, late


def main() -> None:
    if len(sys.argv) > 1:
        line, fd, device = (int(argument) for argument in sys.argv[1:])
        with socket.socket(fileno=line) as ours:
            consume(ours, fd, device)
        return
    cuda = Driver.load()
    with cuda.context(0):
        pool = cuda.allocate(64 * MIB)
        for device in range(min(2, cuda.device_count())):
            found = [kill_one(cuda, pool, device) for _ in range(KILLS)]
            took = sorted(ms for ms, _ in found)
            late = sum(late for _, late in found)
            print(f"consumer on GPU {device}: late {late} of {KILLS}; ms to the proof {took[0]:.0f} to {took[-1]:.0f}")


if __name__ == "__main__":
    main()
