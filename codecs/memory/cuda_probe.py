"""Tries what a GPU transport needs, in processes of its own: `python -m tensorferry.codecs.memory.cuda_probe`.

Prints CudaFacts as JSON. The flags of the driver promise more than a container, a MIG slice or WSL2 keeps, so memory is
really allocated, exported, opened by a second process and read there. A process of its own, because a CUDA context
costs hundreds of megabytes for as long as its process lives, and because a driver may hang or crash.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.facts import CudaFacts, Gpu, Trial
from tensorferry.codecs.memory.cuda_driver import CudaError, Driver, HandleKind, NoDriver
from tensorferry.codecs.memory.cuda_fabric import in_nvlink_domain
from tensorferry.codecs.memory.host import HostSegment

MODULE = "tensorferry.codecs.memory.cuda_probe"
NBYTES = 1 << 16
MOST_NBYTES = 64 << 20  #: of host memory registered with CUDA
PATTERN = 0xA5
WORD = 0x600D
_PR_SET_PDEATHSIG = 1
ANSWER_S = 20.0  #: for the second process to open a handle; its context takes up to a second of that


class Offer(msgspec.Struct, frozen=True):
    """What the first process exports; a descriptor comes beside it. kind: "ipc", "posix_fd" or "fabric"."""

    kind: str
    device: int  #: to open it under
    nbytes: int
    handle: bytes = b""


class Failed(Exception):
    """A step of a trial did not do what it should have."""

    def __init__(self, step: str, problem: str) -> None:
        super().__init__(step, problem)
        self.step, self.problem = step, problem


def probe() -> CudaFacts:
    """What CUDA can do in a process with this environment."""
    try:
        cuda = Driver.load()
        driver, gpus = cuda.version(), tuple(_gpus(cuda))
    except NoDriver as absent:
        return CudaFacts(absent.problem, absent.missing)
    except CudaError as problem:
        return CudaFacts(str(problem))
    if not gpus:
        return CudaFacts(driver=driver)
    with ExitStack() as undo:
        try:
            undo.enter_context(cuda.context(0))
        except CudaError as problem:
            failed = Trial(False, "context", str(problem))
            peer = None if len(gpus) == 1 else failed
            return CudaFacts("", False, driver, gpus, failed, failed, peer, failed, failed)
        other = undo.enter_context(_Other.started())
        return CudaFacts(
            driver=driver,
            gpus=gpus,
            words=_trial(lambda: _words(cuda)),
            ipc=_trial(lambda: _ipc(cuda, other, 0)),
            peer=None if len(gpus) == 1 else _trial(lambda: _ipc(cuda, other, 1)),
            posix_fd=_trial(lambda: _chunk(cuda, other, "posix_fd")),
            fabric=_trial(lambda: _chunk(cuda, other, "fabric")),
        )


def _gpus(cuda: Driver) -> Iterator[Gpu]:
    count = cuda.device_count()
    for device in range(count):
        name = cuda.name(device)
        mig = "MIG" in name.split()
        uuid = f"{'MIG' if mig else 'GPU'}-{cuda.uuid(device)}"
        yield Gpu(
            name,
            uuid,
            mig,
            vmm=_flag(cuda, device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
            posix_fd=_flag(cuda, device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
            fabric=_flag(cuda, device, "HANDLE_TYPE_FABRIC_SUPPORTED"),
            mnnvl=in_nvlink_domain(name, uuid),
            mps=_flag(cuda, device, "MPS_ENABLED"),
            peers=tuple(peer for peer in range(count) if peer != device and cuda.can_reach(device, peer)),
        )


def _flag(cuda: Driver, device: int, name: str) -> bool:
    try:
        return bool(cuda.attribute(device, name))
    except (CudaError, AttributeError):  # a driver, or bindings, from before the attribute
        return False


# --- trials: each leaves nothing behind, however it ends


def _trial(attempt: Callable[[], None]) -> Trial:
    try:
        attempt()
    except Failed as failed:
        return Trial(False, failed.step, failed.problem)
    return Trial(True)


@contextmanager
def _step(step: str) -> Iterator[None]:
    """What fails within the block failed at this step."""
    try:
        yield
    except (FerryError, OSError) as problem:
        raise Failed(step, str(problem)) from None


def _words(cuda: Driver) -> None:
    """The lease protocol's other half: a stream stores into a page that other processes have mapped.

    Registers more than the memlock limit, where that is low, to see whether the driver counts it.
    """
    page_nbytes = os.sysconf("SC_PAGESIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    nbytes = page_nbytes if limit == resource.RLIM_INFINITY else min(limit // page_nbytes * page_nbytes, MOST_NBYTES)
    with ExitStack() as undo, _step("allocate"):
        page = HostSegment.create(nbytes + page_nbytes, "tensorferry-probe")
        undo.callback(page.close)
        address = page.data.ctypes.data
        with _step("register"):
            pointer = cuda.register(address, page.nbytes, read_only=False)
            undo.callback(_quietly, cuda.unregister, address)
        with _step("write"):
            stream = cuda.stream()
            undo.callback(_quietly, cuda.destroy, stream)
            cuda.write_word(stream, pointer, WORD)
            cuda.wait_word(stream, pointer, WORD)
            cuda.synchronize(stream)
        if (seen := int(page.data[:4].view(np.uint32)[0])) != WORD:
            raise Failed("look", f"the CPU sees {seen:#x} where the stream wrote {WORD:#x}")


def _ipc(cuda: Driver, other: _Other, device: int) -> None:
    with ExitStack() as undo:
        with _step("allocate"):
            pointer = cuda.allocate(NBYTES)
            undo.callback(_quietly, cuda.free, pointer)
            cuda.fill(pointer, PATTERN, NBYTES)
            cuda.read(pointer, 1)  # so that the fill is done
        with _step("export"):
            handle = cuda.ipc_export(pointer)
        other.accept(Offer("ipc", device, NBYTES, handle))


def _chunk(cuda: Driver, other: _Other, kind: HandleKind) -> None:
    with ExitStack() as undo:
        with _step("create"):
            granularity = cuda.granularity(0, kind)
            nbytes = -(-NBYTES // granularity) * granularity
            chunk = cuda.create_chunk(0, nbytes, kind)
            undo.callback(_quietly, cuda.release_chunk, chunk)
        with _step("map"):
            pointer = undo.enter_context(_mapped(cuda, 0, chunk, nbytes))
            cuda.fill(pointer, PATTERN, NBYTES)
            cuda.read(pointer, 1)
        with _step("export"):
            shareable = cuda.export_chunk(chunk, kind)
        if isinstance(shareable, bytes):
            other.accept(Offer(kind, 0, nbytes, shareable))
        else:
            undo.callback(os.close, shareable)
            other.accept(Offer(kind, 0, nbytes), shareable)


@contextmanager
def _mapped(cuda: Driver, device: int, chunk: int, nbytes: int) -> Iterator[int]:
    with ExitStack() as undo:
        address = cuda.reserve(nbytes)
        undo.callback(_quietly, cuda.give_up, address, nbytes)
        cuda.map(address, nbytes, chunk, device)
        undo.callback(_quietly, cuda.unmap, address, nbytes)
        yield address


def _quietly(undo: Callable[..., None], *arguments: int) -> None:
    """Give back what a trial took. That this fails, too, says nothing new: the process ends soon, and all goes."""
    try:
        undo(*arguments)
    except CudaError as problem:
        print(f"tensorferry: probe: {problem}", file=sys.stderr)


# --- the second process


class _Other:
    """The process that opens what this one exports."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._line, self._process = line, process

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[_Other]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.settimeout(ANSWER_S)
            with theirs:
                command = [sys.executable, "-m", MODULE, str(theirs.fileno())]
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)
            try:
                yield cls(ours, process)
            finally:
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


