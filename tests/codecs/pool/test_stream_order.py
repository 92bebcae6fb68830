"""In which order things reach a GPU, on a GPU that runs only when it is told to: no driver, no CUDA device.

What a real one does with it is tested in `tests/gpu`. Here streams are queues of steps that a test runs by hand, so
every order between two streams and the host can be looked at.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
import torch

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, LeaseNotReady, LeasePoisoned, StaleLease, StreamCapturing
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.memory import registered
from tensorferry.codecs.memory.cuda_device import CudaDevice, StreamOrder
from tensorferry.codecs.memory.cuda_driver import CudaError, NoDriver
from tensorferry.codecs.memory.cuda_ipc import CudaImport, CudaSegment
from tensorferry.codecs.memory.memory import GpuHandle
from tensorferry.codecs.messages import PoolDescription, Proxy
from tensorferry.codecs.pool import control as control_module
from tensorferry.codecs.pool.control import ControlPage
from tensorferry.codecs.pool.pool import Pool, new_nonce
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES, View
from tensorferry.pipeline.deployment.spec import Deployment, EncoderSpec, TimeoutsSpec
from tensorferry.pipeline.peers.peer import Peer, PeerLife
from tensorferry.stages.adapters.base import Finish, ItemInfo, Load, Out
from tensorferry.stages.encoder.encoder import Encoder
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.scheduler.backlog import Backlog
from tensorferry.stages.scheduler.collector import Collector

NBYTES = 1 << 16
DEVICE_POINTER = 0x3000


class HandDrivenGpu:
    """What a StreamOrder and the memories need of a CudaDevice; each stream is a queue of steps."""

    ordinal = 0

    def __init__(self) -> None:
        self.uuid: UUID = uuid4()
        self.current = 1  #: stream
        self.capturing: set[int] = set()
        self.blocking = True  #: streams come after the default one's work too, so none is known to be idle
        self.calls: list[str] = []
        self.closed = 0
        self.registered: dict[int, tuple[int, bool]] = {}  #: by address: bytes, and whether read-only
        self.refuse = ""  #: a method that fails
        self.copies: list[tuple[int, int]] = []  #: source and bytes
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

    def close(self) -> None:
        self.closed += 1

    # --- as the driver

    def register(self, address: int, nbytes: int, *, read_only: bool) -> int:
        if self.refuse == "register":
            raise CudaError("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")
        self.registered[address] = nbytes, read_only
        return address

    def unregister(self, address: int) -> None:
        del self.registered[address]
        if self.refuse == "unregister":
            raise CudaError("cuMemHostUnregister", "CUDA_ERROR_UNKNOWN")

    def free(self, pointer: int) -> None: ...

    def ipc_open(self, handle: bytes) -> int:
        return 0x1000

    def ipc_close(self, pointer: int) -> None:
        assert pointer == 0x1000

    def write_word(self, stream: int, pointer: int, value: int) -> None:
        def store() -> bool:
            ctypes.c_uint32.from_address(pointer).value = value
            return True

        self._steps[stream].append(store)

    def write_word_if_busy(self, stream: int, pointer: int, value: int) -> bool:
        if not self.blocking and not self._steps[stream]:
            return False
        self.write_word(stream, pointer, value)
        return True

    def copy(self, into: int, source: int, nbytes: int, stream: int) -> None:
        if self.refusals:
            raise self.refusals.popleft()
        self.copies.append((source, nbytes))

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
        CudaDevice(SimpleNamespace(), 0)  # type: ignore[arg-type]


# --- host memory that a GPU writes ------------------------------------------------------------------------------


@pytest.fixture
def registering(gpu: HandDrivenGpu, monkeypatch: pytest.MonkeyPatch) -> HandDrivenGpu:
    """The GPU that host pools are registered with."""
    monkeypatch.setattr(registered, "CudaDevice", lambda driver, ordinal: gpu)
    monkeypatch.setattr(registered, "Driver", SimpleNamespace(load=lambda: None))
    monkeypatch.setattr(control_module, "STORES_S", 0.01)
    return gpu


@pytest.fixture
def host_shop(registering: HandDrivenGpu) -> Iterator[Shop]:
    """A producer on the GPU, whose pool is the host's; a consumer without one."""
    with Pool.create(NBYTES, 8, device=0) as pool, Reader() as reader:
        yield Shop(registering, pool, reader)
        registering.run(1)


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
        assert pool._segment._segment.data[1024:1034].tolist() == [3] * 10  # type: ignore[attr-defined]
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


