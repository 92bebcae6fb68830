"""Text of an answer that comes in pieces: the same as of the whole, and never half a character."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tensorferry.stages.tokenizer.detokenizer import REPLACEMENT, Detokenizer
from tensorferry.stages.tokenizer.text import TextEncoder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return TextEncoder.from_file(None).tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], seed: int) -> list[str]:
    detokenizer, rng, texts = Detokenizer(tokenizer), random.Random(seed), []
    while ids:
        count = rng.randint(1, 3)
        texts.append(detokenizer.add(ids[:count]))
        ids = ids[count:]
    return texts


@pytest.mark.parametrize("text", ["plain", "Schiff 🛳 fährt", "漢字かな交じり文", "👩‍👩‍👧‍👦 and é", "", " leading"])
def test_pieces_are_the_whole_and_hold_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = list(text.encode())  # the bundled vocabulary has one token a byte
    for seed in range(20):
        given = pieces(tokenizer, ids, seed)
        assert "".join(given) == text
        assert not any(REPLACEMENT in piece for piece in given)


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|vision_end|>") or -1
    assert "".join(pieces(tokenizer, [*b"a", end, *b"b"], 0)) == "ab"


def test_half_a_character_waits_for_its_other_half(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add("é".encode()[:1]) == ""
    assert detokenizer.add("é".encode()[1:]) == "é"


@given(st.lists(st.integers(0, 255) | st.integers(0, 127), max_size=40), st.integers(0, 1000))
def test_of_any_bytes_only_a_broken_end_is_left_out(tokenizer: Tokenizer, ids: list[int], seed: int) -> None:
    whole, given = tokenizer.decode(ids, skip_special_tokens=True), "".join(pieces(tokenizer, ids, seed))
    assert whole.startswith(given)
    assert set(whole[len(given) :]) <= {REPLACEMENT}, "what is left is no whole character"
