"""Pools that share no pages: chunks, retirements and acknowledgements by message, over a driver whose memory is files.

With FABRIC handles nothing but messages goes between the two, as between nodes; with POSIX file descriptors these come
by a line, and a GPU can run it on one node (`tests/gpu`). The post of these tests loses, repeats and shuffles.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
import pytest

from tensorferry.codecs.errors import AttachRefused, LeaseError, LeaseNotReady, PeerGone, StaleLease
from tensorferry.codecs.memory.cuda_vmm import NoFabric
from tensorferry.codecs.messages import (
    Chunk,
    Chunks,
    Confirmed,
    Drain,
    Message,
    Origin,
    PoolDescription,
    Proxy,
    Released,
    Retired,
)
from tensorferry.codecs.messages import Pool as PoolAnnouncement
from tensorferry.codecs.pool.elastic import mail
from tensorferry.codecs.pool.elastic.chunk_imports import ChunkImports
from tensorferry.codecs.pool.elastic.descriptor_line import Arrived
from tensorferry.codecs.pool.elastic.mail import Letter, ReleaseMail
from tensorferry.codecs.pool.export import Attachment, Export
from tensorferry.codecs.pool.pool import Pool, new_nonce
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.pools import attach as attaching
from tensorferry.pipeline.pools.broker import Broker, attach
from tensorferry.pipeline.pools.lease_mail import Post

CHUNK = 2 << 20  #: the stub's granularity
FOREVER_S = 1000.0
Kind = Literal["posix_fd", "fabric"]
Peer = Any  #: conftest.Peer
Stub = Any  #: conftest.Stub
Until = Callable[..., None]
Create = Callable[..., Pool]
Struct = TypeVar("Struct", Export, Attachment)
encode = msgspec.msgpack.encode
decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode


@pytest.fixture(params=get_args(Kind))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def create(stub: Stub, kind: Kind) -> Iterator[Create]:
    """Pools of so many chunks."""
    with ExitStack() as pools:

        def make(chunks: int, *, slots: int = 8, idle_s: float = FOREVER_S) -> Pool:
            return pools.enter_context(
                Pool.create(
                    chunks * CHUNK,
                    slots,
                    memory="cuda_vmm",
                    chunk_nbytes=CHUNK,
                    idle_s=idle_s,
                    grow_wait_s=20.0,
                    mail=kind,
                )
            )

        yield make


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader() as made:
        yield made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not answered is said again at every look."""
    monkeypatch.setattr(mail, "REPEAT_S", 0.0)


def connect(pool: Pool, reader: Reader) -> int:
    """As from another node where handles allow it: no descriptor goes either way."""
    export, fds = pool.export()
    if export.mail == "fabric":
        for fd in fds:
            os.close(fd)
        fds = []
    attachment, given = reader.attach(over_wire(export), fds)
    assert bool(given) is (export.mail == "posix_fd")
    return pool.admit(over_wire(attachment), given)


def over_wire(struct: Struct) -> Struct:
    return msgspec.msgpack.decode(encode(struct), type=type(struct))


def messages(letters: list[Letter]) -> list[Any]:
    return [decode(encode(letter.message)) for letter in letters]


def tell(pool: Pool, *readers: Reader) -> None:
    """Bring everybody what is to be said to them, and the answers."""
    by_epoch = {reader.consumer: reader for reader in readers}
    for letter in pool.letters():
        by_epoch[letter.to].hear(*messages([letter]))
    for reader in readers:
        for message in messages(reader.letters()):
            answer = pool.hear(message)
            if answer is not None:
                reader.hear(*messages([answer]))


