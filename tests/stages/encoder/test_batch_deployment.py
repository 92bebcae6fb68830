"""Encoder ranks as real processes: batches over requests, the cache, and where equal content goes."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.client.client import Client, Outcome
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.adapters.fingerprint import fingerprint_of
from tensorferry.stages.assignment import affine
from tensorferry.stages.processors.registry import make_processor

PROGRAMS = Path(__file__).parents[2] / "programs"
START_S, DEADLINE_S = 60.0, 20.0
SIDE = 28  #: pixels a side of the block that becomes one row
POISONED, CRASHING = 11, 13  #: rows, as in programs/picky_adapter.py

pytestmark = pytest.mark.timeout(120)

DEPLOYMENT = """
name: encoder-batches
transport: shm
runtime_dir: {folder}/run
model: {{adapter: "picky_adapter:Picky", options: {{folder: {folder}}}}}
tokenizer: {{threads: 1, options: {{min_pixels: 784}}}}
encoder: {encoder}
scheduler: {{options: {{digests: true}}}}
pool: {{budget_mb: 64, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 32, inline_below_kb: 0}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0}}
telemetry: {{log_level: error, log_format: json}}
"""


class Running:
    """A deployment that is up."""

    def __init__(self, folder: Path, deployment: Deployment, client: Client) -> None:
        self.folder, self.client = folder, client
        spec = deployment.tokenizer
        self._processor = make_processor(spec.processor, spec.options, deployment.limits)

    def calls(self) -> list[str]:
        """The rows of the items of each call of the adapter, whichever rank's."""
        return [line for file in sorted(self.folder.glob("calls-*")) for line in file.read_text().splitlines()]

    def submit(self, images: Sequence[bytes], request: bytes | None = None) -> asyncio.Future[Outcome]:
        return self.client.submit_nowait(list(images), output_tokens=1, request=request)

    def digests(self, images: Sequence[bytes]) -> list[bytes]:
        """What must come of images, computed here."""
        return [fingerprint_of(view.data.data, view.dtype, view.shape) for view, _ in map(self._process, images)]

    def contents(self, images: Sequence[bytes]) -> list[bytes]:
        return [content for _, content in map(self._process, images)]

    def _process(self, image: bytes) -> tuple[View, bytes]:
        plan = self._processor.plan(image)
        view = View.empty(plan.dtype, plan.shape)
        return view, self._processor.write(image, plan, view)

    async def gauge(self, name: str) -> float:
        """As the encoders' last heartbeats say, all together."""
        members = await self.client.refresh()
        return sum(gauge.value for member in members for gauge in member.gauges if gauge.name == name)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110  (another process does it, without a word)
                await asyncio.sleep(0.005)

    async def until_gauge(self, name: str, value: float) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.gauge(name) != value:  # noqa: ASYNC110  (a heartbeat brings it)
                await asyncio.sleep(0.05)

    async def until_state(self, stage: str, state: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            states: set[str] = set()
            while states != {state}:
                states = {member.state for member in await self.client.refresh() if member.stage == stage}

    async def held(self, images: Sequence[bytes]) -> asyncio.Future[Outcome]:
        """A request that a rank is encoding, and goes on to encode until `let_go`."""
        (self.folder / "gate").touch()
        asked = self.submit(images)
        await self.until((self.folder / "entered").exists)
        return asked

    async def outcomes_together(self, first: Sequence[bytes], *others: Sequence[bytes]) -> list[Outcome]:
        """Of requests of which the others wait while the first is encoded, in order."""
        asked = [await self.held(first), *map(self.submit, others)]
        await self.until_gauge("pool_lent_slots", len(first) + sum(map(len, others)))  # sent, and held
        self.let_go()
        return await outcomes(*asked)

    def let_go(self) -> None:
        (self.folder / "gate").unlink()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Whose path leaves room for the names of sockets; the plug-in can be imported."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield Path(path)


def write(folder: Path, encoder: str) -> Path:
    """A deployment file with this `encoder`."""
    file = folder / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(folder=folder, encoder=encoder))
    return file


@asynccontextmanager
async def running(folder: Path, encoder: str) -> AsyncIterator[Running]:
    """Up for the length of the block; at its end every lease is back, and the processes are drained."""
    file = write(folder, encoder)
    deployment = load(file)
    async with Supervisor.running(deployment, file), Client.connect(deployment, timeout_s=START_S) as client:
        up = Running(folder, deployment, client)
        yield up
        await up.until_gauge("pool_lent_slots", 0)


