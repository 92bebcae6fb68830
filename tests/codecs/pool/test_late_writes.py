"""Stages that wait for a GPU which still writes. In each the stage is a stand-in, the pool and its reader are real."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.codecs.pool.hand_driven_gpu import Shop

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, LeaseNotReady, LeasePoisoned
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES, View
from tensorferry.pipeline.deployment.spec import Deployment, EncoderSpec, TimeoutsSpec
from tensorferry.pipeline.peers.peer import Peer, PeerLife
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.adapters.base import Finish, ItemInfo, Load, Out
from tensorferry.stages.encoder.encoder import Encoder
from tensorferry.stages.finished_requests import FinishedRequests
from tensorferry.stages.scheduler.backlog import Backlog
from tensorferry.stages.scheduler.collector import Collector

READY_S = 60.0  #: a test that waits for it fails by its deadline


class EveryPeer:
    """Peers that know everybody. taker: who takes embeddings, if it matters."""

    def __init__(self, taker: Peer | None = None) -> None:
        self._taker = taker

    def knows(self, origin: wire.Origin) -> bool:
        return True

    def taker(self, *_: object) -> Peer | None:
        return self._taker

    def tell(self, message: wire.Message) -> None: ...


def ready_within(ready_s: float) -> Deployment:
    return Deployment(name="test", timeouts=TimeoutsSpec(ready_s=ready_s))


def stage_of(reader: Reader, tasks: asyncio.TaskGroup) -> Any:
    return SimpleNamespace(
        reader=reader,
        device=None,
        tasks=tasks,
        alone=nullcontext,
        outlive=lambda problem: None,
        limits=Limits(),
        origin=wire.Origin("scheduler", 0, 8),
        peers=EveryPeer(),
        counters=Counters(),
        deployment=ready_within(READY_S),
    )


class Arrivals(Collector):
    """What a scheduler collects, as far as what becomes of embeddings that arrive."""

    def __init__(self, stage: Any, copier: ThreadPoolExecutor) -> None:
        self.stage, self.finished, self.backlog = stage, FinishedRequests(60.0), Backlog(0, lambda request: False)
        side: Any = self.backlog
        replies: Any = None
        super().__init__(stage, copier, self.finished, side, replies)
        self.filed: list[tuple[Any, Any]] = []
        self.is_filed = asyncio.Event()

    def end_request(self) -> None:
        """The request whose embeddings arrive is over."""
        self.finished.add(bytes(16), 0)

    async def settled(self) -> None:
        async with asyncio.timeout(10):
            await self.is_filed.wait()

    def arrive(self, *proxies: Proxy) -> None:
        items = tuple(wire.Embedding(n, 100, (wire.Tensor("embeddings", proxy),)) for n, proxy in enumerate(proxies))
        self.arrived(wire.Embeddings(bytes(16), 0, 7, wire.Origin("encoder", 0, 7), items, ()), [])

    def _file(self, message: Any, over: bool, arrived: Any, problem: Any) -> None:
        self.filed.append((None if over else arrived, problem))
        self.is_filed.set()


@pytest.fixture
async def collector(host_shop: Shop) -> AsyncIterator[Arrivals]:
    async with asyncio.TaskGroup() as tasks:
        with ThreadPoolExecutor(1) as copier:
            yield Arrivals(stage_of(host_shop.reader, tasks), copier)


async def test_a_scheduler_without_a_gpu_waits_for_one_that_still_writes(host_shop: Shop, collector: Arrivals) -> None:
    collector.arrive(host_shop.publish())
    await asyncio.sleep(0)
    assert collector.filed == []
    host_shop.gpu.run(1)
    await collector.settled()
    [(arrived, problem)] = collector.filed
    assert problem is None
    assert arrived[0]["embeddings"].shape == (100,)
    assert host_shop.out() == 0


async def test_a_scheduler_drains_what_it_still_waits_for(host_shop: Shop, collector: Arrivals) -> None:
    collector.arrive(host_shop.publish())
    draining = asyncio.create_task(collector.backlog.join())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not draining.done()
    host_shop.gpu.run(1)
    async with asyncio.timeout(10):
        await draining
    assert len(collector.filed) == 1


@pytest.mark.parametrize("when", ["before it arrives", "while it is waited for"])
async def test_what_a_request_that_is_over_owes_is_given_back_at_once(
    host_shop: Shop, collector: Arrivals, when: str
) -> None:
    written, unwritten = host_shop.publish_written(), host_shop.publish()
    if when == "before it arrives":
        collector.end_request()
    collector.arrive(unwritten, written)
    await asyncio.sleep(0)
    collector.end_request()
    await collector.settled()
    assert collector.filed[0][0] is None
    assert host_shop.out() == 1, "the one that is being written"


async def test_a_poisoned_lease_behind_a_late_one_is_seen_at_once(host_shop: Shop, collector: Arrivals) -> None:
    late = host_shop.publish()
    with host_shop.pool.lease(100) as lease:
        lease.dispatch((host_shop.column,))
        lease.poison()
    slot, generation, offset, _ = lease.grant
    poisoned = Proxy(host_shop.pool.description.pool, slot, generation, offset, CODES["uint8"], (100,), 1, 1)
    collector.arrive(late, poisoned)
    await collector.settled()
    assert isinstance(collector.filed[0][1], LeaseNotReady | LeasePoisoned)


async def test_a_lease_that_is_never_written_is_said_to_be_late(
    host_shop: Shop, collector: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.stage.deployment = ready_within(0.01)
    collector.arrive(host_shop.publish(), host_shop.publish())
    await collector.settled()
    assert "was not written within 0.01 s" in str(collector.filed[0][1])
    host_shop.gpu.run(1)
    assert host_shop.out() == 0, "both were given back"


@pytest.mark.slow
async def test_embeddings_that_cannot_be_copied_fail_their_request_alone(
    host_shop: Shop, collector: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(self: View) -> View:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(View, "copy", copy)
    collector.arrive(host_shop.publish_written(), host_shop.publish_written())
    await collector.settled()
    problem = collector.filed[0][1]
    assert (type(problem), problem.index) == (BadItem, 0)
    assert "could not be copied: RuntimeError: CUDA out of memory" in str(problem)
    assert host_shop.out() == 0


async def test_embeddings_are_ready_when_their_batch_is_done_whatever_is_queued_behind_it(shop: Shop) -> None:
    """The second batch never ends; the first one's embeddings can be read all the same."""
    gpu, ends = shop.gpu, [threading.Event(), threading.Event()]

    class Adapter:
        batches = 0

        def encode(self, items: Sequence[ItemInfo], load: Load, out: Out) -> Finish:
            end = ends[self.batches]
            self.batches += 1
            out(0, "embeddings", (1, 100), "uint8")
            gpu.wait_event(1, -self.batches)

            def finish() -> None:
                assert end.wait(10)

            return finish

    sent: list[wire.Embeddings] = []
    outbox: Any = SimpleNamespace(send_nowait=lambda message, frames: sent.append(message))
    life = PeerLife(8, shop.column)
    scheduler = Peer("scheduler", 0, outbox, downstream=True, quarantine_s=60.0, life=life)
    async with asyncio.TaskGroup() as tasks:
        stage = stage_of(shop.reader, tasks)
        stage.epoch, stage.origin, stage.publisher = 7, wire.Origin("encoder", 0, 7), Publisher(shop.pool)
        stage.deployment = Deployment(name="test", encoder=EncoderSpec(batch_patches=1))
        stage.peers = EveryPeer(scheduler)
        adapter = Adapter()
        with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(2) as waiter:
            encoder = Encoder(stage, adapter, thread, waiter)
            for request in (b"one", b"two"):
                item = wire.Item(
                    "image", (1, 1, 1), 1, bytes(32), (wire.Tensor("features", wire.Inline(0, CODES["uint8"], (1, 3))),)
                )
                ranks = (wire.Rank(0, 7),), (wire.Rank(0, 8),)
                asked = wire.Encode(request.rjust(16), 0, 7, wire.Origin("tokenizer", 0, 3), *ranks, (item,), 60_000)
                encoder.take(asked, [np.zeros(3, np.uint8)])
            encoding = tasks.create_task(encoder.encode())
            async with asyncio.timeout(10):
                while adapter.batches < 2:  # noqa: ASYNC110  (the encoder's thread does it)
                    await asyncio.sleep(0)
                ends[0].set()
                while not sent:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            payload = sent[0].items[0].outputs[0].payload
            assert isinstance(payload, Proxy)
            assert not shop.reader.is_ready(payload)
            gpu.record(-1, 2)
            gpu.run(2)
            gpu.run(1)
            assert shop.reader.is_ready(payload)
            encoding.cancel()
            ends[1].set()
