"""Fixtures of the tests of brokers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import uvloop
from tests.pipeline.pools.conversations import SLOTS

from tensorferry.codecs.pool.pool import Pool


@pytest.fixture(scope="module", autouse=True)
def libuv_has_started() -> None:
    """Its first loop opens a pipe that stays as long as the process."""
    uvloop.new_event_loop().close()


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ferry-") as folder:
        yield f"{folder}/pool.sock"


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.create(1 << 20, SLOTS) as pool:
        yield pool
