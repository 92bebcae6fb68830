"""The producer's side: drafts in the pool while it has room, inline otherwise, and never a lease lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs.errors import BadTensor, LeaseError, PeerBusy, PoolClosed, PoolFull, UnsupportedDtype
from tensorferry.codecs.frames import Buffer, open_inline
from tensorferry.codecs.messages import Inline, Payload, Proxy
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Draft, Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import ALIGNMENT, View, dtype_of

MIB = 1 << 20


class Shop:
    def __init__(self, pool: Pool, reader: Reader) -> None:
        self.pool, self.reader = pool, reader
        self.column = pool.admit(*reader.attach(*pool.export()))
        self.fallbacks: list[tuple[PoolFull, Pool]] = []
        self.publisher = Publisher(
            pool, inline_below_nbytes=1024, on_fallback=lambda full, pool: self.fallbacks.append((full, pool))
        )

    def send(self, *tensors: Any, column: int | None = 0) -> tuple[list[Payload], list[Buffer]]:
        frames: list[Buffer] = []
        with self.publisher.publish(*tensors) as draft:
            return draft.dispatch(column, frames), frames

    def read(self, payload: Payload, frames: list[Buffer]) -> np.ndarray[Any, Any]:
        with self.reader.open(payload, frames) as view:
            return view.numpy().copy()

    def out(self) -> int:
        self.pool.reclaim()
        return self.pool.statistics().lent_slots


@pytest.fixture
def shop() -> Iterator[Shop]:
    with Pool.create(MIB, 8) as pool, Reader() as reader:
        yield Shop(pool, reader)


def some(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# --- in the pool -----------------------------------------------------------------------------------------------


def test_l10_a_draft_is_written_in_place(shop: Shop) -> None:
    with shop.publisher.draft([("float32", (100, 4)), ("int64", (3,))]) as draft:
        assert (draft.transport, draft.nbytes) == ("shm", 1624)
        pixels, grid = (view.numpy() for view in draft.views)
        pixels[:] = 1.5
        grid[:] = [1, 2, 3]
        payloads = draft.dispatch(shop.column, [])
    assert [shop.read(payload, []).sum() for payload in payloads] == [600.0, 6]
    assert shop.out() == 0


def test_l9_the_tensors_of_a_draft_are_packed_into_one_lease_and_aligned(shop: Shop) -> None:
    layout = [("uint8", (1000,)), ("float64", ()), ("bool", (0,)), ("complex128", (7,))]
    with shop.publisher.draft(layout) as draft:
        payloads = [payload for payload in draft.dispatch(shop.column, []) if isinstance(payload, Proxy)]
        assert shop.pool.statistics().lent_slots == 1
    assert len({(proxy.slot, proxy.generation) for proxy in payloads}) == 1
    assert [(dtype_of(proxy.dtype), proxy.shape) for proxy in payloads] == layout
    assert all(proxy.offset % ALIGNMENT == 0 for proxy in payloads)
    ends = [0, *(proxy.offset + view.nbytes for proxy, view in zip(payloads, draft.views, strict=True))]
    assert all(proxy.offset >= end for proxy, end in zip(payloads, ends, strict=False)), "no two overlap"
    assert {proxy.uses for proxy in payloads} == {4}
    for proxy in payloads:
        shop.reader.acknowledge(proxy)
    assert shop.out() == 0


def test_b30_what_was_published_may_change_at_once(shop: Shop) -> None:
    for nbytes in (100, 5000):  # inline, and in the pool
        source = np.full(nbytes, 1, np.uint8)
        with shop.publisher.publish(source) as draft:
            source[:] = 2
            frames: list[Buffer] = []
            [payload] = draft.dispatch(shop.column, frames)
        source[:] = 3
        assert set(shop.read(payload, frames).tolist()) == {1}


def test_a_draft_that_was_not_dispatched_comes_back(shop: Shop) -> None:
    with shop.publisher.draft([("uint8", (5000,))]):
        assert shop.pool.statistics().lent_slots == 1
    assert shop.out() == 0


def test_l3_a_block_that_fails_before_dispatch_gives_the_lease_back(shop: Shop) -> None:
    with pytest.raises(ArithmeticError), shop.publisher.draft([("uint8", (5000,))]):
        raise ArithmeticError
    assert shop.out() == 0


def test_l3_a_publish_that_is_interrupted_gives_the_lease_back(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: View, source: View) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(View, "copy_from", interrupt)
    with pytest.raises(KeyboardInterrupt), shop.publisher.publish(some(5000)):
        pass
    assert shop.publisher.drafts["pool"] == 1
    assert shop.out() == 0


def test_a14_what_may_have_been_sent_counts_as_sent(shop: Shop) -> None:
    sent: list[Payload] = []

    def interrupted_while_sending() -> None:
        with shop.publisher.publish(some(5000)) as draft:
            sent.extend(draft.dispatch(shop.column, []))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_while_sending()
    [payload] = sent
    assert shop.out() == 1
    assert (shop.read(payload, []) == some(5000)).all()
    assert shop.out() == 0


def test_a_send_that_refused_is_taken_back(shop: Shop) -> None:
    with shop.publisher.publish(some(5000)) as draft:
        draft.dispatch(shop.column, [])
        draft.retract(shop.column)
        with pytest.raises(LeaseError, match="owes no acknowledgement"):
            draft.retract(shop.column)
    assert shop.out() == 0


@pytest.mark.parametrize("refuses", [False, True])
def test_a14_all_drafts_of_a_message_that_was_refused_come_back(shop: Shop, refuses: bool) -> None:
    def send() -> None:
        if refuses:
            raise PeerBusy("encoder-0")

    with shop.publisher.publish(some(5000)) as first, shop.publisher.publish(some(5000)) as second:
        for draft in (first, second):
            draft.dispatch(shop.column, [])
        with pytest.raises(PeerBusy) if refuses else nullcontext():
            Draft.send_all([first, second], shop.column, send)
    assert shop.out() == (0 if refuses else 2)


def test_retracting_what_went_inline_is_nothing(shop: Shop) -> None:
    with shop.publisher.publish(some(10)) as draft:
        draft.dispatch(shop.column, [])
        draft.retract(shop.column)
    with shop.publisher.publish(some(5000)) as draft:
        draft.dispatch(None, [])
        draft.retract(None)
    assert shop.out() == 0


def test_a_lease_goes_to_several_consumers_and_comes_back_after_the_last(shop: Shop) -> None:
    with Reader() as second:
        other = shop.pool.admit(*second.attach(*shop.pool.export()))
        with shop.publisher.publish(some(5000)) as draft:
            [first_payload] = draft.dispatch(shop.column, [], consumers=2)
            [second_payload] = draft.dispatch(other, [], consumers=2)
        assert isinstance(first_payload, Proxy)
        assert first_payload.consumers == 2
        assert first_payload == second_payload
        shop.reader.acknowledge(first_payload)
        assert shop.out() == 1
        with second.open(second_payload) as view:
            assert (view.data == some(5000)).all()
        assert shop.out() == 0


def test_a_dispatch_to_an_unknown_column_is_refused(shop: Shop) -> None:
    with shop.publisher.publish(some(5000)) as draft, pytest.raises(LeaseError, match="no consumer has column 9"):
        draft.dispatch(9, [])
    assert shop.out() == 0


def test_a_draft_of_no_tensors_leaves_no_lease(shop: Shop) -> None:
    eager = Publisher(shop.pool, inline_below_nbytes=0)
    with eager.draft([]) as draft:
        assert draft.dispatch(shop.column, []) == []
    assert shop.out() == 0


def test_an_impossible_layout_takes_no_lease(shop: Shop) -> None:
    for layout, error in (("float99", (5000,)), UnsupportedDtype), (("uint8", (1 << 50,)), BadTensor):
        with pytest.raises(error), shop.publisher.draft([("uint8", (5000,)), layout]):
            raise AssertionError("a draft was made")
    assert shop.pool.statistics().leases == 0


# --- inline ------------------------------------------------------------------------------------------------------


def test_small_tensors_and_those_without_a_pool_go_inline(shop: Shop) -> None:
    [small], frames = shop.send(some(1023))
    assert isinstance(small, Inline)
    assert (shop.read(small, frames) == some(1023)).all()
    [large], frames = shop.send(some(1024))
    assert isinstance(large, Proxy)
    assert frames == []
    shop.reader.acknowledge(large)
    with Publisher(None).publish(some(5000)) as draft:
        assert draft.transport == "inline"
        [payload] = draft.dispatch(shop.column, frames)
    assert (shop.read(payload, frames) == some(5000)).all()
    assert shop.publisher.drafts == {"small": 1, "pool": 1}
    assert shop.out() == 0


def test_a_consumer_without_a_column_gets_a_copy(shop: Shop) -> None:
    """It cannot read the pool. The copy is its own: the lease may end while ZeroMQ still sends the bytes."""
    [payload], frames = shop.send(some(5000), column=None)
    assert isinstance(payload, Inline)
    assert shop.out() == 0
    with shop.publisher.draft([("uint8", (MIB // 2,))]) as draft:  # over the same bytes
        draft.views[0].data[:] = 0
    assert (shop.read(payload, frames) == some(5000)).all()


def test_inline_frames_are_counted_from_those_already_in_the_message(shop: Shop) -> None:
    frames: list[Buffer] = [b"somebody else's"]
    payloads: list[Payload] = []
    with ExitStack() as drafts:
        for seed in range(3):
            draft = drafts.enter_context(shop.publisher.publish(some(10, seed), some(20, seed)))
            payloads += draft.dispatch(shop.column, frames)
    assert [payload.frame for payload in payloads if isinstance(payload, Inline)] == [1, 2, 3, 4, 5, 6]
    for place, payload in enumerate(payloads):
        assert isinstance(payload, Inline)
        assert (open_inline(payload, frames).data == some(10 if place % 2 == 0 else 20, place // 2)).all()


def test_l5_a_full_pool_sends_the_same_bytes_inline_and_says_so(shop: Shop) -> None:
    sent = [shop.send(some(300_000, seed)) for seed in range(5)]
    kinds = [type(payloads[0]) for payloads, _ in sent]
    assert kinds == [Proxy, Proxy, Proxy, Inline, Inline]
    assert shop.publisher.drafts == {"pool": 3, "pool_full": 2}
    assert [pool for _, pool in shop.fallbacks] == [shop.pool] * 2
    assert {full.wanted_nbytes for full, _ in shop.fallbacks} == {300_000}
    assert {full.longest_free_nbytes for full, _ in shop.fallbacks} == {MIB - 3 * 300_032}
    assert shop.pool.statistics().refused == 2
    for seed, (payloads, frames) in enumerate(sent):
        assert (shop.read(payloads[0], frames) == some(300_000, seed)).all()
    assert shop.out() == 0


def test_l5_slots_run_out_like_bytes(shop: Shop) -> None:
    sent = [shop.send(some(2000, seed)) for seed in range(10)]
    assert shop.publisher.drafts == {"pool": 8, "pool_full": 2}
    assert {full.free_slots for full, _ in shop.fallbacks} == {0}
    for seed, (payloads, frames) in enumerate(sent):
        assert (shop.read(payloads[0], frames) == some(2000, seed)).all()
    assert shop.out() == 0


def test_b03_larger_than_the_pool(shop: Shop) -> None:
    [payload], frames = shop.send(some(2 * MIB))
    assert isinstance(payload, Inline)
    assert (shop.read(payload, frames) == some(2 * MIB)).all()


def test_b03_room_in_pieces_is_no_room() -> None:
    """Every other one of 64 comes back: half the pool is free, and no two pieces lie side by side."""
    with Pool.create(MIB, 64) as pool, Reader() as reader:
        shop = Shop(pool, reader)
        sent = [shop.send(some(MIB // 64, seed)) for seed in range(64)]
        for payloads, _ in sent[::2]:
            shop.reader.acknowledge(payloads[0])
        assert shop.out() == 32
        assert pool.statistics().free_ranges == 32
        [payload], frames = shop.send(some(MIB // 32))
        assert isinstance(payload, Inline)
        assert (shop.read(payload, frames) == some(MIB // 32)).all()
        for payloads, _ in sent[1::2]:
            shop.reader.acknowledge(payloads[0])
        assert shop.out() == 0
        assert pool.statistics().longest_free_nbytes == MIB, "freed neighbours joined"


def test_b01_a_pool_with_a_slow_consumer_stays_within_its_budget(shop: Shop) -> None:
    """Two consumers, one of which acknowledges everything only at the end."""
    with Reader() as slow:
        other = shop.pool.admit(*slow.attach(*shop.pool.export()))
        owed = []
        for seed in range(40):
            frames: list[Buffer] = []
            with shop.publisher.publish(some(MIB // 4, seed)) as draft:
                [fast_payload] = draft.dispatch(shop.column, frames)
                [slow_payload] = draft.dispatch(other, frames)
            assert (shop.read(fast_payload, frames) == some(MIB // 4, seed)).all()
            owed.append((seed, slow_payload, frames))
        assert shop.publisher.drafts == {"pool": 4, "pool_full": 36}
        assert shop.pool.statistics().peak_lent_nbytes == MIB
        for seed, slow_payload, frames in owed:
            with slow.open(slow_payload, frames) as view:
                assert (view.data == some(MIB // 4, seed)).all()
        assert shop.out() == 0, "without any new traffic"


def test_a_closed_pool_is_an_error_and_not_a_crash(shop: Shop) -> None:
    with shop.publisher.publish(some(5000)) as draft:
        shop.pool.close()
        with pytest.raises(PoolClosed):
            draft.dispatch(shop.column, [])
        draft.views[0].data[0] = 1  # its memory is still there
    with pytest.raises(PoolClosed), shop.publisher.publish(some(5000)):
        raise AssertionError("a draft was made")
    shop.pool.close()
    assert shop.pool.reclaim() == 0


def test_drafts_are_made_in_many_threads(shop: Shop) -> None:
    """Writers in threads, as tokenizers have them, while the loop's thread reads: 400 drafts, none mixed up."""
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(100):
            value = number * 50 + turn % 50
            with shop.publisher.draft([("uint8", (3000,))]) as draft:
                draft.views[0].data[:] = value
                frames: list[Buffer] = []
                [payload] = draft.dispatch(shop.column, frames)
            if set(shop.read(payload, frames).tolist()) != {value}:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert shop.publisher.drafts.total() == 400
    assert shop.out() == 0


def test_a_view_of_a_draft_refuses_a_tensor_of_another_shape(shop: Shop) -> None:
    with shop.publisher.draft([("uint8", (5000,))]) as draft, pytest.raises(BadTensor):
        draft.views[0].copy_from(View.empty("uint8", (50, 100)))
    assert shop.out() == 0
