"""Pools that share no pages: admission and acknowledgements by message, over a driver whose memory is files.

With FABRIC handles nothing but messages goes between the two, as between nodes. POSIX file descriptors come by a line,
and a GPU can run those on one node (`tests/gpu`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import pytest
from tests.codecs.pool.elastic.mail.mail_pools import (
    CHUNK,
    Create,
    Kind,
    Peer,
    Stub,
    Until,
    connect,
    decode,
    digest,
    encode,
    messages,
    out,
    publish,
    some,
    tell,
)

from tensorferry.codecs.errors import AttachRefused, LeaseError, LeaseNotReady, StaleLease
from tensorferry.codecs.memory.cuda_vmm import NoFabric
from tensorferry.codecs.messages import (
    Chunks,
    Confirmed,
    Origin,
    Released,
    Retired,
)
from tensorferry.codecs.pool.elastic.mail import Letter
from tensorferry.codecs.pool.export import Attachment
from tensorferry.codecs.pool.pool import Pool, new_nonce
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.pools.broker import Broker, attach

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


def test_only_complete_bytes_are_dispatched_by_message(create: Create, reader: Reader, stub: Stub) -> None:
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


def test_a_draft_that_is_never_dispatched_comes_back(create: Create, reader: Reader, stub: Stub) -> None:
    pool = create(2)
    column = connect(pool, reader)
    stub.device.hold()
    with Publisher(pool).publish(some(100)) as draft:
        assert not draft.prepared(column)
    assert out(pool) == 1, "its writer may still be at work"
    stub.device.let_go()
    assert out(pool) == 0


def test_poisoned_bytes_are_not_dispatched_by_message(create: Create, reader: Reader) -> None:
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
def test_r4_messages_for_a_previous_epoch_are_ignored(create: Create, reader: Reader) -> None:
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
def test_an_invalid_acknowledgement_by_message_quarantines_its_consumer(
    create: Create, reader: Reader, lie: str
) -> None:
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


# --- admission --------------------------------------------------------------------------------------------------


def test_an_epoch_has_one_column(create: Create, reader: Reader) -> None:
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
