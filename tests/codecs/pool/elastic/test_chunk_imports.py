"""What a consumer of an elastic pool has mapped, what a proxy finds, and what it gives up; see `test_growth.py`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import pytest
from tests.codecs.pool.elastic.elastic_pools import (
    CHUNK,
    WAIT_S,
    Create,
    Pages,
    Peer,
    Stub,
    Until,
    calls,
    connect_here,
    digest,
    encode,
    fill,
    here,
    look_again,
    mapped,
    mapped_here,
    out,
    physical,
    publish,
    retiring,
    shrink_to,
    some,
)

from tensorferry.codecs.errors import LeaseError, PeerGone
from tensorferry.codecs.memory.cuda_driver import CudaError
from tensorferry.codecs.memory.cuda_vmm import VmmImport
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.elastic.chunk_imports import ChunkImports
from tensorferry.codecs.pool.elastic.descriptor_line import Receiver, Sender
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES

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
def test_a_chunk_that_cannot_be_mapped_or_unmapped_does_not_hold_up_the_others(
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


def test_r7_a_chunk_sent_to_a_reader_that_detaches_counts_as_not_sent(
    create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_b2_a_reader_that_detaches_waits_for_the_device_and_then_frees_its_addresses(
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
