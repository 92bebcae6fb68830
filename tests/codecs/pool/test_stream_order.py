"""In which order work reaches a GPU, on one that a test runs by hand; `tests/gpu` has the same on a real one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.codecs.pool.hand_driven_gpu import NBYTES, HandDrivenGpu, Shop

from tensorferry.codecs.errors import LeaseNotReady, StaleLease, StreamCapturing
from tensorferry.codecs.memory.cuda_device import CudaDevice
from tensorferry.codecs.memory.cuda_driver import CudaError, NoDriver
from tensorferry.codecs.memory.cuda_ipc import CudaImport
from tensorferry.codecs.memory.memory import GpuHandle
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.system.descriptors import close_all
from tensorferry.codecs.tensors import CODES


def test_ready_is_stored_by_the_stream_that_writes(shop: Shop) -> None:
    proxy = shop.publish()
    assert not shop.reader.is_ready(proxy)
    shop.gpu.current = 2  # whatever is current by then
    shop.gpu.run(2)
    assert not shop.reader.is_ready(proxy)
    shop.gpu.run(1)
    assert shop.reader.is_ready(proxy)


def test_a_stream_with_nothing_to_do_is_spared_the_trip(shop: Shop) -> None:
    shop.gpu.blocking = False
    proxy = shop.publish()
    assert shop.reader.is_ready(proxy)
    with shop.reader.open(proxy):
        pass
    assert shop.out() == 0
    shop.gpu.write_word(1, shop.gpu.bytes.ctypes.data, 1)  # somebody's work
    proxy = shop.publish()
    assert not shop.reader.is_ready(proxy)
    shop.gpu.run(1)
    assert shop.reader.is_ready(proxy)


def test_r3_nothing_is_queued_for_what_the_host_has_not_seen(shop: Shop) -> None:
    proxy = shop.publish()
    shop.gpu.calls.clear()
    with pytest.raises(LeaseNotReady), shop.reader.open(proxy):
        raise AssertionError("opened")
    assert shop.gpu.calls == []


def test_r1_a_cancelled_lease_waits_for_its_writer(shop: Shop) -> None:
    with shop.pool.lease(100):
        pass
    assert shop.out() == 1
    shop.gpu.run(1)
    assert shop.out() == 0


def test_r5_the_acknowledgement_goes_into_the_stream_of_the_reads(shop: Shop) -> None:
    proxy = shop.publish_written()
    shop.gpu.current = 2
    with shop.reader.open(proxy):
        shop.gpu.current = 3
    shop.gpu.run(3)
    assert shop.out() == 1
    with pytest.raises(StaleLease, match="acknowledged here already"):  # while the word is on its way
        shop.reader.acknowledge(proxy)
    shop.gpu.run(2)
    assert shop.out() == 0


def test_an_unread_lease_is_given_back_at_once(shop: Shop) -> None:
    proxy = shop.publish_written()
    shop.gpu.calls.clear()
    shop.reader.acknowledge(proxy)
    assert shop.gpu.calls == []
    assert shop.out() == 0


@pytest.mark.parametrize("last_reads", [True, False])
def test_the_last_of_several_streams_comes_after_the_others(shop: Shop, last_reads: bool) -> None:
    proxy = shop.publish_written(uses=3)
    for stream in (1, 2):
        shop.gpu.current = stream
        with shop.reader.open(proxy):
            pass
    shop.gpu.current = 3
    if last_reads:
        with shop.reader.open(proxy):
            pass
    else:
        shop.reader.acknowledge(proxy)
    for stream in (3, 2, 3):
        shop.gpu.run(stream)
    assert shop.out() == 1, "the first reader is at work"
    for stream in (1, 2, 3):
        shop.gpu.run(stream)
    assert shop.out() == 0


def test_work_of_another_stream_counts_once_joined(shop: Shop) -> None:
    proxy = shop.publish_written()
    with shop.reader.open(proxy) as view:
        shop.gpu.current = 2
        view.join()
    shop.gpu.run(1)
    assert shop.out() == 1
    shop.gpu.run(2)
    shop.gpu.run(1)
    assert shop.out() == 0


def test_r_capture_is_refused_and_owed(shop: Shop) -> None:
    proxy = shop.publish_written()
    with pytest.raises(StreamCapturing), shop.reader.open(proxy):
        shop.gpu.capturing = {1}
    with pytest.raises(StreamCapturing):
        shop.pool.lease(100).__enter__()
    shop.gpu.run(1)
    assert shop.out() == 1
    shop.gpu.capturing = set()
    shop.reader.acknowledge(proxy)
    shop.gpu.run(1)
    assert shop.out() == 0


# --- a mapping that went stale -----------------------------------------------------------------------------------


@pytest.fixture
def imported(gpu: HandDrivenGpu) -> Iterator[CudaImport]:
    """Of a pool on another GPU, so that bytes are copied."""
    imported = CudaImport(gpu, NBYTES, GpuHandle(bytes(16), os.urandom(64)), cached=True)  # type: ignore[arg-type]
    imported._open()
    yield imported
    imported.close()


def test_l6_a_stale_mapping_is_opened_again_once(gpu: HandDrivenGpu, imported: CudaImport) -> None:
    gpu.refusals.append(CudaError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE"))
    assert imported.lend(0, 100, gpu.order()).nbytes == 100
    assert gpu.calls == ["ipc_open", "copy", "ipc_close", "ipc_open", "copy"]


def test_l6_a_mapping_that_is_stale_twice_is_an_error(gpu: HandDrivenGpu, imported: CudaImport) -> None:
    gpu.refusals.extend([CudaError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE")] * 2)
    with pytest.raises(CudaError):
        imported.lend(0, 100, gpu.order())


def test_l6_nothing_stays_mapped_after_a_copy_that_failed_without_the_cache(gpu: HandDrivenGpu) -> None:
    imported = CudaImport(gpu, NBYTES, GpuHandle(bytes(16), os.urandom(64)), cached=False)  # type: ignore[arg-type]
    gpu.refusals.append(CudaError("cuMemcpyAsync", "CUDA_ERROR_ILLEGAL_ADDRESS"))
    with pytest.raises(CudaError):
        imported.lend(0, 100, gpu.order())
    assert gpu.calls == ["ipc_open", "copy", "ipc_close"]
    imported.lend(0, 100, gpu.order())
    assert gpu.calls[3:] == ["ipc_open", "copy"], "what is lent stays mapped until it is returned"


def test_r10_a_lost_context_is_not_tried_again(gpu: HandDrivenGpu, imported: CudaImport) -> None:
    gpu.refusals.append(CudaError("cuMemcpyAsync", "CUDA_ERROR_ILLEGAL_ADDRESS"))
    with pytest.raises(CudaError) as problem:
        imported.lend(0, 100, gpu.order())
    assert problem.value.sticky
    assert gpu.calls == ["ipc_open", "copy"]


def test_a_torch_that_cannot_use_cuda_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(NoDriver, match=r"torch .* cannot use CUDA: Torch not compiled with CUDA enabled"):
        CudaDevice(object(), 0)  # type: ignore[arg-type]


# --- host memory that a GPU writes ------------------------------------------------------------------------------


def test_a_host_pool_that_a_gpu_writes_is_ready_when_the_gpu_says_so(host_shop: Shop) -> None:
    with host_shop.pool.lease(100) as lease:
        lease.data[:] = 7
        lease.dispatch((host_shop.column,))
    slot, generation, offset, _ = lease.grant
    proxy = Proxy(host_shop.pool.description.pool, slot, generation, offset, CODES["uint8"], (100,), 1, 1)
    assert not host_shop.reader.is_ready(proxy)
    assert not host_shop.pool.on_host
    host_shop.gpu.run(1)
    with host_shop.reader.open(proxy) as view:
        assert view.on_host
        assert view.numpy().tolist() == [7] * 100
    assert host_shop.out() == 0


def test_a_reader_with_a_gpu_copies_out_of_a_host_pool_in_its_stream(registering: HandDrivenGpu) -> None:
    gpu = registering
    with Pool.create(NBYTES, 8) as pool, Reader(device=0) as reader:
        shop = Shop(gpu, pool, reader)
        [(address, (nbytes, read_only))] = [one for one in gpu.registered.items() if one[1][1]]
        assert (nbytes, read_only) == (NBYTES, True), "another process's sealed pages"
        with pool.lease(1000):
            proxy = shop.publish()
        assert proxy.offset == 1024
        assert reader.is_ready(proxy), "the host wrote it"
        with reader.open(proxy) as view:
            assert view.nbytes == 100
            assert gpu.copies == [(address + 1024, 100)]
            assert shop.out() == 1
        gpu.run(1)
        assert shop.out() == 0
    assert (gpu.registered, gpu.closed) == ({}, 1)


def test_a_host_pool_that_a_gpu_writes_is_registered_for_writing(registering: HandDrivenGpu) -> None:
    with Pool.create(NBYTES, 8, device=0) as pool:
        assert (NBYTES, False) in registering.registered.values()
        assert pool.private(100).nbytes == 100  # type: ignore[union-attr]
        with pool.lease(1000), pool.lease(10) as lease:
            lease.data[:] = 3
            assert lease.grant.offset == 1024
        _, fds = pool.export()
        assert os.pread(fds[0], 10, 1024) == b"\3" * 10
        close_all(fds)
        registering.run(1)
    assert (registering.registered, registering.closed) == ({}, 1)


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize("refuse", ["register", "unregister"])
def test_nothing_is_left_of_a_registration_that_fails(
    registering: HandDrivenGpu, side: str, refuse: str, belongings: Callable[[], Any], left: Callable[[Any], list[str]]
) -> None:
    with Pool.create(NBYTES, 8) as pool:
        before = belongings()
        registering.refuse = refuse

        def fail() -> None:
            if side == "producer":
                Pool.create(NBYTES, 8, device=0).close()
                return
            with Reader(device=0) as reader:
                _, fds = reader.attach(*pool.export())
                for fd in fds:
                    os.close(fd)

        with pytest.raises(CudaError):
            fail()
        assert registering.registered == {}
        assert registering.closed == 1
        assert left(before) == []


# --- stages that wait for a GPU which still writes; in each the stage is a stand-in, the pool and its reader are real


def test_a_stale_proxy_is_counted_once(host_shop: Shop) -> None:
    proxy = host_shop.publish_written()
    host_shop.reader.acknowledge(proxy)
    with pytest.raises(StaleLease):
        host_shop.reader.is_ready(proxy)
    with pytest.raises(StaleLease), host_shop.reader.open(proxy):
        raise AssertionError("opened")
    assert host_shop.reader.stale == 1
