"""Pools whose writer is a GPU that runs by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.codecs.pool.hand_driven_gpu import DEVICE_POINTER, NBYTES, HandDrivenGpu, Shop

from tensorferry.codecs.memory import registered
from tensorferry.codecs.memory.cuda_ipc import CudaImport, CudaSegment
from tensorferry.codecs.memory.memory import GpuHandle
from tensorferry.codecs.messages import PoolDescription
from tensorferry.codecs.pool import control as control_module
from tensorferry.codecs.pool.control import ControlPage
from tensorferry.codecs.pool.pool import Pool, new_nonce
from tensorferry.codecs.pool.reader import Reader


@pytest.fixture
def gpu() -> HandDrivenGpu:
    return HandDrivenGpu()


@pytest.fixture
def shop(gpu: HandDrivenGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    def attach(handle: GpuHandle, nbytes: int, *, ordinal: int | None, cached: bool) -> CudaImport:
        imported = CudaImport(gpu, nbytes, handle, cached=cached)  # type: ignore[arg-type]
        imported._open()
        return imported

    monkeypatch.setattr(CudaImport, "attach", attach)
    monkeypatch.setattr(control_module, "STORES_S", 0.01)
    description = PoolDescription(new_nonce(), "cuda_ipc", NBYTES, 8)
    segment = CudaSegment(gpu, DEVICE_POINTER, NBYTES, os.urandom(64))  # type: ignore[arg-type]
    page = ControlPage.create(8, description.pool, 7)
    segment.adopt(page)
    with Pool(segment, page, description, 7) as pool, Reader() as reader:
        yield Shop(gpu, pool, reader)
        for stream in range(4):
            gpu.run(stream)


@pytest.fixture
def registering(gpu: HandDrivenGpu, monkeypatch: pytest.MonkeyPatch) -> HandDrivenGpu:
    """The GPU that host pools are registered with."""
    monkeypatch.setattr(registered, "CudaDevice", lambda driver, ordinal: gpu)
    monkeypatch.setattr(registered.Driver, "load", lambda: None)
    monkeypatch.setattr(control_module, "STORES_S", 0.01)
    return gpu


@pytest.fixture
def host_shop(registering: HandDrivenGpu) -> Iterator[Shop]:
    """A producer on the GPU, whose pool is the host's; a consumer without one."""
    with Pool.create(NBYTES, 8, device=0) as pool, Reader() as reader:
        yield Shop(registering, pool, reader)
        registering.run(1)
