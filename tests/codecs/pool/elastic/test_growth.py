"""Elastic pools between real processes, over a driver whose memory is memfds: how they grow.

What a GPU does with the same code is tested in `tests/gpu`. Touching what is not mapped is a segmentation fault here
too, and memory is there for as long as anybody has it mapped or holds a descriptor of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.codecs.pool.elastic.elastic_pools import (
    CHUNK,
    FOREVER_S,
    MIB,
    WAIT_S,
    Create,
    Peer,
    Stub,
    Until,
    calls,
    connect_here,
    digest,
    encode,
    fill,
    growth_of,
    held_up,
    is_at,
    look_again,
    mapped,
    out,
    physical,
    publish,
    shrink_to,
    some,
)

from tensorferry.codecs.errors import PoolFull
from tensorferry.codecs.memory.cuda_driver import CudaError
from tensorferry.codecs.memory.cuda_vmm import BudgetTooSmall, VmmSegment
from tensorferry.codecs.pool.elastic import growth_state
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader

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


def test_a_lease_waits_no_longer_than_grow_wait_s(create: Create, stub: Stub, until: Until) -> None:
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


def test_an_impatient_lease_does_not_wait(create: Create, until: Until) -> None:
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


def test_r10_a_lost_context_is_raised_by_every_lease(create: Create, stub: Stub, until: Until) -> None:
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


# --- R7: giving up what somebody may still use ------------------------------------------------------------------------


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
    shrink_to(pool, until, 0)
    assert locked == [False] * 6


def test_the_thread_takes_back_what_was_acknowledged_before_it_grows(create: Create, until: Until) -> None:
    pool = create(4)
    with Reader() as reader:
        column = connect_here(pool, reader)
        reader.acknowledge(publish(pool, column, some(CHUNK)))
        look_again(pool, until)
        until(lambda: pool.statistics().lent_slots == 0)


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