def some(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def digest(data: Any) -> str:
    return hashlib.blake2b(bytes(data), digest_size=16).hexdigest()


def publish(pool: Pool, column: int, data: np.ndarray[Any, Any]) -> Proxy:
    with Publisher(pool).publish(data) as draft:
        assert draft.prepared(column)
        [proxy] = draft.dispatch(column, [])
    assert isinstance(proxy, Proxy), "there was no room"
    return proxy


def out(pool: Pool) -> int:
    pool.reclaim()
    return pool.statistics().lent_slots


def shrink(pool: Pool, until: Until) -> None:
    """Wait until the spare is all that is mapped; then shrink no more."""
    assert pool.growth is not None
    pool.growth.idle_s = 0.0
    until(lambda: out(pool) == 0 and pool.statistics().mapped_nbytes == CHUNK)
    pool.growth.idle_s = FOREVER_S


def retiring(pool: Pool) -> int:
    return pool.statistics().retiring_nbytes // CHUNK


# --- what goes well ---------------------------------------------------------------------------------------------


def test_another_process_reads_and_its_message_ends_the_lease(
    create: Create, start_peer: Callable[..., Peer], stub: Stub, until: Until
) -> None:
    pool, peer = create(6), start_peer("chunk_peer.py", **stub.environ)
    column = peer.join(pool)
    for seed in range(12):
        data = some(2 * CHUNK + 5, seed)
        proxy = publish(pool, column, data)
        for message in messages(pool.letters()):
            peer.ask("hear", encode(message))
        assert peer.ask("read", encode(proxy))[2] == digest(data)
        assert out(pool) == 1, "nobody has said so yet"
        until(lambda: release(pool, peer) is not None)
        assert out(pool) == 0
    peer.ask("reset")


def release(pool: Pool, peer: Peer) -> Letter | None:
    """Bring the pool what a peer has to say, and it the last answer, if there was one."""
    answer = None
    for message in peer.ask("letters"):
        released = decode(message)
        assert isinstance(released, Released)
        answer = pool.hear(released) or answer
    if answer is not None:
        peer.ask("hear", encode(answer.message))
    return answer


def test_nothing_but_messages_goes_between_nodes(stub: Stub, reader: Reader) -> None:
    with Pool.create(4 * CHUNK, 8, memory="cuda_vmm", chunk_nbytes=CHUNK, mail="fabric", grow_wait_s=20.0) as pool:
        column = connect(pool, reader)
        data = some(3 * CHUNK)
        proxy = publish(pool, column, data)
        tell(pool, reader)
        with reader.open(proxy) as view:
            assert digest(view.data) == digest(data)
        tell(pool, reader)
        assert out(pool) == 0


def test_several_consumers_each_acknowledge_for_themselves(create: Create, reader: Reader) -> None:
    pool = create(2)
    with Reader() as other:
        columns = connect(pool, reader), connect(pool, other)
        with Publisher(pool).publish(some(100)) as draft:
            [[first], [second]] = [draft.dispatch(column, [], consumers=2) for column in columns]
        for one, proxy in ((reader, first), (other, second)):
            assert out(pool) == 1
            tell(pool, reader, other)
            with one.open(proxy) as view:
                assert digest(view.data) == digest(some(100))
            tell(pool, reader, other)
        assert out(pool) == 0


# --- ready ------------------------------------------------------------------------------------------------------


def test_only_complete_bytes_are_told_of(create: Create, reader: Reader, stub: Stub) -> None:
    pool = create(2)
    column = connect(pool, reader)
    stub.device.hold()
    with Publisher(pool).publish(some(100)) as draft:
        assert not draft.prepared(column)
        with pytest.raises(LeaseNotReady, match="prepared"):
            draft.dispatch(column, [])
        stub.device.let_go()
        assert draft.prepared(column)
        draft.dispatch(column, [])
    assert out(pool) == 1


def test_a_draft_that_is_never_told_of_comes_back(create: Create, reader: Reader, stub: Stub) -> None:
    pool = create(2)
    column = connect(pool, reader)
    stub.device.hold()
    with Publisher(pool).publish(some(100)) as draft:
        assert not draft.prepared(column)
    assert out(pool) == 1, "its writer may still be at work"
    stub.device.let_go()
    assert out(pool) == 0


def test_poisoned_bytes_are_not_told_of(create: Create, reader: Reader) -> None:
    pool = create(2)
    column = connect(pool, reader)
    with pool.lease(100) as lease:
        lease.poison()
        with pytest.raises(LeaseError, match="is poisoned"):
            lease.dispatch([column])
    assert out(pool) == 0


def test_a_proxy_that_overtakes_its_chunk_waits_for_it(create: Create, reader: Reader) -> None:
    pool = create(2)
    column = connect(pool, reader)
    proxy = publish(pool, column, some(CHUNK + 1))
    first, *_ = messages(pool.letters())
    assert isinstance(first, Chunks)
    assert not reader.is_ready(proxy)
    reader.hear(Chunks(first.pool, first.to, first.chunks[:1]))
    assert not reader.is_ready(proxy), "the second chunk is still to come"
    reader.hear(first)
    assert reader.is_ready(proxy)
    with reader.open(proxy) as view:
        assert digest(view.data) == digest(some(CHUNK + 1))


# --- acknowledgements -------------------------------------------------------------------------------------------


def test_an_acknowledgement_is_said_when_the_reads_are_done(create: Create, reader: Reader, stub: Stub) -> None:
    pool = create(2)
    column = connect(pool, reader)
    proxy = publish(pool, column, some(100))
    tell(pool, reader)
    tell(pool, reader)
    stub.device.hold()
    with reader.open(proxy):
        pass
    assert reader.letters() == [], "the copy is queued"
    stub.device.let_go()
    [letter] = reader.letters()
    assert letter.to == pool.producer
    assert isinstance(letter.message, Released)
    assert letter.message.leases == ((proxy.slot, proxy.generation),)


@pytest.mark.usefixtures("impatient")
def test_a_lost_acknowledgement_is_said_again_until_it_is_confirmed(create: Create, reader: Reader) -> None:
    pool = create(2)
    column = connect(pool, reader)
    tell(pool, reader)
    reader.acknowledge(publish(pool, column, some(100)))
    [lost], [again] = messages(reader.letters()), messages(reader.letters())
    assert lost.leases == again.leases != ()
    assert out(pool) == 1
    confirmed = pool.hear(again)
    assert out(pool) == 0
    assert confirmed is not None
    assert len(reader.letters()) == 1, "the confirmation is on its way"
    assert pool.hear(again) == confirmed, "it may have been lost"
    reader.hear(*messages([confirmed]))
    assert reader.letters() == []


def test_what_was_said_is_not_said_again_at_once(create: Create, reader: Reader) -> None:
    pool = create(2)
    column = connect(pool, reader)
    tell(pool, reader)
    reader.letters()
    reader.acknowledge(publish(pool, column, some(100)))
    assert [len(reader.letters()) for _ in range(3)] == [1, 0, 0]
    pool_says = [len(pool.letters()) for _ in range(2)]
    assert pool_says[1] == 0


@pytest.mark.usefixtures("impatient")
def test_repeated_and_late_acknowledgements_change_nothing(create: Create, reader: Reader) -> None:
    pool = create(2, slots=1)
    column = connect(pool, reader)
    tell(pool, reader)
    first = publish(pool, column, some(100))
    reader.acknowledge(first)
    [old] = messages(reader.letters())
    pool.hear(old)
    assert out(pool) == 0
    second = publish(pool, column, some(100, 1))
    tell(pool, reader)
    assert (second.slot, second.generation) == (first.slot, first.generation + 1)
    pool.hear(old)
    assert out(pool) == 1, "it is of the slot's last lease"
    with reader.open(second) as view:
        assert digest(view.data) == digest(some(100, 1))
    [new] = messages(reader.letters())
    pool.hear(new)
    pool.hear(old)
    pool.hear(new)
    assert out(pool) == 0
    reader.hear(Confirmed(old.pool, old.consumer, old.leases))  # late, too
    assert messages(reader.letters()) == [new], "only its own confirmation counts"
    reader.hear(Confirmed(new.pool, new.consumer, new.leases))
    reader.hear(Confirmed(old.pool, old.consumer, old.leases))
    assert reader.letters() == [], "and stays"


def test_a_proxy_that_comes_again_is_stale(create: Create, reader: Reader) -> None:
    pool = create(2, slots=1)
    column = connect(pool, reader)
    tell(pool, reader)
    first = publish(pool, column, some(100))
    reader.acknowledge(first)
    with pytest.raises(StaleLease, match="acknowledged here already"), reader.open(first):
        pass
    tell(pool, reader)
    second = publish(pool, column, some(100))
    reader.acknowledge(second)
    with pytest.raises(StaleLease, match="is over"):
        reader.is_ready(first)
    tell(pool, reader)
    assert out(pool) == 0


@pytest.mark.usefixtures("impatient")
def test_r4_mail_of_a_former_life_is_passed_over(create: Create, reader: Reader) -> None:
    pool = create(2)
    column = connect(pool, reader)
    proxy = publish(pool, column, some(100))
    [chunks] = messages(pool.letters())
    reader.hear(Chunks(chunks.pool, reader.consumer + 1, chunks.chunks))
    assert not reader.is_ready(proxy), "those chunks were another's"
    reader.hear(chunks)
    reader.hear(Retired(chunks.pool, reader.consumer + 1, chunks.chunks))
    assert reader.is_ready(proxy)
    reader.acknowledge(proxy)
    [released] = messages(reader.letters())
    assert pool.hear(Released(released.pool, reader.consumer + 1, released.leases)) is None
    assert pool.hear(Released(released.pool + 1, reader.consumer, released.leases)) is None
    assert out(pool) == 1
    reader.hear(Confirmed(released.pool, reader.consumer + 1, released.leases))
    assert [again.leases for again in messages(reader.letters())] == [released.leases], "its own is still to come"
    assert pool.hear(released) is not None
    assert out(pool) == 0


@pytest.mark.parametrize("lie", ["generation", "slot", "taken", "dropped"])
def test_an_acknowledgement_of_what_nobody_was_lent_is_quarantined(create: Create, reader: Reader, lie: str) -> None:
    pool = create(2)
    column, me = connect(pool, reader), reader.consumer
    proxy = publish(pool, column, some(100))
    living = (proxy.slot, proxy.generation)
    said = {
        "generation": Released(proxy.pool, me, (living, (proxy.slot, proxy.generation + 1))),
        "slot": Released(proxy.pool, me, (living, (8, 1))),
        "taken": Released(proxy.pool, me, (living,), (77,)),
        "dropped": Released(proxy.pool, me, (living,), (), (77,)),
    }
    assert pool.hear(said[lie]) is None
    assert pool.check_words() == [column], "who quarantines it is told"
    assert pool.check_words() == []
    assert pool.hear(Released(proxy.pool, me, (living,))) is None, "believed no more"
    assert (out(pool), pool.statistics().acks_invalid) == (1, 1)
    with pytest.raises(LeaseError, match="quarantined"):
        publish(pool, column, some(100))
    pool.strike(column)
    assert out(pool) == 0


# --- chunks -----------------------------------------------------------------------------------------------------


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
def test_lost_and_late_words_of_chunks(create: Create, reader: Reader, until: Until) -> None:
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


def test_a_chunk_that_was_never_told_of_is_dropped_all_the_same(create: Create, reader: Reader, until: Until) -> None:
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


def test_r7_so_it_does_for_what_it_was_asked_about(create: Create, reader: Reader, until: Until) -> None:
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


def test_r8_so_is_a_producer(create: Create, reader: Reader) -> None:
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
def test_r7_a_producer_that_ends_after_it_was_left_is_told_nothing_more(
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
    ours = ReleaseMail(1, 2, reader.consumer, SimpleNamespace(), 4, 2)  # type: ignore[arg-type]
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


# --- admission --------------------------------------------------------------------------------------------------


def test_a_life_has_one_column(create: Create, reader: Reader) -> None:
    pool = create(2)
    connect(pool, reader)
    with Reader(reader.consumer) as twin, pytest.raises(AttachRefused, match="has a column already"):
        connect(pool, twin)


def test_descriptors_that_are_not_called_for_are_refused(create: Create, kind: Kind) -> None:
    pool = create(2)
    attachment = Attachment(pool.description.pool, new_nonce())
    with pytest.raises(AttachRefused, match="3 descriptors"):
        pool.admit(attachment, [os.dup(0) for _ in range(3)])
    with pytest.raises(AttachRefused, match="descriptors for pool"):
        pool.admit(Attachment(attachment.pool + 1, 5), [])
    export, fds = pool.export()
    with Reader() as reader, pytest.raises(AttachRefused, match="from 2 descriptors, to acknowledge it by message"):
        reader.attach(export, [*fds, os.dup(0)])


def test_only_elastic_pools_are_acknowledged_by_message() -> None:
    with pytest.raises(ValueError, match="only cuda_vmm"):
        Pool.create(1 << 20, mail="posix_fd")


@pytest.mark.parametrize("call", ["cuMemCreate fabric", "cuMemExportToShareableHandle fabric"])
def test_p3_without_a_fabric_stack_the_handshake_says_what_to_do(stub: Stub, reader: Reader, call: str) -> None:
    remedy = "IMEX daemon on every node.*nvidia-caps-imex-channels/channel0"
    with Pool.create(CHUNK, 8, memory="cuda_vmm", chunk_nbytes=CHUNK, mail="fabric", grow_wait_s=20.0) as pool:
        stub.refuse(call, "CUDA_ERROR_NOT_PERMITTED")
        export, fds = pool.export()
        with pytest.raises(NoFabric, match=remedy):
            reader.attach(export, fds)
    with pytest.raises(NoFabric, match=f"{call.split()[0]}: CUDA_ERROR_NOT_PERMITTED.*{remedy}"):
        Pool.create(CHUNK, 8, memory="cuda_vmm", chunk_nbytes=CHUNK, mail="fabric")
    stub.allow()


async def test_the_broker_admits_without_pages(create: Create, reader: Reader) -> None:
    pool = create(2)
    admitted: list[tuple[Origin, int]] = []
    origin = Origin("encoder", 0, reader.consumer)
    with tempfile.TemporaryDirectory(prefix="ferry-") as folder:
        path = f"{folder}/pool.sock"
        async with Broker(path, pool, lambda *who: admitted.append(who)):
            column = await attach(path, origin, pool.description.pool, reader, 20.0)
            assert admitted == [(origin, column)]
            proxy = publish(pool, column, some(100))
            tell(pool, reader)
            with reader.open(proxy) as view:
                assert digest(view.data) == digest(some(100))
            tell(pool, reader)
            assert out(pool) == 0


# --- by the stages' post ----------------------------------------------------------------------------------------


class Peers:
    """As much of `pipeline.peers.Peers` as the post needs: those that are there by epoch, each with a letter box."""

    def __init__(self, *epochs: int) -> None:
        self.boxes: dict[int, list[Message]] = {epoch: [] for epoch in epochs}

    def living(self, epoch: int) -> int | None:
        return epoch if epoch in self.boxes else None

    def send(self, peer: int, message: Message) -> bool:
        self.boxes[peer].append(decode(encode(message)))
        return True


@pytest.mark.usefixtures("impatient")
async def test_the_post_brings_everything_to_whom_it_is_for(create: Create, reader: Reader, until: Until) -> None:
    """One of the pool's consumers is not among the peers, and nothing is said to it."""
    pool = create(2)
    there, here = Peers(reader.consumer), Peers(pool.producer)
    with Reader() as stranger:
        column, _ = connect(pool, reader), connect(pool, stranger)
        producer, consumer = Post(pool, stranger, there), Post(None, reader, here)  # type: ignore[arg-type]
        proxy = publish(pool, column, some(100))

        def bring(condition: Callable[[], bool]) -> bool:
            for boxes, to in ((there.boxes, consumer), (here.boxes, producer)):
                for box in boxes.values():
                    while box:
                        assert to.hear(box.pop())
            return condition()

        async def brought(condition: Callable[[], bool]) -> None:
            while not bring(condition):  # noqa: ASYNC110  (nobody calls when a word is stored)
                await asyncio.sleep(0)

        async with asyncio.timeout(20.0):
            carrying = [asyncio.create_task(post.carry(lambda: True)) for post in (producer, consumer)]
            await brought(lambda: reader.is_ready(proxy))
            reader.acknowledge(proxy)
            await brought(lambda: out(pool) == 0)
            await brought(lambda: reader.letters() == [])
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)
        assert producer.hear(Drain(Origin("encoder", 0, 1))) is None
        assert consumer.hear(Released(proxy.pool, reader.consumer, ())) is False, "it has no pool: passed over"


async def test_p3_a_stage_ends_rather_than_read_less_than_was_chosen(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> int:
        raise NoFabric("cuMemCreate: CUDA_ERROR_NOT_PERMITTED")

    monkeypatch.setattr(attaching.broker, "attach", refuse)
    origin, description = Origin("tokenizer", 0, 5), PoolDescription(6, "cuda_vmm", CHUNK, 8, CHUNK)
    peers: Any = SimpleNamespace(origin=origin, attached=lambda origin, refusal: None)
    with pytest.RaisesGroup(pytest.RaisesExc(NoFabric, match="IMEX daemon")):
        async with asyncio.TaskGroup() as tasks:
            attaching.Attaching(reader, tasks).begin(PoolAnnouncement(origin, description, "/broker"), peers)


# --- everything at once -----------------------------------------------------------------------------------------


class UnreliablePost:
    """Brings messages: some never, some twice, and none in order."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._under_way: list[tuple[Callable[[Any], Letter | None], bytes, Callable[[Any], None]]] = []

    def take(self, letters: list[Letter], to: Callable[[Any], Any], back: Callable[[Any], None]) -> None:
        for letter in letters:
            for _ in range(self._chance.choice((0, 1, 1, 1, 2))):
                self._under_way.append((to, encode(letter.message), back))

    def bring(self, most: int) -> None:
        self._chance.shuffle(self._under_way)
        for _ in range(min(most, len(self._under_way))):
            to, message, back = self._under_way.pop()
            answer = to(decode(message))
            if answer is not None:
                self.take([answer], back, back)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_post_does_every_byte_is_right_and_all_comes_back(
    create: Create, until: Until, seed: int, stub: Stub
) -> None:
    chance = random.Random(seed)
    post = UnreliablePost(chance)
    pool = create(4, slots=3)
    growing = pool.growth
    assert growing is not None
    waiting: list[tuple[Reader, Proxy, str]] = []
    with ExitStack() as readers:
        consumers = {connect(pool, one): one for one in [readers.enter_context(Reader()) for _ in range(2)]}
        read = 0
        for step in range(300):
            column, one = chance.choice(list(consumers.items()))
            match chance.randrange(6):
                case 0:
                    data = some(chance.randrange(1, 2 * CHUNK), step)
                    if not pool.fits([data.nbytes]):
                        continue
                    with Publisher(pool).publish(data) as draft:
                        if draft.transport == "inline":  # a chunk was given back since
                            continue
                        assert draft.prepared(column)
                        [proxy] = draft.dispatch(column, [])
                        assert isinstance(proxy, Proxy)
                        waiting.append((one, proxy, digest(data)))
                case 1:
                    post.take(pool.letters(), one.hear, one.hear)
                    post.take(one.letters(), pool.hear, one.hear)
                case 2:
                    one.upkeep()
                case 3:
                    pool.reclaim()
                    growing.idle_s = chance.choice((0.0, FOREVER_S))
                case 4:
                    post.bring(chance.randrange(4))
                case 5:
                    ready = [entry for entry in waiting if entry[0].is_ready(entry[1])]
                    for entry in ready[:2]:
                        waiting.remove(entry)
                        with entry[0].open(entry[1]) as view:
                            assert digest(view.data) == entry[2]
                        read += 1
            statistics = pool.statistics()
            assert statistics.mapped_nbytes + statistics.retiring_nbytes <= 4 * CHUNK
        growing.idle_s = 0.0

        def settled() -> bool:
            for one in consumers.values():
                tell(pool, *consumers.values())
                one.upkeep()
                for entry in [entry for entry in waiting if entry[0] is one and one.is_ready(entry[1])]:
                    waiting.remove(entry)
                    with one.open(entry[1]) as view:
                        assert digest(view.data) == entry[2]
            growing.look()
            statistics = pool.statistics()
            over = (out(pool), statistics.mapped_nbytes, statistics.retiring_nbytes) == (0, CHUNK, 0)
            return over and not waiting and not any(one.letters() for one in consumers.values())

        until(settled)
        assert read, "it was worth it"
        assert pool.statistics().acks_invalid == 0
