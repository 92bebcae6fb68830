"""Videos: which frames are looked at, their size, patches of several frames, and one through a whole deployment."""

from __future__ import annotations

import io
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, BadRequest
from tensorferry.codecs.tensors import View, nbytes_of
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.client.prompt_parts import Video
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.adapters.fingerprint import fingerprint_of
from tensorferry.stages.processors import gpu_patches
from tensorferry.stages.processors.base import BadMedia, Clip, Plan, plan, write
from tensorferry.stages.processors.frame_sampling import padded, sampled
from tensorferry.stages.processors.normalise import CLIP_STD
from tensorferry.stages.processors.options import QWEN3_VL, Qwen2VLOptions
from tensorferry.stages.processors.qwen2_vl import Qwen2VLProcessor
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.tokenizer.planner import Planner
from tensorferry.stages.tokenizer.text import TextEncoder

LIMITS = LimitsSpec()
QWEN2, QWEN3 = Qwen2VLOptions(), Qwen2VLOptions(**QWEN3_VL)  # type: ignore[arg-type]


def processor(name: str = "qwen2-vl", limits: LimitsSpec = LIMITS, **options: Any) -> Qwen2VLProcessor:
    made = make_processor(name, options, limits)
    assert isinstance(made, Qwen2VLProcessor)
    return made


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(image: Image.Image) -> bytes:
    with io.BytesIO() as file:
        image.save(file, "PNG")
        return file.getvalue()


def clip_of(count: int, width: int = 64, height: int = 32, fps: float | None = None) -> Clip:
    return Clip([png(noise(width, height, seed)) for seed in range(count)], fps)


def written(by: Any, clip: Clip) -> tuple[Plan, View, bytes]:
    planned = plan(by, clip)
    out = View(np.full(nbytes_of(planned.dtype, planned.shape), 0xA5, np.uint8), planned.dtype, planned.shape)
    return planned, out, write(by, clip, planned, out)


# --- which frames -------------------------------------------------------------------------------------------


def digest(numbers: Sequence[int]) -> str:
    return blake2b(np.array(numbers, "<i4").tobytes(), digest_size=8).hexdigest()


@pytest.mark.parametrize(
    ("frames", "fps", "qwen2", "qwen3"),
    [
        (2, 30.0, [0, 1], [0, 1]),
        (3, 1.0, [0, 1], [0, 1, 2]),
        (5, 2.0, [0, 1, 2, 3], [0, 1, 2, 3, 4]),
        (30, 30.0, [0, 7, 15, 22], [0, 10, 19, 29]),
        (100, 24.0, [0, 12, 25, 37, 50, 62, 75, 87], [0, 14, 28, 42, 57, 71, 85, 99]),
        (12, 1.0, list(range(12)), list(range(12))),
        (301, 29.97, "2e72b9fb85f82539", "1a54be70f5ee739d"),
        (2000, 2.0, "07dcf5af5be3a681", "897b9ed4fcacb9b3"),
        (900, 1.0, "187025031e06debf", "8ad6c408fcc47130"),
    ],
)
def test_frames_are_those_that_transformers_samples(
    frames: int, fps: float, qwen2: list[int] | str, qwen3: list[int] | str
) -> None:
    """Golden: `sample_frames(fps=2)` of transformers 5.17's Qwen2VLVideoProcessor and Qwen3VLVideoProcessor."""
    for options, expected in ((QWEN2, qwen2), (QWEN3, qwen3)):
        found = sampled(options, frames, fps)
        assert (digest(found) if isinstance(expected, str) else found) == expected


