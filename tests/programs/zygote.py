"""Where the lives of `test_process_death.py` come from: `zygote.py DESCRIPTOR`.

Imports once what they need, has one thread and no pool, and forks: a life then costs milliseconds instead of the
third of a second that an interpreter takes. A request is msgpack of a `Birth` with its descriptors; the answer is the
pid, and the pidfd as descriptor. The request `None` reaps, and is answered with the pids of those that still live.
Ends, with all its lives, when the caller hangs up.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys

import msgspec
import structlog
from lives.birth import Birth, be_born

PR_SET_PDEATHSIG = 1  # Source: prctl(2)


def main() -> None:
    decode = msgspec.msgpack.Decoder(Birth | None).decode
    libc = ctypes.CDLL(None)
    born: list[int] = []
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
    )  # deaths are no news here
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as caller:
        while True:
            data, fds, _, _ = socket.recv_fds(caller, 1 << 16, 16, socket.MSG_CMSG_CLOEXEC)
            if not data:
                break
            birth = decode(data)
            if birth is None:
                born = [pid for pid in born if os.waitpid(pid, os.WNOHANG) == (0, 0)]
                caller.send(msgspec.msgpack.encode(born))
                continue
            pid = os.fork()
            if pid == 0:
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                caller.detach()
                os.close(int(sys.argv[1]))
                be_born(birth, fds)  # never returns
            born.append(pid)
            pidfd = os.pidfd_open(pid)  # not reaped yet, so it is this one
            socket.send_fds(caller, [msgspec.msgpack.encode(pid)], [pidfd])
            for fd in (*fds, pidfd):
                os.close(fd)
    for pid in born:
        os.kill(pid, signal.SIGKILL)


main()
