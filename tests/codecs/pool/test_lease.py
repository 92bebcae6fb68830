"""What a hostile tester did with a pool's objects: each is refused, or is harmless; no lease is lost and none lies."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs.errors import AttachRefused, BadTensor, FerryError, LeaseError, LeasePoisoned, PoolClosed
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.export import Attachment
from tensorferry.codecs.pool.ledger import Ledger
from tensorferry.codecs.pool.pool import Lease, Pool
from tensorferry.codecs.pool.publisher import Draft, Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.system.interruptible_lock import Lock
from tensorferry.codecs.tensors import CODES

NBYTES = 100_000


@dataclass
class Shop:
    pool: Pool
    reader: Reader
    column: int

    @property
    def publisher(self) -> Publisher:
        return Publisher(self.pool)

    def proxy(self, lease: Lease) -> Proxy:
        slot, generation, offset, _ = lease.grant
        return Proxy(self.pool.description.pool, slot, generation, offset, CODES["uint8"], (NBYTES,))

    def out(self) -> int:
        self.pool.reclaim()
        return self.pool.statistics().lent_slots


@pytest.fixture
def shop() -> Iterator[Shop]:
    with Pool.create(1 << 20, 4) as pool, Reader() as reader:
        yield Shop(pool, reader, pool.admit(*reader.attach(*pool.export())))


def tensor(value: int) -> Any:
    return np.full(NBYTES, value, np.uint8)


# --- a lease or draft is for one block ------------------------------------------------------------------------


def test_a_lease_is_for_one_block(shop: Shop) -> None:
    lease = shop.pool.lease(NBYTES)
    with lease, pytest.raises(LeaseError, match="one block"):
        lease.__enter__()
    with pytest.raises(LeaseError, match="one block"):
        lease.__enter__()
    assert shop.out() == 0


def test_a_draft_is_for_one_block(shop: Shop) -> None:
    draft = shop.publisher.draft([("uint8", (NBYTES,))])
    with draft, pytest.raises(LeaseError, match="one block"):
        draft.__enter__()
    with pytest.raises(LeaseError, match="one block"):
        draft.__enter__()
    assert shop.out() == 0


def test_r3_a_lease_that_is_over_poisons_nothing(shop: Shop) -> None:
    """Its slot may be another's, and poisoned: overwritten, that word would vouch for the bytes again."""
    earlier = []
    for _ in range(4):
        with shop.pool.lease(NBYTES) as over:
            earlier.append(over)
        shop.pool.reclaim()
    with shop.pool.lease(NBYTES) as second:
        [first] = [lease for lease in earlier if lease.grant.slot == second.grant.slot]
        second.poison()
        second.dispatch([shop.column])
        with pytest.raises(LeaseError, match="has ended"):
            first.poison()
        with pytest.raises(LeasePoisoned), shop.reader.open(shop.proxy(second)):
            pass


# --- who was told ---------------------------------------------------------------------------------------------


def test_r2_a_lease_is_dispatched_to_a_consumer_once(shop: Shop) -> None:
    """Or a send that fails would take back the one before, which was opened, and its bytes be lent under the reader."""
    with shop.publisher.publish(tensor(7)) as draft:
        [proxy] = draft.dispatch(shop.column, [])
        with shop.reader.open(proxy) as view:  # type: ignore[arg-type]
            with pytest.raises(LeaseError, match="was dispatched to it already"):
                draft.dispatch(shop.column, [])
            assert view.numpy()[0] == 7
    assert shop.out() == 0


def test_a_consumer_whose_send_failed_can_be_dispatched_to_again(shop: Shop) -> None:
    with shop.publisher.publish(tensor(7)) as draft:
        draft.dispatch(shop.column, [])
        draft.retract(shop.column)
        [proxy] = draft.dispatch(shop.column, [])
    with shop.reader.open(proxy) as view:
        assert view.numpy()[0] == 7
    assert shop.out() == 0