def image(rows: int, seed: int) -> bytes:
    """A PNG of so many rows of embeddings that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, rows * SIDE, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()


def digests(outcome: Outcome) -> list[bytes]:
    assert isinstance(outcome, wire.Result), outcome
    return [item.digest for item in outcome.items]


def failure(outcome: Outcome) -> tuple[str, int]:
    assert isinstance(outcome, wire.Failed), outcome
    return outcome.failure.kind, outcome.failure.item


async def outcomes(*asked: asyncio.Future[Outcome]) -> list[Outcome]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*asked)


async def test_requests_share_a_call_in_which_one_poisoned_item_fails_alone(folder: Path) -> None:
    """Requests that wait behind one that is held go together, and again without the poisoned one."""
    async with running(folder, "{batch_wait_ms: 0}") as up:
        requests = [[image(2, 1), image(3, 2)], [image(4, 3)], [image(1, 4), image(POISONED, 5)], [image(9, 6)]]
        first, *answers = await up.outcomes_together([image(7, 7)], *requests)
        assert digests(first) == up.digests([image(7, 7)])
        assert failure(answers[2]) == ("BadItem", 1)
        for images, answer in zip(requests, answers, strict=True):
            if answer is not answers[2]:
                assert digests(answer) == up.digests(images)
        together, anew = up.calls()[1:]
        assert sorted(map(int, together.split())) == sorted([2, 3, 4, 1, POISONED, 9])
        assert sorted(map(int, anew.split())) == [2, 3, 4, 9]
        await up.until_gauge("encode_calls", 2)
        await up.until_gauge("encoded_items", 5)


async def test_a_crash_of_a_batch_ends_with_the_request_that_caused_it(folder: Path) -> None:
    async with running(folder, "{batch_wait_ms: 0}") as up:
        requests = [[image(3, 1)], [image(CRASHING, 2)], [image(4, 3)]]
        _, *answers = await up.outcomes_together([image(7, 7)], *requests)
        assert failure(answers[1]) == ("EncodeError", -1)
        assert [digests(answers[0]), digests(answers[2])] == [up.digests(requests[0]), up.digests(requests[2])]
        assert sorted(up.calls()[2:]) == sorted(["3", str(CRASHING), "4"])


async def test_an_idle_rank_waits_until_the_batch_is_full(folder: Path) -> None:
    async with running(folder, f"{{batch_wait_ms: 1000, batch_patches: {4 * 20}}}") as up:
        requests = [[image(rows, rows)] for rows in (2, 3, 4, 5, 6)]
        answers = await outcomes(*(up.submit(images) for images in requests))
        assert [digests(answer) for answer in answers] == [up.digests(images) for images in requests]
        assert len(up.calls()) < len(requests)


async def test_a_batch_sheds_what_was_cancelled_while_it_waited(folder: Path) -> None:
    async with running(folder, "{batch_wait_ms: 0}") as up:
        first = await up.held([image(1, 1)])
        waiting = [up.submit([image(rows, rows)], request=rows.to_bytes(16, "big")) for rows in (2, 3, 4)]
        await up.until_gauge("pool_lent_slots", 4)  # the tokenizer has sent them
        up.client.cancel((3).to_bytes(16, "big"))
        [cancelled] = await outcomes(waiting[1])
        assert failure(cancelled)[0] == "Cancelled"
        up.let_go()
        answers = await outcomes(first, waiting[0], waiting[2])
        assert [digests(answer) for answer in answers] == [up.digests([image(rows, rows)]) for rows in (1, 2, 4)]
        assert "3" not in " ".join(up.calls()).split()


async def test_e4_a_hit_is_not_encoded_again(folder: Path) -> None:
    async with running(folder, "{cache_mb: 1}") as up:
        for _ in range(3):
            [answer] = await outcomes(up.submit([image(2, 1), image(3, 2)]))
            assert digests(answer) == up.digests([image(2, 1), image(3, 2)])
        assert up.calls() == ["2 3"]
        await up.until_gauge("cache_hits", 4)
        assert await up.gauge("cache_misses") == 2
        assert await up.gauge("cache_nbytes") == (2 + 3) * 32 + 2 * 32  # rows of fingerprints, and the digests


async def test_equal_items_in_flight_are_encoded_once(folder: Path) -> None:
    """Eight requests of the same image, and one of another, wait together."""
    async with running(folder, "{cache_mb: 1, batch_wait_ms: 0}") as up:
        first, *same = await up.outcomes_together([image(1, 1)], *8 * [[image(5, 5), image(1, 1)]])
        assert digests(first) == up.digests([image(1, 1)])
        assert [digests(answer) for answer in same] == 8 * [up.digests([image(5, 5), image(1, 1)])]
        assert up.calls() == ["1", "5"]
        await up.until_gauge("cache_hits", 8 + 7)


async def test_affinity_sends_equal_content_to_one_rank_which_knows_it(folder: Path) -> None:
    async with running(folder, "{ranks: 3, assignment: affinity, cache_mb: 1}") as up:
        images = [image(2, seed) for seed in range(9)]
        expected = affine(up.contents(images), range(3))
        assert len(set(expected)) > 1
        for turn in range(4):
            [answer] = await outcomes(up.submit(images[turn:] + images[:turn]))
            assert digests(answer) == up.digests(images[turn:] + images[:turn])
            assert isinstance(answer, wire.Result)
            assert [item.rank for item in answer.items] == expected[turn:] + expected[:turn]
        assert sum(len(call.split()) for call in up.calls()) == 9
        await up.until_gauge("cache_hits", 3 * 9)


async def test_a_drain_waits_for_the_batch_that_waits(folder: Path) -> None:
    """The deployment is stopped while two requests wait behind one that is held."""
    file = write(folder, "{batch_wait_ms: 0}")
    deployment, sent = load(file), asyncio.Event()

    async def ask() -> tuple[list[Outcome], list[bytes]]:
        async with Client.connect(deployment, timeout_s=START_S) as client:
            up = Running(folder, deployment, client)
            asked = [await up.held([image(1, 1)]), up.submit([image(2, 2)]), up.submit([image(3, 3)])]
            await up.until_gauge("pool_lent_slots", 3)
            sent.set()
            await up.until_state("tokenizer", "leaving")
            up.let_go()
            return await outcomes(*asked), up.digests([image(1, 1), image(2, 2), image(3, 3)])

    async with Supervisor.running(deployment, file):
        asking = asyncio.create_task(ask())
        async with asyncio.timeout(START_S):
            await sent.wait()
    answers, expected = await asking
    assert [digest for answer in answers for digest in digests(answer)] == expected