READY_S = 60.0  #: a test that waits for it fails by its deadline


def stage_of(reader: Reader, tasks: asyncio.TaskGroup, counted: list[str]) -> Any:
    return SimpleNamespace(
        reader=reader,
        device=None,
        tasks=tasks,
        alone=nullcontext,
        outlive=lambda problem: None,
        limits=Limits(),
        peers=SimpleNamespace(knows=lambda origin: True),
        counters=SimpleNamespace(count=counted.append),
        deployment=Deployment(name="test", timeouts=TimeoutsSpec(ready_s=READY_S)),
    )


class Arrivals(Collector):
    """What a scheduler collects, as far as what becomes of embeddings that arrive."""

    def __init__(self, stage: Any, copier: ThreadPoolExecutor) -> None:
        self.stage, self.over, self.backlog = stage, FinishedRequests(60.0), Backlog(0, lambda request: False)
        replies: Any = None
        super().__init__(stage, copier, self.over, self.backlog, replies)
        self.filed: list[tuple[Any, Any]] = []
        self.is_filed = asyncio.Event()

    async def settled(self) -> None:
        async with asyncio.timeout(10):
            await self.is_filed.wait()

    def arrive(self, *proxies: Proxy) -> None:
        items = tuple(wire.Embedding(n, 100, (wire.Tensor("embeddings", proxy),)) for n, proxy in enumerate(proxies))
        self.arrived(wire.Embeddings(bytes(16), 0, 7, wire.Origin("encoder", 0, 7), items, ()), [])

    def _file(self, message: Any, over: bool, arrived: Any, problem: Any) -> None:
        self.filed.append((None if over else arrived, problem))
        self.is_filed.set()


@pytest.fixture
async def collector(host_shop: Shop) -> AsyncIterator[Arrivals]:
    async with asyncio.TaskGroup() as tasks:
        with ThreadPoolExecutor(1) as copier:
            yield Arrivals(stage_of(host_shop.reader, tasks, []), copier)


async def test_a_scheduler_without_a_gpu_waits_for_one_that_still_writes(host_shop: Shop, collector: Arrivals) -> None:
    collector.arrive(host_shop.publish())
    await asyncio.sleep(0)
    assert collector.filed == []
    host_shop.gpu.run(1)
    await collector.settled()
    [(arrived, problem)] = collector.filed
    assert problem is None
    assert arrived[0]["embeddings"].shape == (100,)
    assert host_shop.out() == 0


async def test_a_scheduler_drains_what_it_still_waits_for(host_shop: Shop, collector: Arrivals) -> None:
    collector.arrive(host_shop.publish())
    draining = asyncio.create_task(collector.backlog.join())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not draining.done()
    host_shop.gpu.run(1)
    async with asyncio.timeout(10):
        await draining
    assert len(collector.filed) == 1


@pytest.mark.parametrize("when", ["before it arrives", "while it is waited for"])
async def test_what_a_request_that_is_over_owes_is_given_back_at_once(
    host_shop: Shop, collector: Arrivals, when: str
) -> None:
    written, unwritten = host_shop.publish_written(), host_shop.publish()
    if when == "before it arrives":
        collector.over.add(bytes(16), 0)
    collector.arrive(unwritten, written)
    await asyncio.sleep(0)
    collector.over.add(bytes(16), 0)
    await collector.settled()
    assert collector.filed[0][0] is None
    assert host_shop.out() == 1, "the one that is being written"


async def test_a_poisoned_lease_behind_a_late_one_is_seen_at_once(host_shop: Shop, collector: Arrivals) -> None:
    late = host_shop.publish()
    with host_shop.pool.lease(100) as lease:
        lease.dispatch((host_shop.column,))
        lease.poison()
    slot, generation, offset, _ = lease.grant
    poisoned = Proxy(host_shop.pool.description.pool, slot, generation, offset, CODES["uint8"], (100,), 1, 1)
    collector.arrive(late, poisoned)
    await collector.settled()
    assert isinstance(collector.filed[0][1], LeaseNotReady | LeasePoisoned)


