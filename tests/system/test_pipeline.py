"""A whole deployment of real processes: every item arrives bit-equal, in its place, and everything comes back."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadRequest, DeploymentError
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.client.client import Client, Outcome, Part
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.adapters.fingerprint import fingerprint_of
from tensorferry.stages.assignment import assign
from tensorferry.stages.processors.registry import make_processor

ROOT = Path(__file__).parents[2]
START_S = 60.0

pytestmark = pytest.mark.timeout(120)

DEPLOYMENT = """
name: {name}
transport: {transport}
runtime_dir: {runtime_dir}
model: {{adapter: fingerprint}}
tokenizer: {{workers: {tokenizers}, threads: 1}}
encoder: {{ranks: {encoders}}}
scheduler: {{groups: {groups}, tp_size: {tp_size}, attention_tp_size: {tp_size}, options: {{digests: true}}}}
pool: {{budget_mb: {budget_mb}, inline_below_kb: {inline_below_kb}}}
embeddings_pool: {{budget_mb: 32, inline_below_kb: 0}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0}}
telemetry: {{log_level: warning, log_format: json}}
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield Path(path)


@pytest.fixture
def deploy(tmp_path: Path, short_path: Path) -> Callable[..., Deployment]:
    """Writes a deployment file and loads it; `deploy.file` is where."""

    def make(**settings: object) -> Deployment:
        values = dict(
            name="pipeline-test",
            transport="shm",
            runtime_dir=short_path / "run",
            tokenizers=1,
            encoders=1,
            groups=1,
            tp_size=1,
            budget_mb=64,
            inline_below_kb=0,
        )
        file = tmp_path / "deployment.yaml"
        file.write_text(DEPLOYMENT.format(**(values | settings)))
        return load(file)

    return make


@asynccontextmanager
async def running(deployment: Deployment, tmp_path: Path) -> AsyncIterator[Client]:
    async with (
        Supervisor.running(deployment, tmp_path / "deployment.yaml"),
        Client.connect(deployment, timeout_s=START_S) as client,
    ):
        yield client


