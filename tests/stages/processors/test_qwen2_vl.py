"""The Qwen2-VL processor: sizes, patches and their order, hashes, options."""

from __future__ import annotations

import hashlib
import io
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from tensorferry.codecs.errors import ConfigError
from tensorferry.codecs.tensors import View, nbytes_of
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors.base import BadMedia, Plan, Processor
from tensorferry.stages.processors.normalise import CLIP_MEAN, CLIP_STD, bfloat16_bits
from tensorferry.stages.processors.qwen2_vl import Qwen2VLProcessor
from tensorferry.stages.processors.registry import BUILT_IN, check_processor, make_processor

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "images"
DATA = ROOT / "tests" / "data" / "images"
LIMITS = LimitsSpec()


def processor(**options: object) -> Processor:
    return make_processor("qwen2-vl", options, LIMITS)


def png(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def home(plan: Plan) -> View:
    """Where a tensor goes; not zero, so that a byte left out is seen."""
    return View(np.full(nbytes_of(plan.dtype, plan.shape), 0xA5, np.uint8), plan.dtype, plan.shape)


def written(by: Processor, data: bytes) -> tuple[Plan, View, bytes]:
    plan = by.plan(data)
    out = home(plan)
    return plan, out, by.write(data, plan, out)


# --- the tensor ---------------------------------------------------------------------------------------------

#: Grid and BLAKE2b-128 of the float32 tensor that transformers 5.24.0's Qwen2VLImageProcessorPil makes of the
#: picture, upright (torch 2.13.0, Pillow 13.0.0, on 2026-11-29). Of losslessly coded samples, as a JPEG does not
#: decode to the same levels in every build of libjpeg, and of those that Pillow 11.3 resizes as 13.0 does.
GOLDEN = {
    "chelsea.png": ((1, 22, 32), "ede00bd90ac1fc0f0c48a14dad2dab1c"),
    "camera_1bit.png": ((1, 12, 12), "35001d614cb692ae5320ebfee167c347"),
    "rocket_anim.gif": ((1, 8, 8), "1f48db26f7681124c883b63b37c0504b"),
    "pixel_1x1.png": ((1, 4, 4), "c4281501968f062d64987b36cfaf767f"),
    "png_bytes_named.jpg": ((1, 8, 10), "ec6e62a434458a1dd36432dc17ddbe99"),
}


def sample(name: str) -> bytes:
    return next(path for path in (EXAMPLES / name, DATA / name) if path.exists()).read_bytes()


@pytest.mark.parametrize(("name", "grid", "digest"), [(name, *golden) for name, golden in GOLDEN.items()])
def test_tensor_is_transformers_bit_for_bit(name: str, grid: tuple[int, int, int], digest: str):
    plan, out, _ = written(processor(), sample(name))
    assert plan == Plan("image", grid, (grid[1] * grid[2], 1176), "float32", grid[1] * grid[2] // 4)
    assert hashlib.blake2b(out.data.data, digest_size=16).hexdigest() == digest


@pytest.mark.parametrize(
    ("name", "grid", "first", "last"),
    [
        ("rocket.jpg", (1, 30, 46), -1.5440893, -0.95407724),
        ("coffee_exif_orientation6.jpg", (1, 28, 42), -1.4856956, -1.2526988),
        ("chelsea_rgba.png", (1, 10, 16), 1.9303361, 0.36838892),
        ("coffee_palette_trns.png", (1, 14, 22), -1.3835065, -1.0536178),
    ],
)
def test_photo_is_near_transformers(name: str, grid: tuple[int, int, int], first: float, last: float):
    plan, out, _ = written(processor(), sample(name))
    assert plan.grid == grid
    values = out.numpy()
    assert values[0, 0] == pytest.approx(first, abs=0.03)  # two levels of 256
    assert values[-1, -1] == pytest.approx(last, abs=0.03)


def patches_by_definition(pixels: np.ndarray, patch: int, merge: int, frames: int) -> np.ndarray:
    """Patch by patch, in plain loops: what the fast way is compared with."""
    height, width, _ = pixels.shape
    rows = []
    for block_top in range(0, height, patch * merge):
        for block_left in range(0, width, patch * merge):
            for top in range(block_top, block_top + patch * merge, patch):
                for left in range(block_left, block_left + patch * merge, patch):
                    row = []
                    for channel in range(3):
                        levels = pixels[top : top + patch, left : left + patch, channel].reshape(-1)
                        shares = (levels * (1 / 255)).astype(np.float32)
                        values = (shares - np.float32(CLIP_MEAN[channel])) / np.float32(CLIP_STD[channel])
                        row += [values] * frames
                    rows.append(np.concatenate(row))
    return np.stack(rows)


@pytest.mark.parametrize(
    ("patch", "merge", "frames"), [(14, 2, 2), (16, 2, 2), (14, 1, 1), (4, 3, 1), (1, 1, 1), (2, 4, 3)]
)
def test_patches_are_in_merge_order_whatever_the_settings(patch: int, merge: int, frames: int):
    side = patch * merge
    image = noise(3 * side, 2 * side)
    by = processor(patch_size=patch, merge_size=merge, temporal_patch_size=frames, min_pixels=side * side)
    plan, out, _ = written(by, png(image))
    assert plan.grid == (1, 2 * merge, 3 * merge)
    assert plan.rows == 6
    assert np.array_equal(out.numpy(), patches_by_definition(np.asarray(image), patch, merge, frames))


def test_bfloat16_is_float32_rounded_half_to_even():
    data = png(noise(280, 140))
    plan, exact, _ = written(processor(), data)
    narrow_plan, narrow, _ = written(processor(dtype="bfloat16"), data)
    assert (narrow_plan.dtype, narrow_plan.shape) == ("bfloat16", plan.shape)
    assert np.array_equal(narrow.data.view(np.uint16), bfloat16_bits(exact.numpy()).reshape(-1))


def test_bfloat16_bits():
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x00000000, 0x80000000], np.uint32)
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82, 0x0000, 0x8000]
    assert bfloat16_bits(ties.view(np.float32)).tolist() == expected
    values = np.random.default_rng(1).normal(size=10_000).astype(np.float32)
    wide = (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)
    assert (np.abs(wide - values) <= np.abs(values) * 2**-8).all()


