"""The processors beside those of transformers, run here: the same patches of the same pictures."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from tensorferry.codecs.tensors import View
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors.base import Clip, plan, write
from tensorferry.stages.processors.image import upright
from tensorferry.stages.processors.normalise import NORMALISATIONS
from tensorferry.stages.processors.options import QWEN3_VL, Qwen2VLOptions
from tensorferry.stages.processors.registry import make_processor

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")

IMAGES = sorted(
    path
    for path in Path(__file__).parents[3].joinpath("examples", "images").iterdir()
    if path.suffix in (".jpg", ".png", ".webp", ".avif")
)
LIMITS = LimitsSpec()


def theirs(name: str) -> Any:
    """transformers' PIL processor with the settings of ours."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if name == "qwen2-vl":
        return Qwen2VLImageProcessorPil()
    return Qwen2VLImageProcessorPil(
        patch_size=QWEN3_VL["patch_size"],
        size={"shortest_edge": QWEN3_VL["min_pixels"], "longest_edge": QWEN3_VL["max_pixels"]},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_images_are_bit_for_bit_those_of_the_pil_processor(name: str, path: Path) -> None:
    """In float32; and in bfloat16, where theirs is rounded by torch."""
    data = path.read_bytes()
    expected = theirs(name)(images=[upright(data, LIMITS)], return_tensors="pt")
    pixels = expected["pixel_values"].to(torch.float32)
    for dtype in ("float32", "bfloat16"):
        processor = make_processor(name, {"dtype": dtype}, LIMITS)
        plan = processor.plan(data)
        assert [list(plan.grid)] == expected["image_grid_thw"].tolist()
        out = View.empty(plan.dtype, plan.shape)
        processor.write(data, plan, out)
        assert torch.equal(out.torch(), pixels.to(getattr(torch, dtype)))


def test_the_defaults_are_those_of_transformers() -> None:
    """But for the sizes of Qwen3-VL, which its checkpoints' files have and the classes have not."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image, options = Qwen2VLImageProcessorPil, Qwen2VLOptions()
    assert image.size == {"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels}
    assert NORMALISATIONS[options.normalisation] == (tuple(image.image_mean), tuple(image.image_std))
    for key in ("patch_size", "merge_size", "temporal_patch_size"):
        assert getattr(image, key) == getattr(options, key)


def test_the_defaults_of_videos_are_those_of_transformers() -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed; transformers needs it for videos")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    qwen2, qwen3 = Qwen2VLOptions(), Qwen2VLOptions(**QWEN3_VL)  # type: ignore[arg-type]
    for video, options in ((Qwen2VLVideoProcessor, qwen2), (Qwen3VLVideoProcessor, qwen3)):
        assert (video.min_frames, video.max_frames) == (options.video_min_frames, options.video_max_frames)
        assert NORMALISATIONS[options.normalisation] == (tuple(video.image_mean), tuple(video.image_std))
        for key in ("patch_size", "merge_size", "temporal_patch_size"):
            assert getattr(video, key) == getattr(options, key)
    size = {"shortest_edge": qwen2.video_min_pixels, "longest_edge": qwen2.video_max_pixels}
    assert Qwen2VLVideoProcessor.size == size
    assert Qwen3VLVideoProcessor.fps == qwen3.video_fps


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
@pytest.mark.parametrize(("size", "levels"), [((512, 256), 0), ((500, 300), 8)], ids=["as it is", "resized"])
def test_videos_are_near_those_of_the_video_processor(name: str, size: tuple[int, int], levels: int) -> None:
    """levels: of 256, how far apart Pillow's and torchvision's bicubic interpolation may be; those of frames that need
    none differ by rounding in float32."""
    pytest.importorskip("torchvision", reason="torchvision is not installed; transformers needs it for videos")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    if name == "qwen2-vl":
        video, size = Qwen2VLVideoProcessor(cap_pixels_per_frame=False), (size[0] // 32 * 28, size[1] // 32 * 28)
    else:
        limits = {"shortest_edge": QWEN3_VL["video_min_pixels"], "longest_edge": QWEN3_VL["video_max_pixels"]}
        video = Qwen3VLVideoProcessor(size=limits, cap_pixels_per_frame=False)
    size = (size[0] + (4 if levels else 0), size[1])
    with Image.open(IMAGES[0].parent / "rocket.jpg") as photo:
        pictures = [photo.convert("RGB").crop((20 * n, 10, 20 * n + size[0], 10 + size[1])) for n in range(5)]
    frames = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures])
    expected = video(videos=[frames], return_tensors="pt", do_sample_frames=False)
    clip = Clip([png(picture) for picture in pictures], None)
    processor = make_processor(name, {}, LIMITS)
    planned = plan(processor, clip)
    assert [list(planned.grid)] == expected["video_grid_thw"].tolist()
    out = View.empty(planned.dtype, planned.shape)
    write(processor, clip, planned, out)
    apart = (out.torch() - expected["pixel_values_videos"]).abs()
    level = 1 / 255 / (0.5 if name == "qwen3-vl" else 0.26)
    assert apart.max() < levels * level + 1e-4
    assert apart.mean() < 0.1 * level


def png(image: Image.Image) -> bytes:
    with io.BytesIO() as file:
        image.save(file, "PNG")
        return file.getvalue()


def test_the_documented_defaults_are_the_processors() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "adapters.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| .+ \|$", page, re.MULTILINE)
    for column, name in ((1, "qwen2-vl"), (2, "qwen3-vl")):
        made: Any = make_processor(name, {}, LIMITS)
        documented = {row[0]: row[column].strip("`") for row in rows}
        assert documented == {key: str(value) for key, value in msgspec.structs.asdict(made.options).items()}


def test_there_are_pictures_of_many_kinds() -> None:
    modes = set()
    for path in IMAGES:
        with Image.open(path) as image:
            modes.add(image.mode)
    assert len(IMAGES) >= 9
    assert modes >= {"L", "RGB", "RGBA", "P", "CMYK"}
