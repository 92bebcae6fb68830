"""In which order things reach a GPU, on a GPU that runs only when it is told to: no driver, no CUDA device.

What a real one does with it is tested in `tests/gpu`. Here streams are queues of steps that a test runs by hand, so
every order between two streams and the host can be looked at.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import LeaseNotReady, StaleLease, StreamCapturing
from tensorferry.codecs.memory.cuda_device import StreamOrder
from tensorferry.codecs.memory.cuda_driver import CudaError
from tensorferry.codecs.memory.cuda_ipc import CudaImport, CudaSegment
from tensorferry.codecs.memory.host import HostSegment
from tensorferry.codecs.memory.memory import GpuHandle
from tensorferry.codecs.memory.registered import RegisteredSegment
from tensorferry.codecs.messages import PoolDescription, Proxy
from tensorferry.codecs.pool import control as control_module
from tensorferry.codecs.pool.control import ControlPage
from tensorferry.codecs.pool.pool import Pool, new_nonce
from tensorferry.codecs.reader import Reader
from tensorferry.codecs.tensors import CODES
from tensorferry.stages.scheduler import Scheduler
from tensorferry.stages.tombstones import Tombstones

NBYTES = 1 << 16
DEVICE_POINTER = 0x3000


class HandDrivenGpu:
    """What a StreamOrder and the memories need of a CudaDevice; each stream is a queue of steps."""

    ordinal = 0

    def __init__(self) -> None:
        self.uuid: UUID = uuid4()
        self.current = 1  #: stream
        self.capturing: set[int] = set()
        self.blocking = True  #: streams wait for the default one's work too, so none is known to be idle
        self.calls: list[str] = []
        self.refusals: deque[CudaError] = deque()  #: of the next copies
        self._steps: defaultdict[int, deque[Callable[[], bool]]] = defaultdict(deque)
        self._happened: set[int] = set()
        self._events = 0
        self.bytes = np.zeros(NBYTES, np.uint8)

    def run(self, stream: int) -> None:
        """Until the stream is empty, or waits for another."""
        steps = self._steps[stream]
        while steps and steps[0]():
            steps.popleft()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self.calls.append(method)
        return getattr(self, method)(*arguments, **options)

    def current_stream(self) -> int:
        return self.current

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def order(self) -> StreamOrder:
        order = StreamOrder(self, self.current)  # type: ignore[arg-type]
        order.check()
        return order

    def over(self, pointer: int, nbytes: int) -> Any:
        if pointer == DEVICE_POINTER:
            return self.bytes[:nbytes]
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))  # registered host memory

    def empty(self, nbytes: int, stream: int) -> Any:
        return Tensor(nbytes)

    def close(self) -> None: ...

    # --- as the driver

    def register(self, address: int, nbytes: int, *, read_only: bool) -> int:
        return address

    def unregister(self, address: int) -> None: ...

    def free(self, pointer: int) -> None: ...

    def ipc_open(self, handle: bytes) -> int:
        return 0x1000

    def ipc_close(self, pointer: int) -> None:
        assert pointer == 0x1000

    def write_word_if_busy(self, stream: int, pointer: int, value: int) -> bool:
        if not self.blocking and not self._steps[stream]:
            return False
        self.write_word(stream, pointer, value)
        return True

    def write_word(self, stream: int, pointer: int, value: int) -> None:
        def store() -> bool:
            ctypes.c_uint32.from_address(pointer).value = value
            return True

        self._steps[stream].append(store)

    def copy(self, into: int, source: int, nbytes: int, stream: int) -> None:
        if self.refusals:
            raise self.refusals.popleft()

    def event(self) -> int:
        self._events += 1
        return self._events

    def record(self, event: int, stream: int) -> None:
        def happen() -> bool:
            self._happened.add(event)
            return True

        self._steps[stream].append(happen)

    def wait_event(self, stream: int, event: int) -> None:
        self._steps[stream].append(lambda: event in self._happened)

    def forget(self, event: int) -> None: ...


class Tensor:
    """As much of one as a copy's target needs."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def data_ptr(self) -> int:
        return 0x2000


