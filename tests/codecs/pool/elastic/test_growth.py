"""Elastic pools between real processes, over a driver whose memory is memfds: growing, giving back, and every death.

What a GPU does with the same code is tested in `tests/gpu`. Touching what is not mapped is a segmentation fault here
too, and memory is there for as long as anybody has it mapped or holds a descriptor of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    closing,
    contextmanager,
)
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tensorferry.codecs.errors import AttachRefused, LeaseError, PeerGone, PoolFull
from tensorferry.codecs.memory.cuda_driver import CudaError
from tensorferry.codecs.memory.cuda_vmm import BudgetTooSmall, VmmImport, VmmSegment
from tensorferry.codecs.memory.memory import Handle
from tensorferry.codecs.messages import Origin, Proxy
from tensorferry.codecs.pool.elastic import growth_state
from tensorferry.codecs.pool.elastic.chunk_imports import ChunkImports, ChunksHere
from tensorferry.codecs.pool.elastic.descriptor_line import Receiver, Sender
from tensorferry.codecs.pool.elastic.growth import Growth
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.pools.broker import Broker, attach
from tensorferry.pipeline.process.stage import Stage

MIB = 1 << 20
CHUNK = 2 * MIB  #: the stub's granularity
IDLE_S = 0.02
FOREVER_S = 1000.0
WAIT_S = 20.0  #: for growth, in tests that are not about how long it takes
Peer = Any  #: conftest.Peer
Stub = Any  #: conftest.Stub
Until = Callable[..., None]
Pages = Any  #: conftest.Pages
encode = msgspec.msgpack.encode


Create = Callable[..., Pool]


@pytest.fixture
def create(stub: Stub) -> Iterator[Create]:
    """Pools of so many chunks; an `idle_s` is for tests in which they shrink."""
    with ExitStack() as pools:

        def make(chunks: int, *, slots: int = 8, idle_s: float = FOREVER_S, grow_wait_s: float = WAIT_S) -> Pool:
            return pools.enter_context(
                Pool.create(
                    chunks * CHUNK,
                    slots,
                    memory="cuda_vmm",
                    chunk_nbytes=CHUNK,
                    idle_s=idle_s,
                    grow_wait_s=grow_wait_s,
                )
            )

        yield make


@pytest.fixture
def start(start_peer: Callable[..., Peer], stub: Stub) -> Callable[[], Peer]:
    return lambda: start_peer("chunk_peer.py", **stub.environ)


def connect_here(pool: Pool, reader: Reader) -> int:
    return pool.admit(*reader.attach(*pool.export()))


def some(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def digest(data: Any) -> str:
    return hashlib.blake2b(bytes(data), digest_size=16).hexdigest()


def publish(pool: Pool, column: int, data: np.ndarray[Any, Any]) -> Proxy:
    with Publisher(pool).publish(data) as draft:
        [proxy] = draft.dispatch(column, [])
    assert isinstance(proxy, Proxy), "there was no room"
    return proxy


def fill(pool: Pool, column: int, count: int, nbytes: int = CHUNK) -> list[bytes]:
    return [encode(publish(pool, column, some(nbytes, seed))) for seed in range(count)]


def mapped(pool: Pool) -> int:
    """Chunks that leases may lie in."""
    return pool.statistics().mapped_nbytes // CHUNK


def retiring(pool: Pool) -> int:
    return pool.statistics().retiring_nbytes // CHUNK


def growth_of(pool: Pool) -> Growth:
    assert pool.growth is not None
    return pool.growth


def idle_after(pool: Pool, idle_s: float) -> None:
    """Give idle chunks back after so long from now on."""
    growth_of(pool).idle_s = idle_s


def shrink_to(pool: Pool, until: Until, retiring_chunks: int | None = None) -> None:
    """Wait until the spare is all that is mapped, and this much retired; then shrink no more."""
    idle_after(pool, IDLE_S)
    until(lambda: is_at(pool, 1, retiring_chunks))
    idle_after(pool, FOREVER_S)


def look_again(pool: Pool, until: Until) -> None:
    """Have the pool's thread see whether anything is wanted."""
    growing = growth_of(pool)
    done = growing.rounds
    growing.look()
    until(lambda: growing.rounds != done)


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Chunks take until the end of the block to come; set once one is on its way."""
    grow, begun, go_on = VmmSegment.grow, threading.Event(), threading.Event()

    def slowly(segment: VmmSegment, position: int) -> Handle:
        begun.set()
        assert go_on.wait(WAIT_S * 3)
        return grow(segment, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VmmSegment, "grow", slowly)
        try:
            yield begun
        finally:
            go_on.set()


def is_at(pool: Pool, mapped_chunks: int | None, retiring_chunks: int | None = None) -> bool:
    """Whether it has so many chunks, after a pass to take back what was acknowledged."""
    while pool.reclaim():
        pass
    there = mapped(pool) == mapped_chunks if mapped_chunks is not None else True
    return there and (retiring_chunks is None or retiring(pool) == retiring_chunks)


def here(reader: Reader, pool: Pool) -> ChunksHere:
    """The chunks that a reader of this process has."""
    return reader.chunks(pool.description.pool)


def mapped_here() -> set[str]:
    """Where this process has chunks mapped. Source: proc(5)."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[0] for line in lines if "memfd:stub-chunk" in line}


def physical(*pids: int) -> int:
    """Chunks of memory that these processes have mapped or hold a descriptor of. Source: proc(5)."""
    inodes: set[int] = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
            if "memfd:stub-chunk" in line:
                inodes.add(int(line.split()[4]))
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                path = f"/proc/{pid}/fd/{name}"
                if "memfd:stub-chunk" in os.readlink(path):
                    inodes.add(os.stat(path).st_ino)
            except FileNotFoundError:
                continue
    return len(inodes)


def out(pool: Pool) -> int:
    pool.reclaim()
    return pool.statistics().lent_slots


# --- growing -----------------------------------------------------------------------------------------------------


def test_the_first_tensor_finds_its_chunk(create: Create) -> None:
    pool = create(4)
    assert pool.statistics().mapped_nbytes == CHUNK
    with pool.lease(CHUNK):
        assert pool.statistics().growth_waits == 0


