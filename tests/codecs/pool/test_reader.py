"""The consumer's side: exactly one acknowledgement a lease, whatever it does with it and whatever the proxy says."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from tensorferry.codecs.errors import (
    AttachRefused,
    BadTensor,
    FerryError,
    LeaseNotReady,
    LeasePoisoned,
    PeerGone,
    StaleLease,
    UnsupportedDtype,
)
from tensorferry.codecs.messages import Inline, Proxy
from tensorferry.codecs.pool.control import AckPage
from tensorferry.codecs.pool.export import Export
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES, View

NBYTES = 1 << 16
Change = msgspec.structs.replace


class Shop:
    """A pool and a reader of it, in one process."""

    def __init__(self, pool: Pool, reader: Reader) -> None:
        self.pool, self.reader = pool, reader
        self.column = pool.admit(*reader.attach(*pool.export()))
        self.publisher = Publisher(pool, inline_below_nbytes=0)

    def publish(self, value: int = 7, tensors: int = 1, uses: int = 1) -> list[Proxy]:
        with self.publisher.publish(*[np.full(100, value, np.uint8)] * tensors) as draft:
            return [proxy for proxy in draft.dispatch(self.column, [], uses=uses) if isinstance(proxy, Proxy)]

    def out(self) -> int:
        """Leases that have not come back."""
        self.pool.reclaim()
        return self.pool.statistics().lent_slots


@pytest.fixture
def shop() -> Iterator[Shop]:
    with Pool.create(NBYTES, 8) as pool, Reader() as reader:
        yield Shop(pool, reader)


def test_a_block_s_end_acknowledges(shop: Shop) -> None:
    [proxy] = shop.publish(value=7)
    with shop.reader.open(proxy) as view:
        assert (view.dtype, view.shape, view.data.tolist()) == ("uint8", (100,), [7] * 100)
        assert shop.out() == 1
    assert shop.out() == 0


def test_b07_a_block_that_fails_acknowledges_too(shop: Shop) -> None:
    [proxy] = shop.publish()
    with pytest.raises(ArithmeticError), shop.reader.open(proxy):
        raise ArithmeticError
    assert shop.out() == 0


def test_e4_a_lease_is_acknowledged_unread(shop: Shop) -> None:
    [proxy] = shop.publish()
    shop.reader.acknowledge(proxy)
    assert shop.out() == 0


# --- one acknowledgement, at the last release ------------------------------------------------------------------


def test_l9_a_packed_lease_comes_back_after_its_last_tensor(shop: Shop) -> None:
    proxies = shop.publish(tensors=3)
    with shop.reader.open(proxies[2]):
        pass
    shop.reader.acknowledge(proxies[0])
    assert shop.out() == 1
    with shop.reader.open(proxies[1]) as view:
        assert view.data[0] == 7
    assert shop.out() == 0


def test_b09_a_lease_used_n_times_comes_back_after_n_releases(shop: Shop) -> None:
    [proxy] = shop.publish(uses=3)
    for _ in range(3):
        assert shop.out() == 1
        with shop.reader.open(proxy) as view:
            assert view.data[0] == 7
    assert shop.out() == 0


def test_b09_one_release_too_many_is_refused_and_changes_nothing(shop: Shop) -> None:
    [proxy] = shop.publish()
    shop.reader.acknowledge(proxy)
    for release in (shop.reader.acknowledge, lambda proxy: shop.reader.open(proxy).__enter__()):
        with pytest.raises(StaleLease, match="acknowledged here already") as refused:
            release(proxy)
        assert (refused.value.slot, refused.value.generation) == (proxy.slot, proxy.generation)
    assert shop.out() == 0
    [after] = shop.publish()
    with pytest.raises(StaleLease):
        shop.reader.acknowledge(Change(after, generation=after.generation + 1))
    assert shop.out() == 1
    shop.reader.acknowledge(after)
    assert shop.out() == 0


# --- withdrawn: its producer does not know whether we were told -----------------------------------------------------


def test_a_lease_that_never_came_is_given_back_when_it_is_withdrawn(shop: Shop) -> None:
    [proxy], [other] = shop.publish(), shop.publish()
    assert shop.pool.outstanding(shop.column) == [(proxy.slot, proxy.generation), (other.slot, other.generation)]
    shop.reader.withdraw(proxy.pool, [(proxy.slot, proxy.generation)])
    assert shop.out() == 1
    assert shop.pool.outstanding(shop.column) == [(other.slot, other.generation)]
    with pytest.raises(StaleLease), shop.reader.open(proxy):  # it has come after all
        pass
    with shop.reader.open(other) as view:
        assert view.data[0] == 7


def test_a_lease_that_is_open_is_given_back_at_the_block_s_end_when_it_is_withdrawn(shop: Shop) -> None:
    [proxy] = shop.publish(value=9, uses=3)
    with shop.reader.open(proxy) as view:
        shop.reader.withdraw(proxy.pool, [(proxy.slot, proxy.generation)])
        shop.publish(value=1)
        assert shop.out() == 2
        assert view.data[0] == 9
    assert shop.out() == 1, "the uses to come were withdrawn with it"


def test_what_is_withdrawn_too_late_or_never_was_changes_nothing(shop: Shop) -> None:
    [proxy] = shop.publish()
    shop.reader.acknowledge(proxy)
    for slot, generation in ((proxy.slot, proxy.generation), (proxy.slot, proxy.generation + 1), (4000, 1)):
        shop.reader.withdraw(proxy.pool, [(slot, generation)])
    shop.reader.withdraw(proxy.pool + 1, [(proxy.slot, 1)])
    assert shop.pool.check_words() == []
    [again] = shop.publish()
    with shop.reader.open(again) as view:
        assert view.data[0] == 7


def test_a11_a_lease_opened_twice_at_once_stays_until_the_last_block_ends(shop: Shop) -> None:
    """Even where its producer expected one use: the first release must not free the bytes under the second."""
    [proxy] = shop.publish()
    with shop.reader.open(proxy) as first:
        with shop.reader.open(proxy) as second:
            assert np.shares_memory(first.data, second.data)
        assert shop.out() == 1
        shop.reader.acknowledge(proxy)
        assert shop.out() == 1
        assert first.data[0] == 7
    assert shop.out() == 0


def test_blocks_may_end_in_any_order(shop: Shop) -> None:
    proxies = shop.publish(tensors=2)
    with ExitStack() as outer:
        with ExitStack() as inner:
            outer.enter_context(shop.reader.open(proxies[0]))
            inner.enter_context(shop.reader.open(proxies[1]))
        assert shop.out() == 1
    assert shop.out() == 0


def test_threads_share_a_reader() -> None:
    """4 threads read 2,000 leases, twice each, as they come; every byte is right and every lease comes back."""
    rounds, threads, wrong = 500, 4, []
    with Pool.create(NBYTES, 8) as pool, Reader() as reader:
        column = pool.admit(*reader.attach(*pool.export()))
        publisher = Publisher(pool, inline_below_nbytes=0)

        def work(number: int) -> None:
            for turn in range(rounds):
                value = (number * rounds + turn) % 251
                with publisher.publish(np.full(4000, value, np.uint8)) as draft:
                    frames: list[Any] = []
                    [payload] = draft.dispatch(column, frames, uses=2)
                for _ in range(2):
                    with reader.open(payload, frames) as view:
                        if not (view.data == value).all():
                            wrong.append((number, turn))
                    if isinstance(payload, Inline):
                        break

        running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
        assert not wrong
        assert publisher.drafts.total() == rounds * threads
        pool.reclaim()
        assert pool.statistics().lent_slots == 0
        assert pool.statistics().leases == publisher.drafts["pool"] > 0


# --- not ready, never ready ---------------------------------------------------------------------------------------


def begun(shop: Shop, block: ExitStack) -> tuple[Any, Proxy]:
    """A lease that nothing was written to yet, and the proxy of it that a producer might send early."""
    lease = block.enter_context(shop.pool.lease(100))
    slot, generation, offset, _ = lease.grant
    return lease, Proxy(shop.pool.description.pool, slot, generation, offset, CODES["uint8"], (100,))


@pytest.mark.parametrize("former_leases", [0, 8])
def test_bytes_that_are_not_written_yet_are_not_shown(shop: Shop, former_leases: int) -> None:
    """Nor because the slot's former lease was ready."""
    for _ in range(former_leases):
        shop.reader.acknowledge(shop.publish()[0])
        assert shop.out() == 0
    with ExitStack() as block:
        lease, proxy = begun(shop, block)
        assert not shop.reader.is_ready(proxy)
        lease.data[:] = 9
        lease.dispatch([shop.column])
        assert shop.reader.is_ready(proxy)
    with shop.reader.open(proxy) as view:
        assert view.data[0] == 9
    assert shop.out() == 0


