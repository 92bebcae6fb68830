"""Whatever ends a request, its peers drop it, its room is free again, and its client gets one outcome."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Buffer, Limits
from tensorferry.pipeline.channels.channels import Dealer, open_context
from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.stage import OF_REQUESTS, Stage
from tensorferry.pipeline.process.start_stage import opened
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.tokenizer.clients import Clients
from tensorferry.stages.tokenizer.latencies import Latencies
from tensorferry.stages.tokenizer.planner import Planner
from tensorferry.stages.tokenizer.text import TextEncoder
from tensorferry.stages.tokenizer.tokenizer import Tokenizer

PHOTO = (Path(__file__).parents[2] / "data" / "images" / "tiny_20x20.jpg").read_bytes()
DEADLINE_S = 20.0


@dataclass
class Noted:
    """The work of a peer, which keeps what it is sent of requests."""

    taken: list[Any] = field(default_factory=list)
    on_admit: Callable[[wire.Admit], None] = lambda admit: None

    def of(self, request: bytes) -> list[Any]:
        """What it was sent of a request."""
        return [message for message in self.taken if message.request == request]

    def take(self, message: wire.Message, frames: Sequence[Buffer]) -> bool:
        if not isinstance(message, OF_REQUESTS):
            return False
        self.taken.append(message)
        if isinstance(message, wire.Admit):
            self.on_admit(message)
        return True

    def in_flight(self) -> int:
        return 0

    def busy_since(self) -> float | None:
        return None

    def gauges(self) -> Mapping[str, float]:
        return {}

    def connection_mended(self, peer: Peer) -> None:
        pass


@dataclass
class Spans:
    """An exporter, as far as a tokenizer uses it."""

    taken: list[Callable[[], object]] = field(default_factory=list)

    def take(self, spans: Callable[[], object]) -> None:
        self.taken.append(spans)


@dataclass
class Worker:
    """A tokenizer with one client, one encoder rank and one scheduler rank, all in this process."""

    tokenizer: Tokenizer
    stage: Stage
    client: Dealer
    peers: Mapping[str, tuple[Stage, Noted]]
    spans: Spans

    def submit(self, number: int, *media: bytes, attempt: int = 0) -> bytes:
        request = number.to_bytes(16, "big")
        parts = (wire.TextPart("a"), *(wire.ImagePart(frame) for frame in range(len(media))))
        self.client.send_nowait(wire.Submit(request, attempt, parts, 1, 60_000), list(media))
        return request

    async def sent(self, peer: str, kind: type[wire.Message], request: bytes, attempt: int = 0) -> Any:
        """The first such message of an attempt that a peer is sent."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for message in self.peers[peer][1].of(request):
                    if isinstance(message, kind) and message.attempt == attempt:
                        return message
                await asyncio.sleep(0.001)

    def done(self, request: bytes, attempt: int = 0) -> None:
        origin = self.peers["scheduler"][0].origin
        self.stage.take(wire.Done(request, attempt, self.stage.epoch, origin, 1, (), ()), ())

    async def outcome(self) -> wire.Message:
        async with asyncio.timeout(DEADLINE_S):
            while isinstance(message := (await self.client.receive()).message, wire.Members):
                pass
        return message

    async def serves_another(self, number: int) -> None:
        """One request fills this worker, so another gets its result only if all of the last one was given back."""
        request = self.submit(number)
        await self.sent("scheduler", wire.Admit, request)
        self.done(request)
        result = await self.outcome()
        assert isinstance(result, wire.Result)
        assert result.request == request


@asynccontextmanager
async def running(**spec: Any) -> AsyncIterator[Worker]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        limits = LimitsSpec(in_flight_requests=1, request_timeout_s=60.0)
        deployment = Deployment(name="a", transport="cpu", runtime_dir=f"{folder}/run", limits=limits, **spec)
        async with AsyncExitStack() as undo:
            peers = {}
            for name in ("scheduler", "encoder"):
                stage, work = await undo.enter_async_context(opened(deployment, name, 0)), Noted()
                undo.enter_context(stage.running(stage.serve(work)))
                await stage.peers.wait_ready()
                stage.peers.open()
                peers[name] = stage, work
            stage, spans = await undo.enter_async_context(opened(deployment, "tokenizer", 0)), Spans()
            threads = stage.channels.enter_context(ThreadPoolExecutor(2))
            spec_ = deployment.tokenizer
            processor = make_processor(spec_.processor, spec_.options, deployment.limits)
            text = TextEncoder.from_file(None)
            planner = Planner(processor, text, deployment.limits)
            door = stage.front_door()
            tokenizer = Tokenizer(stage, door, threads, processor, planner, text, None, spans)  # type: ignore[arg-type]
            undo.enter_context(
                stage.running(tokenizer.serve_clients(), stage.serve(tokenizer), tokenizer.watch_peers())
            )
            await stage.peers.wait_ready()
            tokenizer.open()
            address = Runtime.of(deployment).front_door(0)
            context = undo.enter_context(open_context())
            client = undo.enter_context(closing(Dealer(context, address, "door", Limits(), lambda problem: None)))
            async with asyncio.timeout(4 * DEADLINE_S):
                yield Worker(tokenizer, stage, client, peers, spans)
                await tokenizer.drain()


