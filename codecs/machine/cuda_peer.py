"""A second process that opens what a first one exports: both ends of the line between them.

`python -m tensorferry.codecs.machine.cuda_peer DESCRIPTOR` is the second process, `Other` what the first has of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import msgspec

from tensorferry.codecs.machine.facts import Trial
from tensorferry.codecs.machine.trials import Failed, quietly, step, tried
from tensorferry.codecs.memory.cuda_driver import Driver, HandleKind

MODULE = "tensorferry.codecs.machine.cuda_peer"
NBYTES = 1 << 16
PATTERN = 0xA5
ANSWER_S = 20.0  #: to open a handle; a context takes up to a second of that
END_S = 5.0
_PR_SET_PDEATHSIG = 1


class Offer(msgspec.Struct, frozen=True):
    """What the first process exports; a descriptor comes beside it. kind: "ipc", "posix_fd" or "fabric"."""

    kind: str
    device: int  #: to open it under
    nbytes: int
    handle: bytes = b""


class Other:
    """The process that opens what this one exports."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._line, self._process = line, process

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[Other]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.settimeout(ANSWER_S)
            with theirs:
                command = [sys.executable, "-m", MODULE, str(theirs.fileno())]
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)
            try:
                yield cls(ours, process)
            finally:
                ours.close()  # it ends by itself then, unless its driver hangs
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def accept(self, offer: Offer, *fds: int) -> None:
        """Have it open and check an offer. Raises Failed with the step of its that failed."""
        try:
            socket.send_fds(self._line, [msgspec.json.encode(offer)], list(fds))
            answer = self._line.recv(1 << 16)
        except TimeoutError:
            self._process.kill()  # an answer that comes late must not pass for the next one's
            raise Failed("import", f"no answer from the second process within {ANSWER_S:.0f} s") from None
        except OSError as problem:
            raise Failed("import", f"the second process is gone: {problem.strerror}") from None
        if not answer:
            raise Failed("import", f"the second process ended with status {self._process.wait()}")
        found = msgspec.json.decode(answer, type=Trial)
        if not found.ok:
            raise Failed(found.step, found.problem)


class Second:
    """The other end of that line: opens and checks what is offered. Keeps its contexts, as one costs up to a second."""

    def __init__(self, contexts: ExitStack) -> None:
        self._contexts = contexts
        self._device: int | None = None  #: whose context is current

    @classmethod
    def serve(cls, line: socket.socket) -> None:
        """Answer every offer with a Trial, until the first process hangs up."""
        with ExitStack() as contexts:
            second = cls(contexts)
            while packet := (received := socket.recv_fds(line, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC))[0]:
                fds = received[1]
                try:
                    found = tried(partial(second.open, msgspec.json.decode(packet, type=Offer), fds))
                finally:
                    for fd in fds:
                        os.close(fd)
                line.send(msgspec.json.encode(found))

    def open(self, offer: Offer, fds: list[int]) -> None:
        """Raises Failed."""
        with ExitStack() as undo:
            with step("import"):
                cuda = Driver.load()
                if offer.device != self._device:
                    self._contexts.enter_context(cuda.context(offer.device))
                    self._device = offer.device
                if offer.kind == "ipc":
                    pointer = cuda.ipc_open(offer.handle)
                    undo.callback(quietly, cuda.ipc_close, pointer)
                else:
                    kind: HandleKind = "fabric" if offer.kind == "fabric" else "posix_fd"
                    chunk = cuda.import_chunk(offer.handle or fds[0], kind)
                    undo.callback(quietly, cuda.release_chunk, chunk)
                    with step("map"):
                        pointer = undo.enter_context(mapped(cuda, offer.device, chunk, offer.nbytes))
            with step("read"):
                found = cuda.read(pointer, NBYTES)
            if found != bytes([PATTERN]) * NBYTES:
                wrong = sum(byte != PATTERN for byte in found)
                raise Failed("read", f"{wrong} of {NBYTES} bytes are not what was written")


@contextmanager
def mapped(cuda: Driver, device: int, chunk: int, nbytes: int) -> Iterator[int]:
    """The address of a chunk, which is mapped there for the length of the block."""
    with ExitStack() as undo:
        address = cuda.reserve(nbytes)
        undo.callback(quietly, cuda.give_up, address, nbytes)
        cuda.map(address, nbytes, chunk, device)
        undo.callback(quietly, cuda.unmap, address, nbytes)
        yield address


def die_with_parent() -> None:
    """A process whose driver hangs must end with its parent. Source: prctl(2), PR_SET_PDEATHSIG."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(descriptor: str) -> None:
    die_with_parent()
    with socket.socket(fileno=int(descriptor)) as line:
        Second.serve(line)


if __name__ == "__main__":
    main(sys.argv[1])