class Shop:
    def __init__(self, gpu: HandDrivenGpu, pool: Pool, reader: Reader) -> None:
        self.gpu, self.pool, self.reader = gpu, pool, reader
        self.column = pool.admit(*reader.attach(*pool.export()))

    def publish(self, uses: int = 1) -> Proxy:
        with self.pool.lease(100) as lease:
            lease.dispatch((self.column,))
        slot, generation, offset, _ = lease.grant
        return Proxy(self.pool.description.pool, slot, generation, offset, CODES["uint8"], (100,), 1, uses)

    def publish_written(self, uses: int = 1) -> Proxy:
        proxy = self.publish(uses)
        self.gpu.run(self.gpu.current)
        return proxy

    def out(self) -> int:
        self.pool.reclaim()
        return self.pool.statistics().lent_slots


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


def test_l6_but_not_twice(gpu: HandDrivenGpu, imported: CudaImport) -> None:
    gpu.refusals.extend([CudaError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE")] * 2)
    with pytest.raises(CudaError):
        imported.lend(0, 100, gpu.order())


def test_r10_a_lost_context_is_not_tried_again(gpu: HandDrivenGpu, imported: CudaImport) -> None:
    gpu.refusals.append(CudaError("cuMemcpyAsync", "CUDA_ERROR_ILLEGAL_ADDRESS"))
    with pytest.raises(CudaError) as problem:
        imported.lend(0, 100, gpu.order())
    assert problem.value.sticky
    assert gpu.calls == ["ipc_open", "copy"]


# --- host memory that a GPU writes ------------------------------------------------------------------------------


@pytest.fixture
def host_shop(gpu: HandDrivenGpu) -> Iterator[Shop]:
    """A producer on the GPU, whose pool is the host's; a consumer without one."""
    host = HostSegment.create(NBYTES, "test")
    segment = RegisteredSegment(host, gpu, host.data.ctypes.data, borrowed=True)  # type: ignore[arg-type]
    description = PoolDescription(new_nonce(), "host", NBYTES, 8)
    page = ControlPage.create(8, description.pool, 7)
    segment.adopt(page)
    with Pool(segment, page, description, 7) as pool, Reader() as reader:
        yield Shop(gpu, pool, reader)
        gpu.run(1)


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


async def test_a_scheduler_without_a_gpu_waits_for_one_that_still_writes(host_shop: Shop) -> None:
    filed: list[Any] = []
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        scheduler = object.__new__(Scheduler)
        timeouts = SimpleNamespace(ready_s=5.0)
        scheduler._stage = SimpleNamespace(  # type: ignore[assignment]
            reader=host_shop.reader,
            device=None,
            tasks=tasks,
            alone=nullcontext,
            deployment=SimpleNamespace(timeouts=timeouts),
        )
        scheduler._over = Tombstones()
        scheduler._file = lambda *arguments: filed.append(arguments[2:])  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as scheduler._copier:
            proxy = host_shop.publish()
            embedding = wire.Embedding(0, 100, (wire.Output("embeddings", proxy),))
            origin = wire.Origin("encoder", 0, 7)
            scheduler._arrived(wire.Embeddings(bytes(16), 0, 7, origin, (embedding,), ()), [])
            await asyncio.sleep(0)
            assert filed == []
            host_shop.gpu.run(1)
            while not filed:  # noqa: ASYNC110  (a thread files it)
                await asyncio.sleep(0.001)
    [(arrived, problem)] = filed
    assert problem is None
    assert arrived[0]["embeddings"].shape == (100,)
    assert host_shop.out() == 0


def test_a_reader_with_a_gpu_copies_out_of_a_host_pool_in_its_stream(
    gpu: HandDrivenGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(fd: int, nbytes: int, ordinal: int) -> RegisteredSegment:
        host = HostSegment.attach(fd, nbytes)
        pointer = gpu.register(host.data.ctypes.data, nbytes, read_only=True)
        return RegisteredSegment(host, gpu, pointer, borrowed=False)  # type: ignore[arg-type]

    monkeypatch.setattr(RegisteredSegment, "attach", attach)
    with Pool.create(NBYTES, 8) as pool, Reader(device=0) as reader:
        shop = Shop(gpu, pool, reader)
        proxy = shop.publish()
        assert reader.is_ready(proxy), "the host wrote it"
        with reader.open(proxy) as view:
            assert view.nbytes == 100
            assert "copy" in gpu.calls
            assert shop.out() == 1
        gpu.run(1)
        assert shop.out() == 0
