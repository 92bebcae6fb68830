"""A loop that waits holds no message: the last one's frames are given back before the next one comes.

Otherwise ZeroMQ fills other, colder memory for the next: half a millisecond of three for 8 MiB inline.
"""

from __future__ import annotations

import asyncio
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.channels.channels import Received
from tensorferry.pipeline.client.client import Client
from tensorferry.stages.encoder.encoder import Encoder
from tensorferry.stages.encoder.features import Features
from tensorferry.stages.encoder.job_queue import Job, Jobs
from tensorferry.stages.finished_requests import Tombstones
from tensorferry.stages.scheduler.scheduler import Scheduler
from tensorferry.stages.tokenizer.tokenizer import Tokenizer

EPOCH = 7
ORIGIN = wire.Origin("tokenizer", 0, EPOCH)


class FakeChannel:
    """Gives one message, and at the next call says whether anybody still has its frame."""

    def __init__(self) -> None:
        self.kept: bool | None = None
        self._frame: weakref.ref[np.ndarray[Any, Any]] | None = None

    def __aiter__(self) -> FakeChannel:
        return self

    async def __anext__(self) -> Received:
        if self._frame is None:
            frame = np.zeros(1)
            self._frame = weakref.ref(frame)
            return Received(wire.Heartbeat(ORIGIN, 0), [frame])
        self.kept = self._frame() is not None
        raise StopAsyncIteration


def fake_stage(channel: FakeChannel) -> Any:
    """A stage without sockets, which takes every message for news of its peers."""
    return SimpleNamespace(
        device=None,
        inbox=channel,
        epoch=EPOCH,
        alone=nullcontext,
        hear=lambda message: True,
        refused=lambda problem: None,
    )


@pytest.mark.parametrize(
    ("kind", "loop"),
    [(Encoder, "hear"), (Scheduler, "hear"), (Tokenizer, "hear_peers"), (Tokenizer, "serve_clients")],
)
async def test_a_receiving_loop_keeps_no_message(kind: type[Any], loop: str) -> None:
    channel = FakeChannel()
    receiver = object.__new__(kind)
    receiver._stage, receiver._door = fake_stage(channel), channel
    await getattr(receiver, loop)()
    assert channel.kept is False


async def test_a_listening_client_keeps_no_message() -> None:
    channel = FakeChannel()
    await object.__new__(Client)._listen(SimpleNamespace(dealer=channel))  # type: ignore[arg-type]
    assert channel.kept is False


async def test_an_encoder_that_waits_keeps_no_job() -> None:
    encoder = object.__new__(Encoder)
    encoder._stage, encoder._over = fake_stage(FakeChannel()), Tombstones(60.0)
    encoder._stage.counters = SimpleNamespace(count=lambda name: None)
    encoder._cache, encoder._begun, encoder._jobs = None, [], Jobs(0, 0.0, lambda job: 0)
    frame = np.zeros(1)
    kept = weakref.ref(frame)
    long_over = wire.Encode(bytes(16), 0, EPOCH, ORIGIN, (), (), (), 0)
    encoder._jobs.put_nowait(Job(long_over, Features(None, long_over, [frame])))  # type: ignore[arg-type]
    del frame
    encoding = asyncio.create_task(encoder.encode())
    async with asyncio.timeout(10):
        await encoder._jobs.join()
        # Its loop went on to wait before this task could run again.
    assert kept() is None
    encoding.cancel()
    await asyncio.wait([encoding])
