"""The processors beside those of transformers, run here: the same patches of the same pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

from tensorferry.codecs.tensors import View
from tensorferry.pipeline.config import LimitsSpec
from tensorferry.stages.processors.image import upright
from tensorferry.stages.processors.options import QWEN3_VL
from tensorferry.stages.processors.registry import make_processor

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")

IMAGES = sorted(
    path
    for path in Path(__file__).parent.parent.joinpath("examples", "images").iterdir()
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


def test_the_documented_defaults_are_the_processors() -> None:
    page = Path(__file__).parent.parent.joinpath("docs", "adapters.md").read_text(encoding="utf-8")
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