def test_every_byte_of_the_home_is_written_and_no_other():
    data = png(noise(113, 87))
    by = processor()
    plan = by.plan(data)
    memory = np.full(nbytes_of(plan.dtype, plan.shape) + 128, 0x5A, np.uint8)
    first = View(memory[64:-64], plan.dtype, plan.shape)
    by.write(data, plan, first)
    second = home(plan)
    by.write(data, plan, second)
    assert np.array_equal(first.data, second.data)
    assert (memory[:64] == 0x5A).all()
    assert (memory[-64:] == 0x5A).all()


def test_another_image_than_the_planned_is_refused_and_the_home_is_left_alone():
    by = processor()
    plan = by.plan(png(noise(280, 140)))
    out = home(plan)
    with pytest.raises(BadMedia, match="140x280 pixels and does not match its plan"):
        by.write(png(noise(140, 280)), plan, out)
    assert (out.data == 0xA5).all()


# --- sizes (B36) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (1, 1, (56, 56)),
        (1, 200, (28, 812)),
        (27, 257, (28, 252)),
        (1000, 5, (812, 28)),
        (5, 1000, (28, 812)),
        (56, 56, (56, 56)),
        (70, 70, (56, 56)),  # 2.5 tokens: half to even
        (98, 98, (112, 112)),  # 3.5
        (640, 427, (644, 420)),
        (1411, 1411, (980, 980)),
        (3840, 2160, (1316, 728)),
        (20_000, 100, (14_140, 56)),
    ],
)
def test_size_after_the_resize(width: int, height: int, expected: tuple[int, int]):
    by = Qwen2VLProcessor({}, LIMITS)
    assert by.resized(width, height) == expected
    assert by.rows_for(width, height) == expected[0] * expected[1] // 784


@pytest.mark.parametrize("name", ["strip_2400x10.png", "strip_10x2400.jpg"])
def test_strip_of_240_to_1_is_refused_at_its_header(name: str):
    with pytest.raises(BadMedia, match=r"240.0:1; the limit of the aspect ratio is 200:1"):
        processor().plan(sample(name))


@pytest.mark.parametrize(("width", "height"), [(1093, 5), (5, 1093), (201, 1)])
def test_more_than_200_to_1_is_refused_by_the_limit(width: int, height: int):
    data = png(Image.new("RGB", (width, height)))
    by = processor()
    for refused in (lambda: by.plan(data), lambda: by.rows_for(width, height)):
        with pytest.raises(BadMedia, match=rf"{width}x{height} is 2\d\d\.\d:1; the limit .* 200:1"):
            refused()


@pytest.mark.parametrize("size", [(1000, 5), (200, 1), (1, 1), (1, 150), (27, 257), (4, 4)])
def test_extreme_shapes_that_are_accepted_make_tensors(size: tuple[int, int]):
    plan, out, _ = written(processor(), png(noise(*size)))
    assert np.isfinite(out.numpy()).all()
    assert plan.rows == processor().rows_for(*size) > 0


@given(width=st.integers(1, 70_000), height=st.integers(1, 70_000), dtype=st.sampled_from(["float32", "bfloat16"]))
@example(width=20_000, height=100, dtype="float32")
def test_no_item_is_larger_than_the_largest(width: int, height: int, dtype: str):
    by = make_processor("qwen2-vl", {"dtype": dtype}, LimitsSpec(item_pixels=1 << 40))
    try:
        rows = by.rows_for(width, height)
    except BadMedia:
        assert max(width, height) > 200 * min(width, height)
    else:
        assert rows * 4 * 1176 * (4 if dtype == "float32" else 2) <= by.largest_item_nbytes()


