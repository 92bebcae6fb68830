"""A whole deployment whose features and embeddings stay in GPU memory, in processes that never wait for a stream."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import DeploymentError
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.client.prompt_parts import Embeddings
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.adapters.fingerprint import fingerprint_of
from tensorferry.stages.processors.base import Clip
from tensorferry.stages.processors.normalise import CLIP_STD
from tensorferry.stages.processors.qwen2_vl import Qwen2VLProcessor

PROGRAMS = Path(__file__).parents[1] / "programs"
START_S = 90.0
MIB = 1 << 20

DEPLOYMENT = """
name: gpu-test
transport: {transport}
runtime_dir: {runtime_dir}
model: {{adapter: {adapter}}}
tokenizer: {{workers: {tokenizers}, threads: 2, devices: {tokenizer_devices}}}
encoder: {{ranks: {encoders}, devices: {encoder_devices}}}
scheduler:
  {{tp_size: {tp_size}, attention_tp_size: {tp_size}, devices: {scheduler_devices}, options: {{digests: true}}}}
pool: {{budget_mb: {budget_mb}, handle_cache: {handle_cache}, chunk_mb: 8, idle_s: 0.5, acknowledge: {acknowledge}}}
embeddings_pool: {{budget_mb: 32}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0, start_s: 90}}
restarts: {{most: 0}}
telemetry: {{log_level: warning, log_format: json}}
"""


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., tuple[Deployment, Path]]]:
    with tempfile.TemporaryDirectory(prefix="tf-") as short:

        def make(**settings: object) -> tuple[Deployment, Path]:
            values: dict[str, object] = dict(
                runtime_dir=Path(short) / "run",
                transport="cuda_ipc",
                adapter="fingerprint",
                tokenizers=1,
                encoders=1,
                tokenizer_devices=[0],
                encoder_devices=[0],
                scheduler_devices=[0],
                tp_size=1,
                budget_mb=256,
                handle_cache="true",
                acknowledge="words",
            )
            file = tmp_path / "deployment.yaml"
            file.write_text(DEPLOYMENT.format(**(values | settings)))
            return load(file), file

        yield make


@asynccontextmanager
async def running(deployment: Deployment, file: Path) -> AsyncIterator[tuple[Supervisor, Client]]:
    async with (
        Supervisor.running(deployment, file) as supervisor,
        Client.connect(deployment, timeout_s=START_S) as client,
    ):
        yield supervisor, client


def photo(width: int, height: int, seed: int) -> bytes:
    """A PNG that no other seed gives."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    with io.BytesIO() as file:
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
        return file.getvalue()


def processed(image: bytes, device: int | None, dtype: str = "float32") -> tuple[View, bytes]:
    processor = Qwen2VLProcessor({"dtype": dtype}, LimitsSpec())
    plan = processor.plan(image)
    out = View.empty(plan.dtype, plan.shape, device)
    return out, processor.write(image, plan, out)


def expected(image: bytes, device: int | None) -> bytes:
    """The fingerprint of what a GPU, or the host, makes of an image, computed here."""
    view = processed(image, device)[0].host()
    return fingerprint_of(view.data.data, view.dtype, view.shape)


async def all_leases_back(client: Client, deadline_s: float = 20.0) -> None:
    def lent(members: list[wire.Member]) -> float:
        return sum(g.value for member in members for g in member.gauges if g.name == "pool_lent_slots")

    async with asyncio.timeout(deadline_s):
        while lent(await client.refresh()):  # noqa: ASYNC110  (the answer comes from another process)
            await asyncio.sleep(0.05)


async def ask(client: Client, images: list[bytes], at_once: int = 16, device: int | None = 0) -> Counter[str]:
    """Send each image alone, and all in one request too; check every digest. How the items travelled."""
    gate = asyncio.Semaphore(at_once)
    travelled: Counter[str] = Counter()

    async def one(part: list[bytes]) -> None:
        async with gate:
            result = await client.submit(["see: ", *part], output_tokens=2)
        assert isinstance(result, wire.Result), result
        assert [item.digest for item in result.items] == [expected(image, device) for image in part]
        travelled.update(item.transport for item in result.items)

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for image in images:
            group.create_task(one([image]))
        group.create_task(one(images[:7]))
    return travelled


def nothing_left(deployment: Deployment) -> None:
    directory = Path(Runtime.of(deployment).directory)
    assert not directory.exists() or os.listdir(directory) == []


@pytest.fixture
def hbm_comes_back(torch: Any, until: Callable[..., None]) -> Iterator[None]:
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(0)[0]
    yield
    torch.cuda.empty_cache()
    until(lambda: before - torch.cuda.mem_get_info(0)[0] <= 32 * MIB)


# --- the processor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(280, 196), (301, 157), (1600, 1200), (40, 30), (3000, 90)])
def test_the_gpu_resizes_as_the_host_does_to_one_level(torch: Any, width: int, height: int) -> None:
    """280 x 196 is not resized, so there the two are equal but for the arithmetic of normalising. Elsewhere Pillow's
    intermediate rounding shows; patches in another order would be many levels apart."""
    image = photo(width, height, width)
    host, gpu = processed(image, None)[0].numpy(), processed(image, 0)[0].host().numpy()
    assert host.shape == gpu.shape
    levels = np.abs(host - gpu) * 255 * min(CLIP_STD)  # at most that many 8-bit levels apart
    assert levels.max() < (1.1 if (width, height) != (280, 196) else 0.001)