def serve(line: socket.socket) -> None:
    """Be the second process: open and check what is offered, until the first one hangs up."""
    while True:
        packet, fds, _, _ = socket.recv_fds(line, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            break
        offer = msgspec.json.decode(packet, type=Offer)
        try:
            found = _trial(lambda: _open(offer, fds))  # noqa: B023 - called at once
        finally:
            for fd in fds:
                os.close(fd)
        line.send(msgspec.json.encode(found))


def _open(offer: Offer, fds: list[int]) -> None:
    with ExitStack() as undo:
        with _step("import"):
            cuda = Driver.load()
            undo.enter_context(cuda.context(offer.device))
            if offer.kind == "ipc":
                pointer = cuda.ipc_open(offer.handle)
                undo.callback(_quietly, cuda.ipc_close, pointer)
            else:
                kind: HandleKind = "fabric" if offer.kind == "fabric" else "posix_fd"
                chunk = cuda.import_chunk(offer.handle or fds[0], kind)
                undo.callback(_quietly, cuda.release_chunk, chunk)
                with _step("map"):
                    pointer = undo.enter_context(_mapped(cuda, offer.device, chunk, offer.nbytes))
        with _step("read"):
            found = cuda.read(pointer, NBYTES)
        if found != bytes([PATTERN]) * NBYTES:
            wrong = sum(byte != PATTERN for byte in found)
            raise Failed("read", f"{wrong} of {NBYTES} bytes are not what was written")


def main(arguments: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a driver that hangs must not outlive who asked
    if arguments:
        with socket.socket(fileno=int(arguments[0])) as line:
            serve(line)
    else:
        sys.stdout.buffer.write(msgspec.json.encode(probe()))


if __name__ == "__main__":
    main(sys.argv[1:])
