"""Tries what a GPU transport needs, in processes of its own: `python -m tensorferry.codecs.machine.cuda_probe`.

Prints CudaFacts as JSON. The flags of the driver promise more than a container, a MIG slice or WSL2 keeps, so memory is
really allocated, exported, opened by a second process and read there. A process of its own, because a CUDA context
costs hundreds of megabytes for as long as its process lives, and because a driver may hang or crash.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import msgspec
import numpy as np

from tensorferry.codecs.machine.cuda_peer import NBYTES, PATTERN, Offer, Other, die_with_parent, mapped
from tensorferry.codecs.machine.facts import CudaFacts, Gpu, Trial
from tensorferry.codecs.machine.nvlink_domain import in_nvlink_domain
from tensorferry.codecs.machine.trials import Failed, quietly, step, tried
from tensorferry.codecs.memory.cuda_driver import CudaError, Driver, HandleKind, NoDriver
from tensorferry.codecs.memory.host import HostSegment

MOST_NBYTES = 64 << 20  #: of host memory registered with CUDA
WORD = 0x600D


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
        other = undo.enter_context(Other.started())
        return CudaFacts(
            driver=driver,
            gpus=gpus,
            words=tried(partial(_words, cuda)),
            ipc=tried(partial(_ipc, cuda, other, 0)),
            posix_fd=tried(partial(_chunk, cuda, other, "posix_fd")),
            fabric=tried(partial(_chunk, cuda, other, "fabric")),
            peer=None if len(gpus) == 1 else tried(partial(_ipc, cuda, other, 1)),  # last: a second context
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


def _words(cuda: Driver) -> None:
    """The lease protocol's other half: a stream stores into a page that other processes have mapped.

    Registers more than the memlock limit, where that is low, to see whether the driver counts it.
    """
    page_nbytes = os.sysconf("SC_PAGESIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    nbytes = page_nbytes if limit == resource.RLIM_INFINITY else min(limit // page_nbytes * page_nbytes, MOST_NBYTES)
    with ExitStack() as undo, step("allocate"):
        page = HostSegment.create(nbytes + page_nbytes, "tensorferry-probe")
        undo.callback(page.close)
        address = page.data.ctypes.data
        with step("register"):
            pointer = cuda.register(address, page.nbytes, read_only=False)
            undo.callback(quietly, cuda.unregister, address)
        with step("write"):
            stream = cuda.stream()
            undo.callback(quietly, cuda.destroy, stream)
            cuda.write_word(stream, pointer, WORD)
            cuda.wait_word(stream, pointer, WORD)
            cuda.synchronize(stream)
        if (seen := int(page.data[:4].view(np.uint32)[0])) != WORD:
            raise Failed("look", f"the CPU sees {seen:#x} where the stream wrote {WORD:#x}")


def _ipc(cuda: Driver, other: Other, device: int) -> None:
    with ExitStack() as undo:
        with step("allocate"):
            pointer = cuda.allocate(NBYTES)
            undo.callback(quietly, cuda.free, pointer)
            cuda.fill(pointer, PATTERN, NBYTES)
            cuda.read(pointer, 1)  # so that the fill is done
        with step("export"):
            handle = cuda.ipc_export(pointer)
        other.accept(Offer("ipc", device, NBYTES, handle))


def _chunk(cuda: Driver, other: Other, kind: HandleKind) -> None:
    with ExitStack() as undo:
        with step("create"):
            granularity = cuda.granularity(0, kind)
            nbytes = -(-NBYTES // granularity) * granularity
            chunk = cuda.create_chunk(0, nbytes, kind)
            undo.callback(quietly, cuda.release_chunk, chunk)
        with step("map"):
            pointer = undo.enter_context(mapped(cuda, 0, chunk, nbytes))
            cuda.fill(pointer, PATTERN, NBYTES)
            cuda.read(pointer, 1)
        with step("export"):
            shareable = cuda.export_chunk(chunk, kind)
        if isinstance(shareable, bytes):
            other.accept(Offer(kind, 0, nbytes, shareable))
        else:
            undo.callback(os.close, shareable)
            other.accept(Offer(kind, 0, nbytes), shareable)


if __name__ == "__main__":
    die_with_parent()
    sys.stdout.buffer.write(msgspec.json.encode(probe()))