@pytest.mark.parametrize(
    ("frames", "count", "expected"),
    [
        (30, 22, [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 15, 16, 17, 19, 20, 21, 23, 24, 25, 27, 28]),
        (60, 22, [0, 2, 5, 8, 10, 13, 16, 19, 21, 24, 27, 30, 32, 35, 38, 40, 43, 46, 49, 51, 54, 57]),
        (68, 28, [2 * n + 3 * n // 7 for n in range(28)]),
    ],
)
def test_steps_between_frames_are_float32_as_in_transformers(frames: int, count: int, expected: list[int]) -> None:
    """Golden: `torch.arange(0, frames, frames / count).int()`, as in its Qwen2VLVideoProcessor. Each has a step that
    falls on a whole number, and in float64 just short of it."""
    assert sampled(Qwen2VLOptions(video_fps=float(count)), frames, float(frames)) == expected
    assert [int(number * (frames / count)) for number in range(count)] != expected


def test_without_a_rate_all_frames_are_looked_at_up_to_the_limit() -> None:
    assert sampled(QWEN2, 5, None) == [0, 1, 2, 3, 4]
    assert sampled(QWEN3, 768, None) == list(range(768))
    many = sampled(Qwen2VLOptions(video_max_frames=4), 10, None)
    assert many == [0, 3, 6, 9]


@pytest.mark.parametrize("options", [QWEN2, QWEN3])
def test_a_single_frame_is_a_video_too(options: Qwen2VLOptions) -> None:
    assert sampled(options, 1, 30.0) == [0]
    assert padded([0], 2) == [0, 0]
    assert padded([0, 3, 6], 2) == [0, 3, 6, 6]
    assert padded([0, 3], 2) == [0, 3]


@pytest.mark.parametrize("options", [QWEN2, QWEN3])
def test_sampled_frames_are_there_and_in_order(options: Qwen2VLOptions) -> None:
    for frames in (1, 2, 3, 4, 5, 17, 99, 767, 768, 769, 5000):
        for fps in (0.1, 1.0, 2.0, 23.976, 25.0, 240.0):
            found = sampled(options, frames, fps)
            assert found == sorted(set(found))
            assert 0 <= found[0] <= found[-1] < frames
            assert len(found) <= options.video_max_frames


# --- how large ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "width", "height", "qwen2", "qwen3"),
    [
        (1, 640, 480, (644, 476), (640, 480)),
        (3, 640, 480, (644, 476), (640, 480)),
        (4, 1920, 1080, (1008, 560), (1920, 1088)),
        (5, 33, 20, (420, 252), (64, 32)),
        (5, 20, 33, (252, 420), (32, 64)),
        (8, 16, 700, (56, 2100), (32, 1408)),
        (100, 1920, 1080, (1008, 560), (640, 352)),
        (768, 1280, 720, (1008, 560), (224, 128)),
        (768, 64, 48, (392, 280), (64, 64)),
        (2, 8, 8, (336, 336), (64, 64)),
        (7, 500, 31, (1288, 84), (512, 32)),
        (3, 2560, 2560, (756, 756), (2880, 2880)),  # 3 count as 4, which are too many, and then as 3, which are not
    ],
)
def test_sizes_are_those_of_transformers(
    frames: int, width: int, height: int, qwen2: tuple[int, int], qwen3: tuple[int, int]
) -> None:
    """Golden: `smart_resize` of transformers 5.17, of images with Qwen2-VL's limits of a frame, and of videos with
    Qwen3-VL's, those of its video_preprocessor_config.json."""
    assert processor("qwen2-vl").size_of_frames(frames, (width, height)) == qwen2
    assert processor("qwen3-vl").size_of_frames(frames, (width, height)) == qwen3


# --- the tensor ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("frames", "temporal", "grid"), [(5, 2, 3), (4, 2, 2), (1, 2, 1), (4, 3, 2), (3, 1, 3)])
def test_a_patch_holds_consecutive_frames_and_the_last_is_repeated(
    frames: int, temporal: int, grid: int, dtype: str
) -> None:
    """Frame by frame as still images, whose order of patches has tests of its own."""
    options = {"video_min_pixels": 784, "min_pixels": 784, "dtype": dtype}
    by = processor(temporal_patch_size=temporal, **options)
    still = processor(temporal_patch_size=1, **options)
    clip = clip_of(frames, 84, 56)
    planned, out, _ = written(by, clip)
    patches = 4 * 6
    assert planned == Plan("video", (grid, 4, 6), (grid * patches, 588 * temporal), dtype, grid * patches // 4)
    found = out.torch().view(grid, patches, 3, temporal, 196)
    for position in range(grid * temporal):
        data = clip.frames[min(position, frames - 1)]
        image = View.empty(dtype, (patches, 588))
        still.write(data, still.plan(data), image)
        assert found[position // temporal, :, :, position % temporal].equal(image.torch().view(patches, 3, 196))


def test_a_sampled_video_is_the_video_of_its_sampled_frames() -> None:
    by = processor("qwen3-vl", video_min_frames=2, video_max_frames=3)
    clip = clip_of(9, fps=1.0)
    planned, out, hashed = written(by, clip)
    same = written(by, Clip([clip.frames[number] for number in (0, 4, 8)], None))
    assert planned.grid == (2, 2, 4)
    assert (same[0], same[2]) == (planned, hashed)
    assert np.array_equal(out.data, same[1].data)


def test_whatever_changes_the_tensor_changes_the_hash() -> None:
    clip = clip_of(4)
    hashes = [
        written(by, Clip(frames, None))[2]
        for by, frames in [
            (processor("qwen3-vl"), clip.frames),
            (processor("qwen3-vl"), clip.frames[::-1]),
            (processor("qwen3-vl"), clip.frames[:3]),
            (processor("qwen3-vl"), [*clip.frames[:3], clip.frames[2], clip.frames[3]]),
            (processor("qwen3-vl", dtype="bfloat16"), clip.frames),
            (processor("qwen2-vl"), clip.frames),
            (processor("qwen2-vl", normalisation="half"), clip.frames),
        ]
    ]
    assert len(set(hashes)) == len(hashes)
    image = processor("qwen3-vl", min_pixels=2048)
    out = View.empty(*(lambda p: (p.dtype, p.shape))(image.plan(clip.frames[0])))
    still = image.write(clip.frames[0], image.plan(clip.frames[0]), out)
    assert still != written(image, Clip(clip.frames[:1], None))[2]


def flat(width: int, height: int) -> bytes:
    """Its pixels are the same bytes as those of any other with as many."""
    return png(Image.new("RGB", (width, height), (90, 90, 90)))


def test_frames_of_equal_bytes_and_another_grid_have_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same frames, resized to 84 x 28 and to 28 x 84: for equal options there is one size, so it is put in."""
    by, clip, hashes = processor(), Clip([flat(60, 60)] * 2, None), []
    for size in ((84, 28), (28, 84)):
        monkeypatch.setattr(Qwen2VLProcessor, "size_of_frames", lambda self, frames, found, size=size: size)
        hashes.append(written(by, clip)[2])
    assert len(set(hashes)) == 2


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Clip | bytes], bytes]:
    """Writes to what is taken for GPU memory, and returns the content hash."""
    monkeypatch.setattr(gpu_patches, "pinned_copy", lambda data: torch.from_numpy(data.copy()))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def hashed(by: Any, media: Clip | bytes) -> bytes:
        planned = plan(by, media)
        nbytes = nbytes_of(planned.dtype, planned.shape)
        there = View(torch.full((nbytes,), 0xFF, dtype=torch.uint8), planned.dtype, planned.shape)
        return write(by, media, planned, there)

    return hashed


@pytest.mark.parametrize("media", [Clip([flat(112, 56)] * 2, None), flat(112, 56)], ids=["video", "image"])
def test_where_a_gpu_resizes_the_size_is_in_the_hash(
    on_a_gpu: Callable[[Any, Clip | bytes], bytes], media: Clip | bytes
) -> None:
    """There the hash is over the pixels before they are resized."""
    limits = [784, 6272, 25088]
    hashes = [on_a_gpu(processor(video_min_pixels=least, min_pixels=least), media) for least in limits]
    assert len(set(hashes)) == 2, "the first two change nothing"


@pytest.mark.parametrize(("width", "height"), [(112, 56), (150, 77)])
def test_where_a_gpu_resizes_a_video_is_the_same_to_one_level(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arithmetic, run by torch on the host; `gpu/test_stages.py` has it on a GPU. 112 x 56 needs no resize."""
    monkeypatch.setattr(gpu_patches, "pinned_copy", lambda data: torch.from_numpy(data.copy()))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    by = processor(video_min_pixels=3136)
    coarse = [noise(5, 5, seed).resize((width, height), Image.Resampling.BICUBIC) for seed in range(5)]
    clip = Clip([png(picture) for picture in coarse], None)
    planned, host, hashed = written(by, clip)
    nbytes = nbytes_of(planned.dtype, planned.shape)
    there = View(torch.full((nbytes,), 0xFF, dtype=torch.uint8), planned.dtype, planned.shape)
    assert write(by, clip, planned, there) != hashed
    apart = (there.torch() - host.torch()).abs() * 255 * min(CLIP_STD)
    assert apart.max() < (1.1 if (width, height) != (112, 56) else 0.001)


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([], "the video has no frames"),
        ([png(noise(64, 32)), b"no picture"], "frame 1: "),
        ([png(noise(64, 32)), png(noise(64, 32)), png(noise(32, 64))], "frame 1 is 64x32, frame 2 is 32x64"),
        ([png(noise(1, 201))], r"1x201 is 201\.0:1; the limit"),
        ([png(noise(101, 100))], r"frame 0: 101x100 is 10100 pixels; the limit is 10000 \(limits\.item_pixels\)"),
        ([png(noise(100, 100))] * 33, r"33 frames of 100x100; the limit is 320000 pixels in all, 32 times limits\."),
    ],
)
def test_a_video_that_cannot_be_used_says_why(frames: list[bytes], problem: str) -> None:
    with pytest.raises(BadMedia, match=problem):
        plan(processor(limits=LimitsSpec(item_pixels=10_000)), Clip(frames, None))


def test_a_frame_that_turns_out_broken_is_named() -> None:
    clip = clip_of(3)
    broken = Clip([*clip.frames[:2], clip.frames[2][:-200] + bytes(200)], None)
    by = processor("qwen3-vl")
    planned = by.plan_video(clip)
    with pytest.raises(BadMedia, match="frame 2: "):
        by.write_video(broken, planned, View.empty(planned.dtype, planned.shape))


def test_another_video_than_the_planned_is_refused() -> None:
    by = processor("qwen3-vl")
    planned = by.plan_video(clip_of(4))
    for other in (clip_of(4, 128, 32), clip_of(6)):
        with pytest.raises(BadMedia, match="does not match its plan"):
            by.write_video(other, planned, View.empty(planned.dtype, planned.shape))


def test_a_processor_without_videos_refuses_them() -> None:
    class Stills:
        def plan(self, data: bytes) -> Plan:
            raise AssertionError

    with pytest.raises(BadMedia, match="this deployment's processor takes no videos"):
        plan(Stills(), clip_of(1))  # type: ignore[arg-type]


def test_the_planner_takes_a_videos_frames_from_the_message() -> None:
    planner = Planner(processor("qwen3-vl"), TextEncoder.from_file(None), LimitsSpec(item_mb=1))
    frames = [b"text before", *clip_of(3).frames]
    prompt = planner.plan(wire.Submit(bytes(16), 0, (wire.TextPart("a"), wire.VideoPart(1, 3)), 1, 1000), frames)
    assert [item.modality for item in prompt.plans] == ["video"]
    assert prompt.spans == [(2, prompt.plans[0].rows)]
    for part, data, problem in (
        (wire.VideoPart(1, 4), frames, "its bytes should be frame 4, but the message has 4"),
        (wire.VideoPart(0, 2), [bytes(600_000), bytes(600_000)], "1200000 encoded bytes; limits.item_mb is 1"),
    ):
        with pytest.raises(BadItem, match=problem) as caught:
            planner.plan(wire.Submit(bytes(16), 0, (part,), 1, 1000), data)
        assert caught.value.index == 0


# --- end to end -------------------------------------------------------------------------------------------

DEPLOYMENT = """
name: video-test
transport: shm
runtime_dir: {runtime_dir}
model: {{adapter: fingerprint}}
tokenizer: {{processor: qwen3-vl, threads: 1}}
encoder: {{ranks: 2}}
scheduler: {{options: {{digests: true}}}}
pool: {{budget_mb: 64, inline_below_kb: 0}}
embeddings_pool: {{budget_mb: 32, inline_below_kb: 0}}
limits: {{request_mb: 1024}}
timeouts: {{heartbeat_s: 0.5}}
telemetry: {{log_level: warning}}
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield Path(path)


@asynccontextmanager
async def running(file: Path) -> AsyncIterator[Client]:
    deployment = load(file)
    async with Supervisor.running(deployment, file), Client.connect(deployment, timeout_s=60.0) as client:
        yield client


@pytest.mark.processes
async def test_a_video_through_a_whole_deployment(tmp_path: Path, short_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(runtime_dir=short_path / "run"))
    clip, image = clip_of(9, 64, 32, fps=3.0), png(noise(100, 80, 50))
    by = processor("qwen3-vl")
    planned, out, _ = written(by, clip)
    still = by.plan(image)
    pixels = View.empty(still.dtype, still.shape)
    by.write(image, still, pixels)
    with io.BytesIO() as into:
        first, *others = [Image.open(io.BytesIO(frame)) for frame in clip.frames]
        first.save(into, "WEBP", save_all=True, append_images=others, duration=[333, 333, 334] * 3, lossless=True)
        animation = into.getvalue()
    async with running(file) as client:
        parts = ["What happens here? ", Video(clip.frames, fps=3.0), " And here? ", image]
        result = await client.submit(parts, output_tokens=1)
        assert isinstance(result, wire.Result), result
        assert [item.grid for item in result.items] == [planned.grid, still.grid]
        assert planned.grid[0] == 3  # 9 frames of 3 a second are 6 of 2 a second
        assert [item.digest for item in result.items] == [
            fingerprint_of(view.data.data, view.dtype, view.shape) for view in (out, pixels)
        ]
        animated = await client.submit(["And this? ", Video(animation)], output_tokens=1)
        assert isinstance(animated, wire.Result), animated
        assert [(item.grid, item.digest) for item in animated.items] == [
            (planned.grid, result.items[0].digest),
        ]
        many = await client.submit([image, Video(animation[:-40])])
        assert isinstance(many, wire.Failed)
        assert (many.failure.kind, many.failure.item) == ("BadItem", 1)
        bad = await client.submit([Video([*clip.frames[:8], b"no picture"])])
        assert isinstance(bad, wire.Failed)
        assert (bad.failure.kind, bad.failure.item) == ("BadItem", 0)
        assert "frame 8: " in bad.failure.problem
        for video in (Video([]), Video(clip.frames, fps=0.0), Video(clip.frames, fps=float("nan"))):
            with pytest.raises(BadRequest, match="a video "):
                client.submit_nowait([video])
