"""Pools that share no pages, with each kind of handle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import get_args

import pytest
from tests.codecs.pool.elastic.mail.mail_pools import (
    CHUNK,
    FOREVER_S,
    Create,
    Kind,
    Stub,
)

from tensorferry.codecs.pool.elastic import mail
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.reader import Reader


@pytest.fixture(params=get_args(Kind))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def create(stub: Stub, kind: Kind) -> Iterator[Create]:
    """Pools of so many chunks."""
    with ExitStack() as pools:

        def make(chunks: int, *, slots: int = 8, idle_s: float = FOREVER_S) -> Pool:
            return pools.enter_context(
                Pool.create(
                    chunks * CHUNK,
                    slots,
                    memory="cuda_vmm",
                    chunk_nbytes=CHUNK,
                    idle_s=idle_s,
                    grow_wait_s=20.0,
                    mail=kind,
                )
            )

        yield make


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader() as made:
        yield made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not answered is said again at every look."""
    monkeypatch.setattr(mail, "REPEAT_S", 0.0)
