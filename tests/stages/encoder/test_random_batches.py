"""Batches of good and bad items, equal and different, in every combination that a seed makes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.stages.encoder.rank import CRASHING, POISONED, WRONG_ROWS


def said(pixels: Sequence[int], answer: list[tuple[int, int]] | str) -> bool:
    """Whether this is what a request of these items must be told."""
    refused = [f"BadItem {index}" for index, first in enumerate(pixels) if first in (POISONED, WRONG_ROWS)]
    if CRASHING in pixels:
        refused.append("EncodeError -1")
    return answer in refused if refused else answer == list(enumerate(pixels))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
async def test_whatever_comes_together_output_i_belongs_to_input_i(rank_of: Any, seed: int) -> None:
    """Requests of good and bad items, equal and different, some given up, in batches and caches of any size."""
    rng = random.Random(seed)
    cache_nbytes = rng.choice([0, 8 * rng.choice([1, 3, 1000])])  # of so many items
    rank = rank_of(batch_patches=rng.choice([0, 8, 40, 16384]), cache_nbytes=cache_nbytes)
    contents = [*range(1, rng.choice([4, 40])), *rng.choices([POISONED, CRASHING, WRONG_ROWS, 1], k=rng.randrange(4))]
    asked: dict[bytes, list[int]] = {}
    over: set[bytes] = set()
    for turn in range(3):
        for number in range(rng.randrange(12)):
            request = f"{turn} {number}".encode()
            asked[request] = rng.choices(contents, k=rng.randrange(1, 5))
            late = rng.random() < 0.1
            rank.ask(request, asked[request], **({"deadline_ms": 0} if late else {}))
            if late or rng.random() < 0.1:
                over.add(request)
                rank.cancel(request)
        await rank.serve()
        assert rank.encoder.gauges().get("cache_nbytes", 0) <= cache_nbytes
    answered = {name.strip() for name in rank.embeddings.keys() | rank.failures.keys()}
    assert answered == asked.keys() - over
    wrong = {request: rank.answers(request) for request in answered if not said(asked[request], rank.answers(request))}
    assert not wrong, {request: (asked[request], answer) for request, answer in wrong.items()}
