"""Elastic pools over the stub driver, and processes that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.codecs.pool.elastic.elastic_pools import (
    CHUNK,
    FOREVER_S,
    WAIT_S,
    Create,
    Peer,
    Stub,
)

from tensorferry.codecs.pool.pool import Pool


@pytest.fixture
def create(stub: Stub) -> Iterator[Create]:
    """Pools of so many chunks; an `idle_s` is for tests in which they shrink."""
    with ExitStack() as pools:

        def make(chunks: int, *, slots: int = 8, idle_s: float = FOREVER_S, grow_wait_s: float = WAIT_S) -> Pool:
            return pools.enter_context(
                Pool.create(
                    chunks * CHUNK,
                    slots,
                    memory="cuda_vmm",
                    chunk_nbytes=CHUNK,
                    idle_s=idle_s,
                    grow_wait_s=grow_wait_s,
                )
            )

        yield make


@pytest.fixture
def start(start_peer: Callable[..., Peer], stub: Stub) -> Callable[[], Peer]:
    return lambda: start_peer("chunk_peer.py", **stub.environ)
