"""Which batches may be under way together: every transition of the three states."""

from __future__ import annotations

import pytest

from tensorferry.codecs.tensors import CODES
from tensorferry.stages.encoder.batch_state import (
    Batch,
    Computing,
    Idle,
    Next,
    Overlapping,
    State,
    begun,
    ended,
    must_wait,
    next_batch,
    queued,
    under_way,
)
from tensorferry.stages.encoder.embedding_cache import Content


def content(number: int) -> Content:
    return Content(bytes([number]) * 16, "image", (1, 1, 1), 1, CODES["uint8"], (1, 3))


A, B, C = Batch(1.0, frozenset({content(1), content(2)})), Batch(2.0, frozenset({content(3)})), Batch(3.0)
QUEUED = Computing(A, queued=True)


@pytest.mark.parametrize(
    ("state", "allowed"),
    [
        (Idle(), Next.ANY),
        (Computing(A), Next.NONE),
        (QUEUED, Next.FULL),
        (Overlapping(A, B), Next.NONE),
        (Overlapping(A, B, queued=True), Next.NONE),
    ],
)
def test_a_second_batch_may_begin_once_the_first_is_queued_and_no_third(state: State, allowed: Next) -> None:
    assert next_batch(state) is allowed


def test_a_batch_begins_where_one_may() -> None:
    assert begun(Idle(), A) == Computing(A)
    assert begun(QUEUED, B) == Overlapping(A, B)


@pytest.mark.parametrize("state", [Computing(A), Overlapping(A, B), Overlapping(A, B, queued=True)])
def test_a_batch_that_may_not_begin_is_an_error(state: State) -> None:
    with pytest.raises(ValueError, match="no batch may begin"):
        begun(state, C)


def test_a_batch_that_has_queued_its_work_says_so_of_the_newest_alone() -> None:
    assert queued(Computing(A), A) == QUEUED
    assert queued(Overlapping(A, B), B) == Overlapping(A, B, queued=True)
    assert queued(Overlapping(A, B), A) == Overlapping(A, B), "the older one encodes some of its jobs again"
    assert queued(QUEUED, A) == QUEUED


@pytest.mark.parametrize(
    ("state", "batch", "after"),
    [
        (Computing(A), A, Idle()),
        (QUEUED, A, Idle()),
        (Overlapping(A, B), A, Computing(B)),
        (Overlapping(A, B, queued=True), A, Computing(B, queued=True)),
        (Overlapping(A, B), B, QUEUED),
        (Overlapping(A, B, queued=True), B, QUEUED),
    ],
)
def test_a_batch_that_ends_leaves_the_other_as_it_is(state: State, batch: Batch, after: State) -> None:
    assert ended(state, batch) == after


@pytest.mark.parametrize("state", [Idle(), Computing(A), Overlapping(A, B)])
def test_a_batch_that_is_not_under_way_cannot_end(state: State) -> None:
    with pytest.raises(ValueError, match="is not under way"):
        ended(state, C)


def test_e4_a_batch_waits_for_one_that_encodes_a_content_of_its_own() -> None:
    assert must_wait(QUEUED, frozenset({content(2), content(9)}))
    assert not must_wait(QUEUED, frozenset({content(3)}))
    assert must_wait(Overlapping(A, B), frozenset({content(3)}))
    assert not must_wait(Idle(), frozenset({content(1)}))
    assert not must_wait(QUEUED, frozenset()), "without a cache no batch waits"


def test_the_batches_under_way_are_told_the_oldest_first() -> None:
    assert under_way(Idle()) == ()
    assert under_way(Computing(A)) == (A,)
    assert under_way(Overlapping(A, B)) == (A, B)