def photo(width: int, height: int, seed: int) -> bytes:
    """A JPEG that no other seed gives."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    with io.BytesIO() as file:
        coarse.resize((width, height), Image.Resampling.BILINEAR).save(file, "JPEG", quality=90)
        return file.getvalue()


def expected(deployment: Deployment) -> Callable[[bytes], bytes]:
    """What the fingerprint adapter must have made of an image, computed here."""
    processor = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)

    def fingerprint(image: bytes) -> bytes:
        plan = processor.plan(image)
        out = View.empty(plan.dtype, plan.shape)
        processor.write(image, plan, out)
        return fingerprint_of(out.data.data, plan.dtype, plan.shape)

    return fingerprint


async def all_leases_back(client: Client, deadline_s: float = 20.0) -> None:
    """Until every pool of the deployment says that it has lent nothing."""
    async with asyncio.timeout(deadline_s):
        while lent := lent_slots(await client.refresh()):
            await asyncio.sleep(0.05)
            assert lent is not None


def lent_slots(members: list[wire.Member]) -> dict[str, float]:
    return {
        f"{member.stage}-{member.rank}": gauge.value
        for member in members
        for gauge in member.gauges
        if gauge.name == "pool_lent_slots" and gauge.value
    }


def gauges(members: list[wire.Member], name: str) -> float:
    return sum(gauge.value for member in members for gauge in member.gauges if gauge.name == name)


def workload(seed: int, with_images: int, images: int, text_only: int) -> list[list[Part]]:
    """Requests of text and images in mixed order; `images` of them in all, over `with_images` requests."""
    rng = random.Random(seed)
    counts = [1] * with_images
    for _ in range(images - with_images):
        counts[rng.randrange(with_images)] += 1
    requests: list[list[Part]] = []
    serial = 0
    for count in counts:
        parts: list[Part] = [f"request {len(requests)}: "]
        for _ in range(count):
            serial += 1
            parts.append(photo(rng.randrange(30, 260), rng.randrange(30, 260), serial))
            if rng.random() < 0.5:
                parts.append(f" and {serial} ")
        requests.append(parts)
    requests += [[f"text only {number}"] for number in range(text_only)]
    rng.shuffle(requests)
    return requests


async def run(client: Client, requests: list[list[Part]], at_once: int = 64) -> list[Outcome]:
    gate = asyncio.Semaphore(at_once)

    async def one(parts: list[Part]) -> Outcome:
        async with gate:
            return await client.submit(parts, output_tokens=4)

    return await asyncio.gather(*(one(parts) for parts in requests))


def check(deployment: Deployment, requests: list[list[Part]], outcomes: list[Outcome], images: int) -> Counter[str]:
    """Every item, counted first, bit-equal and in its place. Returns how many travelled how."""
    failures = [outcome for outcome in outcomes if not isinstance(outcome, wire.Result)]
    assert not failures, failures[:3]
    results = [outcome for outcome in outcomes if isinstance(outcome, wire.Result)]
    assert sum(len(result.items) for result in results) == images
    fingerprint = expected(deployment)
    travelled: Counter[str] = Counter()
    for parts, result in zip(requests, results, strict=True):
        sent = [part for part in parts if isinstance(part, bytes)]
        assert [item.digest for item in result.items] == [fingerprint(image) for image in sent]
        travelled.update(item.transport for item in result.items)
    return travelled


def nothing_left(deployment: Deployment, before: set[int]) -> None:
    """No process of ours, no socket, lock or other file; memfds and descriptors went with their processes."""
    left = {child.pid: child.cmdline() for child in psutil.Process().children(recursive=True)}
    assert not {pid: line for pid, line in left.items() if pid not in before}
    directory = Path(Runtime.of(deployment).directory)
    assert not directory.exists() or os.listdir(directory) == []


@pytest.mark.parametrize(
    ("transport", "budget_mb", "images", "requests", "text_only"),
    [("shm", 256, 820, 500, 200), ("shm", 4, 300, 150, 20), ("cpu", 64, 300, 150, 20)],
    ids=["pool", "half-inline", "inline"],
)
async def test_s1_e1_every_item_arrives_bit_equal_and_in_order(
    deploy: Callable[..., Deployment],
    tmp_path: Path,
    transport: str,
    budget_mb: int,
    images: int,
    requests: int,
    text_only: int,
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    deployment = deploy(tokenizers=2, encoders=3, groups=2, transport=transport, budget_mb=budget_mb)
    sent = workload(7, requests, images, text_only)
    async with running(deployment, tmp_path) as client:
        outcomes = await run(client, sent, at_once=16)
        travelled = check(deployment, sent, outcomes, images)
        await all_leases_back(client)
        members = await client.refresh()
    assert {member.stage: member.state for member in members} == dict.fromkeys(
        ("tokenizer", "encoder", "scheduler"), "ready"
    )
    match transport, budget_mb:
        case "cpu", _:
            assert travelled == {"inline": images}
        case _, 4:
            assert travelled["inline"] > images / 8, travelled
            assert travelled["shm"] > images / 8, travelled
            assert gauges(members, "drafts_pool_full") == travelled["inline"]
        case _:
            assert travelled == {"shm": images}
            assert gauges(members, "pool_peak_lent_slots") > 1
    nothing_left(deployment, before)


async def test_l5_with_when_full_wait_everything_finds_room(deploy: Callable[..., Deployment], tmp_path: Path) -> None:
    deploy(encoders=2, budget_mb=4)
    file = tmp_path / "deployment.yaml"
    text = file.read_text().replace("pool: {budget_mb: 4,", "pool: {budget_mb: 4, when_full: wait, wait_ms: 60000,")
    file.write_text(text)
    deployment = load(file)
    sent = workload(11, 60, 90, 0)
    async with running(deployment, tmp_path) as client:
        outcomes = await run(client, sent)
        assert check(deployment, sent, outcomes, 90) == {"shm": 90}
        await all_leases_back(client)


async def test_l5_the_wait_for_room_has_an_end(deploy: Callable[..., Deployment], tmp_path: Path) -> None:
    """An image that no pool of 1 MiB has room for waits for 300 ms, and goes inline."""
    deploy(budget_mb=1)
    file = tmp_path / "deployment.yaml"
    file.write_text(
        file.read_text().replace("pool: {budget_mb: 1,", "pool: {budget_mb: 1, when_full: wait, wait_ms: 300,")
    )
    deployment = load(file)
    async with running(deployment, tmp_path) as client:
        for size, how, least_s in ((100, "shm", 0.0), (700, "inline", 0.3)):
            async with asyncio.timeout(20):
                result = await client.submit([photo(size, size, size)])
            assert isinstance(result, wire.Result)
            marks = {mark.step: mark.at_ns for mark in result.marks}
            assert result.items[0].transport == how
            assert (marks["processed"] - marks["received"]) / 1e9 >= least_s


async def test_e6_every_rank_of_an_attention_group_gets_the_embeddings(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = deploy(encoders=2, groups=1, tp_size=2)
    sent = workload(3, 20, 40, 5)
    async with running(deployment, tmp_path) as client:
        outcomes = await run(client, sent)
        check(deployment, sent, outcomes, 40)
        await all_leases_back(client)


async def test_b41_items_are_spread_by_the_assignment_that_anybody_can_compute(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = deploy(encoders=3)
    async with running(deployment, tmp_path) as client:
        for number in range(5):
            request = number.to_bytes(16, "big")
            result = await client.submit([photo(80 + 30 * size, 120, size) for size in range(7)], request=request)
            assert isinstance(result, wire.Result)
            patches = [item.grid[0] * item.grid[1] * item.grid[2] for item in result.items]
            assert [item.rank for item in result.items] == assign(request, patches, 3)


async def test_a_request_id_is_answered_once(deploy: Callable[..., Deployment], tmp_path: Path) -> None:
    deployment = deploy()
    async with running(deployment, tmp_path) as client:
        assert isinstance(await client.submit(["once"], request=bytes(16)), wire.Result)
        again = await client.submit(["once"], request=bytes(16))
        assert isinstance(again, wire.Failed)
        assert (again.failure.kind, again.failure.retryable) == ("BadRequest", False)


BAD = {
    "truncated": lambda good: good[: len(good) // 3],
    "empty": lambda good: b"",
    "text": lambda good: b"no image at all",
    "header only": lambda good: good[:20],
}


@pytest.mark.parametrize("kind", BAD)
async def test_b33_a_bad_image_fails_its_request_alone(
    deploy: Callable[..., Deployment], tmp_path: Path, kind: str
) -> None:
    deployment = deploy()
    good = photo(100, 80, 1)
    async with running(deployment, tmp_path) as client:
        bad, beside = await asyncio.gather(
            client.submit([good, good, BAD[kind](good), good]), client.submit(["fine ", good])
        )
        assert isinstance(bad, wire.Failed)
        assert (bad.failure.kind, bad.failure.item, bad.failure.retryable) == ("BadItem", 2, False)
        assert isinstance(beside, wire.Result)
        assert isinstance(await client.submit([good]), wire.Result)
        await all_leases_back(client)


async def test_cancelled_and_overdue_requests_give_everything_back(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = deploy(encoders=2)
    async with running(deployment, tmp_path) as client:
        futures = []
        for number in range(40):
            request = number.to_bytes(16, "big")
            futures.append(client.submit_nowait([photo(200, 200, number)], request=request))
            if number % 2:
                client.cancel(request)
        overdue = client.submit_nowait([photo(250, 250, 1)] * 8, deadline_s=0.001)
        outcomes = await asyncio.gather(*futures)
        late = await overdue
        assert isinstance(late, wire.Failed)
        assert late.failure.kind == "DeadlineExceeded"
        kinds = Counter(
            outcome.failure.kind if isinstance(outcome, wire.Failed) else type(outcome).__name__ for outcome in outcomes
        )
        assert kinds["Result"] >= 20
        assert kinds["Result"] + kinds["Cancelled"] == 40
        await all_leases_back(client)


async def test_b27_what_the_wire_cannot_carry_is_refused_at_once(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = deploy()
    async with running(deployment, tmp_path) as client:
        for parts, options in (
            ([], {}),
            (["x"] * 4097, {}),
            (["x" * ((1 << 22) + 1)], {}),
            (["x"], {"output_tokens": -1}),
            (["x"], {"output_tokens": 1 << 21}),
            (["x"], {"request": b"8 bytes."}),
            (["x"], {"deadline_s": 0.0}),
            (["x"], {"deadline_s": float("nan")}),
            ([np.array([1 << 40])], {}),
            ([np.array([1.5])], {}),
        ):
            with pytest.raises(BadRequest):
                client.submit_nowait(parts, **options)  # type: ignore[arg-type]
        assert isinstance(await client.submit(["x"], deadline_s=1e6), wire.Result)


async def test_s1_a_deployment_that_stops_answers_for_what_it_had(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    deploy()
    file = tmp_path / "deployment.yaml"
    text = file.read_text().replace("quarantine_s: 20.0", "quarantine_s: 1.0")
    file.write_text(text.replace("options: {digests: true}", "options: {service_ms: 60000}"))
    deployment = load(file)
    async with Supervisor.running(deployment, file) as supervisor:
        timeouts = msgspec.structs.replace(deployment.timeouts, start_s=1.5)  # it waits so long for a next life
        async with Client.connect(msgspec.structs.replace(deployment, timeouts=timeouts), timeout_s=START_S) as client:
            asked = client.submit_nowait(["never served"])
            os.kill(supervisor.processes["tokenizer", 0], signal.SIGSTOP)
            async with asyncio.timeout(20):
                lost = await asked
            os.kill(supervisor.processes["tokenizer", 0], signal.SIGCONT)
        assert isinstance(lost, wire.Failed)
        assert (lost.failure.kind, lost.failure.retryable) == ("PeerGone", True)
        async with Client.connect(deployment, timeout_s=START_S) as client:
            client.submit_nowait(["never served either"], deadline_s=1.0)


@pytest.mark.parametrize("how", ["cancelled", "too late"])
async def test_s1_an_engine_is_spared_what_nobody_waits_for(
    deploy: Callable[..., Deployment], tmp_path: Path, how: str
) -> None:
    deploy()
    file = tmp_path / "deployment.yaml"
    file.write_text(file.read_text().replace("options: {digests: true}", "options: {service_ms: 600000}"))
    deployment = load(file)
    async with (
        Supervisor.running(deployment, file),  # raises where a stage does not drain
        Client.connect(deployment, timeout_s=START_S) as client,
    ):
        if how == "cancelled":
            asked = client.submit_nowait(["in the engine"], request=b"16 bytes exactly")
        late = await client.submit(["behind it, or in the engine"], deadline_s=1.0)
        assert isinstance(late, wire.Failed)
        assert late.failure.kind == "DeadlineExceeded"
        if how == "cancelled":
            client.cancel(b"16 bytes exactly")
            lost = await asked
            assert isinstance(lost, wire.Failed)
            assert lost.failure.kind == "Cancelled"


async def test_a_client_of_nobody_is_told_so(deploy: Callable[..., Deployment]) -> None:
    with pytest.raises(DeploymentError, match="is not running; start it"):
        async with Client.connect(deploy(), timeout_s=5):
            pass


async def test_busy_beyond_the_limit_in_flight(deploy: Callable[..., Deployment], tmp_path: Path) -> None:
    deploy()
    file = tmp_path / "deployment.yaml"
    file.write_text(file.read_text() + "limits: {in_flight_requests: 4}\n")
    deployment = load(file)
    async with running(deployment, tmp_path) as client:
        outcomes = await asyncio.gather(*(client.submit([photo(200, 200, number)]) for number in range(40)))
        kinds = Counter(type(outcome).__name__ for outcome in outcomes)
        assert kinds["Busy"] > 0
        assert kinds["Busy"] + kinds["Result"] == 40
        busy = next(outcome for outcome in outcomes if isinstance(outcome, wire.Busy))
        assert busy.retry_ms > 0
        assert "limits.in_flight_requests" in busy.reason