def test_opening_too_early_is_an_error_and_a_release(shop: Shop) -> None:
    with ExitStack() as block:
        lease, proxy = begun(shop, block)
        shop.pool._ledger.dispatch(lease.grant, [shop.column])  # told before it is ready, as on a GPU
        with pytest.raises(LeaseNotReady), shop.reader.open(proxy):
            raise AssertionError("opened")
        assert shop.out() == 1, "a lease ends only when it is ready, however often it was acknowledged"
    assert shop.out() == 0


def test_an_early_acknowledgement_counts_once_the_bytes_are_ready(shop: Shop) -> None:
    with ExitStack() as block:
        lease, proxy = begun(shop, block)
        shop.reader.acknowledge(proxy)
        assert shop.out() == 1
        lease.dispatch([shop.column])
    assert shop.out() == 0


def test_l12_a_poisoned_lease_is_an_error_and_never_a_value(shop: Shop) -> None:
    with ExitStack() as block:
        lease, proxy = begun(shop, block)
        lease.poison()
        lease.dispatch([shop.column])  # ready afterwards does not make it good
    with pytest.raises(LeasePoisoned):
        shop.reader.is_ready(proxy)
    with pytest.raises(LeasePoisoned), shop.reader.open(proxy):
        raise AssertionError("opened")
    assert shop.out() == 0


