"""The faults that users of such services report of images, videos and their embeddings, each as a whole kind.

| row | the kind | shown by |
|---|---|---|
| B32 | a small file that costs much | `test_image_limits.py`: bombs, in a process that has no more to give; `test_animations.py`: frames and pixels of a file |
| B33 | a broken picture is more than an error of its request | `test_image.py`: malformed samples, cut anywhere, whatever bytes; `test_pipeline.py`: `test_b33_...`; `test_animations.py` |
| B34 | phone photos lie on their side | `test_image.py`: orientation, on every format; `test_animations.py`: every frame, and bytes, path and data URL; `test_b34_...` here |
| B35 | colours of less common modes | `test_image.py`: every mode, transparency, the first picture; `test_animations.py`: transparency |
| B36 | extreme shapes | `test_qwen2_vl.py`: sizes; `test_b36_...` here, through a deployment |
| B37 | somebody else's features | `test_qwen2_vl.py` and `test_video.py`: whatever changes the tensor changes the hash; `test_embedding_cache.py`: all is in the key |
| B38 | the same picture twice | `test_cached_batches.py`: equal items in flight; `test_random_batches.py`: a hundred seeds; `test_b38_b39_...` here |
| B39 | two caches that disagree | there is one, of the encoder rank, and every item carries its data; `test_cached_batches.py`: hits and evictions; `test_b38_b39_...` here |
| B40 | items and placeholders that do not agree | `test_text.py`: placeholders in text; `test_failed_batches.py`: wrong rows; `test_b40_...` here |
| B41 | items that come back in another order | `test_random_batches.py`: a hundred seeds of batches; `test_b41_...` here, through a deployment |
| B42 | odd numbers of frames | `test_video.py`: which frames, the last repeated; `test_b42_...` here. There is no audio |
"""  # noqa: E501 - a table

from __future__ import annotations

import asyncio
import io
import math
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, BadMessage, FerryError
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.client.prompt_parts import Embeddings, Part, Video
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.adapters.fingerprint import fingerprint_of
from tensorferry.stages.assignment import assign
from tensorferry.stages.processors.base import AnimatedFile, BadMedia, Clip, Media, plan, write
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.scheduler.splice import check, contradiction

PROGRAMS = Path(__file__).parents[1] / "programs"
LIMITS = LimitsSpec()

DEPLOYMENT = """
name: media-test
transport: shm
runtime_dir: {runtime_dir}
model: {{adapter: "{adapter}", options: {options}}}
tokenizer: {{processor: qwen3-vl, threads: 2, options: {{min_pixels: 4096}}}}
encoder: {{ranks: {ranks}, batch_patches: {batch_patches}, cache_mb: {cache_mb}}}
scheduler: {{options: {{digests: true}}}}
pool: {{budget_mb: 64, inline_below_kb: 4}}
embeddings_pool: {{budget_mb: 32, inline_below_kb: 1}}
limits: {{request_mb: 1024, request_tokens: 2000}}
timeouts: {{heartbeat_s: 0.2}}
telemetry: {{log_level: warning}}
"""


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    with tempfile.TemporaryDirectory(prefix="tf-") as short:  # sockets' paths have 107 bytes

        def make(**settings: object) -> Path:
            values = dict(adapter="fingerprint", options="{}", ranks=1, batch_patches=16384, cache_mb=0)
            file = tmp_path / "deployment.yaml"
            file.write_text(DEPLOYMENT.format(runtime_dir=Path(short) / "run", **(values | settings)))
            return file

        yield make


@asynccontextmanager
async def running(file: Path) -> AsyncIterator[tuple[Deployment, Client]]:
    deployment = load(file)
    async with Supervisor.running(deployment, file), Client.connect(deployment, timeout_s=60.0) as client:
        yield deployment, client