def test_a_new_pool_holds_addresses_and_a_spare(create: Create, until: Until) -> None:
    pool = create(8)
    until(lambda: pool.statistics().grown == 1)
    statistics = pool.statistics()
    assert (statistics.reserved_nbytes, statistics.mapped_nbytes, statistics.retiring_nbytes) == (8 * CHUNK, CHUNK, 0)
    assert (statistics.capacity_nbytes, statistics.free_nbytes, statistics.grown) == (8 * CHUNK, CHUNK, 1)
    assert statistics.fragmentation == 0.0
    assert physical(os.getpid()) == 1


def test_it_grows_with_demand_and_a_peer_reads_all_of_it(
    create: Create, start: Callable[[], Peer], until: Until
) -> None:
    pool, peer = create(8), start()
    column = peer.join(pool)
    payloads = fill(pool, column, 8)
    assert out(pool) == 8
    assert (mapped(pool), physical(os.getpid())) == (8, 8)
    for seed, payload in enumerate(payloads):
        assert peer.ask("read", payload)[2] == digest(some(CHUNK, seed))
    assert out(pool) == 0
    peer.ask("reset")


def test_the_spare_is_there_before_it_is_asked_for(create: Create, until: Until) -> None:
    pool = create(8, grow_wait_s=0.0)

    def has_spare() -> bool:
        return pool.statistics().longest_free_nbytes >= CHUNK

    with ExitStack() as leases:
        for number in range(8):
            until(has_spare)
            assert mapped(pool) == number + 1, "the spare, and no more"
            leases.enter_context(pool.lease(CHUNK))
        with pytest.raises(PoolFull):
            pool.lease(1).__enter__()