@pytest.mark.parametrize(("width", "height"), [(280, 196), (301, 157)])
def test_the_gpu_makes_videos_as_the_host_does_to_one_level(torch: Any, width: int, height: int) -> None:
    processor = Qwen2VLProcessor({"video_min_pixels": 3136}, LimitsSpec())
    clip = Clip([photo(width, height, seed) for seed in range(5)], None)
    plan = processor.plan_video(clip)
    views = [View.empty(plan.dtype, plan.shape, device) for device in (None, 0, 0)]
    hashes = [processor.write_video(clip, plan, view) for view in views]
    host, gpu, again = (view.host().numpy() for view in views)
    levels = np.abs(host - gpu) * 255 * min(CLIP_STD)
    assert levels.max() < (1.1 if (width, height) != (280, 196) else 0.001)
    assert np.array_equal(gpu, again)
    assert hashes[0] != hashes[1] == hashes[2]


def test_equal_pixels_have_equal_hashes_and_tensors_on_the_gpu(torch: Any) -> None:
    first, second = (processed(photo(300, 200, 5), 0) for _ in range(2))
    assert first[1] == second[1] != processed(photo(300, 200, 6), 0)[1]
    assert first[1] != processed(photo(300, 200, 5), None)[1], "the host's tensor is another"
    assert torch.equal(first[0].torch(), second[0].torch())
    assert processed(photo(300, 200, 5), 0, "bfloat16")[0].torch().dtype == torch.bfloat16


# --- deployments ----------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.usefixtures("hbm_comes_back")
@pytest.mark.parametrize(
    ("budget_mb", "settings"),
    [
        (256, {"tokenizers": 2, "encoders": 2}),
        (6, {"tp_size": 2}),
        (64, {"handle_cache": "false"}),
        (256, {"transport": "cuda_vmm", "tokenizers": 2, "encoders": 2}),
        (6, {"transport": "cuda_vmm", "tp_size": 2}),
        (256, {"transport": "cuda_vmm", "acknowledge": "messages", "tokenizers": 2, "encoders": 2}),
        (6, {"transport": "cuda_vmm", "acknowledge": "messages", "tp_size": 2}),
    ],
    ids=["pool", "half-inline", "no-handle-cache", "elastic", "elastic-half-inline", "mail", "mail-half-inline"],
)
async def test_l10_features_stay_on_the_gpu_and_arrive_bit_equal(
    deploy: Callable[..., tuple[Deployment, Path]], budget_mb: int, settings: dict[str, object]
) -> None:
    deployment, file = deploy(budget_mb=budget_mb, **settings)
    images = [photo(100 + 7 * n, 400 - 5 * n, n) for n in range(48)]
    async with running(deployment, file) as (_, client):
        travelled = await ask(client, images, at_once=24)
        await all_leases_back(client)
    transport = deployment.transport
    assert travelled[transport] + travelled["inline"] == 55
    if budget_mb == 6:
        assert travelled["inline"] > 3, travelled
        assert travelled[transport] > 3, travelled
    elif transport == "cuda_ipc":
        assert travelled[transport] == 55, travelled
    else:  # what comes in the millisecond in which a pool grows may go inline
        assert travelled[transport] > 45, travelled
    nothing_left(deployment)


@pytest.mark.parametrize("acknowledge", ["words", "messages"])
async def test_an_idle_deployment_s_elastic_pools_hold_a_chunk_each(
    deploy: Callable[..., tuple[Deployment, Path]], acknowledge: str
) -> None:
    """Gone within 5 s of idling, the consumers' mappings too."""
    deployment, file = deploy(transport="cuda_vmm", encoders=2, acknowledge=acknowledge)

    def chunks(members: list[wire.Member]) -> float:
        names = ("pool_mapped_nbytes", "pool_retiring_nbytes")
        return sum(g.value for member in members for g in member.gauges if g.name in names) / (8 * MIB)

    async with running(deployment, file) as (_, client):
        await ask(client, [photo(1000 + n, 900, n) for n in range(24)], at_once=24)
        await all_leases_back(client)
        async with asyncio.timeout(5):
            while chunks(await client.refresh()) > 3:  # noqa: ASYNC110  (the answer comes from another process)
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("transport", ["cuda_ipc", "cuda_vmm"])
@pytest.mark.parametrize("budget_mb", [256, 6])
async def test_e3_embeddings_of_a_request_go_through_gpu_memory_to_every_scheduler(
    deploy: Callable[..., tuple[Deployment, Path]], transport: str, budget_mb: int
) -> None:
    deployment, file = deploy(transport=transport, tp_size=2, budget_mb=budget_mb)
    digests = [bytes([number]) * 32 for number in range(64)]
    items = [
        Embeddings({"embeddings": np.broadcast_to(np.frombuffer(digest, np.uint8), (4096 + number, 32))})
        for number, digest in enumerate(digests)
    ]
    async with running(deployment, file) as (_, client):
        image = photo(200, 100, 1)
        results = await asyncio.gather(*(client.submit(["a", item, image, item]) for item in items))
        travelled: Counter[str] = Counter()
        for result, digest in zip(results, digests, strict=True):
            assert isinstance(result, wire.Result), result
            assert [item.digest for item in result.items] == [digest, expected(image, 0), digest]
            travelled.update(item.transport for item in result.items if item.rank == -1)
        assert travelled[transport] > 3, travelled
        await all_leases_back(client)
    nothing_left(deployment)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("transport", ["cuda_ipc", "cuda_vmm"])