def picture(width: int, height: int, seed: int) -> Image.Image:
    """One that no other seed gives."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    with io.BytesIO() as file:
        image.save(file, kind, **options)
        return file.getvalue()


def fingerprint(deployment: Deployment, media: Media) -> bytes:
    """What the fingerprint adapter must have made of an item, computed here."""
    by = make_processor(deployment.tokenizer.processor, deployment.tokenizer.options, deployment.limits)
    planned = plan(by, media)
    out = View.empty(planned.dtype, planned.shape)
    write(by, media, planned, out)
    return fingerprint_of(out.data.data, out.dtype, out.shape)


# --- B34: orientation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_b34_a_turned_picture_has_the_hash_of_its_upright_twin_alone(kind: str, orientation: int) -> None:
    """Where the format is lossless; and never that of the same pixels without the tag."""
    by = make_processor("qwen2-vl", {}, LIMITS)
    image, exif = picture(84, 56, 1), Image.Exif()
    exif[0x0112] = orientation
    lossless = {"WEBP": {"lossless": True}}.get(kind, {})

    def hashed(data: bytes) -> bytes:
        planned = by.plan(data)
        return by.write(data, planned, View.empty(planned.dtype, planned.shape))

    tagged, plain = (hashed(encoded(image, kind, **lossless, **options)) for options in ({"exif": exif}, {}))
    assert tagged != plain
    if kind != "JPEG":
        turn = {
            2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
            5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
            8: Image.Transpose.ROTATE_90,
        }[orientation]  # fmt: skip
        assert tagged == hashed(encoded(image.transpose(turn), kind, **lossless))


# --- B36: extreme shapes --------------------------------------------------------------------------------------


@pytest.mark.processes
async def test_b36_extreme_shapes_are_served_or_refused_and_the_workers_live_on(deploy: Callable[..., Path]) -> None:
    async with running(deploy()) as (_, client):
        before = {member.epoch for member in await client.refresh()}
        for width, height in ((1093, 5), (5, 1093), (201, 1)):
            failed = await client.submit([encoded(picture(width, height, 1))])
            assert isinstance(failed, wire.Failed)
            assert (failed.failure.kind, failed.failure.item, failed.failure.retryable) == ("BadItem", 0, False)
            assert "the limit of the aspect ratio is 200:1" in failed.failure.problem
        for width, height in ((1000, 5), (1, 1), (1, 200), (200, 1), (27, 257)):
            result = await client.submit([encoded(picture(width, height, 2))])
            assert isinstance(result, wire.Result), (width, height, result)
            assert result.items[0].rows * 4 == math.prod(result.items[0].grid)
        assert {member.epoch for member in await client.refresh()} == before


# --- B38, B39: one cache, and what it is told -----------------------------------------------------------------


@pytest.mark.processes
async def test_b38_b39_what_comes_again_has_its_embeddings(
    deploy: Callable[..., Path],
) -> None:
    """Twice in a request, again behind one that was refused with it, and again after others have pushed it out."""
    async with running(deploy(cache_mb=1)) as (deployment, client):
        a, *others = (encoded(picture(64 + 32 * (seed % 5), 64, seed)) for seed in range(60))
        clip = [encoded(picture(64, 32, seed)) for seed in range(3)]
        expected, video = fingerprint(deployment, a), fingerprint(deployment, Clip(clip, None))
        refused = await client.submit([a, "x" * 3000, a])
        assert isinstance(refused, wire.Failed)
        assert "limits.request_tokens is 2000" in refused.failure.problem
        for _ in range(2):
            twice = await client.submit([a, "and", a, Video(clip), Video(clip)])
            assert isinstance(twice, wire.Result)
            assert [item.digest for item in twice.items] == [expected] * 2 + [video] * 2
        for other in others:
            assert isinstance(await client.submit([other]), wire.Result)
        again = await client.submit([a])
        assert isinstance(again, wire.Result)
        assert again.items[0].digest == expected


# --- B40: items and placeholders ------------------------------------------------------------------------------


def placed(offset: int, length: int) -> wire.PlacedItem:
    return wire.PlacedItem("image", (1, 2, 2), bytes(32), (wire.Span(offset, length),))


def admitted(*lengths: int, tokens: int = 40) -> wire.Admit:
    items = tuple(placed(sum(lengths[:place]) + place, length) for place, length in enumerate(lengths))
    owner, me = wire.Origin("tokenizer", 0, 1), wire.Rank(0, 7)
    return wire.Admit(bytes(16), 0, 7, owner, (me,), bytes(4 * tokens), items, 1, 60_000)


@pytest.mark.parametrize(
    ("admit", "rows", "problem"),
    [
        (admitted(4, 4), [4, 4, 4], "embeddings for items [2], which have no placeholders"),
        (admitted(), [4], "embeddings for items [0], which have no placeholders"),
        (admitted(4, 4), [4, 3], "item 1: 3 rows of embeddings for 4 placeholders"),
        (admitted(4, 4), [5, 4], "item 0: 5 rows of embeddings for 4 placeholders"),
    ],
)
def test_b40_a_count_that_does_not_agree_is_an_error_of_the_request(
    admit: wire.Admit, rows: Sequence[int], problem: str
) -> None:
    embeddings = {index: {"embeddings": View.empty("float32", (count, 8))} for index, count in enumerate(rows)}
    with pytest.raises(FerryError) as caught:
        check(admit, embeddings)
    assert isinstance(caught.value, BadItem | BadMessage)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("admit", "epoch", "problem"),
    [
        (admitted(4, 4), 7, ""),
        (admitted(4, 40), 7, "placeholders up to token 45 of 40"),
        (admitted(4), 8, "this rank is not among the schedulers"),
        (replace(admitted(4), token_ids=bytes(41)), 7, "token ids of 41 bytes"),
        (replace(admitted(), items=(placed(4, 2), placed(5, 2))), 7, "item 1 is from token 5 on, behind token 6"),
        (replace(admitted(), items=(placed(4, (1 << 31) - 1),)), 7, "placeholders up to token 2147483651 of 40"),
    ],
)
def test_b40_a_request_that_cannot_be_right_is_found_out_before_anything_waits_for_it(
    admit: wire.Admit, epoch: int, problem: str
) -> None:
    found = contradiction(admit, epoch)
    assert problem in str(found) if problem else found is None


# --- B41: order -----------------------------------------------------------------------------------------------


def mixed(seed: int) -> list[tuple[Part, Media | bytes]]:
    """Items of a request, mixed in size and kind, each with what its digest is of: 7 images, 1 or 2 videos, an animated
    file, 2 items of embeddings."""
    rng = random.Random(seed)
    items: list[tuple[Part, Media | bytes]] = []
    for place in range(7):
        image = encoded(picture(rng.randrange(20, 260), rng.randrange(20, 260), 100 * seed + place), "JPEG")
        items.append((image, image))
    for place in range(rng.randrange(1, 3)):
        size = rng.randrange(20, 120), rng.randrange(20, 120)
        frames = [encoded(picture(*size, 7000 * seed + 20 * place + frame)) for frame in range(rng.randrange(1, 6))]
        items.append((Video(frames), Clip(frames, None)))
    pictures = [picture(48, 40, 9000 * seed + frame) for frame in range(3)]
    film = encoded(pictures[0], "PNG", save_all=True, append_images=pictures[1:], duration=400)
    items.append((Video(film), AnimatedFile(film)))
    for _ in range(2):
        digest = rng.randbytes(32)
        rows = np.broadcast_to(np.frombuffer(digest, np.uint8), (rng.randrange(1, 60), 32))
        items.append((Embeddings({"embeddings": rows}), digest))
    rng.shuffle(items)
    return items


@pytest.mark.processes
async def test_b41_output_i_belongs_to_input_i(deploy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred seeds, three ranks that take up to 100 ms a call, all at once: every item bit for bit, encoded once, by
    the rank that anybody can compute."""
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS), prepend=":")
    file = deploy(adapter="late_adapter:Late", options="{most_ms: 100}", ranks=3, batch_patches=4096)
    per_rank: Counter[int] = Counter()
    gate = asyncio.Semaphore(16)

    async with running(file) as (deployment, client):

        async def one(seed: int) -> None:
            items = mixed(seed)
            request = seed.to_bytes(16, "big")
            async with gate:
                result = await client.submit([part for part, _ in items], request=request, output_tokens=1)
            assert isinstance(result, wire.Result), result
            for item, (_, source) in zip(result.items, items, strict=True):
                is_ready = isinstance(source, bytes) and len(source) == 32
                assert item.digest == (source if is_ready else fingerprint(deployment, source))
                assert (item.rank == -1) == is_ready
            patches = [math.prod(item.grid) for item in result.items]
            places = assign(request, patches, 3)
            assert [item.rank for item in result.items if item.rank != -1] == [
                place for place, count in zip(places, patches, strict=True) if count
            ]
            per_rank.update(item.rank for item in result.items)

        await asyncio.gather(*(one(seed) for seed in range(100)))
        async with asyncio.timeout(20):
            members = await client.refresh()
            while encoded_items(members) != {rank: per_rank[rank] for rank in range(3)}:
                await asyncio.sleep(0.1)
                members = await client.refresh()


