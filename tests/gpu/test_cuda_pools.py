"""The pool's contract over GPU memory of either kind, between real processes; the producer never waits for its streams.

What is special to pools in chunks is tested in `test_cuda_vmm.py`.
"""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.gpu.busy import keep_busy

from tensorferry.codecs.errors import (
    AttachRefused,
    BadTensor,
    FerryError,
    LeaseNotReady,
    LeasePoisoned,
    NotStaged,
    PeerGone,
    StaleLease,
    StreamCapturing,
    UnsupportedDtype,
)
from tensorferry.codecs.frames import Buffer, open_inline
from tensorferry.codecs.memory.cuda_driver import Driver
from tensorferry.codecs.messages import Inline, Proxy
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES, DTYPES, View, view_of

MIB = 1 << 20
LONG_MS = 300
Peer = Any
Connect = Callable[[Pool, Peer], int]
Feed = Callable[..., int]
encode = msgspec.msgpack.encode
#: Chunks of the least size, so that 8 MiB are four of them.
OPTIONS: dict[str, dict[str, Any]] = {
    "cuda_ipc": {"memory": "cuda_ipc"},
    "cuda_vmm": {"memory": "cuda_vmm", "chunk_nbytes": 2 * MIB, "idle_s": 1000.0, "grow_wait_s": 10.0},
}