async def test_l10_an_encoder_on_a_peer_gpu_stages_locally(
    deploy: Callable[..., tuple[Deployment, Path]], transport: str
) -> None:
    deployment, file = deploy(transport=transport, encoders=2, encoder_devices=[1, 0])
    async with running(deployment, file) as (_, client):
        travelled = await ask(client, [photo(90 + 9 * n, 200, n) for n in range(20)])
        assert travelled[transport] > (26 if transport == "cuda_ipc" else 20), travelled
        await all_leases_back(client)


@pytest.mark.alone
@pytest.mark.usefixtures("hbm_comes_back")
@pytest.mark.parametrize(
    ("tokenizer", "encoder", "scheduler", "budget_mb"),
    [("null", "[0]", "null", 256), ("[0]", "[0]", "[0]", 256), ("[0]", "null", "[0]", 256), ("[0]", "[0]", "null", 6)],
    ids=["encoder", "all", "all-but-the-encoder", "half-inline"],
)
async def test_stages_on_gpus_with_pools_in_host_memory(
    deploy: Callable[..., tuple[Deployment, Path]], tokenizer: str, encoder: str, scheduler: str, budget_mb: int
) -> None:
    deployment, file = deploy(
        transport="shm",
        tokenizer_devices=tokenizer,
        encoder_devices=encoder,
        scheduler_devices=scheduler,
        budget_mb=budget_mb,
        encoders=2,
    )
    images = [photo(100 + 7 * n, 400 - 5 * n, n) for n in range(48)]
    async with running(deployment, file) as (_, client):
        travelled = await ask(client, images, at_once=24, device=0 if tokenizer == "[0]" else None)
        await all_leases_back(client)
    assert travelled["shm"] + travelled["inline"] == 55
    assert (travelled["inline"] > 3) is (budget_mb == 6), travelled
    assert travelled["shm"] > 3, travelled
    nothing_left(deployment)


async def test_patch_vit_encodes_on_the_gpu(deploy: Callable[..., tuple[Deployment, Path]]) -> None:
    deployment, file = deploy(adapter="patch-vit")
    async with running(deployment, file) as (_, client):
        asked = [photo(200, 140, 1), photo(200, 140, 2), photo(200, 140, 1)]
        results = [await client.submit([image]) for image in asked]
        assert all(isinstance(result, wire.Result) for result in results), results
        first, other, again = (result.items[0] for result in results if isinstance(result, wire.Result))
        assert first.digest == again.digest != other.digest
        assert first.transport == "cuda_ipc"
        await all_leases_back(client)


@pytest.mark.alone
@pytest.mark.usefixtures("hbm_comes_back")
@pytest.mark.parametrize("victim", ["tokenizer", "encoder", "scheduler"])
@pytest.mark.parametrize(
    ("transport", "acknowledge"), [("cuda_ipc", "words"), ("cuda_vmm", "words"), ("cuda_vmm", "messages")]
)
async def test_r8_nothing_is_left_of_a_deployment_that_lost_a_process(
    deploy: Callable[..., tuple[Deployment, Path]], victim: str, transport: str, acknowledge: str
) -> None:
    deployment, file = deploy(transport=transport, acknowledge=acknowledge)

    async def lose_one() -> None:
        async with running(deployment, file) as (supervisor, client), asyncio.timeout(60):
            asked = [client.submit_nowait([photo(700, 700, n)]) for n in range(12)]
            await asked[0]
            os.kill(supervisor.processes[victim, 0], signal.SIGKILL)
            await asyncio.Event().wait()

    with pytest.raises(DeploymentError, match=f"{victim}-0 was killed by SIGKILL"):
        await lose_one()
    nothing_left(deployment)


async def test_r10_a_lost_context_ends_its_process_at_once(
    deploy: Callable[..., tuple[Deployment, Path]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])]))
    deployment, file = deploy(adapter="sticky_adapter:Sticky")

    async def lose_the_gpu() -> None:
        async with running(deployment, file) as (_, client), asyncio.timeout(60):
            assert isinstance(await client.submit([photo(140, 112, 1)]), wire.Result)
            client.submit_nowait([photo(28 * 13, 28, 2)])
            await asyncio.Event().wait()

    with pytest.raises(DeploymentError, match="encoder-0 exited with status 1"):
        await lose_the_gpu()
    assert "gpu_lost" in capfd.readouterr().err
    nothing_left(deployment)
