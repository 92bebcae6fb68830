"""A loop that waits holds no message: the last one's frames are given back before the next one comes.

Otherwise ZeroMQ fills other, colder memory for the next: half a millisecond of three for 8 MiB inline.
"""

from __future__ import annotations

import asyncio
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.stages.played_peers import PlayedPeers

from tensorferry.codecs import messages as wire
from tensorferry.codecs.tensors import CODES, view_of
from tensorferry.pipeline.channels.channels import Received
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.start_stage import opened
from tensorferry.pipeline.process.work import NoWork
from tensorferry.stages.encoder.encoder import Encoder
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


async def test_a_stage_that_serves_keeps_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work is whatever it is; a tokenizer takes what clients send by the same loop."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        deployment = Deployment(name="a", transport="cpu", runtime_dir=f"{folder}/run")
        async with opened(deployment, "tokenizer", 0) as stage:
            inbox, door = FakeChannel(), FakeChannel()
            with monkeypatch.context() as patch:
                patch.setattr(stage, "inbox", inbox)
                await stage.serve(NoWork())
            tokenizer = object.__new__(Tokenizer)
            tokenizer._stage, tokenizer._door = stage, door  # type: ignore[assignment]
            await tokenizer.serve_clients()
    assert (inbox.kept, door.kept) == (False, False)


async def test_a_listening_client_keeps_no_message() -> None:
    channel = FakeChannel()
    await object.__new__(Client)._listen(SimpleNamespace(dealer=channel))  # type: ignore[arg-type]
    assert channel.kept is False


async def test_an_encoder_that_waits_keeps_no_job() -> None:
    owner, scheduler = wire.Origin("tokenizer", 0, 3), wire.Origin("scheduler", 0, 8)
    async with AsyncExitStack() as undo:
        stage = PlayedPeers("encoder", undo, owner, scheduler).stage
        adapter: Any = None  # it has nothing to encode
        threads = [undo.enter_context(ThreadPoolExecutor(1)) for _ in range(2)]
        encoder = Encoder(stage, adapter, *threads)
        frame = np.zeros((4, 3), np.uint8)
        kept = weakref.ref(frame)
        features = (wire.Tensor("features", wire.Inline(0, CODES["uint8"], frame.shape)),)
        item = wire.Item("image", (1, 2, 2), 1, bytes(32), features)
        me, to = (wire.Rank(0, stage.epoch),), (wire.Rank(0, scheduler.epoch),)
        encoder.take(wire.Encode(bytes(16), 0, stage.epoch, owner, me, to, (item,), 0), [view_of(frame).data])  # late
        del frame
        assert (encoder.in_flight(), kept() is None) == (1, False)
        encoding = asyncio.create_task(encoder.encode())
        async with asyncio.timeout(10):
            await encoder.drain()
            # Its loop went on to wait before this task could run again.
        assert kept() is None
        encoding.cancel()
        await asyncio.wait([encoding])
