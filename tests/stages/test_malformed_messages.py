"""Messages that lie, and others that do not decode, given to three stages in one process: none leaves its boundary.

What `make fuzz` sees from outside is seen here from inside: what each process holds afterwards, and that the same
messages once more leave nothing more behind.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from benchmarks.malformed import Frames, Layer, Malformed, Sample, batch, encode_tree, lying, samples, swapped
from benchmarks.workload import TAKES, receiver

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.frames import Limits, decode
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.channels import intake
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import STAGES, Deployment
from tensorferry.pipeline.peers.handshake import Peers
from tensorferry.pipeline.process.run_process import Stop
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.stage import Stage
from tensorferry.stages.adapters import fingerprint
from tensorferry.stages.encoder import encoder as encoder_module
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.scheduler import scheduler as scheduler_module
from tensorferry.stages.tokenizer import tokenizer as tokenizer_module

pytestmark = pytest.mark.slow

IMAGES = Path(__file__).parents[1] / "data" / "images"
PHOTOS = ("tiny_20x20.jpg", "camera_1bit.png")
CORPUS = Path(__file__).parents[1] / "corpus" / "messages.json"
COUNT = 1000  #: messages in a pass
DEADLINE_S = 20.0
#: What is said of a request, but to its client.
OF_REQUESTS = (wire.Submit, wire.Admit, wire.Encode, wire.Embeddings, wire.Collected, wire.Done)
GROWTH = 200  #: objects that a pass may leave which is no first one

DEPLOYMENT = """
name: inside
transport: shm
runtime_dir: {directory}/run
model: {{adapter: fingerprint}}
scheduler: {{options: {{digests: true}}}}
pool: {{budget_mb: 4, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 4, inline_below_kb: 0}}
limits: {{request_timeout_s: 5.0}}
telemetry: {{log_level: warning, log_format: json}}
"""


class Inside:
    """A deployment of three stages in this process, and what a fuzzer wants to know of it."""

    def __init__(self, deployment: Deployment, client: Client, parts: dict[str, Any], stages: dict[str, Stage]) -> None:
        self.deployment, self.client, self.parts, self.stages = deployment, client, parts, stages
        self.patience_s = DEADLINE_S
        runtime = Runtime.of(deployment)
        self.epochs = {name: self.stage(name).epoch for name in STAGES}
        swaps: dict[object, Any] = {
            0x1122334455667788: self.epochs["tokenizer"],
            0x0102030405060708: self.epochs["encoder"],
            (1 << 63) - 1: self.epochs["scheduler"],
            0x7ABBCCDDEEFF0011: self.pool("tokenizer"),
            "ipc:///run/user/1000/tensorferry/local/tokenizer-0": runtime.inbox("tokenizer", 0),
            "/run/broker": runtime.broker("tokenizer", 0),
        }
        self.swaps, self.ranks = swaps, dict.fromkeys(STAGES, 0)
        processor = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)
        self.photos, self.digests, self.asked = [(IMAGES / name).read_bytes() for name in PHOTOS], [], 0
        for photo in self.photos:
            plan = processor.plan(photo)
            out = View.empty(plan.dtype, plan.shape)
            processor.write(photo, plan, out)
            self.digests.append(fingerprint.fingerprint_of(out.data.data, plan.dtype, plan.shape))

    def stage(self, name: str) -> Stage:
        return self.stages[name]

    def pool(self, name: str) -> int:
        pool = self.stage(name).publisher.pool
        assert pool is not None
        return pool.description.pool

    def kept(self) -> list[tuple[str, Malformed]]:
        """What the corpus has, for everybody."""
        found = []
        for one in json.loads(CORPUS.read_text(encoding="ascii")):
            header, *inline = map(bytes.fromhex, one["frames"])
            layer = Layer[one["layer"].upper()]
            if layer >= Layer.SCHEMA:
                header = encode_tree(swapped(msgspec.msgpack.decode(header), self.swaps, self.ranks))
                with suppress(BadMessage):
                    if self.is_true(decode((header, *inline), Limits())[0]):  # made so by the line above
                        continue
            found += [(name, Malformed(layer, (header, *inline), one["name"])) for name in TAKES]
        return found

    def made(self, seed: int) -> list[tuple[str, Malformed]]:
        """Malformed messages, and who gets each."""
        shares = {Layer.HEADER: 0.2, Layer.SCHEMA: 0.2, Layer.STAGE: 0.6}
        rng = Random(seed)
        return [
            (receiver(rng, one), one)
            for one in batch(rng, samples(self.swaps, self.ranks), COUNT, Limits(), self.is_true, shares=shares)
        ]

    def is_true(self, message: wire.Message) -> bool:
        """Whether a peer could have said so: then it is believed, and no lie."""
        return isinstance(message, wire.Drain | wire.Drained) and message.origin.epoch in self.epochs.values()

    def deliver(self, to: str, frames: tuple[bytes, ...]) -> None:
        """As the stage's own loop does."""
        stage = self.stage(to.partition("-")[0])
        try:
            message, inline = decode(frames, Limits())
        except BadMessage as problem:
            stage.refused(problem)
            return
        with stage.alone():
            if to == "tokenizer-0 front door":
                self.parts["tokenizer"].take_from_client(b"nobody", message, inline, "")
            else:
                stage.take(message, inline)

    def counted(self, name: str) -> float:
        return sum(self.stage(stage).counters.value(name) for stage in STAGES)

    async def pass_(self, made: list[tuple[str, Malformed]]) -> None:
        """Deliver all of these, and wait until nobody has anything to do."""
        for number, (to, one) in enumerate(made):
            self.deliver(to, one.frames)
            if not number % 16:
                await asyncio.sleep(0)
        async with asyncio.timeout(self.patience_s):
            while self.holds():  # noqa: ASYNC110  (words in shared memory call nobody)
                await asyncio.sleep(0.01)

    def holds(self) -> dict[str, int]:
        """What is held for requests, where there is anything."""
        held = {
            "requests": self.parts["tokenizer"].in_flight(),
            "jobs": self.parts["encoder"].in_flight(),
            "ready": self.parts["scheduler"].unfinished(),
        }
        for name in ("tokenizer", "encoder"):
            pool = self.stage(name).publisher.pool
            assert pool is not None
            held[f"leases of the {name}"] = pool.statistics().lent_slots
        return {name: count for name, count in held.items() if count}

    async def faults(self, made: list[tuple[str, Malformed]]) -> list[str]:
        """Three passes of the same messages; what is wrong then: nothing, if all is well."""
        undecodable = sum(one.layer is not Layer.STAGE for _, one in made)
        found: list[str] = []
        objects: list[int] = []
        for _ in range(3):
            before = self.counted("messages_refused")
            try:
                await self.pass_(made)
            except TimeoutError:
                return [f"still held: {self.holds()}"]
            except Exception as problem:
                return [f"left its boundary: {problem!r}"]
            if self.counted("messages_refused") - before < undecodable:
                found.append("not all that does not decode was counted")
            gc.collect()
            objects.append(len(gc.get_objects()))
        if objects[2] - objects[1] > GROWTH:
            found.append(f"grew by {objects[2] - objects[1]} objects")
        if crashed := self.counted("messages_crashed"):
            found.append(f"{crashed:g} messages brought out a bug")
        return found + await self.ask()

    async def ask(self) -> list[str]:
        """A good request; what is wrong with its answer."""
        chosen = self.photos[self.asked % 2 :]
        self.asked += 1
        outcome = await self.client.submit(["good ", *chosen], deadline_s=5.0)
        if not isinstance(outcome, wire.Result):
            return [f"a good request: {outcome}"]
        right = [item.digest for item in outcome.items] == self.digests[-len(chosen) :]
        return [] if right else ["a good request got another's answer"]


