"""What an adapter loads: one item where it lies, several in one copy each, and no memory but the batch's."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import View
from tensorferry.stages.encoder.batch_call import Call
from tensorferry.stages.encoder.features import Features
from tensorferry.stages.encoder.job_queue import Job

SIDE, WIDTH = 32, 1024  #: of an item: patches in each direction, and bytes of a patch
ITEM_NBYTES = SIDE * SIDE * WIDTH
OWNER, RANKS = wire.Origin("tokenizer", 0, 3), (wire.Rank(0, 7),)


@pytest.fixture
def call_of() -> Iterator[Callable[..., tuple[Call, list[View]]]]:
    """A call for so many items of one request each, and the producer's views of their features."""
    with Pool.create(64 << 20, 16) as pool, Reader() as reader, ExitStack() as undo:
        column = pool.admit(*reader.attach(*pool.export()))
        publisher = Publisher(pool, inline_below_nbytes=0)

        def make(items: int) -> tuple[Call, list[View]]:
            jobs, views = [], []
            for number in range(items):
                draft = undo.enter_context(publisher.draft([("uint8", (SIDE * SIDE, WIDTH))]))
                draft.views[0].data[:] = number + 1
                [payload] = draft.dispatch(column, [])
                views += draft.views
                item = wire.Item("image", (1, SIDE, SIDE), 1, bytes(32), (wire.Tensor("features", payload),))
                message = wire.Encode(bytes([number]) * 16, 0, 7, OWNER, RANKS, RANKS, (item,), 60_000)
                job = Job(message, Features(reader, message, ()))
                undo.callback(job.close)
                jobs.append(job)
            return Call(jobs, None, publisher, None, undo), views

        yield make


@contextmanager
def allocated() -> Iterator[Callable[[], int]]:
    """How many bytes the block has had beyond what was there before, at the most."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_l10_a_single_item_is_borrowed_where_it_lies(call_of: Callable[..., tuple[Call, list[View]]]) -> None:
    call, [produced] = call_of(1)
    with allocated() as most:
        loaded = call.load([0])
        assert most() < ITEM_NBYTES // 4
    assert int(loaded.data[-1]) == 1
    produced.data[-1] = 99
    assert int(loaded.data[-1]) == 99, "it is the producer's memory"


@pytest.mark.parametrize("items", [2, 3])
def test_e5_items_are_copied_straight_into_their_rows_of_one_batch(
    call_of: Callable[..., tuple[Call, list[View]]], items: int
) -> None:
    call, _ = call_of(items)
    with allocated() as most:
        loaded = call.load(range(items))
        assert most() < (items + 0.25) * ITEM_NBYTES, "the batch, and no temporary of an item"
    assert loaded.shape == (items * SIDE * SIDE, WIDTH)
    assert [int(loaded.data[number * ITEM_NBYTES]) for number in range(items)] == list(range(1, items + 1))