@pytest.fixture(params=sorted(OPTIONS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `Pool.create` is told of the kind of memory."""
    return OPTIONS[request.param]


class Shop:
    """A pool in GPU memory and a reader of it, in one process."""

    def __init__(self, pool: Pool, reader: Reader) -> None:
        self.pool, self.reader = pool, reader
        self.column = pool.admit(*reader.attach(*pool.export()))
        self.publisher = Publisher(pool)

    def publish(self, *tensors: Any, uses: int = 1) -> list[Proxy]:
        with self.publisher.publish(*tensors) as draft:
            return [proxy for proxy in draft.dispatch(self.column, [], uses=uses) if isinstance(proxy, Proxy)]

    def out(self) -> int:
        self.pool.reclaim()
        return self.pool.statistics().lent_slots


@pytest.fixture
def shop(torch: Any, options: dict[str, Any]) -> Iterator[Shop]:
    with Pool.create(8 * MIB, 8, **options) as pool, Reader() as reader:
        yield Shop(pool, reader)
        torch.cuda.synchronize()


@pytest.fixture
def pool(torch: Any, options: dict[str, Any]) -> Iterator[Pool]:
    with Pool.create(8 * MIB, 8, **options) as pool:
        yield pool


def digest(tensor: Any) -> str:
    return hashlib.blake2b(bytes(view_of(tensor.cpu()).data), digest_size=16).hexdigest()


def wait_ready(reader: Reader, proxy: Proxy, until: Callable[..., None]) -> None:
    until(lambda: reader.is_ready(proxy))


# --- hand-over ----------------------------------------------------------------------------------------------


def test_a_peer_reads_what_was_written(torch: Any, pool: Pool, gpu_peer: Peer, connect: Connect, until: Any) -> None:
    column = connect(pool, gpu_peer)
    for seed in range(20):  # more than there are slots
        tensor = torch.randint(0, 256, (100 + seed, 1000), dtype=torch.uint8, device="cuda")
        with Publisher(pool).publish(tensor) as draft:
            [payload] = draft.dispatch(column, [])
            assert draft.transport == pool.description.memory
        assert gpu_peer.ask("read", encode(payload)) == ["uint8", [100 + seed, 1000], digest(tensor)]
        until(lambda: pool.reclaim() or not pool.statistics().lent_slots)
    assert pool.statistics().leases == 20


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)])
def test_l9_every_dtype_and_shape(torch: Any, shop: Shop, dtype: str, shape: tuple[int, ...], until: Any) -> None:
    count = int(np.prod(shape)) * DTYPES[dtype]
    kind = getattr(torch, dtype)
    raw = torch.arange(count, dtype=torch.int64, device="cuda").to(torch.uint8)
    tensor = raw.view(kind).view(shape) if count else torch.empty(shape, dtype=kind, device="cuda")
    [proxy] = shop.publish(tensor)
    wait_ready(shop.reader, proxy, until)
    with shop.reader.open(proxy) as view:
        found = view.torch()
        assert (found.dtype, tuple(found.shape), found.is_cuda) == (kind, shape, True)
        assert bytes(found.reshape(-1).view(torch.uint8).cpu().numpy()) == bytes(raw.cpu().numpy())


def test_l9_strided_and_packed(torch: Any, shop: Shop, until: Any) -> None:
    strided = torch.arange(60, device="cuda", dtype=torch.float32).view(6, 10).t()[::2]
    host = np.arange(1000, dtype=np.int16)
    proxies = shop.publish(strided, host, torch.tensor(5.0, device="cuda"))
    for proxy, wanted in zip(proxies, [strided, torch.from_numpy(host), torch.tensor(5.0)], strict=True):
        wait_ready(shop.reader, proxy, until)
        with shop.reader.open(proxy) as view:
            assert torch.equal(view.torch().cpu(), wanted.cpu())
            with pytest.raises(UnsupportedDtype, match="on cuda:0"):
                view.numpy()
    torch.cuda.synchronize()
    assert shop.out() == 0


def test_l10_in_place_and_borrowed(torch: Any, shop: Shop, until: Any) -> None:
    """The reader sees the very bytes the writer wrote: also when they change, as none should."""
    with shop.publisher.draft([("float32", (64, 64))]) as draft:
        written = draft.views[0].torch()
        written.fill_(2.5)
        [proxy] = draft.dispatch(shop.column, [])
    assert isinstance(proxy, Proxy)
    wait_ready(shop.reader, proxy, until)
    with shop.reader.open(proxy) as view:
        assert bool((view.torch() == 2.5).all())
        written.fill_(3.5)
        assert bool((view.torch() == 3.5).all())


def test_e5_copied_straight_into_rows(torch: Any, shop: Shop, until: Any) -> None:
    [proxy] = shop.publish(torch.full((4, 8), 3.0, device="cuda"))
    wait_ready(shop.reader, proxy, until)
    batch = torch.zeros(10, 8, device="cuda")
    shop.reader.copy(proxy, view_of(batch[2:6]))
    assert batch.sum().item() == 4 * 8 * 3
    torch.cuda.synchronize()
    assert shop.out() == 0


def test_gpu_bytes_do_not_go_to_the_host_by_waiting(torch: Any, shop: Shop, until: Any) -> None:
    [proxy] = shop.publish(torch.ones(8, device="cuda"))
    wait_ready(shop.reader, proxy, until)
    with pytest.raises(BadTensor, match="without waiting"), shop.reader.open(proxy) as view:
        View.empty("float32", (8,)).copy_from(view)


# --- order --------------------------------------------------------------------------------------------------


def test_ready_comes_after_the_writes(torch: Any, shop: Shop, until: Any) -> None:
    with shop.publisher.draft([("uint8", (1000,))]) as draft:
        keep_busy(torch, LONG_MS)
        draft.views[0].torch().fill_(9)
        [proxy] = draft.dispatch(shop.column, [])
    assert isinstance(proxy, Proxy)
    assert not shop.reader.is_ready(proxy)
    wait_ready(shop.reader, proxy, until)
    with shop.reader.open(proxy) as view:
        assert bool((view.torch() == 9).all())


def test_what_is_not_ready_is_refused_and_its_release_kept(torch: Any, shop: Shop) -> None:
    with shop.publisher.draft([("uint8", (1000,))]) as draft:
        keep_busy(torch, LONG_MS)
        [proxy] = draft.dispatch(shop.column, [])
    with pytest.raises(LeaseNotReady), shop.reader.open(proxy):
        raise AssertionError("opened")
    assert shop.out() == 1, "released, but its writer is at work"
    torch.cuda.synchronize()
    assert shop.out() == 0


def test_r1_a_cancelled_lease_waits_for_its_writer(torch: Any, shop: Shop) -> None:
    with shop.publisher.draft([("uint8", (1000,))]) as draft:
        keep_busy(torch, LONG_MS)
        draft.views[0].torch().fill_(9)
    assert shop.out() == 1
    torch.cuda.synchronize()
    assert shop.out() == 0


def test_the_ack_comes_after_the_reads(torch: Any, shop: Shop, until: Any) -> None:
    [proxy] = shop.publish(torch.ones(1000, device="cuda"))
    wait_ready(shop.reader, proxy, until)
    with shop.reader.open(proxy) as view:
        keep_busy(torch, LONG_MS)
        view.torch().clone()
    assert shop.out() == 1
    with pytest.raises(StaleLease, match="acknowledged here already"):  # though the word is still on its way
        shop.reader.acknowledge(proxy)
    torch.cuda.synchronize()
    assert shop.out() == 0


def test_two_streams_one_lease_are_both_waited_for(torch: Any, shop: Shop, until: Any) -> None:
    [proxy] = shop.publish(torch.ones(1000, device="cuda"), uses=2)
    wait_ready(shop.reader, proxy, until)
    slow, quick = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(slow), shop.reader.open(proxy) as view:
        keep_busy(torch, LONG_MS)
        view.torch().clone()
    with torch.cuda.stream(quick), shop.reader.open(proxy) as view:
        view.torch().clone()
    keep_busy(torch, 1)  # long enough for the quick one alone
    torch.cuda.current_stream().synchronize()
    assert shop.out() == 1
    torch.cuda.synchronize()
    assert shop.out() == 0


def test_an_unread_release_comes_after_the_reads_of_others(torch: Any, shop: Shop, until: Any) -> None:
    [proxy] = shop.publish(torch.ones(1000, device="cuda"), uses=2)
    wait_ready(shop.reader, proxy, until)
    with torch.cuda.stream(torch.cuda.Stream()), shop.reader.open(proxy) as view:
        keep_busy(torch, LONG_MS)
        view.torch().clone()
    shop.reader.acknowledge(proxy)
    assert shop.out() == 1
    torch.cuda.synchronize()
    assert shop.out() == 0


def test_work_on_a_side_stream_counts_once_joined(torch: Any, shop: Shop, until: Any) -> None:
    side = torch.cuda.Stream()
    with shop.publisher.draft([("uint8", (1000,))]) as draft:
        with torch.cuda.stream(side):
            keep_busy(torch, LONG_MS)
            draft.views[0].torch().fill_(4)
            draft.views[0].join()
        [proxy] = draft.dispatch(shop.column, [])
    assert isinstance(proxy, Proxy)
    assert not shop.reader.is_ready(proxy)
    wait_ready(shop.reader, proxy, until)
    with shop.reader.open(proxy) as view, torch.cuda.stream(side):
        keep_busy(torch, LONG_MS)
        view.torch().clone()
        view.join()
    assert shop.out() == 1
    torch.cuda.synchronize()
    assert shop.out() == 0


def test_any_thread_may_release(torch: Any, shop: Shop, until: Any) -> None:
    """One that has never heard of CUDA: the calls need a context, and the stream is the reader's."""
    [proxy] = shop.publish(torch.ones(1000, device="cuda"))
    wait_ready(shop.reader, proxy, until)
    with torch.cuda.stream(torch.cuda.Stream()):
        block = ExitStack()
        block.enter_context(shop.reader.open(proxy))
    problems: list[BaseException] = []

    def release() -> None:
        try:
            block.close()
        except BaseException as problem:  # a thread's is raised nowhere else
            problems.append(problem)

    thread = threading.Thread(target=release)
    thread.start()
    thread.join()
    assert not problems
    torch.cuda.synchronize()
    assert shop.out() == 0


def test_r_capture_is_refused(torch: Any, shop: Shop, until: Any) -> None:
    [proxy] = shop.publish(torch.ones(1000, device="cuda"))
    wait_ready(shop.reader, proxy, until)
    side, one = torch.cuda.Stream(), torch.ones(1, device="cuda")
    with torch.cuda.stream(side):
        block = ExitStack()
        block.enter_context(shop.reader.open(proxy))
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
            one.add_(1)
            with pytest.raises(StreamCapturing):
                shop.pool.lease(100).__enter__()
            with pytest.raises(StreamCapturing):
                block.close()
    assert shop.out() == 1, "refused means kept"
    shop.reader.acknowledge(proxy)
    until(lambda: shop.out() == 0)
    [other] = shop.publish(torch.ones(1000, device="cuda"))
    wait_ready(shop.reader, other, until)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        one.add_(1)
        with pytest.raises(StreamCapturing), shop.reader.open(other):
            raise AssertionError("opened")


@pytest.fixture
def capturing(torch: Any) -> Iterator[Callable[[], Any]]:
    """A graph that another thread captures in the global mode, torch's default: it adds 1 to a tensor. Call it to end
    the capture, to run it 3 times and to get the tensor. By the driver's own calls: torch does not get over a capture
    that was spoiled."""
    began, finish, ended = threading.Event(), threading.Event(), threading.Event()
    counted, side, cuda = torch.zeros(1, device="cuda"), torch.cuda.Stream(), Driver.load()
    with torch.cuda.stream(side):
        counted.add_(0)
    torch.cuda.synchronize()
    graphs: list[Any] = []
    problems: list[FerryError] = []

    def capture() -> None:
        with torch.cuda.stream(side):
            mode = cuda._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
            cuda.call("cuStreamBeginCapture", side.cuda_stream, mode)
            counted.add_(1)
            began.set()
            finish.wait(60)
            try:
                graphs.append(cuda.call("cuStreamEndCapture", side.cuda_stream))
            except FerryError as problem:
                problems.append(problem)
        ended.set()

    thread = threading.Thread(target=capture)
    thread.start()
    assert began.wait(60)

    def end() -> Any:
        finish.set()
        assert ended.wait(60)
        assert not problems
        runnable = cuda.call("cuGraphInstantiate", graphs[0], 0)
        for _ in range(3):
            cuda.call("cuGraphLaunch", runnable, side.cuda_stream)
        torch.cuda.synchronize()
        cuda.call("cuGraphExecDestroy", runnable)
        return counted

    yield end
    finish.set()
    thread.join(60)
    for graph in graphs:
        cuda.call("cuGraphDestroy", graph)


def test_the_check_of_captures_sees_one_spoiled(torch: Any, capturing: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match="captur"):
        torch.cuda.current_stream().query()
    with pytest.raises(AssertionError):
        capturing()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_r_a_capture_of_another_thread_is_not_spoiled(
    torch: Any, shop: Shop, until: Any, request: pytest.FixtureRequest, busy: bool
) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        source = torch.arange(1000, device="cuda")
        shop.publish(source)  # torch has the memory that it needs, and need not ask for it beside a capture
        torch.cuda.synchronize()
        end = request.getfixturevalue("capturing")
        if busy:
            keep_busy(torch, 20)
        [proxy] = shop.publish(source)
        wait_ready(shop.reader, proxy, until)
        with shop.reader.open(proxy) as view:
            again = view.torch().clone()
        assert end().item() == 3
        assert again.equal(source)


def test_r_staging_beside_a_capture_of_another_thread(
    torch: Any, shop: Shop, until: Any, request: pytest.FixtureRequest
) -> None:
    def inline() -> bytes:
        frames: list[Buffer] = []
        with shop.publisher.publish(source) as draft:
            draft.stage()
            until(lambda: draft.staged)
            draft.dispatch(None, frames)
        return b"".join(map(bytes, frames))

    with torch.cuda.stream(torch.cuda.Stream()):
        source = torch.arange(1000, device="cuda")
        torch.cuda.synchronize()
        first = inline()
        end = request.getfixturevalue("capturing")
        assert inline() == first
        assert end().item() == 3


# --- leases that are over, or never begin --------------------------------------------------------------------


def test_stale_and_poisoned(torch: Any, shop: Shop, until: Any) -> None:
    [proxy] = shop.publish(torch.ones(1000, device="cuda"))
    shop.reader.acknowledge(proxy)
    with pytest.raises(StaleLease), shop.reader.open(proxy):
        raise AssertionError("opened")
    with shop.pool.lease(100) as lease:
        lease.poison()
        lease.dispatch((shop.column,))
    slot, generation, offset, _ = lease.grant
    poisoned = Proxy(shop.pool.description.pool, slot, generation, offset, CODES["uint8"], (100,))
    with pytest.raises(LeasePoisoned):
        shop.reader.is_ready(poisoned)
    with pytest.raises(LeasePoisoned), shop.reader.open(poisoned):
        raise AssertionError("opened")
    torch.cuda.synchronize()
    until(lambda: shop.out() == 0)


def test_a_lie_about_the_size_is_refused(torch: Any, pool: Pool) -> None:
    export, fds = pool.export()
    lie = msgspec.structs.replace(export, description=msgspec.structs.replace(export.description, nbytes=1 << 35))
    with Reader() as reader, pytest.raises(AttachRefused, match="were announced"):
        reader.attach(lie, fds)


# --- inline -----------------------------------------------------------------------------------------------------


def test_l5_a_full_pool_s_draft_is_staged_without_waiting(
    torch: Any, shop: Shop, no_host_waits: Any, until: Any
) -> None:
    with shop.pool.lease(8 * MIB), no_host_waits():
        with shop.publisher.draft([("uint8", (MIB,)), ("float32", (3,))]) as draft:
            keep_busy(torch, LONG_MS)
            draft.views[0].torch().fill_(7)
            draft.views[1].torch().fill_(1.5)
            assert draft.transport == "inline"
            with pytest.raises(NotStaged):
                draft.dispatch(shop.column, [])
            started = time.monotonic()
            draft.stage()
            assert (time.monotonic() - started) * 1000 < LONG_MS
            assert not draft.staged
            with pytest.raises(NotStaged):
                draft.dispatch(shop.column, [])
            until(lambda: draft.staged)
            frames: list[Buffer] = []
            payloads = draft.dispatch(shop.column, frames)
    first, second = payloads
    assert isinstance(first, Inline)
    assert isinstance(second, Inline)
    assert bytes(open_inline(first, frames).data) == b"\7" * MIB
    assert open_inline(second, frames).numpy().tolist() == [1.5] * 3


def test_a_leased_draft_is_staged_for_a_consumer_that_cannot_map_it(torch: Any, shop: Shop, until: Any) -> None:
    frames: list[Buffer] = []
    with shop.publisher.publish(torch.full((1000,), 6, dtype=torch.uint8, device="cuda")) as draft:
        [proxy] = draft.dispatch(shop.column, frames)
        draft.stage()
        until(lambda: draft.staged)
        [inline] = draft.dispatch(None, frames)
    assert isinstance(inline, Inline)
    assert bytes(open_inline(inline, frames).data) == b"\6" * 1000
    shop.reader.acknowledge(proxy)


def test_staging_is_not_used_again_while_a_frame_is_out(torch: Any, shop: Shop, until: Any) -> None:
    """A23: the socket's thread may still be sending it."""
    frames: list[Buffer] = []
    for number in range(8):
        with shop.pool.lease(8 * MIB), shop.publisher.draft([("uint8", (MIB,))]) as draft:
            draft.views[0].torch().fill_(number)
            draft.stage()
            until(lambda: draft.staged)
            draft.dispatch(shop.column, frames)
        until(lambda: shop.out() == 0)
    assert [int(np.asarray(frame)[-1]) for frame in frames] == list(range(8))


# --- no host waits -----------------------------------------------------------------------------------------------


def test_the_watch_over_host_waits_sees_them(torch: Any, no_host_waits: Any) -> None:
    one = torch.ones(1, device="cuda")
    planted: list[Callable[[], Any]] = [
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.current_stream().synchronize(),
        lambda: torch.cuda.current_stream().record_event().synchronize(),
        lambda: one.item(),
        lambda: one.cpu(),
        lambda: one.nonzero(),
        lambda: bool(one),
        lambda: Driver.load().synchronize(0),
    ]
    for wait in planted:
        for compiled in (False, True):
            with pytest.raises((AssertionError, RuntimeError)), no_host_waits(compiled=compiled):
                wait()


def test_l1_no_host_wait_between_publish_and_ack(torch: Any, shop: Shop, no_host_waits: Any, until: Any) -> None:
    """On both sides, by a trace of every driver call of ours and of all of torch that can wait."""
    source, into = torch.ones(MIB, dtype=torch.uint8, device="cuda"), torch.empty(MIB, dtype=torch.uint8, device="cuda")
    with shop.pool.lease(8 * MIB):  # all chunks, if it has any, are there
        shop.reader.upkeep()
    torch.cuda.synchronize()
    assert shop.out() == 0
    with no_host_waits() as calls:
        for _ in range(50):
            until(lambda: shop.pool.fits([MIB]))
            keep_busy(torch, 0.1)
            [proxy] = shop.publish(source)
            wait_ready(shop.reader, proxy, until)
            with shop.reader.open(proxy) as view:
                into.copy_(view.torch())
    assert calls.count("cuStreamWriteValue32") == 100
    allowed = {"cuStreamWriteValue32", "cuCtxGetCurrent"}
    assert set(calls) == allowed


# --- under load, and death ---------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
@pytest.mark.parametrize("nbytes", [4 << 10, 64 << 10, MIB])
@pytest.mark.parametrize("straight", [False, True], ids=["borrowed", "copied"])
def test_10_000_items_through_a_pool_that_holds_8(
    torch: Any, pool: Pool, gpu_peer: Peer, connect: Connect, until: Any, straight: bool, nbytes: int, feed: Feed
) -> None:
    column = connect(pool, gpu_peer)
    assert feed(pool, gpu_peer, column, 10_000, nbytes, early=False, straight=straight) == 0
    until(lambda: pool.reclaim() or not pool.statistics().lent_slots)
    assert pool.statistics().leases == 10_000


@pytest.mark.timeout(180)
@pytest.mark.parametrize("nbytes", [4 << 10, 64 << 10, MIB])
def test_the_check_of_bytes_sees_a_reader_that_acknowledges_too_early(
    torch: Any, pool: Pool, gpu_peer: Peer, connect: Connect, nbytes: int, feed: Feed
) -> None:
    column = connect(pool, gpu_peer)
    assert feed(pool, gpu_peer, column, 1000, nbytes, early=True, straight=False) > 0


def test_l12_a_consumer_killed_in_the_middle_of_its_reads(
    torch: Any, pool: Pool, gpu_peer: Peer, connect: Connect, until: Any
) -> None:
    column = connect(pool, gpu_peer)
    with Publisher(pool).publish(torch.ones(MIB, dtype=torch.uint8, device="cuda")) as draft:
        [payload] = draft.dispatch(column, [])
    gpu_peer.ask("hog", encode(payload))
    with Publisher(pool).publish(torch.ones(MIB, dtype=torch.uint8, device="cuda")) as draft:
        draft.dispatch(column, [])  # and this one it never sees
    torch.cuda.synchronize()
    assert (pool.reclaim(), pool.statistics().lent_slots) == (0, 2)
    gpu_peer.signal(signal.SIGKILL)
    until(lambda: pool.strike_dead() == [column])
    until(lambda: pool.reclaim() and not pool.statistics().lent_slots)


@pytest.mark.alone
def test_l12_a_producer_killed_in_the_middle_of_its_writes(
    torch: Any, gpu_peer: Peer, connect_to: Any, until: Any, options: dict[str, Any]
) -> None:
    free_before = torch.cuda.mem_get_info()[0]
    with Reader() as reader:
        gpu_peer.ask("create", 256 * MIB, 8, options)
        column, pool = connect_to(gpu_peer, reader)
        written = msgspec.msgpack.decode(gpu_peer.ask("publish", column, MIB, 5, 0), type=Proxy)
        wait_ready(reader, written, until)
        unwritten = msgspec.msgpack.decode(gpu_peer.ask("publish", column, MIB, 6, 3000), type=Proxy)
        assert not reader.is_ready(unwritten)
        gpu_peer.signal(signal.SIGKILL)
        gpu_peer.wait()
        with pytest.raises(PeerGone):
            until(lambda: reader.is_ready(unwritten))
        with reader.open(written) as view:  # what was ready stays readable
            assert bool((view.torch() == 5).all())
        reader.detach(pool)
    until(lambda: torch.cuda.mem_get_info()[0] >= free_before)


@pytest.mark.alone
def test_hbm_is_back_at_its_start_value(torch: Any, gpu_peer: Peer, connect: Connect, until: Any) -> None:
    gpu_peer.ask("start")
    with Pool.create(MIB, 8, memory="cuda_ipc") as small:  # contexts and local memory of both are there
        connect(small, gpu_peer)
        gpu_peer.ask("detach", small.description.pool)
    free_before = torch.cuda.mem_get_info()[0]
    with Pool.create(512 * MIB, 8, memory="cuda_ipc") as pool:
        connect(pool, gpu_peer)
        assert torch.cuda.mem_get_info()[0] <= free_before - 512 * MIB
    assert torch.cuda.mem_get_info()[0] <= free_before - 512 * MIB, "the consumer has it mapped"
    gpu_peer.ask("detach", pool.description.pool)
    assert torch.cuda.mem_get_info()[0] == free_before


def test_l6_without_the_cache_only_the_reader_s_stream_is_waited_for(
    torch: Any, gpu_peer: Peer, connect_to: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    call = Driver.call

    def traced(self: Driver, name: str, *arguments: Any) -> Any:
        calls.append((name, *arguments))
        return call(self, name, *arguments)

    with Reader(cache_handles=False) as reader:
        gpu_peer.ask("create", 8 * MIB, 8, OPTIONS["cuda_ipc"])
        column, _ = connect_to(gpu_peer, reader)
        proxy = msgspec.msgpack.decode(gpu_peer.ask("publish", column, MIB, 5, 0), type=Proxy)
        wait_ready(reader, proxy, until)
        own = torch.cuda.Stream()
        monkeypatch.setattr(Driver, "call", traced)
        with torch.cuda.stream(own), reader.open(proxy) as view:
            read = view.torch().clone()
        monkeypatch.undo()
        names = [name for name, *_ in calls]
        waits = [arguments for name, *arguments in calls if name == "cuStreamSynchronize"]
        assert waits == [[own.cuda_stream]]
        assert (
            names.index("cuIpcOpenMemHandle") < names.index("cuStreamSynchronize") < names.index("cuIpcCloseMemHandle")
        )
        assert bool((read == 5).all())
        until(lambda: gpu_peer.ask("out") == 0)


def test_r8_a_forked_child_keeps_no_descriptor_of_the_driver(gpu_peer: Peer, options: dict[str, Any]) -> None:
    gpu_peer.ask("create", 8 * MIB, 8, options)
    ours, child_s = gpu_peer.ask("nvidia_descriptors_of_a_forked_child")
    assert ours > 0
    assert child_s == 0


def test_detaching_holds_nobody_else_up(
    torch: Any, gpu_peer: Peer, connect_to: Any, until: Any, options: dict[str, Any]
) -> None:
    """R7: off the loop it may take as long as the reads that are queued."""
    with Reader() as reader, Pool.create(8 * MIB, 8, **options) as other:
        other_column = other.admit(*reader.attach(*other.export()))
        gpu_peer.ask("create", 8 * MIB, 8, options)
        column, pool = connect_to(gpu_peer, reader)
        proxy = msgspec.msgpack.decode(gpu_peer.ask("publish", column, MIB, 5, 0), type=Proxy)
        wait_ready(reader, proxy, until)
        with torch.cuda.stream(torch.cuda.Stream()), reader.open(proxy) as view:
            keep_busy(torch, LONG_MS)
            read = view.torch().clone()
        thread = threading.Thread(target=reader.detach, args=(pool,))
        thread.start()
        until(lambda: pool not in reader.pools)
        started = time.monotonic()
        with Publisher(other).publish(torch.ones(8, device="cuda")) as draft:
            [payload] = draft.dispatch(other_column, [])
        assert isinstance(payload, Proxy)
        reader.acknowledge(payload)
        assert thread.is_alive(), time.monotonic() - started
        thread.join()
        assert bool((read == 5).all())
        until(lambda: gpu_peer.ask("out") == 0)


# --- peer GPUs ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
@pytest.mark.parametrize("visible", ["0,1", "1", "1,0"])
@pytest.mark.usefixtures("two_gpus")
def test_a_consumer_on_a_peer_gpu(
    torch: Any, pool: Pool, start_peer: Callable[..., Peer], connect: Connect, until: Any, visible: str
) -> None:
    peer = start_peer("gpu_peer.py", "ignore", CUDA_VISIBLE_DEVICES=visible)
    peer.ask("start", visible.split(",").index("1"))
    column = connect(pool, peer)
    tensor = torch.randint(0, 256, (MIB,), dtype=torch.uint8, device="cuda")
    with Publisher(pool).publish(tensor) as draft:
        [payload] = draft.dispatch(column, [])
    assert peer.ask("read", encode(payload)) == ["uint8", [MIB], digest(tensor)]
    until(lambda: pool.reclaim() or not pool.statistics().lent_slots)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("nbytes", [4 << 10, 64 << 10, MIB])
@pytest.mark.parametrize("straight", [False, True], ids=["staged", "copied"])
@pytest.mark.usefixtures("two_gpus")
def test_10_000_items_to_a_peer_gpu(
    torch: Any, pool: Pool, start_peer: Callable[..., Peer], connect: Connect, straight: bool, nbytes: int, feed: Feed
) -> None:
    peer = start_peer("gpu_peer.py", "ignore", CUDA_VISIBLE_DEVICES="1")
    column = connect(pool, peer)
    assert feed(pool, peer, column, 10_000, nbytes, early=False, straight=straight) == 0


@pytest.mark.usefixtures("two_gpus")
def test_a_consumer_that_counts_the_gpus_differently_borrows(
    torch: Any, pool: Pool, start_peer: Callable[..., Peer], connect: Connect, until: Any
) -> None:
    peer = start_peer("gpu_peer.py", "ignore", CUDA_VISIBLE_DEVICES="1,0")
    column = connect(pool, peer)
    tensor = torch.randint(0, 256, (MIB,), dtype=torch.uint8, device="cuda")
    with Publisher(pool).publish(tensor) as draft:
        [payload] = draft.dispatch(column, [])
    assert peer.ask("read", encode(payload)) == ["uint8", [MIB], digest(tensor)]


@pytest.mark.usefixtures("two_gpus")
def test_l12_a_consumer_on_a_peer_gpu_killed_mid_copy(
    torch: Any, start_peer: Callable[..., Peer], connect: Connect, until: Any, options: dict[str, Any]
) -> None:
    with Pool.create(1024 * MIB, 64, **(options | {"chunk_nbytes": 64 * MIB})) as pool:
        peer = start_peer("gpu_peer.py", "ignore", CUDA_VISIBLE_DEVICES="1")
        column = connect(pool, peer)
        for _ in range(4):
            with Publisher(pool).publish(torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")) as draft:
                [payload] = draft.dispatch(column, [])
            peer.send("hog", encode(payload))
        peer.signal(signal.SIGKILL)
        until(lambda: pool.strike_dead() == [column])
        until(lambda: pool.reclaim() or not pool.statistics().lent_slots)