@asynccontextmanager
async def inside(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Inside]:
    parts: dict[str, Any] = {}
    stages: dict[str, Stage] = {}

    def kept(name: str, cls: Any) -> Any:
        def make(stage: Stage, *arguments: Any) -> Any:
            parts[name], stages[name] = cls(stage, *arguments), stage
            return parts[name]

        return make

    modules: Any = {"tokenizer": tokenizer_module, "encoder": encoder_module, "scheduler": scheduler_module}
    with tempfile.TemporaryDirectory(prefix="tf-") as directory:
        file = Path(directory) / "deployment.yaml"
        file.write_text(DEPLOYMENT.format(directory=directory))
        deployment = load(file)
        Runtime.of(deployment).prepare()
        stops = {name: Stop() for name in STAGES}
        for name, module in modules.items():
            monkeypatch.setattr(module, name.capitalize(), kept(name, getattr(module, name.capitalize())))
        tasks = [asyncio.create_task(modules[name].main(deployment, 0, stops[name])) for name in STAGES]
        try:
            async with asyncio.timeout(60.0):
                async with Client.connect(deployment) as client:
                    yield Inside(deployment, client, parts, stages)
        finally:
            for stop in stops.values():
                stop.drain()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
@pytest.mark.parametrize("seed", [1, 2])
async def test_b27_whatever_a_message_says_it_ends_alone_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    async with inside(monkeypatch) as deployment:
        assert await deployment.faults(deployment.made(seed)) == []
    assert "crashed" not in capfd.readouterr().err


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_what_was_found_once_is_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with inside(monkeypatch) as deployment:
        assert await deployment.faults(deployment.kept()) == []
        [its_encoder] = deployment.stage("tokenizer").peers.usable("encoder")
        assert its_encoder.column is not None, "its tensors still go by the pool"
        assert deployment.parts["encoder"].gauges()["encoded_items"] == len(PHOTOS), "the good request's items"
        pending = deployment.parts["scheduler"]._collector.pending.values()
        assert all(one.admit is None or one.admit.token_ids[:2] == b"ok" for one in pending), "nothing waits in vain"