@pytest.mark.parametrize("counts", [{"uses": 70_000}, {"uses": 0}, {"consumers": 1025}, {"consumers": 0}], ids=str)
def test_counts_that_no_receiver_accepts_are_refused_before_a_dispatch_is_booked(
    shop: Shop, counts: dict[str, int]
) -> None:
    with shop.publisher.publish(tensor(1)) as draft, pytest.raises(LeaseError, match="at most"):
        draft.dispatch(shop.column, [], **counts)
    assert shop.out() == 0


def test_uses_count_for_every_tensor(shop: Shop) -> None:
    with (
        Publisher(shop.pool, inline_below_nbytes=0).draft([("uint8", (1,))] * 9) as draft,
        pytest.raises(LeaseError, match="72000 uses"),
    ):
        draft.dispatch(shop.column, [], uses=8000)
    assert shop.out() == 0


# --- detach, and descriptors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["detach", "close"])
def test_r7_a_block_that_outlives_its_pool_s_mapping_still_acknowledges(shop: Shop, how: str) -> None:
    with shop.publisher.publish(tensor(7)) as draft:
        [proxy] = draft.dispatch(shop.column, [])
    with shop.reader.open(proxy) as view:
        if how == "detach":
            shop.reader.detach(shop.pool.description.pool)
        else:
            shop.reader.close()
        assert view.numpy()[0] == 7
        assert shop.out() == 1
        del view
    assert shop.out() == 0


@pytest.mark.parametrize("room", [0, 1, 2])
def test_an_export_that_finds_no_descriptor_leaves_none(shop: Shop, room: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 16, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):  # noqa: PT012
            while True:
                fillers.append(os.dup(0))
        for _ in range(room):
            os.close(fillers.pop())
        with pytest.raises(OSError, match="Too many open files"):
            shop.pool.export()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_pool_says_so_when_it_is_exported(shop: Shop) -> None:
    shop.pool.close()
    with pytest.raises(PoolClosed):
        shop.pool.export()


# --- blocks that the garbage collector ends ---------------------------------------------------------------------


def abandoned(block: Any) -> None:
    """Leave a block open in a generator that only the collector of cycles can end."""

    def inside() -> Iterator[None]:
        me.append(running)
        with block:
            yield

    me: list[Any] = []
    running = inside()
    next(running)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The collector of cycles runs nowhere but inside the locks of pools and readers, and over what the test has made:
    everything that earlier tests have imported takes it a second each time."""

    def collecting(method: Any) -> Any:
        def collect_first(*arguments: Any) -> Any:
            gc.collect()
            return method(*arguments)

        return collect_first

    monkeypatch.setattr(Ledger, "lend", collecting(Ledger.lend))
    monkeypatch.setattr(Reader, "_living", collecting(Reader._living))
    gc.disable()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("collector")
def test_a_block_that_the_collector_ends_inside_a_lock_does_not_wait_for_itself(shop: Shop) -> None:
    for value in range(1, 4):
        abandoned(shop.publisher.draft([("uint8", (NBYTES,))]))
        with shop.publisher.publish(tensor(value)) as draft:
            [proxy] = draft.dispatch(shop.column, [])
        abandoned(shop.reader.open(proxy))
        with shop.publisher.publish(tensor(value)) as draft:
            [other] = draft.dispatch(shop.column, [])
        with shop.reader.open(other) as view:
            assert view.numpy()[0] == value
        assert shop.out() == 0


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("collector")
def test_a_finaliser_that_calls_the_pool_inside_its_lock_is_refused(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would find the books half written, and leave them wrong."""
    refused: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", lambda problem: refused.append(problem.exc_value))

    block = ExitStack()
    block.callback(shop.pool.reclaim)
    abandoned(block)
    del block
    with shop.publisher.publish(tensor(1)) as draft:
        [proxy] = draft.dispatch(shop.column, [])
    with shop.reader.open(proxy):
        pass
    assert [str(problem) for problem in refused] == [
        "called by a finaliser, within another call of the same pool or reader"
    ]
    assert shop.out() == 0


