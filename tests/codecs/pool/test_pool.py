"""The pool's contract between real processes: hand-over, acknowledgement, death of either side, and lies.

`peer` is another process (programs/peer.py) that this module's tests share and that must have nothing left after
each; `start_peer` starts processes that a test may stop or kill.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from tensorferry.codecs.errors import AttachRefused, LeaseError, PeerGone, PoolFull
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.messages import Payload, Proxy
from tensorferry.codecs.pool.export import Attachment
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES

MIB = 1 << 20
Peer = Any  #: conftest.Peer
Refused = Callable[..., AbstractContextManager[Any]]
encode = msgspec.msgpack.encode


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.create(MIB, 8) as pool:
        yield pool


def some(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def digest(data: Any) -> str:
    return hashlib.blake2b(bytes(data), digest_size=16).hexdigest()


def send(pool: Pool, column: int | None, *tensors: Any, uses: int = 1) -> tuple[list[bytes], list[bytes]]:
    """Publish copies: the encoded payloads, and the inline frames."""
    frames: list[Buffer] = []
    with Publisher(pool, inline_below_nbytes=0).publish(*tensors) as draft:
        payloads = draft.dispatch(column, frames, uses=uses)
    return [encode(payload) for payload in payloads], [bytes(frame) for frame in frames]


def out(pool: Pool) -> int:
    """Leases that have not come back."""
    pool.reclaim()
    return pool.statistics().lent_slots


# --- hand-over -------------------------------------------------------------------------------------------------


def test_a_peer_reads_what_was_written(pool: Pool, peer: Peer) -> None:
    column = peer.join(pool)
    for seed in range(20):  # more than there are slots
        [payload], _ = send(pool, column, some(100_000, seed).reshape(100, 1000))
        assert out(pool) == 1
        assert peer.ask("read", payload) == ["uint8", [100, 1000], digest(some(100_000, seed))]
        assert out(pool) == 0
    assert pool.statistics().leases == 20


def test_no_process_of_a_pool_imports_torch(pool: Pool, peer: Peer) -> None:
    peer.join(pool)
    assert peer.ask("belongings")[2] == 0


def test_l10_written_in_place(pool: Pool, peer: Peer) -> None:
    column = peer.join(pool)
    with Publisher(pool).draft([("float32", (200, 200))]) as draft:
        draft.views[0].numpy()[:] = np.arange(200, dtype=np.float32)
        [payload] = draft.dispatch(column, [])
    wanted = digest(np.tile(np.arange(200, dtype=np.float32), 200))
    assert peer.ask("read", encode(payload)) == ["float32", [200, 200], wanted]
    assert out(pool) == 0


def test_materialised_bytes_are_the_peer_s_own(pool: Pool, peer: Peer) -> None:
    column = peer.join(pool)
    [payload], _ = send(pool, column, some(MIB // 2, 1))
    peer.ask("materialise", payload)
    assert out(pool) == 0
    send(pool, None, some(MIB, 2))  # over the same bytes
    assert peer.ask("look_at_copy") == digest(some(MIB // 2, 1))


def test_l10_borrowed_bytes_stay_until_they_are_given_back(pool: Pool, peer: Peer) -> None:
    column = peer.join(pool)
    [payload], _ = send(pool, column, some(MIB // 2, 1))
    peer.ask("borrow", payload)
    for seed in range(20):  # traffic all around it
        send(pool, None, some(MIB // 2, seed))
        assert out(pool) == 1
    assert peer.ask("look_at_borrowed") == digest(some(MIB // 2, 1))
    peer.ask("give_back")
    assert out(pool) == 0


def test_l9_a_packed_item_is_one_lease(pool: Pool, peer: Peer) -> None:
    column = peer.join(pool)
    tensors = some(1000, 1), some(24, 2).view("<i8"), np.zeros((0, 5), np.float16)
    payloads, _ = send(pool, column, *tensors)
    for tensor, payload in zip(tensors, payloads, strict=True):
        assert out(pool) == 1
        assert peer.ask("read", payload) == [tensor.dtype.name, list(tensor.shape), digest(tensor.tobytes())]
    assert out(pool) == 0


def test_b09_uses(pool: Pool, peer: Peer) -> None:
    column = peer.join(pool)
    [payload], _ = send(pool, column, some(1000), uses=3)
    peer.ask("read", payload)
    peer.ask("acknowledge", payload)
    assert out(pool) == 1
    peer.ask("read", payload)
    assert out(pool) == 0


def test_e4_acknowledged_unread(pool: Pool, peer: Peer, refused: Refused) -> None:
    column = peer.join(pool)
    [payload], _ = send(pool, column, some(1000))
    peer.ask("acknowledge", payload)
    assert out(pool) == 0
    with refused("StaleLease", "acknowledged here already"):
        peer.ask("acknowledge", payload)


def test_l3_abandoned_before_it_was_ready(pool: Pool, peer: Peer) -> None:
    """A request that is given up gives its proxies back at once; the bytes come back when they are written."""
    column = peer.join(pool)
    with pool.lease(1000) as lease:
        slot, generation, offset, _ = lease.grant
        peer.ask("acknowledge", encode(Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (1000,))))
        pool._ledger.dispatch(lease.grant, [column])
        assert out(pool) == 1
    assert out(pool) == 0


def test_b07_a_peer_s_error_gives_the_lease_back(pool: Pool, peer: Peer, refused: Refused) -> None:
    column = peer.join(pool)
    [payload], _ = send(pool, column, some(1000))
    with refused("ArithmeticError"):
        peer.ask("fail_inside", payload)
    assert out(pool) == 0


def test_every_consumer_must_acknowledge(pool: Pool, peer: Peer, start_peer: Callable[[], Peer]) -> None:
    columns, other = [peer.join(pool)], start_peer()
    columns.append(other.join(pool))
    with Publisher(pool).publish(some(MIB // 2)) as draft:
        payloads = [encode(draft.dispatch(column, [], consumers=2)[0]) for column in columns]
    for each, payload in zip((peer, other), payloads, strict=True):
        assert out(pool) == 1
        assert each.ask("read", payload)[2] == digest(some(MIB // 2))
    assert out(pool) == 0


def test_bytes_are_not_shown_before_they_are_written(pool: Pool, peer: Peer, refused: Refused) -> None:
    column = peer.join(pool)
    with pool.lease(1000) as lease:
        slot, generation, offset, _ = lease.grant
        payload = encode(Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (1000,)))
        assert peer.ask("is_ready", payload) is False
        lease.data[:] = some(1000)
        lease.dispatch([column])
        assert peer.ask("is_ready", payload) is True
    assert peer.ask("read", payload)[2] == digest(some(1000))
    assert out(pool) == 0
    with pool.lease(1000) as lease:
        slot, generation, offset, _ = lease.grant
        lease.poison()
        lease.dispatch([column])
    with refused("LeasePoisoned"):
        peer.ask("read", encode(Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (1000,))))
    assert out(pool) == 0


# --- blocks that end otherwise --------------------------------------------------------------------------------


def test_l3_cancelled_leases_come_back(pool: Pool) -> None:
    for _ in range(20):
        with pool.lease(MIB):
            pass
    with pytest.raises(ArithmeticError), pool.lease(MIB):
        raise ArithmeticError
    assert out(pool) == 0


def test_a14_a_block_that_fails_after_dispatch_leaves_the_lease_to_its_consumer(pool: Pool, peer: Peer) -> None:
    column = peer.join(pool)
    told: list[Proxy] = []

    def fails_after_dispatch() -> None:
        with pool.lease(1000) as lease:
            lease.data[:] = some(1000)
            lease.dispatch([column])
            slot, generation, offset, _ = lease.grant
            told.append(Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (1000,)))
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails_after_dispatch()
    assert out(pool) == 1
    assert peer.ask("read", encode(told[0]))[2] == digest(some(1000))
    assert out(pool) == 0


def test_l3_what_a_lease_s_state_does_not_allow_is_refused_with_its_name(pool: Pool, peer: Peer) -> None:
    column = peer.join(pool)
    with pool.lease(1000) as lease:
        with pytest.raises(LeaseError, match="no consumer has column 5"):
            lease.dispatch([column, 5])
        with pytest.raises(LeaseError, match="owes no acknowledgement"):
            lease.retract(column)
        lease.dispatch([column])
        lease.retract(column)
    late: list[Callable[[], None]] = [partial(lease.dispatch, [column]), partial(lease.retract, column)]
    for act in late:
        with pytest.raises(LeaseError, match="is not open") as refused:
            act()
        assert (refused.value.slot, refused.value.generation) == lease.grant[:2]
    assert out(pool) == 0


# --- death -----------------------------------------------------------------------------------------------------------


def test_l12_a_killed_consumer_gives_everything_back(pool: Pool, start_peer: Callable[[], Peer]) -> None:
    consumer = start_peer()
    column = consumer.join(pool)
    payloads = [send(pool, column, some(100_000, seed))[0][0] for seed in range(3)]
    consumer.ask("borrow", payloads[0])  # one being read, two still in the mail
    assert out(pool) == 3
    assert pool.strike_dead() == []
    consumer.kill()
    assert out(pool) == 3, "nobody has looked yet"
    assert pool.strike_dead() == [column]
    assert out(pool) == 0
    assert pool.statistics().struck_consumers == 1
    assert pool.statistics().consumers == 0
    pool.strike(column)  # its death is heard of a second time


def test_l12_a_full_pool_finds_the_dead_by_itself(pool: Pool, start_peer: Callable[[], Peer]) -> None:
    consumer = start_peer()
    column = consumer.join(pool)
    for seed in range(3):
        send(pool, column, some(300_000, seed))
    with pytest.raises(PoolFull), pool.lease(MIB):
        raise AssertionError("lent")
    consumer.kill()
    with pool.lease(MIB) as lease:
        assert lease.data.nbytes == MIB
        with pytest.raises(LeaseError, match=f"no consumer has column {column}"):
            lease.dispatch([column])
    assert out(pool) == 0


def test_the_death_of_one_consumer_is_not_the_acknowledgement_of_another(
    pool: Pool, peer: Peer, start_peer: Callable[[], Peer]
) -> None:
    doomed = start_peer()
    columns = [doomed.join(pool), peer.join(pool)]
    with Publisher(pool).publish(some(MIB // 2)) as draft:
        _, payload = (encode(draft.dispatch(column, [], consumers=2)[0]) for column in columns)
    doomed.kill()
    pool.strike_dead()
    assert out(pool) == 1
    assert peer.ask("read", payload)[2] == digest(some(MIB // 2))
    assert out(pool) == 0


def test_l12_what_a_killed_producer_had_finished_is_still_read(start_peer: Callable[[], Peer]) -> None:
    producer = start_peer()
    producer.ask("create", MIB, 8)
    with Reader() as reader:
        column = producer.offer(reader)[0]
        ready = decode(producer.ask("publish", column, bytes(some(50_000, 1))))
        unready = decode(producer.ask("begin", 1000))
        assert isinstance(unready, Proxy)
        assert not reader.is_ready(unready)
        producer.kill()
        with reader.open(ready) as view:
            assert digest(view.data) == digest(some(50_000, 1))
            del view
        with pytest.raises(PeerGone, match="died before slot"):
            reader.is_ready(unready)
        with pytest.raises(PeerGone), reader.open(unready):
            raise AssertionError("opened")


def test_b07_a_stopped_consumer_keeps_its_own_leases_alone(
    pool: Pool, peer: Peer, start_peer: Callable[[], Peer]
) -> None:
    stopped = start_peer()
    slow, quick = stopped.join(pool), peer.join(pool)
    [kept], _ = send(pool, slow, some(200_000, 99))
    stopped.ask("borrow", kept)
    stopped.stop()
    for seed in range(30):
        [payload], _ = send(pool, quick, some(200_000, seed))
        assert peer.ask("read", payload)[2] == digest(some(200_000, seed))
        assert out(pool) == 1
    with pytest.raises(PoolFull), pool.lease(MIB):
        raise AssertionError("bytes were lent that a living process may still read")
    assert pool.strike_dead() == [], "a stopped process is not dead"
    stopped.signal(signal.SIGCONT)
    assert stopped.ask("look_at_borrowed") == digest(some(200_000, 99))
    stopped.ask("give_back")
    assert out(pool) == 0


def test_c2_a_restarted_consumer_does_not_acknowledge_for_its_previous_epoch(
    pool: Pool, start_peer: Callable[[], Peer]
) -> None:
    former, successor = start_peer(), start_peer()
    column = former.join(pool)
    [payload], _ = send(pool, column, some(1000))
    former.kill()
    again = successor.join(pool)
    assert again != column
    successor.ask("acknowledge", payload)  # mail of a former life
    assert out(pool) == 1
    with pool.lease(1000) as lease:
        lease.dispatch([again])
    assert out(pool) == 2
    pool.strike_dead()
    assert out(pool) == 1, "the former life's lease, and no other"
    slot, generation, offset, _ = lease.grant
    successor.ask(
        "acknowledge", encode(Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (1000,)))
    )
    assert out(pool) == 0


def test_a_store_into_a_borrowed_view_kills_the_culprit_and_changes_nothing(
    pool: Pool, start_peer: Callable[[], Peer]
) -> None:
    culprit = start_peer()
    column = culprit.join(pool)
    [payload], _ = send(pool, column, np.zeros(1000, np.uint8))
    culprit.send("store_into", payload)
    assert culprit.wait() == -signal.SIGSEGV
    _, fds = pool.export()
    assert not any(os.pread(fds[0], pool.description.nbytes, 0))
    for fd in fds:
        os.close(fd)
    assert pool.strike_dead() == [column]
    assert out(pool) == 0


def test_a_closed_pool_s_bytes_stay_with_those_who_map_them(peer: Peer) -> None:
    with Pool.create(MIB, 8) as pool:
        column = peer.join(pool)
        [payload], _ = send(pool, column, some(1000))
    assert peer.ask("read", payload)[2] == digest(some(1000))


# --- lies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ({"offset": MIB}, "BadTensor"),
        ({"shape": (1 << 20, 1 << 20)}, "BadTensor"),
        ({"shape": (1 << 39, 1 << 39)}, "BadTensor"),
        ({"dtype": 255}, "UnsupportedDtype"),
    ],
    ids=str,
)
def test_b31_a_lie_about_the_bytes_is_an_error_and_a_release(
    pool: Pool, peer: Peer, refused: Refused, lie: dict[str, Any], error: str
) -> None:
    column = peer.join(pool)
    [payload], _ = send(pool, column, some(1000))
    for act in ("read", "borrow"):
        with refused(error if act == "read" else "StaleLease"):
            peer.ask(act, encode(msgspec.structs.replace(decode(payload), **lie)))
        assert out(pool) == 0


@pytest.mark.parametrize("lie", [{"slot": 8}, {"generation": 99}, {"pool": 1}], ids=str)
def test_b31_a_lie_about_the_lease_frees_nothing(pool: Pool, peer: Peer, refused: Refused, lie: dict[str, Any]) -> None:
    column = peer.join(pool)
    [payload], _ = send(pool, column, some(1000))
    with refused("BadTensor|StaleLease|PeerGone"):
        peer.ask("acknowledge", encode(msgspec.structs.replace(decode(payload), **lie)))
    assert out(pool) == 1
    peer.ask("acknowledge", payload)
    assert out(pool) == 0


def strange_attachments(pool: Pool) -> Iterator[tuple[str, Callable[[], tuple[Attachment, list[int]]]]]:
    """What a consumer might answer, none of it right."""

    def answered(**changes: int) -> tuple[Attachment, list[int]]:
        with Reader() as reader:
            attachment, fds = reader.attach(*pool.export())
        return msgspec.structs.replace(attachment, **changes), fds

    def without(place: int) -> tuple[Attachment, list[int]]:
        attachment, fds = answered()
        os.close(fds.pop(place))
        return attachment, fds

    def with_null(place: int) -> tuple[Attachment, list[int]]:
        attachment, fds = without(place)
        return attachment, [*fds[:place], os.open(os.devnull, os.O_RDWR), *fds[place:]]

    def with_more() -> tuple[Attachment, list[int]]:
        attachment, fds = answered()
        return attachment, [*fds, os.dup(fds[0])]

    def of_another_pool(slots: int) -> tuple[Attachment, list[int]]:
        with Pool.create(MIB, slots) as other, Reader() as reader:
            attachment, fds = reader.attach(*other.export())
        return Attachment(pool.description.pool, attachment.consumer), fds

    for place, what in enumerate(["page", "process"]):
        yield f"no {what}", partial(without, place)
        yield f"the {what} is a device", partial(with_null, place)
    yield "one descriptor more", with_more
    yield "a page of another pool", partial(of_another_pool, 8)
    yield "a page of another size", partial(of_another_pool, 9)
    yield "another pool", partial(answered, pool=77)
    yield "another consumer", partial(answered, consumer=78)


def test_a_strange_attachment_is_refused_with_everything_closed(
    pool: Pool, belongings: Callable[[], Any], left: Callable[..., list[str]]
) -> None:
    for what, make in strange_attachments(pool):
        before = belongings()
        with pytest.raises(AttachRefused):
            pool.admit(*make())
        assert left(before) == [], what
        assert pool.statistics().consumers == 0, what


# --- room ------------------------------------------------------------------------------------------------------------


def test_l5_a_full_pool_s_surplus_arrives_inline(pool: Pool, peer: Peer) -> None:
    column = peer.join(pool)
    fallbacks: list[int] = []
    publisher = Publisher(pool, on_fallback=lambda full, _: fallbacks.append(full.wanted_nbytes))
    sent = []
    for seed in range(6):
        frames: list[Buffer] = []
        with publisher.publish(some(150_000 + seed, seed)) as draft:
            sent.append((encode(draft.dispatch(column, frames)[0]), [bytes(frame) for frame in frames]))
    with publisher.publish(some(150_000, 6)) as draft:  # a peer that cannot map the pool
        frames = []
        sent.append((encode(draft.dispatch(None, frames)[0]), [bytes(frame) for frame in frames]))
    with publisher.publish(some(MIB + 1)) as draft:
        assert draft.transport == "inline"
    assert publisher.drafts == {"pool": 6, "pool_full": 2}
    assert fallbacks == [150_000, MIB + 1]
    for seed, (payload, inline) in enumerate(sent):
        nbytes = 150_000 + seed % 6
        assert peer.ask("read", payload, inline) == ["uint8", [nbytes], digest(some(nbytes, seed))]
    assert out(pool) == 0


def test_n_slices_of_a_pool_are_one_mapping_in_a_consumer(pool: Pool, peer: Peer) -> None:
    before = peer.ask("belongings")
    column = peer.join(pool)
    attached = peer.ask("belongings")
    for seed in range(200):
        [payload], _ = send(pool, column, some(64, seed))
        peer.ask("read", payload)
    assert peer.ask("belongings") == attached
    assert attached[1] - before[1] == 3, "memory, control page, ack page"
    peer.ask("detach", pool.description.pool)
    assert peer.ask("belongings") == before


def test_attaching_and_leaving_again_and_again_leaves_nothing(
    pool: Pool, peer: Peer, belongings: Callable[[], Any], left: Callable[..., list[str]]
) -> None:
    before, theirs = belongings(), peer.ask("belongings")
    for _ in range(20):
        column = peer.join(pool)
        send(pool, column, some(1000))
        peer.ask("detach", pool.description.pool)
        pool.strike(column)
    assert out(pool) == 0
    assert left(before) == []
    assert peer.ask("belongings") == theirs


def test_what_a_process_may_have_open_is_enough_for_many_pools(peer: Peer) -> None:
    """B22: descriptors do not grow with leases, only with pools and consumers."""
    with ExitStack() as pools:
        for _ in range(10):
            peer.join(pools.enter_context(Pool.create(1 << 16, 8)))
        descriptors, mappings, _ = peer.ask("belongings")
        assert mappings == 30
        assert descriptors < 80


def decode(payload: bytes) -> Payload:
    found: Payload = msgspec.msgpack.decode(payload, type=Payload)
    return found


@pytest.mark.parametrize("memory", ["shm", "gpu", None])
def test_a_pool_in_memory_that_there_is_not_is_refused(memory: Any) -> None:
    with pytest.raises(ValueError, match=r"memory=.*: a pool lies in one of host, cuda_ipc, cuda_vmm"):
        Pool.create(1 << 20, memory=memory)