def test_poison_of_a_former_lease_means_nothing_to_the_next(shop: Shop) -> None:
    with ExitStack() as block:
        lease, _ = begun(shop, block)
        lease.poison()
    for _ in range(8):  # once around all slots
        [proxy] = shop.publish()
        with shop.reader.open(proxy) as view:
            assert view.data[0] == 7
        assert shop.out() == 0


# --- proxies that lie -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ({"offset": NBYTES}, BadTensor),
        ({"offset": NBYTES - 64}, BadTensor),
        ({"offset": (1 << 40) - 64}, BadTensor),
        ({"offset": 1}, BadTensor),
        ({"shape": (NBYTES + 1,)}, BadTensor),
        ({"shape": (1 << 20, 1 << 20)}, BadTensor),
        ({"shape": (1 << 20, 1 << 10)}, BadTensor),
        ({"shape": (1 << 39, 1 << 39)}, BadTensor),
        ({"shape": (0, 1 << 39, 1 << 39)}, BadTensor),
        ({"shape": (-100,)}, BadTensor),
        ({"dtype": CODES["float64"], "shape": (NBYTES // 8 + 1,)}, BadTensor),
        ({"dtype": len(CODES)}, UnsupportedDtype),
        ({"dtype": 255}, UnsupportedDtype),
    ],
    ids=str,
)
def test_b31_a_proxy_that_lies_is_an_error_before_anything_is_allocated_and_its_lease_comes_back(
    shop: Shop,
    allocates_under: Callable[[int], AbstractContextManager[None]],
    lie: dict[str, Any],
    error: type[FerryError],
) -> None:
    shop.publish()  # a neighbour, whose bytes are nobody else's business
    [proxy] = shop.publish()
    wrong = Change(proxy, **lie)
    with pytest.raises(error):
        shop.reader.is_ready(wrong)
    with allocates_under(1 << 20), pytest.raises(error), shop.reader.open(wrong):
        raise AssertionError("opened")
    assert shop.out() == 1, "its lease, and only its lease, came back"


@pytest.mark.parametrize("lie", [{"dtype": 255}, {"shape": (1 << 39, 1 << 39)}, {"offset": NBYTES}], ids=str)
def test_b06_a_proxy_that_lies_can_be_given_back_unread(shop: Shop, lie: dict[str, Any]) -> None:
    [proxy] = shop.publish()
    shop.reader.acknowledge(Change(proxy, **lie))
    assert shop.out() == 0


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ({"slot": 8}, BadTensor),
        ({"slot": (1 << 31) - 1}, BadTensor),
        ({"slot": 5}, StaleLease),
        ({"generation": 2}, StaleLease),
        ({"generation": (1 << 31) - 1}, StaleLease),
        ({"pool": 12345}, PeerGone),
    ],
    ids=str,
)
def test_b31_a_proxy_of_no_lease_frees_nothing(shop: Shop, lie: dict[str, Any], error: type[FerryError]) -> None:
    [proxy] = shop.publish()
    wrong = Change(proxy, **lie)
    for act in (shop.reader.is_ready, shop.reader.acknowledge, lambda wrong: shop.reader.open(wrong).__enter__()):
        with pytest.raises(error):
            act(wrong)
    assert shop.out() == 1
    shop.reader.acknowledge(proxy)
    assert shop.out() == 0


