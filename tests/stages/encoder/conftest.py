"""Encoder ranks for tests, closed with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.stages.encoder.rank import Echo, Queued, Rank


@pytest.fixture(params=[Echo, Queued])
def rank_of(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rank]]:
    """Makes a rank, with an adapter that encodes in its call, or one that has its results awaited."""
    with ExitStack() as undo:

        def make(adapter: Any = None, **spec: Any) -> Rank:
            rank = Rank(adapter or request.param(), **spec)
            undo.callback(rank.close)
            return rank

        yield make