async def test_a_lease_that_is_never_written_is_said_to_be_late(
    host_shop: Shop, collector: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.stage.deployment = Deployment(name="test", timeouts=TimeoutsSpec(ready_s=0.01))
    collector.arrive(host_shop.publish(), host_shop.publish())
    await collector.settled()
    assert "was not written within 0.01 s" in str(collector.filed[0][1])
    host_shop.gpu.run(1)
    assert host_shop.out() == 0, "both were given back"


@pytest.mark.slow
async def test_embeddings_that_cannot_be_copied_fail_their_request_alone(
    host_shop: Shop, collector: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(self: View) -> View:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(View, "copy", copy)
    collector.arrive(host_shop.publish_written(), host_shop.publish_written())
    await collector.settled()
    problem = collector.filed[0][1]
    assert (type(problem), problem.index) == (BadItem, 0)
    assert "could not be copied: RuntimeError: CUDA out of memory" in str(problem)
    assert host_shop.out() == 0


async def test_embeddings_are_ready_when_their_batch_is_done_whatever_is_queued_behind_it(shop: Shop) -> None:
    """The second batch never ends; the first one's embeddings can be read all the same."""
    gpu, ends = shop.gpu, [threading.Event(), threading.Event()]

    class Adapter:
        batches = 0

        def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish:
            end = ends[self.batches]
            self.batches += 1
            out(0, "embeddings", (1, 100), "uint8")
            gpu.wait_event(1, -self.batches)

            def finish() -> None:
                assert end.wait(10)

            return finish

    sent: list[wire.Embeddings] = []
    outbox: Any = SimpleNamespace(send_nowait=lambda message, frames: sent.append(message))
    life = PeerLife(8, shop.column)
    scheduler = Peer("scheduler", 0, outbox, downstream=True, quarantine_s=60.0, life=life)
    async with asyncio.TaskGroup() as tasks:
        stage = stage_of(shop.reader, tasks, [])
        stage.epoch, stage.origin, stage.publisher = 7, wire.Origin("encoder", 0, 7), Publisher(shop.pool)
        stage.deployment = Deployment(name="test", encoder=EncoderSpec(batch_patches=1))
        stage.peers = SimpleNamespace(taker=lambda *_: scheduler, knows=lambda _: True)
        adapter = Adapter()
        with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(2) as waiter:
            encoder = Encoder(stage, adapter, thread, waiter)
            for request in (b"one", b"two"):
                item = wire.Item(
                    "image", (1, 1, 1), 1, bytes(32), (wire.Tensor("features", wire.Inline(0, CODES["uint8"], (1, 3))),)
                )
                ranks = (wire.Rank(0, 7),), (wire.Rank(0, 8),)
                asked = wire.Encode(request.rjust(16), 0, 7, wire.Origin("tokenizer", 0, 3), *ranks, (item,), 60_000)
                encoder.take(asked, [np.zeros(3, np.uint8)])
            encoding = tasks.create_task(encoder.encode())
            async with asyncio.timeout(10):
                while adapter.batches < 2:  # noqa: ASYNC110  (the encoder's thread does it)
                    await asyncio.sleep(0)
                ends[0].set()
                while not sent:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            payload = sent[0].items[0].outputs[0].payload
            assert isinstance(payload, Proxy)
            assert not shop.reader.is_ready(payload)
            gpu.record(-1, 2)
            gpu.run(2)
            gpu.run(1)
            assert shop.reader.is_ready(payload)
            encoding.cancel()
            ends[1].set()


def test_a_stale_proxy_is_counted_once(host_shop: Shop) -> None:
    proxy = host_shop.publish_written()
    host_shop.reader.acknowledge(proxy)
    with pytest.raises(StaleLease):
        host_shop.reader.is_ready(proxy)
    with pytest.raises(StaleLease), host_shop.reader.open(proxy):
        raise AssertionError("opened")
    assert host_shop.reader.stale == 1
