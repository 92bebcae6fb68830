"""An answer over several attempts: every token once, in order, or an error."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import StreamDiverged
from tensorferry.pipeline.client.growing_answer import GrowingAnswer, is_repeatable

ORIGIN = wire.Origin("scheduler", 0, 1)


def delta(first: int, *ids: int, text: str = "") -> wire.Delta:
    token_ids = np.array(ids, "<i4").tobytes()
    return wire.Delta(bytes(16), 0, 0, ORIGIN, first, token_ids, tuple(range(first, first + len(ids))), text)


def cut(ids: list[int], places: list[int]) -> list[wire.Delta]:
    edges = sorted({0, len(ids), *(place % len(ids) for place in places)})
    return [
        delta(low, *ids[low:high], text="".join(chr(97 + each) for each in ids[low:high]))
        for low, high in pairwise(edges)
    ]


@given(
    st.lists(st.integers(0, 25), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 100), max_size=6), min_size=1, max_size=4),
    st.data(),
)
def test_s5_whatever_attempts_break_off_each_token_comes_once_in_order(
    ids: list[int], attempts: list[list[int]], data: st.DataObject
) -> None:
    answer, got, text = GrowingAnswer(), list[int](), ""
    for number, places in enumerate(attempts):
        deltas = cut(ids, places)
        last = number == len(attempts) - 1
        answer.begin_attempt()
        for each in deltas if last else deltas[: data.draw(st.integers(0, len(deltas)))]:
            new = answer.add(each)
            if new is not None:
                assert new.first == len(got)
                assert list(new.at_ns) == list(range(new.first, new.first + len(new.at_ns)))
                got += np.frombuffer(new.token_ids, "<i4").tolist()
                text += new.text
    assert got == ids
    assert text == answer.text == "".join(chr(97 + each) for each in ids)


def test_other_tokens_in_a_later_attempt_are_refused() -> None:
    answer = GrowingAnswer()
    answer.add(delta(0, 1, 2))
    answer.begin_attempt()
    with pytest.raises(StreamDiverged, match="answers with other tokens"):
        answer.add(delta(0, 1, 3))


def test_another_text_in_a_later_attempt_is_refused() -> None:
    answer = GrowingAnswer()
    answer.add(delta(0, 1, text="ab"))
    answer.begin_attempt()
    with pytest.raises(StreamDiverged, match="another text"):
        answer.add(delta(0, 1, text="ax"))


@pytest.mark.parametrize("first", [1, 3])
def test_a_gap_and_a_repetition_are_refused(first: int) -> None:
    answer = GrowingAnswer()
    answer.add(delta(0, 1, 2))
    with pytest.raises(StreamDiverged, match="the token after 2 was expected"):
        answer.add(delta(first, 3))


def test_an_answer_that_is_told_again_from_its_start_adds_nothing_that_is_known() -> None:
    answer = GrowingAnswer()
    answer.add(delta(0, 1, 2, text="ab"))
    assert answer.add(delta(0, 1, text="a")) is None
    assert answer.seen == 1
    assert answer.add(delta(1, 2, 3, text="bc")) == delta(2, 3, text="c")
    with pytest.raises(StreamDiverged, match="other tokens"):
        answer.add(delta(0, 9))


def test_text_that_completes_a_known_token_comes_with_the_next_one() -> None:
    answer = GrowingAnswer()
    answer.add(delta(0, 1, 2, text="a"))  # its second token was half a character
    answer.begin_attempt()
    assert answer.add(delta(0, 1, 2, text="a")) is None
    assert answer.add(delta(2, 3, text="é!")) == delta(2, 3, text="é!")


def test_lists_of_different_lengths_are_refused() -> None:
    wrong = wire.Delta(bytes(16), 0, 0, ORIGIN, 0, bytes(8), (1,))
    with pytest.raises(StreamDiverged, match="not equally many"):
        GrowingAnswer().add(wrong)


def test_only_greedy_and_seeded_answers_are_repeatable() -> None:
    assert is_repeatable(None)
    assert is_repeatable(wire.Sampling())
    assert is_repeatable(wire.Sampling(temperature=1.0, seed=3))
    assert not is_repeatable(wire.Sampling(temperature=1.0))