def test_a_proxy_of_a_lease_that_is_over_is_refused(shop: Shop) -> None:
    [old] = shop.publish()
    shop.reader.acknowledge(old)
    assert shop.out() == 0
    for _ in range(8):  # the slot comes round again, with the next generation
        [new] = shop.publish(value=9)
        if new.slot == old.slot:
            break
        shop.reader.acknowledge(new)
        shop.out()
    assert new.generation == old.generation + 1
    with pytest.raises(StaleLease, match=f"is over: the slot is at generation {new.generation}"):
        shop.reader.acknowledge(old)
    with pytest.raises(StaleLease), shop.reader.open(old):
        raise AssertionError("opened")
    assert (shop.out(), shop.reader.stale) == (1, 2)


# --- pools come and go ------------------------------------------------------------------------------------------------


def test_detaching_under_a_view_keeps_its_bytes_and_ends_without_an_error(shop: Shop) -> None:
    [proxy], [other] = shop.publish(value=3), shop.publish()
    with shop.reader.open(proxy) as view:
        shop.reader.detach(proxy.pool)
        assert view.data.tolist() == [3] * 100
        del view
    for act in (shop.reader.is_ready, shop.reader.acknowledge):
        with pytest.raises(PeerGone, match="is not attached here"):
            act(other)
    assert shop.reader.pools == frozenset()
    shop.reader.detach(proxy.pool)


def test_a_pool_that_goes_while_a_block_begins_is_gone(shop: Shop) -> None:
    """As when another thread detaches it between the two looks that `open` takes."""
    [proxy] = shop.publish()
    hold = shop.reader._hold

    def hold_and_detach(proxy: Proxy) -> Any:
        held = hold(proxy)
        shop.reader.detach(proxy.pool)
        return held

    shop.reader._hold = hold_and_detach  # type: ignore[method-assign]
    with pytest.raises(PeerGone, match="was detached"), shop.reader.open(proxy):
        raise AssertionError("opened")


def test_a_block_opened_before_a_detach_acknowledges_in_its_own_column(shop: Shop) -> None:
    [proxy] = shop.publish()
    with shop.reader.open(proxy) as view:
        shop.reader.detach(proxy.pool)
        again = shop.pool.admit(*shop.reader.attach(*shop.pool.export()))
        del view
    assert again != shop.column
    assert shop.out() == 0


def test_a_pool_is_attached_once(shop: Shop) -> None:
    with pytest.raises(AttachRefused, match="is attached already"):
        shop.reader.attach(*shop.pool.export())
    assert shop.reader.pools == {shop.pool.description.pool}


