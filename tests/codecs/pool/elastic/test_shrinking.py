"""When an elastic pool gives chunks back, and what keeps them; see `test_growth.py`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import pytest
from tests.codecs.pool.elastic.elastic_pools import (
    CHUNK,
    IDLE_S,
    Create,
    Pages,
    Peer,
    Stub,
    Until,
    connect_here,
    digest,
    encode,
    fill,
    growth_of,
    idle_after,
    is_at,
    look_again,
    mapped,
    out,
    physical,
    publish,
    retiring,
    shrink_to,
    some,
)

from tensorferry.codecs.errors import PoolFull
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.reader import Reader

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


# --- R7: giving up what somebody may still use ------------------------------------------------------------------------


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