# --- what a step of the end raises -------------------------------------------------------------------------------


def no_cancel(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    send = worker.stage.peers.send

    def sent(peer: Peer, message: wire.Message, inline: Sequence[Buffer] = ()) -> bool:
        if isinstance(message, wire.Cancel):
            raise RuntimeError("planted")
        return send(peer, message, inline)

    patch.setattr(worker.stage.peers, "send", sent)


def no_answer(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    def answer(self: Clients, client: bytes, message: wire.Message) -> bool:
        raise RuntimeError("planted")

    patch.setattr(Clients, "answer", answer)


def no_latency(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    def add(self: Latencies, now_s: float, ms: float) -> None:
        raise RuntimeError("planted")

    patch.setattr(Latencies, "add", add)


def no_spans(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    def take(spans: Callable[[], object]) -> None:
        raise RuntimeError("planted")

    patch.setattr(worker.spans, "take", take)


@pytest.mark.parametrize("plant", [no_cancel, no_answer, no_latency, no_spans])
async def test_a_step_of_the_end_that_raises_keeps_no_other_from_its_part(
    plant: Callable[[Worker, pytest.MonkeyPatch], None],
) -> None:
    async with running() as worker:
        with pytest.MonkeyPatch.context() as patch:
            plant(worker, patch)
            request = worker.submit(1)
            await worker.sent("scheduler", wire.Admit, request)
            if plant is no_cancel:
                worker.client.send_nowait(wire.Cancel(request, 0, 0))
            else:
                worker.done(request)
            if plant is not no_answer:
                kind = wire.Failed if plant is no_cancel else wire.Result
                assert isinstance(await worker.outcome(), kind)
            async with asyncio.timeout(DEADLINE_S):
                while not worker.stage.counters.value("messages_crashed"):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        assert worker.stage.counters.value("messages_crashed") == 1
        assert len(worker.spans.taken) == (plant is not no_spans)
        assert worker.tokenizer.in_flight() == 0
        await worker.serves_another(2)


async def test_a_request_that_cannot_be_started_keeps_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as worker:
        with monkeypatch.context() as patch:

            def create_task(work: Any, **options: Any) -> None:
                raise RuntimeError("planted")

            patch.setattr(worker.stage.tasks, "create_task", create_task)
            worker.submit(1)
            async with asyncio.timeout(DEADLINE_S):
                while not worker.stage.counters.value("messages_crashed"):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        assert worker.tokenizer.in_flight() == 0
        await worker.serves_another(1)


# --- where a cancellation may come -------------------------------------------------------------------------------


@dataclass
class CancelledAt:
    """Runs a service, and cancels its task when it awaits for the `at`th time."""

    service: Coroutine[Any, Any, None]
    at: int
    awaits: int = 0

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self.service.__await__()
        problem: BaseException | None = None
        while True:
            try:
                awaited = next(steps) if problem is None else steps.throw(problem)
            except StopIteration:
                return
            problem = None
            self.awaits += 1
            task = asyncio.current_task()
            if self.awaits == self.at and task is not None:
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield awaited
            except BaseException as raised:
                problem = raised


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_a_request_may_be_cancelled_wherever_it_awaits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned, processed and sent; fails at its scheduler; waits, and is processed and sent again."""
    serve, at = Tokenizer.serve, 0

    async def serve_and_cancel(self: Tokenizer, *arguments: Any) -> None:
        await CancelledAt(serve(self, *arguments), at)

    monkeypatch.setattr(Tokenizer, "serve", serve_and_cancel)
    async with running() as worker:
        scheduler, work = worker.peers["scheduler"]
        lost = wire.Failure("PeerGone", "lost", scheduler.origin, None, True)

        def reply(admit: wire.Admit) -> None:
            if admit.attempt % wire.SENDINGS:
                worker.done(admit.request, admit.attempt)
            else:
                worker.stage.take(wire.Failed(admit.request, admit.attempt, lost, worker.stage.epoch), ())

        work.on_admit = reply
        outcome: wire.Message | None = None
        while not isinstance(outcome, wire.Result):
            at += 1
            request = worker.submit(at, PHOTO)
            outcome = await worker.outcome()
            assert outcome.request == request  # type: ignore[attr-defined]
            assert worker.tokenizer.in_flight() == 0
            if isinstance(outcome, wire.Failed):
                assert outcome.failure.kind == "Cancelled"
                for admit in [one for one in work.of(request) if isinstance(one, wire.Admit)]:
                    cancel = await worker.sent("scheduler", wire.Cancel, request, admit.attempt)
                    assert cancel.to == scheduler.epoch
        assert at > 6, "planning, two times processing and waiting for reports, and the pause between"