def test_of_two_threads_that_attach_a_pool_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool.create(NBYTES, 8) as pool, Reader() as reader:
        attached = []
        create = AckPage.create

        def create_late(*arguments: int) -> AckPage:
            """While we attach, another thread does."""
            monkeypatch.undo()
            attached.append(reader.attach(*pool.export()))
            return create(*arguments)

        monkeypatch.setattr(AckPage, "create", create_late)
        with pytest.raises(AttachRefused, match="is attached already"):
            reader.attach(*pool.export())
        assert pool.admit(*attached[0]) == 0
        assert len(reader.pools) == 1


def test_closing_detaches_everything() -> None:
    with Pool.create(NBYTES, 8) as first, Pool.create(NBYTES, 8) as second:
        reader = Reader()
        for pool in (first, second):
            pool.admit(*reader.attach(*pool.export()))
        assert len(reader.pools) == 2
        reader.close()
        assert not reader.pools
        reader.close()


def strange_exports(pool: Pool, other: Pool) -> Iterator[tuple[str, Callable[[], tuple[Export, list[int]]]]]:
    def described(**changes: Any) -> tuple[Export, list[int]]:
        export, fds = pool.export()
        return Change(export, description=Change(export.description, **changes)), fds

    def produced_by_another() -> tuple[Export, list[int]]:
        export, fds = pool.export()
        return Change(export, producer=78), fds

    def without(place: int) -> tuple[Export, list[int]]:
        export, fds = pool.export()
        os.close(fds.pop(place))
        return export, fds

    def with_null(place: int) -> tuple[Export, list[int]]:
        export, fds = without(place)
        return export, [*fds[:place], os.open(os.devnull, os.O_RDWR), *fds[place:]]

    def with_foreign(place: int) -> tuple[Export, list[int]]:
        export, fds = without(place)
        _, theirs = other.export()
        taken = theirs.pop(place)
        for fd in theirs:
            os.close(fd)
        return export, [*fds[:place], taken, *fds[place:]]

    def with_more() -> tuple[Export, list[int]]:
        export, fds = pool.export()
        return export, [*fds, os.dup(fds[0])]

    for place, what in enumerate(["memory", "control page", "process"]):
        yield f"no {what}", partial(without, place)
        yield f"{what} is /dev/null", partial(with_null, place)
    yield "memory of another size", partial(with_foreign, 0)
    yield "control page of another pool", partial(with_foreign, 1)
    yield "one descriptor more", with_more
    yield "size", partial(described, nbytes=NBYTES + 1)
    yield "no size", partial(described, nbytes=0)
    yield "slots", partial(described, slots=9)
    yield "pool", partial(described, pool=77)
    yield "kind of memory", partial(described, memory="cuda_ipc")
    yield "producer", produced_by_another


def test_a_strange_export_is_refused_with_everything_closed(
    belongings: Callable[[], Any], left: Callable[..., list[str]]
) -> None:
    with Pool.create(NBYTES, 8) as pool, Pool.create(NBYTES * 2, 8) as other, Reader() as reader:
        for what, make in strange_exports(pool, other):
            before = belongings()
            with pytest.raises(AttachRefused):
                reader.attach(*make())
            assert left(before) == [], what
            assert not reader.pools, what
        column = pool.admit(*reader.attach(*pool.export()))
        assert column == 0, "and a good one is taken afterwards"


def test_inline_payloads_need_no_pool() -> None:
    with Reader() as reader:
        payload = Inline(1, CODES["int16"], (2,))
        with reader.open(payload, [b"", np.array([1, 2], "<i2").tobytes()]) as view:
            assert view.numpy().tolist() == [1, 2]
        reader.acknowledge(payload)


def test_what_was_copied_out_is_the_reader_s_own(shop: Shop) -> None:
    """Materialise: the producer may write the range again as soon as the block has ended."""
    [proxy] = shop.publish(value=5)
    own = View.empty("uint8", proxy.shape)
    with shop.reader.open(proxy) as view:
        own.copy_from(view)
    assert shop.out() == 0
    for _ in range(8):
        [later] = shop.publish(value=6)
        shop.reader.acknowledge(later)
        shop.out()
    assert own.numpy().tolist() == [5] * 100
