"""Machines as a probe may find them, for the tests of transports."""

from __future__ import annotations

from typing import Any

import msgspec

from tensorferry.codecs.machine.facts import CudaFacts, Facts, Gpu, HostFacts, Trial
from tensorferry.codecs.machine.transport import (
    TRANSPORTS,
    Budget,
)

ALL = frozenset(TRANSPORTS)


WORKS = Trial(True)


NOT_PERMITTED = Trial(False, "create", "cuMemCreate: CUDA_ERROR_NOT_PERMITTED")


H200 = Gpu("NVIDIA H200", "GPU-0001", vmm=True, posix_fd=True, fabric=True)


GB200 = Gpu("NVIDIA GB200", "GPU-0002", vmm=True, posix_fd=True, fabric=True, mnnvl=True)


NO_DRIVER = CudaFacts("libcuda.so.1 cannot be loaded", missing=True)


def host(**changes: Any) -> HostFacts:
    """A plain Linux machine."""
    plain = HostFacts(
        kernel="6.18.0",
        memfd=WORKS,
        shm_nbytes=1 << 30,
        available_nbytes=1 << 34,
        memlock_nbytes=None,
        open_files=1 << 16,
        seccomp=0,
        nested_pids=False,
        imex=False,
        mps=False,
    )
    return msgspec.structs.replace(plain, **changes)


def cuda(*gpus: Gpu, **changes: Any) -> CudaFacts:
    """CUDA on a machine where everything works, but FABRIC handles only where there is a domain for them."""
    gpus = gpus or (H200,)
    fabric = WORKS if gpus[0].mnnvl else NOT_PERMITTED
    every = CudaFacts(driver=13000, gpus=gpus, words=WORKS, ipc=WORKS, posix_fd=WORKS, fabric=fabric)
    return msgspec.structs.replace(every, **changes)


CPU_ONLY = Facts(host(), NO_DRIVER)


ONE_H200 = Facts(host(), cuda())


TWO_H200 = Facts(host(), cuda(H200, msgspec.structs.replace(H200, uuid="GPU-0003")))


RACK = Facts(host(imex=True), cuda(GB200))


FEATURES, EMBEDDINGS = Budget(1024, 341, 3, (1, 1, 1)), Budget(256, 128, 2, (0, 1))


IPC_FAULTS: dict[str, tuple[Facts, str, str]] = {
    "import": (
        Facts(host(), cuda(ipc=Trial(False, "import", "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE"))),
        "cannot open GPU memory by CUDA IPC (import: cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE)",
        "--ipc=host",
    ),
    "MIG": (
        Facts(
            host(), cuda(Gpu("A100 MIG 1g.5gb", "MIG-1", mig=True), ipc=Trial(False, "export", "cuIpcGetMemHandle: X"))
        ),
        "by CUDA IPC on a MIG instance (export",
        "same GPU instances",
    ),
}