def test_a_tensor_may_lie_in_three_chunks(create: Create, start: Callable[[], Peer], until: Until) -> None:
    pool, peer = create(8), start()
    column = peer.join(pool)
    with pool.lease(CHUNK // 2):
        data = some(3 * CHUNK - 1000)
        proxy = publish(pool, column, data)
        assert proxy.offset == CHUNK // 2
        look_again(pool, until)
        look_again(pool, until)
        assert mapped(pool) == 5, "however often it asked for room"
        assert peer.ask("read", encode(proxy))[2] == digest(data)
    peer.ask("reset")


def test_a_lease_waits_no_longer_than_it_was_told(create: Create, stub: Stub, until: Until) -> None:
    pool = create(4, grow_wait_s=0.1)
    until(lambda: pool.statistics().grown == 1)
    with held_up():
        with pytest.raises(PoolFull):
            pool.lease(2 * CHUNK).__enter__()
        assert (pool.statistics().refused, pool.statistics().growth_waits) == (1, 1)
        assert pool.growing([2 * CHUNK])
    until(lambda: pool.fits([2 * CHUNK]))
    with pool.lease(2 * CHUNK):
        pass


def test_what_the_budget_cannot_hold_is_not_waited_for(create: Create) -> None:
    pool = create(4)  # waits for longer than a test may take
    with pool.lease(3 * CHUNK):
        assert not pool.growing([CHUNK + 1])
        with pytest.raises(PoolFull):
            pool.lease(CHUNK + 1).__enter__()
        with pool.lease(CHUNK):
            assert not pool.fits([1])
    assert not pool.growing([5 * CHUNK])


def test_room_for_several_is_asked_for_at_once(create: Create, until: Until) -> None:
    pool = create(8)
    sizes = [CHUNK + 1, CHUNK // 2, 2 * CHUNK, CHUNK]
    assert pool.growing(sizes)
    until(lambda: pool.fits(sizes))
    look_again(pool, until)
    assert mapped(pool) <= 7, "what they need and the spare, once"


def test_what_was_asked_for_twice_comes_once(create: Create, until: Until) -> None:
    pool = create(8)
    until(lambda: pool.statistics().grown == 1)
    with held_up() as begun:
        assert pool.growing([3 * CHUNK])
        assert begun.wait(WAIT_S)
        assert pool.growing([3 * CHUNK])
        growing = growth_of(pool)
        growing.found([2 * CHUNK])
        assert growing.wanted == (3 * CHUNK,), "somebody else's"
        growing.found([3 * CHUNK])
        assert growing.wanted == ()
    until(lambda: pool.fits([3 * CHUNK]))
    with pool.lease(3 * CHUNK):
        look_again(pool, until)
        look_again(pool, until)
        assert mapped(pool) == 4, "those, and the spare"


def test_all_slots_taken_is_no_reason_to_grow(create: Create) -> None:
    pool = create(8, slots=1)
    with pool.lease(1), pytest.raises(PoolFull):
        pool.lease(CHUNK).__enter__()
    assert mapped(pool) <= 2, "the spare, and what the first lease touched"


def test_the_impatient_do_not_wait(create: Create, until: Until) -> None:
    pool = create(4, grow_wait_s=FOREVER_S)
    until(lambda: pool.statistics().grown == 1)
    with held_up():
        with pytest.raises(PoolFull):
            pool.lease(2 * CHUNK, patient=False).__enter__()
        with Publisher(pool).draft([("uint8", (2 * CHUNK,))], patient=False) as draft:
            assert draft.transport == "inline"
    assert pool.statistics().growth_waits == 0


def test_no_memory_on_the_gpu_is_a_full_pool(
    create: Create, stub: Stub, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth_state, "REFUSED_S", 0.2)
    pool = create(4)
    until(lambda: pool.statistics().grown == 1)
    stub.refuse("cuMemCreate")
    with pytest.raises(PoolFull):
        pool.lease(2 * CHUNK).__enter__()
    with pytest.raises(PoolFull):
        pool.lease(2 * CHUNK).__enter__()  # refused without asking the GPU again so soon
    assert pool.statistics().growth_refused == 1
    assert mapped(pool) == 1
    stub.allow()
    until(lambda: pool.fits([2 * CHUNK]))


@pytest.mark.parametrize("call", ["cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_chunk_that_comes_half_way_leaves_nothing(create: Create, stub: Stub, until: Until, call: str) -> None:
    pool = create(4)
    until(lambda: pool.statistics().grown == 1)
    stub.refuse(call)
    with pytest.raises(PoolFull):
        pool.lease(2 * CHUNK).__enter__()
    assert (mapped(pool), physical(os.getpid())) == (1, 1)
    stub.allow()


def test_r10_a_lost_context_is_told_to_who_asks(create: Create, stub: Stub, until: Until) -> None:
    pool = create(4)
    until(lambda: pool.statistics().grown == 1)
    stub.refuse("cuMemCreate", "CUDA_ERROR_ILLEGAL_ADDRESS")
    for _ in range(2):
        with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
            pool.lease(2 * CHUNK).__enter__()
    stub.allow()


def test_a_lease_whose_bytes_cannot_be_had_comes_back(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = create(4)
    with monkeypatch.context() as patch:
        patch.setattr(VmmSegment, "lend", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.lease(1).__enter__()
    assert out(pool) == 0


def test_a_budget_below_one_chunk_is_refused(stub: Stub) -> None:
    with pytest.raises(BudgetTooSmall, match=f"{MIB} bytes: GPU memory comes in chunks of {CHUNK}"):
        Pool.create(MIB, memory="cuda_vmm")


def test_p5_a_budget_that_chunks_do_not_divide_stays_a_hard_cap(stub: Stub) -> None:
    with Pool.create(341 * MIB, 8, memory="cuda_vmm") as pool:
        assert (pool.description.nbytes, pool.description.chunk_nbytes) == (340 * MIB, 34 * MIB)


@pytest.mark.parametrize("how", ["interrupted", "interrupted early", "no thread"])
def test_l4_a_pool_that_was_not_made_leaves_nothing(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, belongings: Callable[[], Any], until: Until, how: str
) -> None:
    Pool.create(4 * CHUNK, 8, memory="cuda_vmm", chunk_nbytes=CHUNK).close()
    before, threads = belongings(), threading.active_count()
    start, late = threading.Thread.start, list[threading.Thread]()

    def started_late(thread: threading.Thread) -> None:
        """Ctrl-C while `start` waits for the thread to begin: it does, later."""
        late.append(thread)
        raise KeyboardInterrupt

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if how == "interrupted":
            patch.setattr(threading.Condition, "wait_for", interrupted)
        else:
            patch.setattr(threading.Thread, "start", started_late if how == "interrupted early" else refused)
        with pytest.raises((KeyboardInterrupt, RuntimeError), match="start new thread" if how == "no thread" else None):
            Pool.create(4 * CHUNK, 8, memory="cuda_vmm", chunk_nbytes=CHUNK)
    assert physical(os.getpid()) == 0
    for thread in late:
        start(thread)
    until(lambda: threading.active_count() == threads and not belongings().gained_since(before))
    assert physical(os.getpid()) == 0, "a thread that began late has made nothing"


# --- shrinking ---------------------------------------------------------------------------------------------------


def test_idle_chunks_are_given_back_but_the_spare(create: Create, start: Callable[[], Peer], until: Until) -> None:
    pool, peer = create(8), start()
    column = peer.join(pool)
    for payload in fill(pool, column, 8):
        peer.ask("acknowledge", payload)
    shrink_to(pool, until, 7)
    peer.ask("upkeep")  # maps what is still there, and drops the rest
    assert (mapped(pool), retiring(pool)) == (1, 0)
    assert physical(os.getpid(), peer.pid) == 1
    statistics = pool.statistics()
    assert (statistics.grown, statistics.retired) == (8, 7)
    peer.ask("reset")


def test_a_chunk_with_a_lease_stays_and_so_does_a_spare_beside_it(create: Create, until: Until) -> None:
    pool = create(8, idle_s=IDLE_S)
    with ExitStack() as leases:
        for _ in range(6):
            leases.enter_context(pool.lease(CHUNK // 2 + 1))
        kept = leases.enter_context(pool.lease(100))
        leases.enter_context(pool.lease(CHUNK))
        kept.data[:] = 7
        inner = leases.pop_all()
    with inner:
        until(lambda: pool.statistics().longest_free_nbytes >= CHUNK)
        assert bytes(kept.data) == b"\7" * 100
    until(lambda: is_at(pool, 1))
    assert pool.statistics().longest_free_nbytes == CHUNK


def test_an_idle_pool_s_thread_sleeps(create: Create, start: Callable[[], Peer], until: Until) -> None:
    pool = create(4, idle_s=IDLE_S)
    with pool.lease(2 * CHUNK):
        pass
    until(lambda: is_at(pool, 1))
    assert growth_of(pool).patience_s() is None


def test_c3_a_stopped_importer_pins_its_chunks_alone_and_they_stay_in_the_budget(
    create: Create, start: Callable[[], Peer], until: Until
) -> None:
    pool, stopped, other = create(4), start(), start()
    columns = stopped.join(pool), other.join(pool)
    for payload in fill(pool, columns[0], 2):
        stopped.ask("read", payload)
    stopped.stop()
    for payload in fill(pool, columns[1], 4):  # the other two chunks it has in its line
        other.ask("read", payload)
    shrink_to(pool, until, 3)
    other.ask("upkeep")
    assert retiring(pool) == 3, "the stopped process holds them"
    with pytest.raises(PoolFull):  # not waited for either
        pool.lease(2 * CHUNK).__enter__()
    for seed in range(20):  # and the rest goes on
        payload = encode(publish(pool, columns[1], some(CHUNK, seed)))
        assert other.ask("read", payload)[2] == digest(some(CHUNK, seed))
    assert pool.statistics().mapped_nbytes + pool.statistics().retiring_nbytes <= 4 * CHUNK
    stopped.signal(signal.SIGCONT)
    stopped.ask("upkeep")
    assert retiring(pool) == 0
    assert physical(os.getpid(), stopped.pid, other.pid) == 1
    for payload in fill(pool, columns[0], 4):
        stopped.ask("read", payload)
    for each in (stopped, other):
        each.ask("reset")


def test_c3_a_killed_importer_holds_nothing(create: Create, start: Callable[[], Peer], until: Until) -> None:
    pool, doomed = create(4), start()
    column = doomed.join(pool)
    for payload in fill(pool, column, 4):
        doomed.ask("read", payload)
    shrink_to(pool, until, 3)
    doomed.kill()
    with pool.lease(4 * CHUNK):  # finds it dead by itself
        assert retiring(pool) == 0
    assert pool.statistics().struck_consumers == 1


def test_c3_killed_with_chunks_in_its_line(create: Create, start: Callable[[], Peer], until: Until) -> None:
    pool, doomed = create(4), start()
    doomed.join(pool)
    doomed.stop()
    with pool.lease(4 * CHUNK):
        pass
    shrink_to(pool, until, 3)
    assert pool.strike_dead() == []
    assert retiring(pool) == 3
    doomed.kill()
    assert len(pool.strike_dead()) == 1
    assert retiring(pool) == 0


def test_a_quarantined_importer_is_not_believed(pages: Pages, create: Create, until: Until) -> None:
    pool = create(4)
    with Reader() as reader:
        column = connect_here(pool, reader)
        [payload] = fill(pool, column, 1, 4 * CHUNK)
        reader.acknowledge(msgspec.msgpack.decode(payload, type=Proxy))
        assert out(pool) == 0
        pages.acks[-1].drop(3, 77)
        assert pool.check_words() == [column], "there never was a chunk 77"
        shrink_to(pool, until, 3)
        reader.upkeep()
        assert retiring(pool) == 3


# --- what a proxy finds ----------------------------------------------------------------------------------------------


def test_a13_a_cached_import_of_a_retired_chunk_is_never_read(
    create: Create, start: Callable[[], Peer], until: Until
) -> None:
    """Chunk 3 is retired and grown again: the same position, offset and size, other memory."""
    pool, peer = create(4), start()
    column = peer.join(pool)
    old = [msgspec.msgpack.decode(payload, type=Proxy) for payload in fill(pool, column, 4)]
    for proxy in old:
        peer.ask("read", encode(proxy))  # which caches the import
    shrink_to(pool, until, 3)
    assert not pool.fits([4 * CHUNK])
    assert not pool.growing([4 * CHUNK]), "while the old memory is mapped over there, no new one comes to its place"
    peer.ask("upkeep")
    new = [msgspec.msgpack.decode(payload, type=Proxy) for payload in fill(pool, column, 4)]
    assert sorted(proxy.offset for proxy in new) == sorted(proxy.offset for proxy in old)
    for seed, proxy in enumerate(new):
        assert peer.ask("read", encode(proxy))[2] == digest(some(CHUNK, seed))
    peer.ask("reset")


def test_a13_old_proxies_are_refused_before_any_memory_is_touched(
    create: Create, start: Callable[[], Peer], until: Until, refused: Callable[..., AbstractContextManager[Any]]
) -> None:
    pool, peer = create(4), start()
    column = peer.join(pool)
    payloads = fill(pool, column, 4)
    for payload in payloads:
        peer.ask("acknowledge", payload)
    shrink_to(pool, until, 3)
    peer.ask("upkeep")
    for payload in payloads:
        with refused("StaleLease"):
            peer.ask("read", payload)
    peer.ask("reset")


def test_a_lie_about_the_place_is_refused_where_there_is_no_chunk(
    create: Create, start: Callable[[], Peer], until: Until, refused: Callable[..., AbstractContextManager[Any]]
) -> None:
    pool, peer = create(4), start()
    column = peer.join(pool)
    until(lambda: pool.statistics().grown == 1)
    proxy = publish(pool, column, some(100))
    until(lambda: mapped(pool) == 2)
    with refused("StaleLease", "where there is no chunk"):
        peer.ask("read", encode(msgspec.structs.replace(proxy, offset=3 * CHUNK)))
    assert out(pool) == 0, "the lease came back all the same"
    peer.ask("reset")


def test_a_late_consumer_finds_the_chunks_that_are_there(create: Create, start: Callable[[], Peer]) -> None:
    pool, early, late = create(4), start(), start()
    first = early.join(pool)
    early.ask("read", fill(pool, first, 1, 3 * CHUNK)[0])
    second = late.join(pool)
    data = some(3 * CHUNK, 5)
    assert late.ask("read", encode(publish(pool, second, data)))[2] == digest(data)
    for each in (early, late):
        each.ask("reset")


def test_upkeep_maps_ahead_of_need(create: Create, stub: Stub) -> None:
    pool = create(4)
    with Reader() as reader:
        connect_here(pool, reader)
        with pool.lease(3 * CHUNK):
            reader.upkeep()
            assert len(here(reader, pool).mapped) >= 3


@pytest.mark.parametrize("moment", ["upkeep", "detach"])
def test_a_chunk_that_cannot_be_had_or_given_up_does_not_keep_the_others(
    create: Create, monkeypatch: pytest.MonkeyPatch, until: Until, moment: str
) -> None:
    pool = create(4)
    with Reader() as reader:
        connect_here(pool, reader)
        with pool.lease(4 * CHUNK):
            pass
        first, second = CudaError("first", "CUDA_ERROR_UNKNOWN"), CudaError("second", "CUDA_ERROR_UNKNOWN")
        bad = {"map": {0: first, 3: second}, "unmap": {1: first, 2: second}}
        do: dict[str, Callable[..., None]] = {"map": VmmImport.map, "unmap": VmmImport.unmap}

        def work(call: str) -> Callable[..., None]:
            def fails_at_some(memory: VmmImport, position: int, *handle: Any) -> None:
                if position in bad[call]:
                    raise bad[call][position]
                do[call](memory, position, *handle)

            return fails_at_some

        for call in bad:
            monkeypatch.setattr(VmmImport, call, work(call))
        with pytest.raises(CudaError, match="first"):
            reader.upkeep()
        assert tuple(map(set, here(reader, pool))) == ({1, 2}, {0, 3})
        bad["map"].clear()
        reader.upkeep()
        assert set(here(reader, pool).mapped) == {0, 1, 2, 3}
        if moment == "detach":
            with pytest.raises(CudaError, match="first"):
                reader.detach(pool.description.pool)
            shrink_to(pool, until, 2)
            return
        shrink_to(pool, until, 3)
        with pytest.raises(CudaError, match="first"):
            reader.upkeep()
        assert (set(here(reader, pool).mapped), retiring(pool)) == ({0, 1, 2}, 2), "3 is not theirs any more"
        bad["unmap"].clear()
        reader.upkeep()
        assert (set(here(reader, pool).mapped), retiring(pool)) == ({0}, 0)


def test_what_is_there_is_in_the_line_when_a_consumer_is_admitted(create: Create, until: Until) -> None:
    pool = create(4)
    until(lambda: pool.statistics().grown == 1)
    with Reader() as reader:
        connect_here(pool, reader)
        reader.upkeep()
        assert here(reader, pool).mapped == {0: 1}


def test_what_could_not_be_sent_is_sent_before_it_is_needed(
    create: Create, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = create(4)
    with Reader() as reader:
        column = connect_here(pool, reader)
        send = Sender.send
        monkeypatch.setattr(Sender, "send", lambda *_: False)
        lease = pool.lease(2 * CHUNK).__enter__()
        until(lambda: mapped(pool) == 3)
        with pytest.raises(LeaseError, match="does not take its chunk"):
            lease.dispatch([column])
        here_alone = threading.current_thread()  # the pool's thread does not get through
        monkeypatch.setattr(Sender, "send", lambda *what: threading.current_thread() is here_alone and send(*what))
        lease.dispatch([column])
        lease.__exit__()
        slot, generation, offset, _ = lease.grant
        proxy = Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (2 * CHUNK,))
        with reader.open(proxy) as view:
            assert view.nbytes == 2 * CHUNK


def test_its_own_process_reads_it_too(create: Create) -> None:
    pool = create(4)
    with Reader() as reader:
        column = connect_here(pool, reader)
        proxy = publish(pool, column, some(2 * CHUNK))
        with reader.open(proxy) as view:
            assert digest(view.data) == digest(some(2 * CHUNK))
        assert out(pool) == 0


def test_a_chunk_that_cannot_be_mapped_costs_its_lease_and_can_be_tried_again(create: Create, stub: Stub) -> None:
    pool = create(4)
    with Reader() as reader:
        column = connect_here(pool, reader)
        first, second = publish(pool, column, some(100, 1)), publish(pool, column, some(100, 2))
        stub.refuse("cuMemImportFromShareableHandle")
        with pytest.raises(CudaError), reader.open(first):
            raise AssertionError("opened")
        stub.allow()
        with reader.open(second) as view:
            assert digest(view.data) == digest(some(100, 2))
        assert out(pool) == 0


# --- R7: giving up what somebody may still use ------------------------------------------------------------------------


def test_b2_nothing_is_unmapped_while_its_acknowledgement_is_queued(pages: Pages, create: Create, stub: Stub) -> None:
    """With a producer that retires too early, as none should: unmapping never waits, and costs its process the GPU."""
    pool = create(4)
    with Reader() as reader:
        column = connect_here(pool, reader)
        proxy = publish(pool, column, some(100))
        with reader.open(proxy):
            pages.control[-1].set_chunk(0, 0)
            reader.upkeep()
            assert 0 in here(reader, pool).mapped, "it is open"
            stub.device.hold()
        reader.upkeep()
        assert 0 in here(reader, pool).mapped, "its acknowledgement is on its way"
        stub.device.let_go()
        reader.upkeep()
        assert 0 not in here(reader, pool).mapped
        assert pages.acks[-1].dropped_words()[0] == 1


def test_b2_a_queued_acknowledgement_keeps_its_chunk_from_being_retired(
    create: Create, stub: Stub, until: Until
) -> None:
    pool = create(4)
    with Reader() as reader:
        column = connect_here(pool, reader)
        proxy = publish(pool, column, some(4 * CHUNK))
        with reader.open(proxy):
            stub.device.hold()
        idle_after(pool, 0.0)
        look_again(pool, until)
        look_again(pool, until)
        assert (mapped(pool), pool.statistics().lent_slots) == (4, 1)
        stub.device.let_go()
        shrink_to(pool, until)


def test_what_was_just_used_is_not_idle(create: Create) -> None:
    pool = create(4)
    with Reader() as reader:
        column = connect_here(pool, reader)
        proxy = publish(pool, column, some(3 * CHUNK))
        reader.acknowledge(proxy)
        before_ns = time.monotonic_ns()
        assert out(pool) == 0
        assert set(growth_of(pool).chunks.idle(before_ns)).isdisjoint({0, 1, 2})


def test_r7_what_is_sent_to_one_that_leaves_was_not_sent(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that comes in the very moment in which the line was found empty for the last time."""
    pool = create(4)
    with Reader() as reader:
        attachment, fds = reader.attach(*pool.export())
        line, receive, sent = Sender(os.dup(fds[-1])), Receiver.receive, []
        pool.admit(attachment, fds)

        def receive_and_send(receiver: Receiver) -> Any:
            arrived = receive(receiver)
            if arrived is None:
                sent.append(line.send(7, 3, 0))
            return arrived

        monkeypatch.setattr(Receiver, "receive", receive_and_send)
        reader.detach(pool.description.pool)
        line.close()
        assert sent == [False]


def test_r7_a_reader_that_detaches_holds_nothing_and_says_so(
    create: Create, start: Callable[[], Peer], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, peer, other = create(4), start(), start()
    column = peer.join(pool)
    other.join(pool)
    for payload in fill(pool, column, 3):
        peer.ask("read", payload)
    other.stop()
    with pool.lease(4 * CHUNK):  # the last is in its line
        peer.ask("detach", pool.description.pool)
        assert physical(peer.pid) == 0
    other.signal(signal.SIGCONT)
    other.ask("detach", pool.description.pool)
    shrink_to(pool, until, 0)
    with pool.lease(4 * CHUNK) as lease, pytest.raises(LeaseError, match="does not take its chunk"):
        lease.dispatch([column])
    monkeypatch.setattr(Sender, "send", lambda *_: pytest.fail("a line that is shut is tried again"))
    look_again(pool, until)
    look_again(pool, until)
    assert pool.check_growth() is None
    for each in (peer, other):
        each.ask("reset")


def test_a_closed_pool_s_bytes_stay_with_those_who_have_its_chunks(create: Create, start: Callable[[], Peer]) -> None:
    pool, peer = create(4), start()
    column = peer.join(pool)
    payload = encode(publish(pool, column, some(3 * CHUNK)))
    pool.close()
    assert peer.ask("read", payload)[2] == digest(some(3 * CHUNK)), "though it had mapped nothing until now"
    peer.ask("detach", pool.description.pool)
    assert physical(os.getpid(), peer.pid) == 0
    peer.ask("reset")


def test_l12_a_killed_producer_s_chunks_can_be_read_and_go_with_the_last_reader(
    start: Callable[[], Peer], stub: Stub, until: Until
) -> None:
    producer = start()
    producer.ask("create", 4 * CHUNK, 16, {"memory": "cuda_vmm", "chunk_nbytes": CHUNK, "grow_wait_s": WAIT_S})
    with Reader() as reader:
        column = producer.offer(reader)[0]
        proxies = [
            msgspec.msgpack.decode(producer.ask("publish", column, bytes(some(190_000, seed))), type=Proxy)
            for seed in range(14)
        ]
        unready = msgspec.msgpack.decode(producer.ask("begin", 1000), type=Proxy)
        producer.kill()
        for seed, proxy in enumerate(proxies):
            with reader.open(proxy) as view:
                assert digest(view.data) == digest(some(190_000, seed))
        with pytest.raises(PeerGone):
            reader.is_ready(unready)
        reader.upkeep()
        assert physical(os.getpid()) >= 2
    assert physical(os.getpid()) == 0


@pytest.mark.parametrize("moment", ["growing", "shrinking"])
def test_c3_an_importer_killed_while_chunks_come_and_go(
    create: Create, start: Callable[[], Peer], until: Until, moment: str
) -> None:
    pool, doomed, other = create(8), start(), start()
    doomed.join(pool)
    column = other.join(pool)
    payloads = fill(pool, column, 4)
    if moment == "growing":
        doomed.send("upkeep")
        doomed.kill()
        payloads += fill(pool, column, 4)
    for payload in payloads:
        other.ask("read", payload)
    if moment == "shrinking":
        idle_after(pool, IDLE_S)
        until(lambda: not is_at(pool, None, 0))
        doomed.send("upkeep")
        doomed.kill()
    shrink_to(pool, until)
    pool.strike_dead()
    other.ask("upkeep")
    until(lambda: (retiring(pool), physical(os.getpid(), other.pid)) == (0, 1))
    other.ask("reset")


def calls(stub_cuda: Any) -> list[str]:
    """What the driver was asked since the last time, in order."""
    found = [call for call, result in stub_cuda.calls() if result == "ok"]
    (stub_cuda.folder / "calls.log").write_text("")
    return found


def test_b2_who_leaves_waits_for_the_device_and_then_gives_its_addresses_up(
    create: Create, stub_cuda: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = create(2)
    with Reader() as reader:
        connect_here(pool, reader)
        with pool.lease(2 * CHUNK):
            reader.upkeep()
        assert len(here(reader, pool).mapped) == 2
        calls(stub_cuda)
        upkeep = ChunkImports.upkeep

        def detached_before(mapping: ChunkImports) -> None:
            reader.detach(pool.description.pool)
            monkeypatch.setattr(Receiver, "receive", lambda _: pytest.fail("there is nothing left to look at"))
            upkeep(mapping)

        monkeypatch.setattr(ChunkImports, "upkeep", detached_before)
        reader.upkeep()
        last = ["cuMemHostUnregister", "cuMemAddressFree", "cuDevicePrimaryCtxRelease"]
        assert calls(stub_cuda) == ["cuCtxSynchronize", *2 * ["cuMemUnmap"], *last]
    pool.close()
    [unregister, *last] = last
    assert calls(stub_cuda) == [unregister, "cuCtxSynchronize", *2 * ["cuMemUnmap"], *last]


@pytest.mark.parametrize("problem", ["a budget below a chunk", "no addresses"])
def test_a_pool_that_is_refused_keeps_no_context(stub: Stub, stub_cuda: Any, problem: str) -> None:
    if problem == "no addresses":
        stub.refuse("cuMemAddressReserve")
    with pytest.raises((BudgetTooSmall, CudaError)):
        Pool.create(CHUNK if problem == "no addresses" else MIB, memory="cuda_vmm")
    asked = calls(stub_cuda)
    assert asked.count("cuDevicePrimaryCtxRetain") == asked.count("cuDevicePrimaryCtxRelease") == 1


def test_nobody_waits_for_the_driver(create: Create, monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    """The pool's lock is taken on event loops."""
    pool = create(4)
    locked = list[bool]()
    do: dict[str, Callable[..., Any]] = {"grow": VmmSegment.grow, "shrink": VmmSegment.shrink}

    def work(call: str) -> Callable[..., Any]:
        def asked_meanwhile(memory: VmmSegment, position: int) -> Any:
            asking = threading.Thread(target=pool.outstanding, args=(0,), daemon=True)
            asking.start()
            asking.join(WAIT_S)
            locked.append(asking.is_alive())
            return do[call](memory, position)

        return asked_meanwhile

    for call in do:
        monkeypatch.setattr(VmmSegment, call, work(call))
    with pool.lease(4 * CHUNK):
        pass
    shrink_to(pool, until)
    assert locked == [False] * 6


def test_the_thread_takes_back_what_was_acknowledged_before_it_grows(create: Create, until: Until) -> None:
    pool = create(4)
    with Reader() as reader:
        column = connect_here(pool, reader)
        reader.acknowledge(publish(pool, column, some(CHUNK)))
        look_again(pool, until)
        until(lambda: pool.statistics().lent_slots == 0)


def test_the_thread_sends_again_what_could_not_be_sent(
    create: Create, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = create(4)
    with Reader() as reader:
        connect_here(pool, reader)

        def come() -> set[int]:
            reader.upkeep()
            return set(here(reader, pool).mapped)

        with monkeypatch.context() as patch:
            patch.setattr(Sender, "send", lambda *_: False)
            with pool.lease(2 * CHUNK):
                until(lambda: pool.statistics().grown == 3)
            assert come() == {0}
        growth_of(pool).look()
        until(lambda: come() == {0, 1, 2})  # and nobody dispatches


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "torch"])
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_chunk_that_cannot_be_mapped_holds_nothing(
    create: Create, stub: Stub, monkeypatch: pytest.MonkeyPatch, side: str, call: str
) -> None:
    """torch: it asks the driver about the first chunk's first byte."""
    pool = create(4) if side == "consumer" else None
    with Reader() as reader, monkeypatch.context() as patch:
        if pool is not None:
            connect_here(pool, reader)
        handles, before = len(stub.driver.chunks), mapped_here()
        if call == "torch":
            patch.setattr(stub.device, "over", lambda *_: 1 / 0)
        else:
            stub.refuse(call)
        if pool is not None:
            with pytest.raises((CudaError, ZeroDivisionError)):
                reader.upkeep()
            assert here(reader, pool).mapped == {}
        else:
            pool = create(4)
            assert (mapped(pool), physical(os.getpid())) == (0, 0)
        assert (len(stub.driver.chunks), mapped_here() - before) == (handles, set())
        stub.allow()


# --- over and over --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_l4_100_times_to_the_budget_and_back_leaves_nothing(
    create: Create, start: Callable[[], Peer], until: Until, belongings: Callable[[], Any]
) -> None:
    pool, peer = create(4), start()
    column = peer.join(pool)

    def there_and_back() -> None:
        for payload in fill(pool, column, 4):
            peer.ask("read", payload)
        shrink_to(pool, until)
        peer.ask("upkeep")
        until(lambda: is_at(pool, 1, 0))

    there_and_back()
    until(lambda: pool.statistics().longest_free_nbytes == CHUNK)
    before, theirs = belongings(), peer.ask("belongings")
    space = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    for _ in range(100):
        there_and_back()
    until(lambda: not belongings().gained_since(before))
    assert peer.ask("belongings") == theirs
    grown_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) - int(space)
    assert grown_pages * 4096 < 64 * MIB
    assert pool.statistics().grown == 1 + 3 * 101
    assert physical(os.getpid(), peer.pid) == 1
    peer.ask("reset")


def test_l4_closing_ends_the_thread_whatever_it_does(stub: Stub) -> None:
    before = threading.active_count()
    for number in range(20):
        pool = Pool.create(64 * CHUNK, 8, memory="cuda_vmm", chunk_nbytes=CHUNK, idle_s=0.0)
        if number % 2:
            pool.growing([60 * CHUNK])
        pool.close()
        pool.close()
    assert threading.active_count() == before
    assert physical(os.getpid()) == 0


def test_a_lease_that_waits_is_woken_by_the_end(create: Create, stub: Stub, until: Until) -> None:
    pool = create(4, grow_wait_s=FOREVER_S)
    until(lambda: pool.statistics().grown == 1)
    found: list[BaseException] = []

    def lend() -> None:
        try:
            pool.lease(4 * CHUNK).__enter__()
        except Exception as problem:
            found.append(problem)

    waiting, closing = threading.Thread(target=lend, daemon=True), threading.Thread(target=pool.close, daemon=True)
    with held_up() as begun:
        waiting.start()
        assert begun.wait(WAIT_S)
        closing.start()
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        assert closing.is_alive(), "it waits for what the thread is doing"
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert [type(problem).__name__ for problem in found] == ["PoolClosed"]


# --- what goes wrong in the thread ------------------------------------------------------------------------------------


def fail(monkeypatch: pytest.MonkeyPatch, times: int, problem: Exception, call: str = "grow") -> None:
    """Let the memory of pools fail so often."""
    work, left = getattr(VmmSegment, call), [problem] * times

    def failing(memory: VmmSegment, position: int) -> Any:
        if left:
            raise left.pop()
        return work(memory, position)

    monkeypatch.setattr(VmmSegment, call, failing)


@pytest.mark.parametrize(
    "problem",
    [RuntimeError("CUDA error: out of memory"), MemoryError(), KeyError(3), OSError(24, "Too many open files")],
    ids=["torch", "memory", "bug", "descriptors"],
)
def test_whatever_fails_while_it_grows_is_counted_told_once_and_outlived(
    create: Create, monkeypatch: pytest.MonkeyPatch, until: Until, problem: Exception
) -> None:
    monkeypatch.setattr(growth_state, "REFUSED_S", 0.05)
    pool = create(4)
    fail(monkeypatch, 2, problem)
    for count in (1, 2):
        with pytest.raises(PoolFull):
            pool.lease(2 * CHUNK).__enter__()
        assert (mapped(pool), pool.statistics().growth_failed) == (1, count), "the position is not coming for ever"
        until(lambda: growth_of(pool).state.grow_from_ns < time.monotonic_ns())
    assert [pool.check_growth(), pool.check_growth()] == [problem, None]
    with pool.lease(2 * CHUNK):
        assert pool.statistics().growth_refused == 0


def test_whatever_fails_before_it_grows_is_outlived_too(
    create: Create, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(growth_state, "REFUSED_S", 0.05)
    pool = create(4)
    with monkeypatch.context() as patch:
        patch.setattr(growth_of(pool).chunks, "needed", lambda *_: 1 / 0)
        look_again(pool, until)
    assert isinstance(pool.check_growth(), ZeroDivisionError)
    until(lambda: pool.fits([3 * CHUNK]))


def test_a_chunk_that_cannot_be_unmapped_stays_in_the_budget_and_is_tried_again(
    create: Create, monkeypatch: pytest.MonkeyPatch, stub: Stub, until: Until
) -> None:
    monkeypatch.setattr(growth_state, "REFUSED_S", 0.05)
    pool = create(4)
    with pool.lease(4 * CHUNK):
        pass
    pool.reclaim()
    stub.refuse("cuMemUnmap", "CUDA_ERROR_UNKNOWN")
    idle_after(pool, 0.0)
    until(lambda: pool.statistics().growth_failed >= 3)
    assert (retiring(pool), pool.statistics().retired, physical(os.getpid())) == (1, 0, 4), "one is enough to know"
    assert not pool.growing([4 * CHUNK]), "its memory is still there"
    assert isinstance(pool.check_growth(), CudaError)
    assert pool.check_growth() is None
    stub.allow()
    shrink_to(pool, until, 0)
    assert (pool.statistics().retired, physical(os.getpid())) == (3, 1)
    with pool.lease(4 * CHUNK):
        pass


@pytest.mark.parametrize("problem", [CudaError("cuMemUnmap", "CUDA_ERROR_LAUNCH_FAILED"), "torch's"], ids=["ours", ""])
@pytest.mark.parametrize("call", ["grow", "shrink"])
def test_r10_a_context_that_is_lost_in_the_thread_is_told_to_who_asks_and_to_who_looks(
    create: Create, monkeypatch: pytest.MonkeyPatch, until: Until, call: str, problem: Any
) -> None:
    if problem == "torch's":
        problem = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    pool = create(4)
    growing = growth_of(pool)
    if call == "shrink":
        with pool.lease(3 * CHUNK):
            pass
        pool.reclaim()
    fail(monkeypatch, 99, problem, call)
    idle_after(pool, 0.0)
    if call == "grow":
        growing.ask([3 * CHUNK])
    until(lambda: pool.check_growth() is problem)
    assert pool.check_growth() is problem, "as often as anybody looks"
    for nbytes in (4 * CHUNK, 1):  # also what finds room: nobody could write it
        for ask in (lambda nbytes: pool.lease(nbytes).__enter__(), lambda nbytes: pool.fits([nbytes])):
            with pytest.raises(type(problem)) as raised:
                ask(nbytes)
            assert raised.value is problem
    assert out(pool) == 0
    statistics = pool.statistics()
    assert statistics.mapped_nbytes + statistics.retiring_nbytes <= 4 * CHUNK
    assert growing.patience_s() is None, "and nothing more is tried"


async def test_r10_a_stage_s_next_look_finds_the_lost_context(
    create: Create, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    pool, ended = create(4), []
    lost = CudaError("cuMemCreate", "CUDA_ERROR_ECC_UNCORRECTABLE")
    fail(monkeypatch, 1, lost)
    assert pool.growing([2 * CHUNK])
    until(lambda: pool.check_growth() is lost)
    monkeypatch.setattr("tensorferry.pipeline.process.stage.Broker", lambda *_, **__: Serving())
    stage = Stage.__new__(Stage)
    stage.origin, stage.runtime = Origin("encoder", 0, 7), SimpleNamespace(broker=lambda *_: "")  # type: ignore[assignment]
    stage.deployment, stage.mends = Deployment(name="a"), []
    stage.peers = SimpleNamespace(announce=lambda _: None, admitted=None)  # type: ignore[assignment]

    def end(problem: BaseException) -> None:
        ended.append(problem)
        raise asyncio.CancelledError  # the process ends here

    monkeypatch.setattr(stage, "outlive", end)
    async with AsyncExitStack() as undo:
        with pytest.raises(asyncio.CancelledError):
            await (await stage.hand_out(pool, undo))
    assert ended == [lost]


class Serving(AbstractAsyncContextManager[Any]):
    """As much of a Broker as a stage has without consumers."""

    mend = staticmethod(lambda: False)
    check_words = staticmethod(lambda: None)

    async def __aexit__(self, *_: object) -> None: ...


# --- the line -------------------------------------------------------------------------------------------------------


def narrow(sender: Sender, descriptor: int, made: Callable[[Sender, int], None] = Sender.__init__) -> None:
    """Make a line that takes a few packets, the kernel's least."""
    with socket.socket(fileno=os.dup(descriptor)) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    made(sender, descriptor)


def test_who_does_not_empty_its_line_is_dispatched_nothing_that_it_cannot_map(
    create: Create, start: Callable[[], Peer], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, stopped = create(40, slots=64), start()
    monkeypatch.setattr(Sender, "__init__", narrow)
    column = stopped.join(pool)
    until(lambda: pool.statistics().grown == 1)
    stopped.stop()
    with ExitStack() as leases:
        last = [leases.enter_context(pool.lease(CHUNK)) for _ in range(40)][-1]
        with pytest.raises(LeaseError, match="does not take its chunk at 39"):
            last.dispatch([column])
        stopped.signal(signal.SIGCONT)

        def is_sent() -> bool:
            stopped.ask("upkeep")
            try:
                last.dispatch([column])  # which sends it first
            except LeaseError:  # the pool's thread has filled the line again
                return False
            return True

        until(is_sent)
        last.data[:] = 3
        slot, generation, offset, _ = last.grant
    proxy = Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (CHUNK,))
    assert stopped.ask("read", encode(proxy))[2] == digest(b"\3" * CHUNK)
    stopped.ask("reset")


@pytest.mark.parametrize(
    ("replace", "problem"),
    [
        (lambda fds: fds[:2], "2 descriptors"),
        (lambda fds: [*fds[:2], fds[0]], "is not a line"),
        (lambda fds: [*fds[:2], fds[1]], "is not a line"),
    ],
)
def test_an_admission_without_a_line_is_refused(
    create: Create, replace: Callable[[list[int]], list[int]], problem: str
) -> None:
    pool = create(4)
    with Reader() as reader:
        attachment, fds = reader.attach(*pool.export())
        given = [os.dup(fd) for fd in replace(fds)]
        for fd in fds:
            os.close(fd)
        with pytest.raises(AttachRefused, match=problem):
            pool.admit(attachment, given)


def test_a_line_of_another_kind_is_refused(create: Create) -> None:
    pool = create(4)
    ours, theirs = socket.socketpair()
    with Reader() as reader, ours:
        attachment, fds = reader.attach(*pool.export())
        os.close(fds.pop())
        with pytest.raises(AttachRefused, match="no UNIX SEQPACKET socket"):
            pool.admit(attachment, [*fds, theirs.detach()])


@pytest.mark.parametrize(
    "lie",
    [
        {"chunk_nbytes": CHUNK // 2, "nbytes": 2 * CHUNK},  # which is as many positions
        {"chunk_nbytes": 3 * CHUNK},
        {"chunk_nbytes": 0},
        {"nbytes": 0},
    ],
)
def test_a_lie_about_chunks_is_refused(create: Create, lie: dict[str, int]) -> None:
    export, fds = create(4).export()
    lying = msgspec.structs.replace(export, description=msgspec.structs.replace(export.description, **lie))
    with Reader() as reader, pytest.raises(AttachRefused, match="a chunk is a multiple of"):
        reader.attach(lying, fds)


def test_packets_that_are_not_of_the_protocol_are_passed_over(create: Create) -> None:
    """By a consumer: too short, too long, without a descriptor, for positions that are taken or are none."""
    pool = create(4)
    with Reader() as reader:
        attachment, fds = reader.attach(*pool.export())
        with socket.socket(fileno=os.dup(fds[-1])) as line, closing(Sender(os.dup(fds[-1]))) as sender:
            column = pool.admit(attachment, fds)
            proxy = publish(pool, column, some(100))
            for packet in (b"", b"1234567", b"123456789"):
                socket.send_fds(line, [packet], [0])
            line.send(b"\1\0\0\0\3\0\0\0")
            for position in (0, 4, 0xFFFFFFFF):
                assert sender.send(9, position, 0)
        with reader.open(proxy) as view:
            assert digest(view.data) == digest(some(100))
        other = publish(pool, column, some(3 * CHUNK))
        reader.acknowledge(other)


def test_what_a_process_without_descriptors_cannot_take_it_does_not_hold(
    start: Callable[[], Peer],
    create: Create,
    until: Until,
    refused: Callable[..., AbstractContextManager[Any]],
) -> None:
    pool, peer = create(4), start()
    column = peer.join(pool)
    peer.ask("run_short_of_descriptors", True)
    payloads = fill(pool, column, 4)
    with refused("StaleLease", "which has not come"):
        peer.ask("read", payloads[-1])
    for payload in payloads[:-1]:
        peer.ask("acknowledge", payload)
    peer.ask("run_short_of_descriptors", False)
    shrink_to(pool, until)
    peer.ask("upkeep")
    until(lambda: retiring(pool) == 0)
    peer.ask("reset")


async def test_the_broker_admits_to_an_elastic_pool(create: Create, until: Until) -> None:
    pool = create(4)
    with tempfile.TemporaryDirectory(prefix="ferry-") as folder, Reader() as reader:
        path = f"{folder}/pool.sock"
        async with Broker(path, pool, lambda origin, column: None):
            column = await attach(path, Origin("encoder", 0, 7), pool.description.pool, reader, 20.0)
            proxy = publish(pool, column, some(2 * CHUNK))
            with reader.open(proxy) as view:
                assert digest(view.data) == digest(some(2 * CHUNK))
