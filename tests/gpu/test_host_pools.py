"""Host pools with a GPU at either end: the pages are registered, the words are stored by streams."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.gpu.busy import keep_busy

from tensorferry.codecs.errors import PeerGone
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import View, view_of

MIB = 1 << 20
LONG_MS = 300
Peer = Any
Connect = Callable[[Pool, Peer], int]
Feed = Callable[..., int]
encode = msgspec.msgpack.encode


@pytest.fixture
def written_by_gpu(torch: Any) -> Iterator[Pool]:
    with Pool.create(8 * MIB, 8, device=0) as pool:
        yield pool


@pytest.fixture
def written_by_host(torch: Any) -> Iterator[Pool]:
    with Pool.create(8 * MIB, 8) as pool:
        yield pool


def publish(pool: Pool, column: int, tensor: Any) -> Proxy:
    with Publisher(pool).publish(tensor) as draft:
        assert draft.transport == "shm"
        [payload] = draft.dispatch(column, [])
    assert isinstance(payload, Proxy)
    return payload


def out(pool: Pool) -> int:
    pool.reclaim()
    return pool.statistics().lent_slots


def test_what_a_gpu_writes_is_read_without_one(
    torch: Any, written_by_gpu: Pool, gpu_peer: Peer, connect: Connect, until: Any
) -> None:
    """The peer's reader was given no device, so it looks at the pages themselves."""
    column = connect(written_by_gpu, gpu_peer)
    for seed in range(20):  # more than there are slots
        tensor = torch.randint(0, 256, (100 + seed, 1000), dtype=torch.uint8, device="cuda")
        proxy = publish(written_by_gpu, column, tensor)
        wanted = hashlib.blake2b(tensor.cpu().numpy().tobytes(), digest_size=16).hexdigest()
        assert gpu_peer.ask("read", encode(proxy)) == ["uint8", [100 + seed, 1000], wanted]
        until(lambda: not out(written_by_gpu))


def test_ready_comes_after_what_the_gpu_writes(torch: Any, written_by_gpu: Pool, until: Any) -> None:
    with Reader() as reader:
        column = written_by_gpu.admit(*reader.attach(*written_by_gpu.export()))
        with Publisher(written_by_gpu).draft([("int32", (1000,))]) as draft:
            keep_busy(torch, LONG_MS)
            draft.views[0].torch().fill_(5)
            [proxy] = draft.dispatch(column, [])
        assert isinstance(proxy, Proxy)
        assert not reader.is_ready(proxy)
        until(lambda: reader.is_ready(proxy))
        with reader.open(proxy) as view:
            assert view.on_host
            assert view.numpy().tolist() == [5] * 1000
        assert out(written_by_gpu) == 0


def test_a_reader_on_a_gpu_has_local_copies_of_what_the_host_wrote(
    torch: Any, written_by_host: Pool, until: Any
) -> None:
    array = np.arange(30_000, dtype=np.float32).reshape(300, 100)
    with Reader(device=0) as reader:
        column = written_by_host.admit(*reader.attach(*written_by_host.export()))
        proxies = [publish(written_by_host, column, array + number) for number in range(4)]
        keep_busy(torch, LONG_MS)
        with reader.open(proxies[0]) as view:
            first = view.torch()
        batch = View.empty("float32", (900, 100), 0)
        for number, proxy in enumerate(proxies[1:]):
            reader.copy(proxy, batch.rows(300 * number, 300 * number + 300))
        assert out(written_by_host) == 4, "the copies are behind other work"
        torch.cuda.synchronize()
        assert out(written_by_host) == 0
        assert torch.equal(first.cpu(), torch.from_numpy(array))
        for number in range(3):
            rows = batch.torch()[300 * number : 300 * number + 300]
            assert torch.equal(rows.cpu(), torch.from_numpy(array + number + 1))


def test_no_host_wait_at_either_end(torch: Any, written_by_gpu: Pool, no_host_waits: Any, until: Any) -> None:
    source = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    into = view_of(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
    with Reader(device=0) as reader:
        column = written_by_gpu.admit(*reader.attach(*written_by_gpu.export()))
        with no_host_waits():
            for _ in range(50):
                until(lambda: written_by_gpu.fits([MIB]))
                proxy = publish(written_by_gpu, column, source)
                until(lambda proxy=proxy: reader.is_ready(proxy))
                reader.copy(proxy, into)
        torch.cuda.synchronize()
        assert out(written_by_gpu) == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("nbytes", [4 << 10, 64 << 10, MIB])
@pytest.mark.parametrize("straight", [False, True], ids=["opened", "copied"])
def test_10_000_items_from_gpu_to_gpu_through_host_memory(
    torch: Any, start_peer: Callable[..., Peer], connect: Connect, feed: Feed, nbytes: int, straight: bool
) -> None:
    last = torch.cuda.device_count() - 1
    peer = start_peer("gpu_peer.py", "ignore", CUDA_VISIBLE_DEVICES=str(last))
    peer.ask("start", 0)
    with Pool.create(8 * nbytes, 8, device=0) as pool:
        assert feed(pool, peer, connect(pool, peer), 10_000, nbytes, early=False, straight=straight) == 0


def test_l12_a_consumer_killed_in_the_middle_of_its_copies(
    torch: Any, written_by_host: Pool, gpu_peer: Peer, connect: Connect, until: Any
) -> None:
    gpu_peer.ask("start", 0)
    column = connect(written_by_host, gpu_peer)
    gpu_peer.ask("busy", 1000)
    gpu_peer.ask("hog", encode(publish(written_by_host, column, np.ones(MIB, np.uint8))))
    publish(written_by_host, column, np.ones(MIB, np.uint8))  # and this one it never sees
    assert out(written_by_host) == 2
    gpu_peer.signal(signal.SIGKILL)
    until(lambda: written_by_host.strike_dead() == [column])
    assert out(written_by_host) == 0


def test_l12_a_producer_killed_in_the_middle_of_its_writes(
    torch: Any, gpu_peer: Peer, connect_to: Any, until: Any
) -> None:
    with Reader() as reader:
        gpu_peer.ask("create", 8 * MIB, 8, {"memory": "host", "device": 0})
        column, _ = connect_to(gpu_peer, reader)
        written = msgspec.msgpack.decode(gpu_peer.ask("publish", column, MIB, 5, 0), type=Proxy)
        until(lambda: reader.is_ready(written))
        unwritten = msgspec.msgpack.decode(gpu_peer.ask("publish", column, MIB, 6, 3000), type=Proxy)
        assert not reader.is_ready(unwritten)
        gpu_peer.signal(signal.SIGKILL)
        gpu_peer.wait()
        with pytest.raises(PeerGone):
            until(lambda: reader.is_ready(unwritten))
        with reader.open(written) as view:  # what was ready stays readable
            assert bool((view.numpy() == 5).all())
