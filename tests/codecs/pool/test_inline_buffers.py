"""Private memory comes back by itself, when nobody can see it any more, and never before."""

from __future__ import annotations

import gc
import threading

import numpy as np

from tensorferry.codecs.pool.inline_buffers import BLOCKS, LARGEST_NBYTES, SMALLEST_NBYTES, Scratch
from tensorferry.codecs.pool.publisher import Publisher

NBYTES = 1 << 20


def address(data: np.ndarray) -> int:
    return int(data.__array_interface__["data"][0])


def test_a_block_is_used_again_once_its_last_view_is_gone() -> None:
    scratch = Scratch()
    first = scratch.take(NBYTES)
    first[:] = 7
    where, view = address(first), memoryview(first[100:200])
    del first
    other = scratch.take(NBYTES)
    assert address(other) != where
    assert set(view) == {7}
    del view
    assert address(scratch.take(NBYTES)) == where


def test_the_latest_back_is_the_first_to_be_used_again() -> None:
    scratch = Scratch()
    one, two = scratch.take(NBYTES), scratch.take(NBYTES)
    where = address(two)
    del one, two  # in this order
    assert address(scratch.take(NBYTES)) == where


def test_a_block_serves_what_fits_it_and_is_not_less_than_half() -> None:
    scratch = Scratch()
    where = address(scratch.take(NBYTES))
    for nbytes in (NBYTES + 1, NBYTES // 2 - 1):
        other = scratch.take(nbytes)
        assert address(other) != where
        assert other.shape == (nbytes,)
    again = scratch.take(NBYTES // 2)
    assert address(again) == where
    assert (again.shape, again.dtype, again.flags.writeable) == ((NBYTES // 2,), np.uint8, True)


def test_what_waits_is_bounded() -> None:
    scratch = Scratch()
    many = [scratch.take(NBYTES) for _ in range(3 * BLOCKS)]
    del many
    assert scratch.idle_nbytes == BLOCKS * NBYTES
    huge, small = scratch.take(LARGEST_NBYTES + 1), scratch.take(SMALLEST_NBYTES - 1)
    del huge, small
    assert scratch.idle_nbytes == BLOCKS * NBYTES


def test_blocks_may_go_in_any_thread() -> None:
    """Each thread fills its block with a byte of its own: nobody ever finds another one's."""
    scratch = Scratch()
    wrong: list[int] = []

    def work(value: int) -> None:
        for number in range(200):
            block = scratch.take(NBYTES)
            block.fill(value)
            if (block != value).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert not wrong
    assert scratch.idle_nbytes <= BLOCKS * NBYTES


def test_a_publisher_keeps_no_frame_that_is_still_on_its_way() -> None:
    publisher = Publisher(None)
    kept = []
    for value in range(6):
        with publisher.publish(np.full(NBYTES, value, np.uint8)) as draft:
            frames: list[memoryview] = []
            draft.dispatch(None, frames)
        kept.append(frames[0])
        del draft
    gc.collect()
    assert [int(frame[0]) for frame in kept] == [int(frame[-1]) for frame in kept] == list(range(6))
