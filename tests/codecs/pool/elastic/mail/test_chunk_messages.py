"""Chunks of pools that share no pages: what each side says of them by message, and answers; see `test_mail.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest
from tests.codecs.pool.elastic.mail.mail_pools import (
    CHUNK,
    Create,
    Peer,
    Stub,
    Until,
    connect,
    digest,
    messages,
    out,
    publish,
    retiring,
    shrink,
    some,
    tell,
)

from tensorferry.codecs.errors import PeerGone
from tensorferry.codecs.messages import (
    Chunk,
    Chunks,
    Proxy,
    Released,
    Retired,
)
from tensorferry.codecs.pool.control import AckPage
from tensorferry.codecs.pool.elastic import mail
from tensorferry.codecs.pool.elastic.chunk_imports import ChunkImports
from tensorferry.codecs.pool.elastic.descriptor_line import Arrived
from tensorferry.codecs.pool.elastic.mail import Letter, ReleaseMail
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.reader import Reader


def test_a_retired_chunk_counts_until_its_consumer_says_that_it_has_dropped_it(
    create: Create, reader: Reader, until: Until
) -> None:
    pool = create(4)
    column = connect(pool, reader)
    proxy = publish(pool, column, some(4 * CHUNK))
    tell(pool, reader)
    with reader.open(proxy) as view:
        assert digest(view.data) == digest(some(4 * CHUNK))
    tell(pool, reader)
    shrink(pool, until)
    assert retiring(pool) == 3
    tell(pool, reader)
    assert retiring(pool) == 3, "it has heard of it, and has them mapped"
    reader.upkeep()
    tell(pool, reader)
    until(lambda: retiring(pool) == 0)
    again = publish(pool, column, some(4 * CHUNK, 1))
    tell(pool, reader)
    with reader.open(again) as view:
        assert digest(view.data) == digest(some(4 * CHUNK, 1)), "in other chunks, at the same places"


@pytest.mark.usefixtures("impatient")
def test_messages_about_chunks_may_be_lost_or_late(create: Create, reader: Reader, until: Until) -> None:
    """The retirement is heard before the chunk; the answers are lost; the chunk is told of once more."""
    pool = create(2)
    column = connect(pool, reader)
    proxy = publish(pool, column, some(2 * CHUNK))
    [chunks] = messages(pool.letters())
    assert messages(pool.letters()) == [chunks], "nobody has answered"
    reader.acknowledge(proxy)
    tell(pool, reader)
    assert pool.letters() == []
    shrink(pool, until)
    retired = messages(pool.letters())
    assert [type(message) for message in retired] == [Retired]
    reader.hear(retired[0])
    reader.upkeep()
    lost = messages(reader.letters())
    assert lost[0].dropped == (retired[0].chunks[0].serial,)
    assert reader.letters() == []
    reader.hear(chunks)  # late
    reader.upkeep()
    tell(pool, reader)
    until(lambda: retiring(pool) == 0)  # the pool's own thread may still have been unmapping it
    assert pool.letters() == []
    again = publish(pool, column, some(2 * CHUNK, 1))
    tell(pool, reader)
    with reader.open(again) as view:
        assert digest(view.data) == digest(some(2 * CHUNK, 1))


def test_a_chunk_whose_announcement_was_lost_is_dropped_all_the_same(
    create: Create, reader: Reader, until: Until
) -> None:
    pool = create(4)
    column = connect(pool, reader)
    with pool.lease(4 * CHUNK):
        first = messages(pool.letters())  # and lost
    assert first
    shrink(pool, until)
    assert retiring(pool) == 3
    for message in messages(pool.letters()):
        assert isinstance(message, Retired), "the others are not said again before their time"
        reader.hear(message)
    reader.upkeep()
    tell(pool, reader)
    until(lambda: retiring(pool) == 0)
    assert column == 0


def test_r7_a_reader_that_detaches_answers_for_what_it_had(create: Create, reader: Reader, until: Until) -> None:
    pool = create(3)
    column = connect(pool, reader)
    proxy = publish(pool, column, some(2 * CHUNK))
    tell(pool, reader)
    with reader.open(proxy):
        reader.detach(pool.description.pool)
    assert out(pool) == 1
    tell(pool, reader)
    assert out(pool) == 0, "its last acknowledgement is still said"
    shrink(pool, until)
    tell(pool, reader)
    until(lambda: retiring(pool) == 0)


def test_r7_a_reader_that_detaches_answers_for_chunks_it_was_asked_to_drop(
    create: Create, reader: Reader, until: Until
) -> None:
    pool = create(3)
    column = connect(pool, reader)
    tell(pool, reader)
    proxy = publish(pool, column, some(3 * CHUNK))
    tell(pool, reader)
    with reader.open(proxy):
        pass
    tell(pool, reader)
    shrink(pool, until)
    tell(pool, reader)
    assert retiring(pool) == 2, "it is asked, and has not looked yet"
    reader.detach(proxy.pool)
    tell(pool, reader)
    until(lambda: retiring(pool) == 0)  # without being asked again


def test_r8_a_consumer_elsewhere_is_dead_when_its_supervisor_says_so(stub: Stub, until: Until) -> None:
    with Pool.create(4 * CHUNK, 8, memory="cuda_vmm", chunk_nbytes=CHUNK, mail="fabric", grow_wait_s=20.0) as pool:
        with Reader() as reader:
            column = connect(pool, reader)
            publish(pool, column, some(4 * CHUNK))
            tell(pool, reader)
        assert pool.strike_dead() == [], "nothing proves it here"
        assert out(pool) == 1
        pool.strike(column)
        shrink(pool, until)
        until(lambda: retiring(pool) == 0)
        assert pool.letters() == []
        assert pool.hear(Released(pool.description.pool, reader.consumer, ())) is None


def test_r8_a_producer_elsewhere_is_dead_when_its_supervisor_says_so(create: Create, reader: Reader) -> None:
    pool = create(3)
    column = connect(pool, reader)
    proxy = publish(pool, column, some(100))
    tell(pool, reader)
    late = publish(pool, column, some(2 * CHUNK))  # more than what there was and the spare: another chunk comes
    assert reader.orphans() == frozenset()
    reader.producer_died(pool.producer)
    assert reader.orphans() == {proxy.pool}
    with reader.open(proxy) as view:
        assert digest(view.data) == digest(some(100)), "what has come can still be read"
    with pytest.raises(PeerGone, match="died before"):
        reader.is_ready(late)
    reader.detach(proxy.pool)
    assert reader.letters() == [], "nobody is there to be told"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("told", [True, False], ids=["by its supervisor", "by its pidfd"])
def test_r7_a_producer_that_ends_after_a_detach_is_sent_nothing_more(
    stub: Stub, start_peer: Callable[..., Peer], belongings: Callable[[], Any], until: Until, told: bool
) -> None:
    producer = start_peer("chunk_peer.py", **stub.environ)
    options = {"memory": "cuda_vmm", "chunk_nbytes": CHUNK, "mail": "posix_fd", "grow_wait_s": 20.0}
    with Reader() as reader:
        before = belongings()
        producer.ask("create", 2 * CHUNK, 8, options)
        column, pool = producer.offer(reader)
        epoch = reader._pools[pool].producer_epoch
        reader.acknowledge(msgspec.msgpack.decode(producer.ask("publish", column, bytes(100)), type=Proxy))
        reader.detach(pool)
        for _ in range(2):
            assert [letter.to for letter in reader.letters()] == [epoch], "it lives, and may not have heard"
        if told:
            reader.producer_died(epoch + 1)
            assert reader.letters()
            reader.producer_died(epoch)
            assert reader.letters() == []
        producer.kill()
        assert (reader.orphans(), reader.letters(), reader._mail) == (frozenset(), [], {})
        until(lambda: not belongings().gained_since(before))


class Late:
    """A line, and what is said of it: a chunk comes and is retired in the moment in which the line was found empty."""

    nbytes = CHUNK

    def __init__(self) -> None:
        self.chunks, self.asked, self.dropped = list[Arrived](), list[tuple[int, int]](), list[tuple[int, int]]()

    def receive(self) -> Arrived | None:
        if self.chunks:
            return self.chunks.pop()
        if not self.asked:
            self.chunks, self.asked = [Arrived(1, 0, b"handle")], [(0, 1)]
        return None

    def retired(self) -> list[tuple[int, int]]:
        return list(self.asked)

    def is_over(self, position: int, serial: int) -> bool:
        return True

    def drop(self, position: int, serial: int) -> None:
        self.dropped.append((position, serial))


def test_a_chunk_that_waits_in_the_line_is_not_said_to_be_dropped() -> None:
    late: Any = Late()
    mapping = ChunkImports(late, late, late, late, CHUNK, [0])
    mapping.upkeep()
    assert (late.dropped, len(late.chunks)) == ([], 1)
    mapping.upkeep()
    assert (late.dropped, late.chunks) == ([(0, 1)], [])


def test_a_chunk_is_over_when_a_later_one_is_there(reader: Reader) -> None:
    """Its own retirement was lost, or is late."""
    with closing(AckPage.create(4, 1, reader.consumer, 2)) as acks:
        ours = ReleaseMail(1, 2, reader.consumer, acks, 4, 2)
    for serial in (1, 3):
        ours.hear(Chunks(1, reader.consumer, (Chunk(0, serial),)))
    assert [ours.is_over(0, serial) for serial in (1, 2, 3, 4)] == [True, True, False, False]
    assert not ours.is_over(1, 1)
    ours.hear(Retired(1, reader.consumer, (Chunk(0, 3),)))
    assert ours.is_over(0, 3)


def test_what_one_message_has_no_room_for_goes_with_the_next(
    create: Create, reader: Reader, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail, "MOST_TOLD", 2)
    monkeypatch.setattr(mail, "REPEAT_S", 1e18)  # so what was left out, and what was said, does not come again
    pool = create(6)
    column = connect(pool, reader)
    proxies = [publish(pool, column, some(CHUNK, seed)) for seed in range(5)]
    until(lambda: pool.statistics().grown == 6)

    def all_of(letters: Callable[[], list[Letter]]) -> list[Any]:
        said = []
        while found := messages(letters()):
            said += found
            assert len(said) < 20
        return said

    told = all_of(pool.letters)
    assert sorted(len(message.chunks) for message in told) == [2, 2, 2]
    for message in told:
        reader.hear(message)
    for proxy in proxies:
        reader.acknowledge(proxy)
    answers = all_of(reader.letters)
    counts = [(len(message.leases), len(message.taken)) for message in answers]
    assert counts == [(2, 2), (2, 2), (1, 2)]
    for message in answers:
        pool.hear(message)
    assert out(pool) == 0
    shrink(pool, until)
    for message in all_of(pool.letters):
        assert len(message.chunks) <= 2
        reader.hear(message)
    reader.upkeep()
    answers = all_of(reader.letters)
    assert [len(message.dropped) for message in answers] == [2, 2, 1]
    for message in answers:
        pool.hear(message)
    until(lambda: retiring(pool) == 0)