async def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that was said of ten requests, as it was and changed, while others use the same slots again; what is
    wrong with the answers of these."""
    heard: list[tuple[wire.Message, Frames]] = []
    keeping, rng = True, Random(26)

    def decode_and_keep(frames: Sequence[Any], limits: Limits) -> tuple[wire.Message, Sequence[Any]]:
        message, inline = decode(frames, limits)
        if keeping and isinstance(message, OF_REQUESTS):
            heard.append((message, tuple(bytes(memoryview(frame)) for frame in frames)))
        return message, inline

    monkeypatch.setattr(intake, "decode", decode_and_keep)
    async with inside(monkeypatch) as deployment:
        problems = [problem for _ in range(10) for problem in await deployment.ask()]
        keeping = False
        assert {type(message) for message, _ in heard} == {*OF_REQUESTS}
        said = [Sample("", msgspec.msgpack.decode(header), tuple(inline)) for _, (header, *inline) in heard]
        for _ in range(10):
            good = asyncio.create_task(deployment.ask())
            for message, frames in rng.sample(heard, len(heard)):
                if rng.random() < 0.5:
                    frames = lying(rng, Sample("", msgspec.msgpack.decode(frames[0]), frames[1:]), said)
                for name, kinds in TAKES.items():
                    if isinstance(message, kinds):
                        deployment.deliver(name, frames)
                await asyncio.sleep(0)
            problems += await good
            if problems:
                break
        if crashed := deployment.counted("messages_crashed"):
            problems.append(f"{crashed:g} messages brought out a bug")
    return problems


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_b26_what_comes_late_of_other_requests_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await late(monkeypatch) == []


# --- what it would find -------------------------------------------------------------------------------------------


def raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that divides by a number of a peer's."""
    taken = scheduler_module.Scheduler.take

    def take(self: Any, message: wire.Message, frames: Any) -> bool:
        if isinstance(message, wire.Admit):
            assert message.deadline_ms // len(message.schedulers) is not None
        return taken(self, message, frames)

    monkeypatch.setattr(scheduler_module.Scheduler, "take", take)


def leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where nobody has drawn a boundary around a message."""
    raises(monkeypatch)
    monkeypatch.setattr(Stage, "alone", lambda self: nullcontext())


def grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that remember whatever they hear."""
    hear, heard = Peers.hear, []

    def hear_and_keep(self: Peers, message: wire.Message) -> bool:
        heard.append(message)
        return hear(self, message)

    monkeypatch.setattr(Peers, "hear", hear_and_keep)


def holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that forgets to say that a job is done."""
    monkeypatch.setattr(encoder_module.Jobs, "done", lambda self, jobs: None)


def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that drops what it refuses, and says nothing."""
    monkeypatch.setattr(Stage, "refused", lambda self, problem: None)


def answers_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that, after a bad item, gives everybody the embeddings of another."""
    failed, said = encoder_module.Replies.failed, fingerprint.fingerprint_of
    bad = []

    def failed_and_note(self: Any, *arguments: Any) -> None:
        bad.append(arguments)
        failed(self, *arguments)

    monkeypatch.setattr(encoder_module.Replies, "failed", failed_and_note)
    monkeypatch.setattr(fingerprint, "fingerprint_of", lambda *arguments: said(*arguments)[:: -1 if bad else 1])


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (raises, "brought out a bug"),
        (leaves, "left its boundary: ZeroDivisionError"),
        (grows, "grew by"),
        (holds, "still held: {'jobs'"),
        (forgets, "not all that does not decode was counted"),
        (answers_wrongly, "a good request got another's answer"),
    ],
    ids=lambda value: getattr(value, "__name__", "said"),
)
async def test_a_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], problem: str
) -> None:
    plant(monkeypatch)
    async with inside(monkeypatch) as deployment:
        deployment.patience_s = 2.0
        found = await deployment.faults(deployment.made(1))
    assert any(problem in one for one in found), found


@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_b26_a_scheduler_that_takes_late_embeddings_for_those_it_waits_for_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, admitted = scheduler_module.Scheduler.take, []

    def take(self: Any, message: wire.Message, frames: Any) -> bool:
        if isinstance(message, wire.Admit):
            admitted.append(message)
        elif isinstance(message, wire.Embeddings) and admitted:
            latest = admitted[-1]
            message = msgspec.structs.replace(message, request=latest.request, attempt=latest.attempt)
        return taken(self, message, frames)

    monkeypatch.setattr(scheduler_module.Scheduler, "take", take)
    assert await late(monkeypatch)
