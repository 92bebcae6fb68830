"""Animated files as videos: their timing, their pictures, and what is refused before Pillow walks to it."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadRequest
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.tensors import View
from tensorferry.pipeline.client import prompt_parts
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors import image as images
from tensorferry.stages.processors.base import AnimatedFile, BadMedia, Clip, Plan, plan, write
from tensorferry.stages.processors.image_headers.animations import MOST_PICTURES, Animation, read_animation
from tensorferry.stages.processors.image_headers.formats import read_container
from tensorferry.stages.processors.image_headers.gif_webp import table_nbytes
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.processors.video_frames import Footage, footage_of

LIMITS = LimitsSpec()
KINDS = ("GIF", "PNG", "WEBP")
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255), (255, 0, 255)]
WHITE = (255, 255, 255)


def drawn(count: int, size: tuple[int, int] = (64, 32), mode: str = "RGB") -> list[Image.Image]:
    """Pictures of one colour each, with a black bar that moves, so that each changes a part of the one before."""
    pictures = []
    for number in range(count):
        picture = Image.new("RGB", size, COLOURS[number % len(COLOURS)])
        ImageDraw.Draw(picture).rectangle((4 * number, 0, 4 * number + 3, size[1]), "black")
        pictures.append(picture.convert(mode))
    return pictures


def animated(pictures: Sequence[Image.Image], kind: str, ms: Sequence[int] | int = 100, **options: Any) -> bytes:
    options = {"WEBP": {"lossless": True, "exact": True}, "GIF": {"disposal": 1}, "PNG": {}}[kind] | options
    with io.BytesIO() as file:
        pictures[0].save(file, kind, save_all=True, append_images=pictures[1:], duration=ms, **options)
        return file.getvalue()


def read(data: bytes) -> Animation:
    return read_animation(data, read_container(data))


def shown(footage: Footage, numbers: Sequence[int] | None = None) -> list[np.ndarray[Any, Any]]:
    numbers = range(footage.frames) if numbers is None else numbers
    footage.size(numbers)
    return [np.asarray(picture) for picture in footage.pictures(numbers)]


def written(by: Any, media: Any) -> tuple[Plan, bytes, bytes]:
    planned = plan(by, media)
    out = View.empty(planned.dtype, planned.shape)
    hashed = write(by, media, planned, out)
    return planned, out.data.tobytes(), hashed


# --- timing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_picture_is_shown_as_long_as_the_file_says(kind: str) -> None:
    """And one that has no time to be seen, for as long as browsers show it."""
    data = animated(drawn(5), kind, [100, 300, 50, 0, 10])
    assert read(data).shown_ms == [100, 300, 50, 100, 100]
    assert footage_of(AnimatedFile(data), LIMITS).fps == pytest.approx(5 / 0.65)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        ([100, 100, 100, 100], [0, 1, 2, 3]),
        ([100, 100, 800, 200], [0, 2, 2, 2]),
        ([900, 20, 20, 60], [0, 0, 0, 0]),
        ([30, 30, 30, 910], [0, 3, 3, 3]),
        ([250, 260, 240, 250], [0, 1, 1, 3]),
        ([260, 240, 250, 250], [0, 0, 2, 3]),
    ],
)
def test_a_frame_is_the_picture_on_screen_at_its_moment(kind: str, ms: list[int], expected: list[int]) -> None:
    pictures = drawn(4)
    found = shown(footage_of(AnimatedFile(animated(pictures, kind, ms)), LIMITS))
    assert [[np.array_equal(frame, picture) for picture in pictures].index(True) for frame in found] == expected


def test_the_rules_of_the_family_choose_by_the_files_rate() -> None:
    """30 pictures of 50 ms are 1.5 s: at 2 a second the 4 that are the least, evenly."""
    by = make_processor("qwen3-vl", {}, LIMITS)
    data = animated(drawn(30, (160, 32)), "PNG", 50)
    listed = [png(picture) for picture in drawn(30, (160, 32))]
    found = written(by, AnimatedFile(data))
    assert found == written(by, Clip(listed, 20.0))
    assert found == written(by, Clip([listed[number] for number in (0, 10, 19, 29)], None))


# --- pictures -------------------------------------------------------------------------------------------------


def png(picture: Image.Image) -> bytes:
    with io.BytesIO() as file:
        picture.save(file, "PNG")
        return file.getvalue()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_an_animated_file_is_the_video_of_its_pictures(kind: str, frames: int) -> None:
    by = make_processor("qwen3-vl", {"dtype": "bfloat16"}, LIMITS)
    pictures = drawn(frames)
    found = written(by, AnimatedFile(animated(pictures, kind, 500)))
    assert found == written(by, Clip([png(picture) for picture in pictures], 2.0))
    assert found[0].modality == "video"
    assert found[0].grid[0] == -(-frames // 2)


@pytest.mark.parametrize("kind", KINDS)
def test_transparency_is_laid_over_white(kind: str) -> None:
    pictures = drawn(3, mode="RGBA")
    for picture in pictures:
        picture.paste((0, 0, 0, 0), (32, 0, 64, 32))
    data = animated(pictures, kind, **({"disposal": 2} if kind != "WEBP" else {}))
    for frame, picture in zip(shown(footage_of(AnimatedFile(data), LIMITS)), pictures, strict=True):
        assert np.array_equal(frame[:, :32], np.asarray(picture.convert("RGB"))[:, :32])
        assert (frame[:, 32:] == WHITE).all()
    assert (images.upright_rgb(data, LIMITS)[:, 32:] == WHITE).all()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_orientation_turns_every_frame(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = animated(drawn(3), kind, exif=exif)
    footage = footage_of(AnimatedFile(data), LIMITS)
    assert footage.size([0]) == (32, 64)
    for frame, picture in zip(shown(footage), drawn(3), strict=True):
        assert np.array_equal(frame, np.asarray(picture.transpose(Image.Transpose.ROTATE_270)))


def test_a_pngs_default_image_may_be_no_part_of_the_animation() -> None:
    pictures = drawn(3)
    data = animated([Image.new("RGB", (64, 32), "gray"), *pictures], "PNG", 70, default_image=True)
    assert read(data).shown_ms == [70, 70, 70]
    found = shown(footage_of(AnimatedFile(data), LIMITS))
    assert all(np.array_equal(frame, picture) for frame, picture in zip(found, pictures, strict=True))
    assert np.array_equal(images.upright_rgb(data, LIMITS), np.full((32, 64, 3), 128))


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_come_again_without_being_decoded_again(kind: str) -> None:
    footage = footage_of(AnimatedFile(animated(drawn(3), kind, [900, 30, 30])), LIMITS)
    first, again, *_ = footage.pictures([0, 1])
    assert first is again


@pytest.mark.parametrize("kind", KINDS)
def test_as_an_image_it_is_its_first_picture(kind: str) -> None:
    pictures = drawn(3)
    data = animated(pictures, kind)
    by = make_processor("qwen3-vl", {}, LIMITS)
    assert by.plan(data).modality == "image"
    assert np.array_equal(images.upright_rgb(data, LIMITS), np.asarray(pictures[0]))


# --- what is refused ------------------------------------------------------------------------------------------


def problem_of(data: bytes, limits: LimitsSpec = LIMITS) -> str:
    by = make_processor("qwen3-vl", {}, limits)
    try:
        written(by, AnimatedFile(data))
    except BadMedia as problem:
        return str(problem)
    return "accepted"


def test_more_frames_than_a_file_may_have_are_refused_unseen() -> None:
    gif = animated(drawn(2, (8, 8)), "GIF")
    second = gif.index(b"!\xf9", gif.index(b"!\xf9") + 1)
    bomb = gif[:second] + gif[second:-1] * (MOST_PICTURES + 1) + b";"
    assert problem_of(bomb) == "more than 4096 frames; that is the limit of one file"


def test_a_gif_of_crumbs_is_refused_before_it_costs_seconds() -> None:
    head = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + bytes(6)
    crumbs = b"," + struct.pack("<HHHHB", 0, 0, 8, 8, 0) + b"\x02" + b"\1x" * 60_000 + b"\0"
    assert problem_of(head + crumbs * 9 + b";") == (
        "a GIF has too many pieces for its size: a file of this length may have 24576 chunks, segments or boxes "
        "(or 393216 GIF blocks); write it again with any image program"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_counted_up_to_the_last_picture_that_is_needed(kind: str) -> None:
    data = animated(drawn(40), kind, 100)
    limits = LimitsSpec(item_pixels=64 * 32)
    assert problem_of(data, limits).endswith(
        "frames 0 to 39 of 64x32; the limit is 65536 pixels in all, 32 times limits.item_pixels"
    )
    assert problem_of(animated(drawn(32), kind, 100), limits) == "accepted"
    over = problem_of(data, LimitsSpec(item_pixels=64 * 32 - 1))
    assert over == "64x32 is 2048 pixels; the limit is 2047 (limits.item_pixels)"


def test_a_picture_off_the_canvas_is_refused_before_memory_is_taken() -> None:
    gif = bytearray(animated(drawn(3), "GIF"))
    at = gif.index(b",", gif.index(b"!\xf9", gif.index(b"!\xf9") + 1) + 8)
    gif[at + 5 : at + 9] = struct.pack("<HH", 65000, 65000)
    assert "frame 1 reaches to " in problem_of(bytes(gif))
    webp = bytearray(animated(drawn(3), "WEBP"))
    second = webp.index(b"ANMF", webp.index(b"ANMF") + 1)
    webp[second + 14 : second + 20] = b"\xff\xff\0\xff\xff\0"
    assert "frame 1 reaches to " in problem_of(bytes(webp))


@pytest.mark.parametrize("declared", [1, 2, 4, 2**31 - 1, 0])
def test_a_png_of_other_than_the_declared_number_of_pictures_is_refused(declared: int) -> None:
    data = bytearray(animated(drawn(3), "PNG"))
    chunk = data.index(b"acTL")
    data[chunk + 4 : chunk + 8] = struct.pack(">L", declared)
    data[chunk + 12 : chunk + 16] = struct.pack(">L", zlib.crc32(data[chunk : chunk + 12]))
    with pytest.raises(BadMedia, match=rf"declares {declared} pictures and has 3") as caught:
        read(bytes(data))
    assert str(caught.value).startswith("truncated: ") is (declared > 3)


def test_what_is_no_animated_file_is_refused_by_name() -> None:
    picture = drawn(1)[0]
    for kind in ("JPEG", "TIFF", "BMP"):
        with io.BytesIO() as file:
            picture.save(file, kind)
            problem = problem_of(file.getvalue())
        assert problem == f"{kind} is not accepted as a video; GIF, PNG, WEBP or a list of pictures is"
    assert "MP4" in problem_of(b"\0\0\0\x20ftypisom" + bytes(100))
    assert problem_of(b"") == "the file is empty"
    assert problem_of(b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + b";") == "the GIF has no picture"
    clear = picture.convert("RGB")
    clear.info["transparency"] = (255, 0, 0)
    with io.BytesIO() as file:
        clear.save(file, "PNG", save_all=True, append_images=drawn(3)[1:], transparency=(255, 0, 0))
        assert "with a transparent colour is not accepted" in problem_of(file.getvalue())


def test_a_canvas_without_a_colour_is_refused() -> None:
    gif = bytearray(animated(drawn(3), "GIF"))
    gif[6:10] = struct.pack("<HH", 100, 100)
    assert "leaves some of its canvas without a colour" in problem_of(bytes(gif))


@pytest.mark.parametrize("kind", KINDS)
def test_cut_anywhere_it_is_bad_media(kind: str) -> None:
    data = animated(drawn(3, (16, 16)), kind)
    for end in range(len(data)):
        assert problem_of(data[:end]) != "accepted", end


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_bytes_come_only_bad_media_is_raised(kind: str) -> None:
    data = animated(drawn(3, (16, 16)), kind)
    random = np.random.default_rng(7)
    for _ in range(400):
        damaged = np.frombuffer(data, np.uint8).copy()
        places = random.integers(6, len(damaged), random.integers(1, 4))
        damaged[places] = random.integers(0, 256, len(places))
        problem_of(damaged.tobytes())


def test_a_damaged_picture_is_named() -> None:
    data = bytearray(animated(drawn(3, (64, 64)), "GIF"))
    last = data.rindex(b",\0\0\0\0")
    data[last + 10 + table_nbytes(data[last + 9])] = 13  # bits of its first codes; there are 12 at most
    assert problem_of(bytes(data)).startswith("frame 2: GIF: ")


# --- where it comes from --------------------------------------------------------------------------------------


def test_bytes_path_and_data_url_are_the_same(tmp_path: Path) -> None:
    data = animated(drawn(3), "GIF")
    path = tmp_path / "clip.gif"
    path.write_bytes(data)
    url = "data:image/gif;base64," + base64.b64encode(data).decode()
    percent = "data:image/gif," + "".join(f"%{byte:02x}" for byte in data)
    for source in (data, memoryview(data), path, str(path), url, percent):
        frames: list[Buffer] = [b"before"]
        assert prompt_parts.on_wire(prompt_parts.Video(source), frames) == wire.AnimationPart(1)
        assert prompt_parts.on_wire(prompt_parts.Image(source), frames) == wire.ImagePart(2)
        assert [bytes(frame) for frame in frames[1:]] == [data, data]


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (prompt_parts.Video("data:image/gif;base64,====!"), "not base64"),
        (prompt_parts.Video("data:image/gif"), "has no comma"),
        (prompt_parts.Video("/nonexistent/clip.gif"), "cannot read '/nonexistent/clip.gif'"),
        (prompt_parts.Image(Path("/")), "cannot read '/'"),
        (prompt_parts.Video(b"GIF89a", fps=2.0), "has its own timing, so omit fps"),
    ],
)
def test_a_source_that_cannot_be_read_says_why(part: prompt_parts.Part, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        prompt_parts.on_wire(part, [])
