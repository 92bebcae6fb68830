"""The processor of Kimi-K2.5: sizes, padding, order of patches, hashes; and what it shares with transformers'."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from tensorferry.codecs.errors import ConfigError
from tensorferry.codecs.tensors import View, nbytes_of
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors import gpu_patches
from tensorferry.stages.processors.base import BadMedia, Clip, Plan, plan, write
from tensorferry.stages.processors.image import upright
from tensorferry.stages.processors.kimi_k25 import KimiK25Processor, canvas_of
from tensorferry.stages.processors.registry import make_processor

LIMITS = LimitsSpec()
IMAGES = sorted(Path(__file__).parents[3].joinpath("examples", "images").glob("*.[jpw]*"))
LEVEL = 1 / 255 / 0.5  #: one of 256, normalised


def processor(**options: object) -> KimiK25Processor:
    made = make_processor("kimi-k25", options, LIMITS)
    assert isinstance(made, KimiK25Processor)
    return made


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def png(image: Image.Image) -> bytes:
    with io.BytesIO() as file:
        image.save(file, "PNG")
        return file.getvalue()


def written(by: KimiK25Processor, data: bytes) -> tuple[Plan, View, bytes]:
    """Its home is not zero, so that a byte left out is seen."""
    planned = by.plan(data)
    out = View(np.full(nbytes_of(planned.dtype, planned.shape), 0xA5, np.uint8), planned.dtype, planned.shape)
    return planned, out, by.write(data, planned, out)


# --- beside transformers ------------------------------------------------------------------------------------


@pytest.fixture
def theirs() -> Any:
    """transformers' class with Moonshot's mean and deviation."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")
    pytest.importorskip("torchvision", reason="torchvision is not installed; transformers needs it for this class")
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

    return Kimi_K25ImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)


def test_the_defaults_are_those_of_transformers(theirs: Any) -> None:
    options = processor().options
    assert (theirs.patch_size, theirs.merge_size) == (14, 2)
    assert theirs.max_patches == options.max_patches
    assert theirs.size.max_height == theirs.size.max_width == options.max_side_patches


@given(width=st.integers(1, 20_000), height=st.integers(1, 20_000))
@example(width=7168, height=461)
@example(width=7169, height=13)
def test_sizes_are_those_of_transformers(width: int, height: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")
    pytest.importorskip("torchvision", reason="torchvision is not installed; transformers needs it for this class")
    from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize

    resized = processor().resized(width, height)
    assert (resized[::-1], canvas_of(resized)[::-1]) == navit_resize(height, width, 14, 2, 16384, 512)


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_images_are_those_of_transformers(theirs: Any, path: Path) -> None:
    """None of these is reduced, so nothing but rounding in float32 is between them."""
    data = path.read_bytes()
    expected = theirs(images=[upright(data, LIMITS)], return_tensors="pt")
    planned, out, _ = written(processor(), data)
    assert [list(planned.grid)] == expected["image_grid_thw"].tolist()
    torch.testing.assert_close(out.torch(), expected["pixel_values"].flatten(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(2100, 1900), (7300, 100)])
def test_reduced_images_are_near_those_of_transformers(theirs: Any, size: tuple[int, int]) -> None:
    with Image.open(next(path for path in IMAGES if path.name == "rocket.jpg")) as photo:
        picture = photo.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    expected = theirs(images=[picture], return_tensors="pt")["pixel_values"].flatten(1)
    planned, out, _ = written(processor(), png(picture))
    assert planned.shape == expected.shape
    apart = (out.torch() - expected).abs() / LEVEL
    assert apart.max() < 2.1, "Pillow's and torchvision's bicubic interpolation"
    assert apart.mean() < 0.02


# --- the tensor ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "resized", "grid"),
    [
        ((1, 1), (1, 1), (1, 2, 2)),
        ((28, 28), (28, 28), (1, 2, 2)),
        ((29, 27), (29, 27), (1, 2, 4)),  # not enlarged
        ((640, 480), (640, 480), (1, 36, 46)),
        ((3000, 2000), (2202, 1468), (1, 106, 158)),
        ((9000, 90), (7168, 71), (1, 6, 512)),
        ((7, 8000), (6, 7168), (1, 512, 2)),
        ((7168, 461), (7168, 461), (1, 34, 512)),  # 32.9 patches count as 32: over max_patches
    ],
)
def test_size_after_the_resize(size: tuple[int, int], resized: tuple[int, int], grid: tuple[int, int, int]) -> None:
    by = processor()
    assert by.resized(*size) == resized
    planned = by.plan(png(noise(*size)))
    assert planned.grid == grid
    assert planned.shape == (grid[1] * grid[2], 3 * 14 * 14)
    assert planned.rows == by.rows_for(*size) == grid[1] * grid[2] // 4


def test_patches_are_in_raster_order_and_black_beyond_the_picture() -> None:
    picture = np.asarray(noise(50, 30))
    _, out, _ = written(processor(), png(Image.fromarray(picture)))
    canvas = np.zeros((56, 56, 3), np.uint8)
    canvas[:30, :50] = picture
    patches = [
        canvas[14 * row : 14 * row + 14, 14 * column : 14 * column + 14].transpose(2, 0, 1).ravel()
        for row in range(4)
        for column in range(4)
    ]
    np.testing.assert_allclose(out.numpy(), (np.array(patches) / 255 - 0.5) / 0.5, atol=1e-6)