@pytest.mark.usefixtures("collector")
def test_the_late_end_of_a_block_that_fails_harms_no_other_block(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", told.append)
    lock, done = Lock(), []
    with lock():
        lock.run(lambda: 1 / 0)
        lock.run(lambda: done.append(1))
    with lock():
        assert done == [1]
    assert [type(problem.exc_value) for problem in told] == [ZeroDivisionError]
    other = threading.Thread(target=lambda: lock.run(lambda: done.append(2)))
    other.start()
    other.join(10)
    assert done == [1, 2]


@pytest.mark.leaves("a use that an interrupt has lost keeps its pool mapped")
def test_an_interrupt_leaves_no_lock_held(shop: Shop) -> None:
    """Wherever in a call it comes; what the call was about may be lost (docs/library.md)."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    rng, interrupts = random.Random(5), 0
    try:
        while interrupts < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 2e-4))
                with shop.publisher.publish(tensor(1)) as draft:
                    for payload in draft.dispatch(shop.column, []):
                        with shop.reader.open(payload):
                            pass
                shop.pool.statistics()
            except KeyboardInterrupt:
                interrupts += 1
            except (FerryError, LookupError):
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:  # between the two
        pass
    finally:
        signal.signal(signal.SIGALRM, before)
    asked: list[int] = []
    other = threading.Thread(target=lambda: asked.append(shop.pool.statistics().slots), daemon=True)
    other.start()
    other.join(10)
    assert asked == [4]


# --- arguments ------------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"nbytes": "64"}, (TypeError, "nbytes='64'")),
        ({"nbytes": 1.5}, (TypeError, "nbytes=1.5")),
        ({"nbytes": None}, (TypeError, "nbytes=None")),
        ({"slots": -5}, (ValueError, "slots=-5: from 1 to 1048576")),
        ({"slots": 0}, (ValueError, "slots=0: from 1 to")),
        ({"slots": (1 << 20) + 1}, (ValueError, "slots=1048577: from 1 to")),
        ({"slots": "4"}, (TypeError, "slots='4'")),
        ({"producer": -1}, (ValueError, "producer=-1: from 1 to")),
        ({"producer": "x"}, (TypeError, "producer='x'")),
        ({"device": "x"}, (TypeError, "device='x'")),
        ({"device": -1}, (ValueError, "device=-1: from 0 to")),
        ({"memory": "cuda_vmm", "chunk_nbytes": -1}, (ValueError, "chunk_nbytes=-1: from 1 to")),
        ({"memory": "cuda_vmm", "idle_s": -1.0}, (ValueError, "idle_s=-1.0: from 0 to 1e\\+09 seconds")),
        ({"memory": "cuda_vmm", "idle_s": float("nan")}, (ValueError, "idle_s=nan: from 0")),
        ({"memory": "cuda_vmm", "idle_s": 1e300}, (ValueError, "idle_s=1e\\+300: from 0")),
        ({"memory": "cuda_vmm", "grow_wait_s": float("inf")}, (ValueError, "grow_wait_s=inf: from 0")),
        pytest.param(
            {"memory": "cuda_vmm", "grow_wait_s": 10**400},
            (ValueError, "grow_wait_s=10+: from 0"),
            id="a very long wait",
        ),
        ({"memory": "cuda_vmm", "mail": "rdma"}, (ValueError, "mail='rdma': .* one of posix_fd, fabric")),
        ({"memory": "cuda_vmm", "mail": ""}, (ValueError, "mail='': .* one of posix_fd, fabric")),
        ({"memory": "cuda_vmm", "mail": 5}, (ValueError, "mail=5: .* one of posix_fd, fabric")),
        ({"memory": "cuda_vmm", "grow_wait_s": "x"}, (TypeError, "grow_wait_s='x'")),
    ],
    ids=str,
)
def test_a_pool_checks_its_arguments_before_it_takes_anything(
    arguments: dict[str, Any], problem: tuple[type[Exception], str]
) -> None:
    before = descriptors()
    for _ in range(3):
        with pytest.raises(problem[0], match=problem[1]):
            Pool.create(**{"nbytes": 1 << 20, **arguments})
    assert descriptors() == before


def test_what_is_no_pool_or_device_is_refused_where_it_is_given(shop: Shop) -> None:
    for pool in ("x", shop.reader, Pool):
        with pytest.raises(TypeError, match=r"pool=.*: give a Pool, or None"):
            Publisher(pool)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device='x'"):
        Reader(device="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="consumer=-1: from 1 to"):
        Reader(-1)


@pytest.mark.parametrize(
    "layout",
    [None, 3, [("float32",)], [("float32", 3)], [("float32", None)], [3], [("float32", (1.5,))], [(["a"], (1,))],
     [("float32", ("2",))]],
    ids=str,
)  # fmt: skip
def test_a_layout_that_is_none_says_what_one_is(shop: Shop, layout: Any) -> None:
    with pytest.raises(BadTensor, match=r"is no layout; give the dtype and shape of each tensor"):
        shop.publisher.draft(layout)


def test_extents_that_numpy_counted_are_whole_numbers(shop: Shop) -> None:
    with shop.publisher.draft([("uint8", (np.int64(NBYTES),))]) as draft:  # type: ignore[list-item]
        assert draft.nbytes == NBYTES


@pytest.mark.parametrize("payload", [None, "proxy", b"", 3], ids=repr)
def test_what_is_no_payload_is_refused_by_a_reader(shop: Shop, payload: Any) -> None:
    for refuse in (
        lambda: shop.reader.open(payload).__enter__(),
        lambda: shop.reader.copy(payload, shop.publisher),  # type: ignore[arg-type]
        lambda: shop.reader.acknowledge(payload),
        lambda: shop.reader.is_ready(payload),
    ):
        with pytest.raises(TypeError, match="is no payload; give one that `dispatch` returned"):
            refuse()


@pytest.mark.parametrize("nbytes", [-1, -(1 << 40)])
def test_a_lease_of_less_than_nothing_is_refused(shop: Shop, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"nbytes={nbytes}: from 0 to"):
        shop.pool.lease(nbytes)
    with pytest.raises(TypeError, match="nbytes='1'"):
        shop.pool.lease("1")  # type: ignore[arg-type]
    assert shop.out() == 0


def test_a_column_that_never_was_cannot_be_written_off(shop: Shop) -> None:
    for column in (99, shop.column + 1, -1):
        with pytest.raises(ValueError, match=f"column={column}: from 0 to {shop.column}"):
            shop.pool.strike(column)
    with pytest.raises(TypeError, match="column=None"):
        shop.pool.strike(None)  # type: ignore[arg-type]
    shop.pool.strike(shop.column)
    shop.pool.strike(shop.column)
    assert shop.pool.statistics().struck_consumers == 1


def test_attach_and_admit_refuse_what_is_none_and_close_what_they_were_given(shop: Shop) -> None:
    before = descriptors()
    for refuse in (shop.reader.attach, shop.pool.admit):
        with pytest.raises(TypeError, match=r"None is no (Export|Attachment)"):
            refuse(None, [os.dup(0)])  # type: ignore[arg-type]
    export, fds = shop.pool.export()
    for fd in fds:
        os.close(fd)
    for given in ([999, 998, 997], [os.dup(0), 998, os.dup(0)], [os.dup(0), -1], [-1]):
        with pytest.raises(AttachRefused, match=r"descriptor (999|998|-1) is not open"):
            Reader().attach(export, given)
    attachment = Attachment(export.description.pool, 7)
    with pytest.raises(AttachRefused, match="descriptor 998 is not open"):
        shop.pool.admit(attachment, [os.dup(0), 998])
    assert descriptors() == before


def test_a_draft_gives_no_bytes_outside_its_block(shop: Shop) -> None:
    """They are somebody else's by then."""

    def check_refused(draft: Draft) -> None:
        for outside in (partial(draft.dispatch, None, []), partial(draft.dispatch, shop.column, []), draft.stage):
            with pytest.raises(LeaseError, match="outside its block"):
                outside()

    for publisher in (shop.publisher, Publisher(None)):
        draft = publisher.publish(tensor(1))
        check_refused(draft)
        with draft:
            draft.dispatch(None, [])
        with publisher.publish(tensor(2)):
            check_refused(draft)
    assert shop.out() == 0