def encoded_items(members: Sequence[wire.Member]) -> dict[int, int]:
    """How many items each encoder rank has read and encoded."""
    return {
        member.rank: int(gauge.value)
        for member in members
        for gauge in member.gauges
        if member.stage == "encoder" and gauge.name == "encoded_items"
    }


# --- B42: odd numbers of frames -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "temporal", "padded"), [(1, 2, 2), (3, 2, 4), (17, 2, 18), (1, 4, 4), (3, 4, 4), (17, 4, 20)]
)
@pytest.mark.parametrize("form", ["list", "file"])
def test_b42_frames_are_filled_up_and_every_row_is_there(frames: int, temporal: int, padded: int, form: str) -> None:
    by = make_processor("qwen3-vl", {"temporal_patch_size": temporal, "video_min_pixels": 1}, LIMITS)
    pictures = [picture(64, 32, seed) for seed in range(frames)]
    media: Clip | AnimatedFile = Clip([encoded(one) for one in pictures], None)
    if form == "file":
        media = AnimatedFile(encoded(pictures[0], "PNG", save_all=True, append_images=pictures[1:], duration=500))
    planned = plan(by, media)
    assert planned.grid[0] * temporal == padded
    assert planned.rows * 4 == planned.patches == planned.shape[0]
    out = View.empty(planned.dtype, planned.shape)
    out.data[:] = 0xFF  # NaN
    write(by, media, planned, out)
    assert np.isfinite(out.numpy()).all()


def test_b42_no_frames_are_an_error_of_the_client() -> None:
    with pytest.raises(BadMedia, match="the video has no frames"):
        plan(make_processor("qwen3-vl", {}, LIMITS), Clip([], 2.0))