def test_bfloat16_is_float32_rounded() -> None:
    data = png(noise(100, 60))
    _, exact, one = written(processor(), data)
    _, rounded, other = written(processor(dtype="bfloat16"), data)
    assert torch.equal(rounded.torch(), exact.torch().to(torch.bfloat16))
    assert one != other


@pytest.mark.slow
@pytest.mark.parametrize("size", [(50, 30), (56, 28), (2100, 1900)])
def test_a_gpu_makes_the_same(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic, run by torch on the host."""
    monkeypatch.setattr(gpu_patches, "pinned_copy", lambda data: torch.from_numpy(data.copy()))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    by, data = processor(), png(noise(9, 7).resize(size, Image.Resampling.BICUBIC))
    planned, host, hashed = written(by, data)
    nbytes = nbytes_of(planned.dtype, planned.shape)
    there = View(torch.full((nbytes,), 0xFF, dtype=torch.uint8), planned.dtype, planned.shape)
    assert by.write(data, planned, there) != hashed
    apart = (there.torch() - host.torch()).abs()
    assert apart.max() < (1.1 * LEVEL if size[0] > 2000 else 1e-6)


def test_hash_is_of_what_the_tensor_is_made_of() -> None:
    picture = noise(50, 30)
    with io.BytesIO() as file:
        picture.save(file, "WEBP", lossless=True)
        other_file = file.getvalue()
    hashes = [written(processor(), data)[2] for data in (png(picture), other_file, png(noise(50, 31)))]
    assert hashes[0] == hashes[1] != hashes[2]
    assert [len(hashed) for hashed in hashes] == [32] * 3


def test_equal_bytes_of_another_size_have_another_hash() -> None:
    """Pictures of one colour: padded to whole tokens or not, they differ in nothing but their sides."""
    one, other = (written(processor(), png(Image.new("RGB", size, (90, 90, 90)))) for size in ((84, 28), (28, 84)))
    assert np.array_equal(one[1].data, other[1].data)
    assert one[0] != other[0]
    assert one[2] != other[2]


def test_where_a_gpu_resizes_the_size_is_in_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the hash is over the pixels before they are resized."""
    monkeypatch.setattr(gpu_patches, "pinned_copy", lambda data: torch.from_numpy(data.copy()))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    data, hashes = png(Image.new("RGB", (112, 56), (90, 90, 90))), []
    for most in (8, 32, 64):
        by = processor(max_patches=most)
        planned = by.plan(data)
        nbytes = nbytes_of(planned.dtype, planned.shape)
        there = View(torch.full((nbytes,), 0xFF, dtype=torch.uint8), planned.dtype, planned.shape)
        hashes.append(by.write(data, planned, there))
    assert hashes[0] != hashes[1] == hashes[2]


# --- sizes for a replay, and for a pool ---------------------------------------------------------------------


@given(rows=st.integers(1, 6000), aspect=st.floats(0.01, 100))
def test_size_for_rows_has_these_rows(rows: int, aspect: float) -> None:
    by = processor()
    width, height = by.size_for(rows, aspect)
    assert by.resized(width, height) == (width, height)
    found = by.rows_for(width, height)
    assert abs(found - min(rows, 4096)) <= 12, "a prime over 256 has no size of its own"
    assert found == rows or rows > 256


@given(width=st.integers(1, 9000), height=st.integers(1, 9000), most=st.sampled_from([4, 1000, 16384]))
@example(width=7168, height=461, most=16384)
@example(width=27, height=27 * 14, most=4)
def test_no_item_is_larger_than_the_largest(width: int, height: int, most: int) -> None:
    by = processor(max_patches=most)
    across, down = canvas_of(by.resized(width, height))
    assert across * down * 3 * 4 <= by.largest_item_nbytes()


def test_largest_item_is_no_wild_guess() -> None:
    largest = 34 * 512  #: patches of 7168 x 461 pixels
    assert largest <= processor().largest_item_nbytes() // (588 * 4) < 1.06 * largest


# --- bad input ----------------------------------------------------------------------------------------------


def test_what_cannot_be_used_says_why() -> None:
    small = make_processor("kimi-k25", {}, LimitsSpec(item_pixels=1000))
    with pytest.raises(BadMedia, match=r"50x30 is 1500 pixels; the limit is 1000"):
        small.plan(png(noise(50, 30)))
    with pytest.raises(BadMedia, match=r"50x30 is over the limit of 1000 pixels"):
        small.rows_for(50, 30)
    by, data = processor(), png(noise(50, 30))
    with pytest.raises(BadMedia, match="takes no videos"):
        plan(by, Clip([data], None))
    planned = by.plan(data)
    with pytest.raises(BadMedia, match="50x57 pixels and does not match its plan"):
        write(by, png(noise(50, 57)), planned, View.empty(planned.dtype, planned.shape))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_side_patches": 513}, "513 must be a multiple of 2"),
        ({"max_patches": 3}, "max_patches"),
        ({"fps": 1}, "fps"),
    ],
)
def test_bad_option_is_named(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        processor(**options)