@given(data=st.data())
def test_no_item_is_larger_than_the_largest_whatever_the_options(data: st.DataObject):
    patch, merge = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 3))
    token = (patch * merge) ** 2
    least = data.draw(st.integers(1, 200 * token))
    most = data.draw(st.integers(-(-least // token) * token, 1000 * token))
    options = {"patch_size": patch, "merge_size": merge, "min_pixels": least, "max_pixels": most}
    by = make_processor("qwen2-vl", options, LimitsSpec(item_pixels=1 << 60))
    short = data.draw(st.integers(1, 1000))
    long = data.draw(st.integers(short, 200 * short))
    tensor_nbytes = by.rows_for(long, short) * merge**2 * (3 * 2 * patch**2) * 4
    assert tensor_nbytes <= by.largest_item_nbytes() <= 4 * 6 * max(most, 2 * least + 600 * token)


def test_largest_item_is_no_wild_guess():
    by = processor()
    assert by.largest_item_nbytes() == by.rows_for(1120, 896) * 4 * 1176 * 4 == 1003520 * 3 * 2 * 4
    # Small budgets: a strip of 200:1 cannot be narrower than a token, so it is what counts.
    small = processor(min_pixels=784, max_pixels=3136)
    assert small.rows_for(20_000, 100) * 4 * 1176 * 4 == small.largest_item_nbytes()
    assert small.rows_for(100, 20_000) * 4 * 1176 * 4 == small.largest_item_nbytes()
    # Enlarged to just one number of pixels: both sides are rounded up, 84.1 to 112 and 11,933 to 11,956.
    exact = processor(min_pixels=1003520, max_pixels=1003520)
    assert exact.rows_for(42, 5960) * 4 * 1176 * 4 == exact.largest_item_nbytes() > 1.3 * 1003520 * 24


@given(rows=st.integers(1, 1280), aspect=st.floats(0.01, 100))
def test_size_for_rows_has_these_rows(rows: int, aspect: float):
    by = Qwen2VLProcessor({}, LIMITS)
    width, height = by.size_for(rows, aspect)
    assert by.resized(width, height) == (width, height)
    assert abs(by.rows_for(width, height) - rows) == min(abs(count - rows) for count in POSSIBLE)


#: Numbers of tokens between min_pixels and max_pixels that are a product of two sides within 200:1.
POSSIBLE = [
    count
    for count in range(4, 1281)
    if any(count % side == 0 and count // side <= 200 * side for side in range(1, math.isqrt(count) + 1))
]


@pytest.mark.parametrize(
    ("rows", "aspect", "expected"),
    [
        (1196, 1.5, (46, 26)),
        (1196, 1 / 1.5, (26, 46)),
        (1000, 1.0, (40, 25)),
        (16, 1.0, (4, 4)),
        (16, 16.0, (16, 1)),
        (101, 1.0, (101, 1)),  # a prime within 200:1 is exact
        (523, 1.0, (29, 18)),  # a larger one is not: 522
        (1, 1.0, (2, 2)),  # min_pixels
        (5000, 1.0, (40, 32)),  # max_pixels
    ],
)
def test_size_for(rows: int, aspect: float, expected: tuple[int, int]):
    width, height = processor().size_for(rows, aspect)
    across, down = width // 28, height // 28
    assert {across, down} == set(expected) if aspect == 1.0 else (across, down) == expected


def test_rows_over_the_pixel_limit_are_refused():
    with pytest.raises(BadMedia, match="limit of 40000000 pixels"):
        processor().rows_for(10_000, 5_000)


# --- content hashes (B37) -----------------------------------------------------------------------------------


def test_hash_is_of_content_not_of_files():
    image = noise(60, 40)
    _, first, one = written(processor(), png(image))
    file = io.BytesIO()
    image.save(file, "TIFF")
    _, second, other = written(processor(), file.getvalue())
    assert one == other
    assert len(one) == 32
    assert np.array_equal(first.data, second.data)


def test_whatever_changes_the_tensor_changes_the_hash():
    turned = b"Exif\0\0II*\0" + struct.pack("<LHHHLHHL", 8, 1, 274, 3, 1, 6, 0, 0)
    image = noise(112, 56)
    palette = image.quantize(8)
    data = png(image)
    reversed_pixels = np.ascontiguousarray(np.asarray(image).reshape(-1)[::-1]).reshape(56, 112, 3)
    hashes = [
        written(by, data)[2]
        for by, data in [
            (processor(), data),
            (processor(), png(image, exif=turned)),
            (processor(), png(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))),
            (processor(), png(Image.fromarray(reversed_pixels))),
            # The same bytes in another shape.
            (processor(), png(Image.frombytes("RGB", (56, 112), image.tobytes()))),
            (processor(), png(palette)),
            (processor(), png(palette, transparency=0)),
            (processor(), png(image.convert("L"))),
            (processor(max_pixels=3136), data),
            (processor(min_pixels=28 * 28 * 16), data),
            (processor(dtype="bfloat16"), data),
            (processor(normalisation="half"), data),
            (processor(temporal_patch_size=1), data),
            (processor(patch_size=28, merge_size=1), data),
            (processor(patch_size=7, merge_size=4), data),
            (processor(patch_size=7), data),
        ]
    ]
    assert len(set(hashes)) == len(hashes)


def test_setting_that_does_not_change_the_tensor_does_not_change_the_hash():
    data = png(noise(112, 56))
    assert written(processor(), data)[2] == written(processor(max_pixels=12_845_056), data)[2]


# --- options and the registry -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("qwen", {}, r"tokenizer\.processor: unknown: 'qwen'; give one of kimi-k25, qwen2-vl"),
        ("qwen2-vl", {"min_pixel": 3136}, r"tokenizer\.options\.min_pixel: unknown option, given 3136; .*min_pixels"),
        ("qwen2-vl", {"patch_size": 0}, r"tokenizer\.options\.patch_size: .*>= 1"),
        ("qwen2-vl", {"patch_size": "14"}, r"tokenizer\.options\.patch_size: .*int"),
        ("qwen2-vl", {"dtype": "float16"}, r"tokenizer\.options\.dtype: .*'float16'"),
        ("qwen2-vl", {"min_pixels": 5000, "max_pixels": 4000}, "min_pixels 5000 is above max_pixels 4000"),
        ("qwen2-vl", {"min_pixels": 785, "max_pixels": 1567}, "no whole number of tokens, of 784 pixels"),
        ("no.such.module:Class", {}, r"cannot import no\.such\.module"),
        ("tensorferry.stages.processors.base:Plan", {}, "is not a processor"),
    ],
)
def test_bad_option_is_named(name: str, options: dict[str, object], problem: str):
    with pytest.raises(ConfigError, match=problem):
        make_processor(name, options, LIMITS)


def test_qwen3_vl_is_a_preset_that_options_change():
    preset = make_processor("qwen3-vl", {}, LIMITS)
    spelled = {"patch_size": 16, "min_pixels": 65_536, "max_pixels": 16_777_216, "normalisation": "half"}
    data = png(noise(300, 200))
    assert written(preset, data)[1:] != written(processor(), data)[1:]
    plan, out, digest = written(preset, data)
    assert plan.grid == (1, 14, 20)
    same = written(processor(**spelled), data)
    assert (same[0], same[2]) == (plan, digest)
    assert np.array_equal(same[1].data, out.data)
    smaller = make_processor("qwen3-vl", {"max_pixels": 100_000, "dtype": "bfloat16"}, LIMITS).plan(
        png(noise(600, 400))
    )
    assert (smaller.dtype, smaller.grid) == ("bfloat16", (1, 16, 24))
    with pytest.raises(ConfigError, match=r"tokenizer\.options: min_pixels 65536 is above max_pixels 3136"):
        check_processor("qwen3-vl", {"max_pixels": 3136})


def test_users_own_processor_is_built_by_its_class():
    made = make_processor("tensorferry.stages.processors.qwen2_vl:Qwen2VLProcessor", {"min_pixels": 784}, LIMITS)
    assert isinstance(made, Qwen2VLProcessor)
    assert made.options.min_pixels == 784


@pytest.mark.processes
def test_checking_a_name_imports_neither_pillow_nor_torch():
    program = (
        "import sys; from tensorferry.stages.processors.registry import check_processor; "
        "check_processor('qwen2-vl', {'min_pixels': 784}); print([m for m in ('PIL', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True, text=True)
    assert done.stdout.strip() == "[]"
    for name in BUILT_IN:
        check_processor(name, {})


@pytest.mark.samples
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_whole_collection():
    root = os.environ.get("TENSORFERRY_SAMPLES")
    if not root:
        pytest.skip("TENSORFERRY_SAMPLES does not name the sample collection")
    by = processor()
    seen = 0
    for path in sorted(Path(root, "images").iterdir()):
        if path.is_dir() or path.suffix in ("", ".md") or path.name.startswith("strip_"):
            continue
        plan, out, digest = written(by, path.read_bytes())
        values = out.numpy()
        assert values.shape == plan.shape, path.name
        assert values.min() >= -2, path.name
        assert values.max() <= 2.5, path.name
        assert len(digest) == 32
        seen += 1
    assert seen >= 20
