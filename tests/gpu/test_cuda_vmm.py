"""Elastic pools on a GPU: memory that comes and goes while others read, and what is left when somebody stops or dies.

Between real processes. What both kinds of pools share is tested in `test_cuda_pools.py`, and the decisions without a
GPU in `tests/codecs/pool/elastic/`.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from tests.gpu.busy import keep_busy

from tensorferry.codecs.errors import LeaseNotReady, PoolFull, StaleLease
from tensorferry.codecs.memory.cuda_driver import Driver
from tensorferry.codecs.messages import Chunks, Confirmed, Proxy, Released, Retired
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import view_of

MIB = 1 << 20
CHUNK = 64 * MIB
IDLE_S, FOREVER_S = 0.02, 1000.0
WAIT_S = 20.0
Peer = Any
Connect = Callable[[Pool, Peer], int]
encode = msgspec.msgpack.encode
pytestmark = pytest.mark.alone


@pytest.fixture
def create(torch: Any) -> Iterator[Callable[..., Pool]]:
    """Pools of so many chunks."""
    with ExitStack() as pools:

        def make(chunks: int, *, idle_s: float = FOREVER_S, grow_wait_s: float = WAIT_S, **options: Any) -> Pool:
            options |= {"chunk_nbytes": CHUNK, "idle_s": idle_s, "grow_wait_s": grow_wait_s}
            return pools.enter_context(Pool.create(chunks * CHUNK, 64, memory="cuda_vmm", **options))

        yield make
        torch.cuda.synchronize()


def idle_after(pool: Pool, idle_s: float) -> None:
    """Give idle chunks back after so long from now on."""
    assert pool.growth is not None
    pool.growth.idle_s = idle_s


def shrink_to(pool: Pool, until: Any, retiring: int | None = None) -> None:
    """Wait until the spare is all that is mapped, and so much retired; then shrink no more."""
    idle_after(pool, IDLE_S)
    until(lambda: is_at(pool, 1, retiring))
    idle_after(pool, FOREVER_S)


def some(torch: Any, nbytes: int, seed: int) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)


def digest(tensor: Any) -> str:
    return hashlib.blake2b(bytes(view_of(tensor.cpu()).data), digest_size=16).hexdigest()


def publish(pool: Pool, column: int, tensor: Any) -> Proxy:
    with Publisher(pool).publish(tensor) as draft:
        [proxy] = draft.dispatch(column, [])
    assert isinstance(proxy, Proxy), "there was no room"
    return proxy


def held(torch: Any) -> int:
    """Bytes of the GPU that are in use, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def fill_up(pool: Pool, leases: ExitStack) -> None:
    """Take a chunk's worth again and again, until there is no room."""
    for _ in range(pool.description.nbytes // CHUNK + 1):
        try:
            leases.enter_context(pool.lease(CHUNK))
        except PoolFull:
            return
    raise AssertionError("the pool lent more than it has")


def is_at(pool: Pool, mapped: int, retiring: int | None = None) -> bool:
    """Whether it has so many chunks, after a pass to take back what was acknowledged."""
    while pool.reclaim():
        pass
    statistics = pool.statistics()
    there = statistics.mapped_nbytes == mapped * CHUNK
    return there and (retiring is None or statistics.retiring_nbytes == retiring * CHUNK)


def test_an_idle_pool_holds_one_chunk_and_a_full_one_its_budget(
    torch: Any, create: Any, gpu_peer: Peer, connect: Connect, until: Any
) -> None:
    gpu_peer.ask("start")
    with Pool.create(2 * MIB, 8, memory="cuda_vmm") as small:  # contexts, kernels and local memory of both are there
        payload = encode(publish(small, connect(small, gpu_peer), torch.ones(MIB, dtype=torch.uint8, device="cuda")))
        gpu_peer.ask("read", payload)
        gpu_peer.ask("detach", small.description.pool)
    torch.cuda.empty_cache()
    before = held(torch)
    pool = create(16)
    column = connect(pool, gpu_peer)
    until(lambda: is_at(pool, 1))
    assert held(torch) - before <= CHUNK + 4 * MIB
    source = torch.ones(CHUNK, dtype=torch.uint8, device="cuda")
    with_source = held(torch)
    payloads = [encode(publish(pool, column, source)) for _ in range(16)]
    assert pool.statistics().mapped_nbytes == 16 * CHUNK
    assert 15 * CHUNK <= held(torch) - with_source <= 15 * CHUNK + 16 * MIB
    for payload in payloads:
        gpu_peer.ask("read", payload)
    torch.cuda.synchronize()
    shrink_to(pool, until)
    gpu_peer.ask("upkeep")
    assert is_at(pool, 1, 0)
    del source
    torch.cuda.empty_cache()
    assert held(torch) - before <= CHUNK + 4 * MIB
    gpu_peer.ask("detach", pool.description.pool)
    pool.close()
    assert held(torch) == before


def test_a_tensor_over_three_chunks(torch: Any, create: Any, gpu_peer: Peer, connect: Connect) -> None:
    pool = create(6)
    column = connect(pool, gpu_peer)
    with pool.lease(CHUNK // 2):
        tensor = some(torch, 3 * CHUNK - 1000, 1)
        proxy = publish(pool, column, tensor)
        assert proxy.offset == CHUNK // 2
        assert gpu_peer.ask("read", encode(proxy))[2] == digest(tensor)


def test_copied_across_chunks_in_this_process(torch: Any, create: Any, until: Any) -> None:
    pool = create(4)
    with Reader() as reader:
        column = pool.admit(*reader.attach(*pool.export()))
        tensor = some(torch, 2 * CHUNK + 8, 2)
        proxy = publish(pool, column, tensor)
        until(lambda: reader.is_ready(proxy))
        into = torch.empty_like(tensor)
        reader.copy(proxy, view_of(into))
        assert torch.equal(into, tensor)
        torch.cuda.synchronize()


def test_a13_what_was_retired_and_grown_again_is_read_anew(
    torch: Any, create: Any, gpu_peer: Peer, connect: Connect, until: Any
) -> None:
    pool = create(4)
    column = connect(pool, gpu_peer)
    offsets = []
    for life in range(3):
        tensors = [some(torch, CHUNK, 10 * life + number) for number in range(4)]
        proxies = [publish(pool, column, tensor) for tensor in tensors]
        offsets.append(sorted(proxy.offset for proxy in proxies))
        for tensor, proxy in zip(tensors, proxies, strict=True):
            assert gpu_peer.ask("read", encode(proxy))[2] == digest(tensor)
        shrink_to(pool, until, 3)
        assert not pool.growing([4 * CHUNK]), "the old memory is mapped over there"
        gpu_peer.ask("upkeep")
        assert is_at(pool, 1, 0)
        with pytest.raises(Exception, match="StaleLease"):
            gpu_peer.ask("read", encode(proxies[0]))
    assert offsets == [[0, CHUNK, 2 * CHUNK, 3 * CHUNK]] * 3


def test_c3_a_stopped_importer_pins_its_chunks_alone(
    torch: Any, create: Any, start_peer: Callable[..., Peer], connect: Connect, until: Any
) -> None:
    stopped, other = start_peer("gpu_peer.py", "ignore"), start_peer("gpu_peer.py", "ignore")
    pool = create(6)
    columns = connect(pool, stopped), connect(pool, other)
    tensor = some(torch, CHUNK, 3)
    for proxy in [publish(pool, columns[0], tensor) for _ in range(2)]:
        stopped.ask("read", encode(proxy))
    torch.cuda.synchronize()
    until(lambda: pool.reclaim() or not pool.statistics().lent_slots)
    stopped.stop()
    for proxy in [publish(pool, columns[1], tensor) for _ in range(4)]:
        other.ask("read", encode(proxy))
    torch.cuda.synchronize()
    shrink_to(pool, until)
    other.ask("upkeep")
    pinned = pool.statistics().retiring_nbytes
    assert 0 < pinned < 6 * CHUNK
    before = held(torch)
    for seed in range(10):
        tensor = some(torch, CHUNK, seed)
        assert other.ask("read", encode(publish(pool, columns[1], tensor)))[2] == digest(tensor)
        torch.cuda.synchronize()
        until(lambda: pool.reclaim() or not pool.statistics().lent_slots)
    statistics = pool.statistics()
    assert statistics.mapped_nbytes + statistics.retiring_nbytes <= 6 * CHUNK
    stopped.signal(signal.SIGCONT)
    stopped.ask("upkeep")
    shrink_to(pool, until)
    other.ask("upkeep")
    stopped.ask("upkeep")
    assert is_at(pool, 1, 0)
    assert held(torch) <= before + 2 * CHUNK - pinned + 16 * MIB


@pytest.mark.parametrize("moment", ["growing", "shrinking"])
def test_c3_an_importer_killed_while_chunks_come_and_go(
    torch: Any, create: Any, start_peer: Callable[..., Peer], connect: Connect, until: Any, moment: str
) -> None:
    before = held(torch)
    doomed = start_peer("gpu_peer.py", "ignore")
    pool = create(8)
    column = connect(pool, doomed)
    tensor = some(torch, CHUNK, 4)
    proxies = [publish(pool, column, tensor) for _ in range(4)]
    for proxy in proxies[:2]:
        doomed.ask("read", encode(proxy))
    if moment == "growing":
        doomed.send("upkeep")
        proxies += [publish(pool, column, tensor) for _ in range(4)]
    else:
        for proxy in proxies[2:]:
            doomed.ask("acknowledge", encode(proxy))
        idle_after(pool, IDLE_S)
        until(lambda: is_at(pool, 1))
        doomed.send("upkeep")
    doomed.signal(signal.SIGKILL)
    until(lambda: pool.strike_dead() == [column])
    shrink_to(pool, until, 0)
    del tensor, proxies
    torch.cuda.empty_cache()
    until(lambda: held(torch) <= before + CHUNK + 16 * MIB)


@pytest.mark.parametrize("moment", ["growing", "shrinking"])
def test_c3_a_producer_killed_while_chunks_come_and_go(
    torch: Any, gpu_peer: Peer, connect_to: Any, until: Any, moment: str
) -> None:
    torch.cuda.empty_cache()
    before = held(torch)
    options = {"memory": "cuda_vmm", "chunk_nbytes": CHUNK, "idle_s": IDLE_S, "grow_wait_s": WAIT_S}
    with Reader() as reader:
        gpu_peer.ask("create", 16 * CHUNK, 64, options)
        column, pool = connect_to(gpu_peer, reader)
        written = [
            msgspec.msgpack.decode(gpu_peer.ask("publish", column, CHUNK, byte, 0), type=Proxy) for byte in range(3)
        ]
        for proxy in written:
            until(lambda proxy=proxy: reader.is_ready(proxy))
        if moment == "growing":
            gpu_peer.send("demand", 12 * CHUNK)
        else:
            for proxy in written[1:]:
                reader.acknowledge(proxy)
            del written[1:]
            gpu_peer.ask("out")
        gpu_peer.signal(signal.SIGKILL)
        gpu_peer.wait()
        for byte, proxy in enumerate(written):
            with reader.open(proxy) as view:
                assert bool((view.torch() == byte).all()), "what was ready stays readable"
        reader.upkeep()
        torch.cuda.synchronize()
        reader.detach(pool)
    torch.cuda.empty_cache()
    until(lambda: held(torch) <= before + 16 * MIB)


def test_no_memory_on_the_gpu_is_a_full_pool(torch: Any, create: Any, until: Any) -> None:
    """For real: another allocation takes nearly all that there is."""
    pool = create(64, grow_wait_s=2.0)
    until(lambda: pool.statistics().grown)
    torch.cuda.empty_cache()
    taken = Driver.load()
    with taken.context(0):
        free = torch.cuda.mem_get_info()[0]
        pointer = taken.allocate(free - 3 * CHUNK)
        try:
            with ExitStack() as leases:
                fill_up(pool, leases)
            statistics = pool.statistics()
            assert statistics.growth_refused >= 1
            assert 1 <= statistics.mapped_nbytes // CHUNK <= 5
        finally:
            taken.free(pointer)
    until(lambda: pool.reclaim() or not pool.statistics().lent_slots)
    until(lambda: pool.fits([CHUNK] * 8), deadline_s=WAIT_S)


def test_b2_a_chunk_under_queued_reads_is_not_unmapped(torch: Any, create: Any, until: Any) -> None:
    """Neither side's: the lease is out until the reads are done, and only then anything is retired."""
    pool = create(4, idle_s=0.02)
    with Reader() as reader:
        column = pool.admit(*reader.attach(*pool.export()))
        proxy = publish(pool, column, torch.full((4 * CHUNK,), 5, dtype=torch.uint8, device="cuda"))
        until(lambda: reader.is_ready(proxy))
        with reader.open(proxy) as view:
            keep_busy(torch, 300)
            right = (view.torch() == 5).all()
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            pool.reclaim()
            reader.upkeep()
            assert torch.cuda.current_stream().query() or pool.statistics().mapped_nbytes == 4 * CHUNK
        assert bool(right)
        until(lambda: is_at(pool, 1))
        reader.upkeep()
        assert is_at(pool, 1, 0)
        torch.cuda.synchronize()
        with pytest.raises(StaleLease), reader.open(proxy):
            raise AssertionError("opened")


def test_growth_goes_on_beside_a_stream_that_is_held_up(torch: Any, create: Any, until: Any) -> None:
    """B1: no call that it takes waits for a stream."""
    pool = create(8)
    until(lambda: pool.statistics().grown)
    keep_busy(torch, 2000)
    started = time.monotonic()
    with pool.lease(6 * CHUNK):
        pass
    assert time.monotonic() - started < 1.0
    assert not torch.cuda.current_stream().query(), "the stream was busy all the while"
    torch.cuda.synchronize()


@pytest.mark.timeout(240)
def test_l4_100_times_to_the_budget_and_back(
    torch: Any, create: Any, gpu_peer: Peer, connect: Connect, until: Any, belongings: Any
) -> None:
    pool = create(8)
    column = connect(pool, gpu_peer)
    tensor = torch.ones(CHUNK, dtype=torch.uint8, device="cuda")

    def there_and_back() -> None:
        for proxy in [publish(pool, column, tensor) for _ in range(8)]:
            gpu_peer.ask("acknowledge", encode(proxy))
        shrink_to(pool, until)
        gpu_peer.ask("upkeep")
        until(lambda: is_at(pool, 1, 0))

    there_and_back()
    torch.cuda.synchronize()
    before, memory = belongings(), held(torch)
    for _ in range(100):
        there_and_back()
    torch.cuda.synchronize()
    assert held(torch) == memory
    more = [name for name in belongings().gained_since(before) if "nvidia" not in name]
    assert not more
    assert pool.statistics().grown == 1 + 7 * 101


@pytest.mark.usefixtures("two_gpus")
def test_a_consumer_on_a_peer_gpu_reads_what_grows(
    torch: Any, create: Any, start_peer: Callable[..., Peer], connect: Connect, until: Any
) -> None:
    peer = start_peer("gpu_peer.py", "ignore")
    peer.ask("start", 1)
    pool = create(6, idle_s=2.0)  # longer than between two of them: what is retired waits for the peer's upkeep
    column = connect(pool, peer)
    for seed in range(6):
        tensor = some(torch, 2 * CHUNK + 4096, seed)
        assert peer.ask("read", encode(publish(pool, column, tensor)))[2] == digest(tensor)
    shrink_to(pool, until)
    peer.ask("upkeep")
    assert is_at(pool, 1, 0)


# --- by message ---------------------------------------------------------------------------------------------------


def tell(pool: Pool, reader: Reader) -> int:
    """Bring each what the other has to say; how many leases were acknowledged."""
    acknowledged = 0
    for letter in pool.letters():
        reader.hear(msgspec.msgpack.decode(encode(letter.message), type=Chunks | Retired | Confirmed))
    for letter in reader.letters():
        released = msgspec.msgpack.decode(encode(letter.message), type=Released)
        acknowledged += len(released.leases)
        answer = pool.hear(released)
        if answer is not None:
            reader.hear(msgspec.msgpack.decode(encode(answer.message), type=Confirmed))
    return acknowledged


def test_by_message_complete_bytes_are_told_of_and_finished_reads(torch: Any, create: Any, until: Any) -> None:
    """Neither side's host waits for its stream, which has 100 ms to do each time."""
    pool, stream = create(2, mail="posix_fd"), torch.cuda.Stream()
    assert (torch.full((8,), 7, dtype=torch.uint8, device="cuda") == 7).all()  # loading a kernel waits for the device
    with Reader() as reader:
        column = pool.admit(*reader.attach(*pool.export()))
        with torch.cuda.stream(stream), Publisher(pool).draft([("uint8", (CHUNK,))]) as draft:
            keep_busy(torch, 100)
            draft.views[0].torch().fill_(7)
            assert not draft.prepared(column)
            with pytest.raises(LeaseNotReady):
                draft.dispatch(column, [])
            until(lambda: draft.prepared(column))
            [proxy] = draft.dispatch(column, [])
        tell(pool, reader)
        with torch.cuda.stream(stream), reader.open(proxy) as view:
            keep_busy(torch, 100)
            right = (view.torch() == 7).all()
        assert tell(pool, reader) == 0, "the read is queued"
        assert not is_at(pool, 1)
        until(lambda: tell(pool, reader) == 1)
        pool.reclaim()
        assert pool.statistics().lent_slots == 0
        assert right.item()
        shrink_to(pool, until, 1)
        tell(pool, reader)
        reader.upkeep()
        tell(pool, reader)
        assert is_at(pool, 1, 0)


def test_by_message_10_000_items_through_a_pool_that_holds_8(torch: Any, create: Any, gpu_peer: Peer) -> None:
    gpu_peer.ask("start")
    pool = create(1, mail="posix_fd")
    column, nbytes, seen = gpu_peer.join(pool), 8 * MIB, 0
    publisher, under_way = Publisher(pool), deque[tuple[Any, int]]()
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(10_000):
            while len(under_way) == 8 or not pool.fits([nbytes]):
                seen += exchange(pool, gpu_peer, under_way, column)
            draft = publisher.draft([("uint8", (nbytes,))])
            draft.__enter__()
            draft.views[0].torch().fill_(number % 251)
            under_way.append((draft, number % 251))
        while seen < 10_000:
            seen += exchange(pool, gpu_peer, under_way, column)
    assert gpu_peer.ask("wrong") == 0


def exchange(pool: Pool, peer: Peer, under_way: deque[tuple[Any, int]], column: int) -> int:
    """Send what is complete, and bring the letters; how many were sent."""
    told = [encode(letter.message) for letter in pool.letters()]
    proxies = []
    while under_way and under_way[0][0].prepared(column):
        draft, byte = under_way.popleft()
        proxies.append((encode(draft.dispatch(column, [])[0]), byte))
        draft.__exit__()
    for released in peer.ask("exchange", told, proxies):
        answer = pool.hear(msgspec.msgpack.decode(released, type=Released))
        if answer is not None:
            peer.ask("exchange", [encode(answer.message)], [])
    return len(proxies)
