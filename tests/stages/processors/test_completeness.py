"""Pictures whose data end before their size says so: refused where that can be known, and nothing else is."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors.base import AnimatedFile, BadMedia
from tensorferry.stages.processors.image import header, upright_rgb
from tensorferry.stages.processors.image_headers.exif import read_directory
from tensorferry.stages.processors.video_frames import footage_of

LIMITS = LimitsSpec()
ROOT = Path(__file__).parents[3]
PHOTO = Image.open(ROOT / "examples" / "images" / "chelsea.png").convert("RGB").resize((160, 112))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">L", len(body)) + name + body + struct.pack(">L", zlib.crc32(name + body))


def png(size: tuple[int, int], depth: int, colour: int, rows: bytes, *before: bytes, interlaced: int = 0) -> bytes:
    """A PNG of filtered rows; `before`: chunks between header and pixels."""
    head = chunk(b"IHDR", struct.pack(">LLBBBBB", *size, depth, colour, 0, 0, interlaced))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(before) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


GRAY_ROWS = b"".join(b"\0" + bytes((7 * column + row) % 255 + 1 for column in range(64)) for row in range(64))
PALETTE = chunk(b"PLTE", bytes(range(48)))


def adam7(width: int, height: int) -> bytes:
    """Rows of an interlaced gray picture without a zero in it."""
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    rows = []
    for left, top, across, down in passes:
        columns = len(range(left, width, across))
        rows += [b"\0" + b"\x55" * columns for _ in range(top, height, down)] if columns else []
    return b"".join(rows)


def cut_scan(data: bytes, keep: float) -> bytes:
    """A JPEG that ends early before a proper end-of-image marker. keep: of the bytes of its last scan."""
    scan = data.rindex(b"\xff\xda")
    return data[: scan + int((len(data) - scan) * keep)].rstrip(b"\xff") + b"\xff\xd9"


def height_of(data: bytes, height: int) -> bytes:
    """A JPEG whose header tells of another height."""
    frame = next(data.index(bytes((0xFF, kind))) for kind in (0xC0, 0xC2) if bytes((0xFF, kind, 0)) in data)
    return data[: frame + 5] + struct.pack(">H", height) + data[frame + 7 :]


def with_field(data: bytes, tag: int, value: int) -> bytes:
    """A little-endian TIFF with the value of a field of one LONG or SHORT changed."""
    at = data.index(struct.pack("<H", tag), struct.unpack_from("<L", data, 4)[0])
    kind = struct.unpack_from("<H", data, at + 2)[0]
    return data[: at + 8] + (struct.pack("<HH", value, 0) if kind == 3 else struct.pack("<L", value)) + data[at + 12 :]


def with_short_strips(data: bytes) -> bytes:
    """A little-endian TIFF of one strip that ends half way; a JPEG ends there with its marker."""
    with Image.open(io.BytesIO(data)) as image:
        (start,), (nbytes,) = image.tag_v2[273], image.tag_v2[279]  # type: ignore[attr-defined]
    half = start + nbytes // 2
    if data[start : start + 2] == b"\xff\xd8":
        return with_field(data[:half] + b"\xff\xd9" + data[half + 2 :], 279, nbytes // 2 + 2)
    return with_field(data, 279, nbytes // 2)


JPEGS = {
    "baseline": encoded(PHOTO, "JPEG", quality=85),
    "4:4:4": encoded(PHOTO, "JPEG", subsampling="4:4:4"),
    "4:2:2": encoded(PHOTO, "JPEG", subsampling="4:2:2"),
    "restarts": encoded(PHOTO, "JPEG", restart_marker_rows=1),
    "progressive": encoded(PHOTO, "JPEG", progressive=True),
    "gray": encoded(PHOTO.convert("L"), "JPEG"),
    "cmyk": encoded(PHOTO.convert("CMYK"), "JPEG"),
    "17 wide": encoded(PHOTO.resize((17, 33)), "JPEG"),
}
SHORT: Mapping[str, Callable[[], bytes]] = {
    "png": lambda: png((64, 64), 8, 0, GRAY_ROWS[: 65 * 32]),
    "png that lacks one row": lambda: png((64, 64), 8, 0, GRAY_ROWS[: 65 * 63]),
    "png, interlaced": lambda: png((64, 64), 8, 0, adam7(64, 64)[:-1], interlaced=1),
    "png of colours": lambda: png((64, 64), 8, 2, b"".join(b"\0" + b"\x40" * 192 for _ in range(40))),
    "png of bits": lambda: png((64, 64), 1, 0, b"".join(b"\0" + b"\xf0" * 8 for _ in range(40))),
    "png of 16 bits": lambda: png((64, 64), 16, 0, b"".join(b"\0" + b"\x40" * 128 for _ in range(40))),
    "png with a palette": lambda: png((64, 64), 8, 3, b"".join(b"\0" + b"\1" * 64 for _ in range(40)), PALETTE),
    "tiff whose strips are half": lambda: with_field(encoded(PHOTO, "TIFF"), 257, 224),
    "tiff, lzw": lambda: with_field(encoded(PHOTO, "TIFF", compression="tiff_lzw", strip_size=160 * 3 * 16), 257, 224),
    **{
        f"tiff, {compression}": lambda compression=compression, mode=mode: with_short_strips(
            encoded(PHOTO.convert(mode), "TIFF", compression=compression)
        )
        for compression, mode in (("jpeg", "RGB"), ("jpeg", "L"), ("group3", "1"), ("group4", "1"), ("tiff_ccitt", "1"))
    },
    "bmp": lambda: encoded(PHOTO, "BMP")[:-2000],
    "webp": lambda: encoded(PHOTO, "WEBP")[:-200],
    "avif": lambda: encoded(PHOTO, "AVIF")[:-200],
    "gif": lambda: encoded(PHOTO.convert("P"), "GIF")[:-2000] + b"\0;",
    **{
        f"jpeg, {name}, half": lambda data=data: cut_scan(data, 0.5)
        for name, data in JPEGS.items()
        if name != "progressive"
    },
    **{
        f"jpeg, {name}, a height that is not there": lambda data=data: height_of(data, 400)
        for name, data in JPEGS.items()
    },
}


@pytest.mark.parametrize("name", SHORT)
def test_a_picture_without_all_of_its_data_is_refused(name: str) -> None:
    with pytest.raises(BadMedia, match=r"(?i)truncated|broken|decod|corrupt|incomplete|fail"):
        upright_rgb(SHORT[name](), LIMITS)


def flat(kind: str, colour: object, mode: str = "RGB", **options: object) -> bytes:
    return encoded(Image.new(mode, (70, 50), colour), kind, **options)  # type: ignore[arg-type]


#: Whole pictures that end with just what a decoder fills up with.
WHOLE = {
    "gray jpeg": flat("JPEG", (128, 128, 128)),
    "gray jpeg, progressive": flat("JPEG", (128, 128, 128), progressive=True),
    "gray jpeg of one channel": flat("JPEG", 128, "L"),
    "gray cmyk jpeg": flat("JPEG", (127, 127, 127, 127), "CMYK"),
    "gray jpeg with restarts": flat("JPEG", (128, 128, 128), restart_marker_blocks=1),
    "black png": flat("PNG", 0),
    "black png with a palette": flat("PNG", 0, "P"),
    "clear png": flat("PNG", (0, 0, 0, 0), "RGBA"),
    "black png of bits": flat("PNG", 0, "1"),
    "interlaced png": png((64, 64), 8, 0, adam7(64, 64), interlaced=1),
    "interlaced png of a column": png((1, 9), 8, 0, adam7(1, 9), interlaced=1),
    "png with more than it needs": png((64, 64), 8, 0, GRAY_ROWS + bytes(1000)),
    "tiff in tiles": encoded(PHOTO, "TIFF", compression="tiff_deflate", tiffinfo={322: 64, 323: 64}),
    **{
        f"tiff, {compression}, {strip_nbytes} bytes a strip, {'Big' if big else 'usual'}": encoded(
            PHOTO.convert(mode), "TIFF", compression=compression, strip_size=strip_nbytes, big_tiff=big
        )
        for compression, mode in (("jpeg", "RGB"), ("jpeg", "L"), ("group3", "1"), ("group4", "1"), ("tiff_ccitt", "1"))
        for strip_nbytes in (8000, 1 << 30)
        for big in (False, True)
    },
    "tiff of one strip": encoded(PHOTO, "TIFF"),
    **{f"jpeg, {name}": data for name, data in JPEGS.items()},
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_picture_is_accepted_whatever_it_shows(name: str) -> None:
    with Image.open(io.BytesIO(WHOLE[name])) as image:
        wanted = np.asarray(image.convert("RGBA" if name == "clear png" else "RGB"))
    found = upright_rgb(WHOLE[name], LIMITS)
    assert found.shape[:2] == wanted.shape[:2]
    if name != "clear png":
        assert (found == wanted).all()


def test_strips_that_overlap_are_not_copied_one_by_one() -> None:
    data = encoded(PHOTO.convert("1"), "TIFF", compression="group4", strip_size=20 * 8)
    directory = read_directory(memoryview(data))
    assert directory is not None
    fields = {field.tag: field for field in directory.fields()}
    overlapping = bytearray(data)
    for at in range(fields[279].count):
        struct.pack_into("<L", overlapping, fields[273].value + 4 * at, 8 + at)
        struct.pack_into("<L", overlapping, fields[279].value + 4 * at, len(data) - 100)
    with pytest.raises(BadMedia, match="overlap"):
        upright_rgb(bytes(overlapping), LIMITS)
    blank = encoded(Image.new("1", (160, 112), 1), "TIFF", compression="group4", strip_size=20 * 8)
    fields = {field.tag: field for field in read_directory(memoryview(blank)).fields()}  # type: ignore[union-attr]
    shared = bytearray(blank)
    first = struct.unpack_from("<L", blank, fields[273].value)[0]
    for at in range(fields[273].count):
        struct.pack_into("<L", shared, fields[273].value + 4 * at, first)
    assert upright_rgb(bytes(shared), LIMITS).min() == 255


def test_a_later_picture_of_a_png_animation_is_refused_where_it_is_short() -> None:
    """As a video; as an image only the first picture counts."""
    frames = [Image.new("RGB", (32, 32), (at, 90, 9)) for at in (10, 200)]
    frames[1].putpixel((31, 31), (1, 2, 3))
    data = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:], duration=100)
    at = data.index(b"fdAT") - 4
    nbytes = struct.unpack_from(">L", data, at)[0]
    short = data[:at] + chunk(b"fdAT", data[at + 8 : at + 12] + zlib.compress(bytes(20))) + data[at + 12 + nbytes :]
    assert upright_rgb(short, LIMITS).shape == (32, 32, 3)
    assert len(list(footage_of(AnimatedFile(data), LIMITS).pictures([0, 1]))) == 2
    with pytest.raises(BadMedia, match="truncated: picture 1 of the PNG has 20 of its"):
        list(footage_of(AnimatedFile(short), LIMITS).pictures([0, 1]))


def test_pictures_behind_the_last_that_is_looked_at_are_not_inflated_and_each_other_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = [Image.effect_noise((32, 32), 10 + at) for at in range(9)]
    footage = footage_of(AnimatedFile(encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])), LIMITS)
    inflated: list[object] = []
    start = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", lambda: inflated.append(stream := start()) or stream)
    assert len(list(footage.pictures([0, 1, 2, 3]))) == 4
    assert len(inflated) == 4


def test_a_picture_without_data_between_others_is_refused() -> None:
    """The data of the picture behind it are not taken for its own."""
    control = struct.pack(">LLLLHHBB", 8, 8, 0, 0, 1, 10, 0, 0)
    pixels = zlib.compress(bytes(72))
    chunks = [chunk(b"fcTL", struct.pack(">L", 0) + control), chunk(b"IDAT", pixels)]
    chunks += [chunk(b"fcTL", struct.pack(">L", at) + control) for at in (1, 2)]
    chunks += [chunk(b"fdAT", struct.pack(">L", 3) + pixels)]
    head = chunk(b"IHDR", struct.pack(">LLBBBBB", 8, 8, 8, 0, 0, 0, 0)) + chunk(b"acTL", struct.pack(">LL", 3, 0))
    data = b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")
    with pytest.raises(BadMedia, match="truncated: picture 1 of the PNG has 0 of its 72 bytes"):
        list(footage_of(AnimatedFile(data), LIMITS).pictures([0, 1, 2]))


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        ((), "without a palette"),
        ((PALETTE, PALETTE), "two palettes"),
        ((chunk(b"PLTE", bytes(47)),), "the PNG palette has 47 bytes"),
        ((chunk(b"PLTE", b""),), "the PNG palette has 0 bytes"),
        ((chunk(b"PLTE", bytes(771)),), "the PNG palette has 771 bytes"),
    ],
)
def test_a_palette_picture_has_one_whole_palette(chunks: tuple[bytes, ...], problem: str) -> None:
    rows = b"".join(b"\0" + bytes(8) for _ in range(8))
    with pytest.raises(BadMedia, match=problem):
        header(png((8, 8), 8, 3, rows, *chunks), LIMITS)


def test_a_palette_behind_the_pixels_is_refused() -> None:
    data = png((8, 8), 8, 3, bytes(72), PALETTE)
    with pytest.raises(BadMedia, match="without a palette"):
        header(data.replace(PALETTE, b"").replace(chunk(b"IEND", b""), PALETTE + chunk(b"IEND", b"")), LIMITS)


@pytest.mark.parametrize(("depth", "colour"), [(16, 3), (4, 2), (1, 6), (3, 0), (8, 1), (8, 5)])
def test_a_depth_that_a_png_of_its_kind_cannot_have_is_refused(depth: int, colour: int) -> None:
    with pytest.raises(BadMedia, match=f"colour type {colour} with {depth} bits a sample"):
        header(png((8, 8), depth, colour, bytes(1000), PALETTE), LIMITS)


def test_unused_bits_of_a_transparent_colour_say_nothing() -> None:
    row = b"\0" + bytes((10, 20, 30)) + bytes((40, 50, 60))
    clear = chunk(b"tRNS", struct.pack(">HHH", 0xAB00 | 10, 0x0100 | 20, 0xFF00 | 30))
    assert upright_rgb(png((2, 1), 8, 2, row, clear), LIMITS).tolist() == [[[255] * 3, [40, 50, 60]]]
    gray = chunk(b"tRNS", struct.pack(">H", 0xAB00 | 7))
    assert upright_rgb(png((2, 1), 8, 0, b"\0\x07\x09", gray), LIMITS)[0, :, 0].tolist() == [255, 9]


@pytest.mark.parametrize("transparency", [chunk(b"tRNS", bytes(17)), chunk(b"tRNS", b"")])
def test_transparency_longer_than_the_palette_is_ignored(transparency: bytes) -> None:
    picture = upright_rgb(png((2, 1), 8, 3, b"\0\x00\x01", PALETTE, transparency), LIMITS)
    assert picture.tolist() == [[[0, 1, 2], [3, 4, 5]]]


def test_transparency_that_is_out_of_place_or_of_a_wrong_length_is_ignored() -> None:
    end, late = chunk(b"IEND", b""), chunk(b"tRNS", b"\0\x07")
    behind = png((2, 1), 8, 0, b"\0\x07\x09").replace(end, late + end)
    assert upright_rgb(behind, LIMITS)[0, :, 0].tolist() == [7, 9]
    assert upright_rgb(png((2, 1), 8, 0, b"\0\x07\x09", chunk(b"tRNS", b"\x07")), LIMITS)[0, :, 0].tolist() == [7, 9]


def test_heic_under_a_general_brand_is_named() -> None:
    brands = struct.pack(">L4s4sL4s4s", 24, b"ftyp", b"mif1", 0, b"mif1", b"heic")
    with pytest.raises(BadMedia, match="HEIC is not accepted"):
        header(brands + bytes(100), LIMITS)


@pytest.mark.samples
@pytest.mark.skipif("TENSORFERRY_SAMPLES" not in os.environ, reason="TENSORFERRY_SAMPLES does not name the collection")
def test_the_short_pictures_of_the_collection() -> None:
    folder = Path(os.environ["TENSORFERRY_SAMPLES"]) / "images" / "short"
    accepted = {"png_pal_trns_long.png", "png_rgb_trns_hi.png"}
    for path in sorted(folder.iterdir()):
        if path.name in accepted:
            upright_rgb(path.read_bytes(), LIMITS)
        else:
            with pytest.raises(BadMedia):
                upright_rgb(path.read_bytes(), LIMITS)


def damaged_deflate(fill_order: int = 1, **options: object) -> tuple[bytes, bytes]:
    """A deflate TIFF, and the same with zeros in the middle of its first strip or tile."""
    more = {"compression": "tiff_adobe_deflate", **options}
    more["tiffinfo"] = {266: fill_order, **more.get("tiffinfo", {})}  # type: ignore[dict-item]
    data = encoded(PHOTO, "TIFF", **more)
    with Image.open(io.BytesIO(data)) as image:
        tags = image.tag_v2  # type: ignore[attr-defined]
        start, nbytes = (tags.get(tag, tags.get(other))[0] for tag, other in ((324, 273), (325, 279)))
    middle = start + nbytes // 2
    return data, data[:middle] + bytes(40) + data[middle + 40 :]


DEFLATE: Mapping[str, dict[str, object]] = {
    "one strip": {},
    "strips": {"strip_size": 160 * 3 * 16},
    "tiles": {"tiffinfo": {322: 64, 323: 64}},
    "a predictor": {"tiffinfo": {317: 2}},
    "bits in reverse order": {"fill_order": 2},
    "BigTIFF": {"big_tiff": True},
}


@pytest.mark.parametrize("name", DEFLATE)
def test_a_deflate_tiff_whose_checksum_is_wrong_is_refused(name: str) -> None:
    """libtiff has all pixels before it comes to the checksum, and does not look at it."""
    data, damaged = damaged_deflate(**DEFLATE[name])  # type: ignore[arg-type]
    assert (upright_rgb(data, LIMITS) == np.asarray(PHOTO)).all()
    with pytest.raises(BadMedia, match=r"cannot be inflated|decoder error"):
        upright_rgb(damaged, LIMITS)


def with_strip(stream: bytes) -> bytes:
    """A gray TIFF of 64 x 64 with this stream as its only strip."""
    fields = ((256, 64), (257, 64), (258, 8), (259, 8), (262, 1), (273, 200), (278, 64), (279, len(stream)))
    entries = b"".join(struct.pack("<HHLL", tag, 4, 1, value) for tag, value in fields)
    head = b"II*\0" + struct.pack("<LH", 8, len(fields)) + entries + bytes(4)
    return head.ljust(200, b"\0") + stream


def test_what_stands_behind_the_pixels_of_a_deflate_strip_is_bounded() -> None:
    pixels = bytes(range(64)) * 64
    assert upright_rgb(with_strip(zlib.compress(pixels + bytes(4096))), LIMITS).shape == (64, 64, 3)
    assert upright_rgb(with_strip(zlib.compress(pixels) + b"more"), LIMITS).shape == (64, 64, 3)
    with pytest.raises(BadMedia, match="more than the 4096 bytes of its pixels"):
        upright_rgb(with_strip(zlib.compress(pixels + bytes(64 << 20))), LIMITS)
    with pytest.raises(BadMedia, match="truncated: strip 0 of the TIFF ends before its checksum"):
        upright_rgb(with_strip(zlib.compress(pixels)[:-4]), LIMITS)


def test_deflate_strips_that_overlap_are_not_inflated_one_by_one() -> None:
    data = encoded(PHOTO, "TIFF", compression="tiff_adobe_deflate", strip_size=160 * 3 * 16)
    directory = read_directory(memoryview(data))
    assert directory is not None
    fields = {field.tag: field for field in directory.fields()}
    overlapping = bytearray(data)
    for at in range(fields[279].count):
        start = struct.unpack_from("<L", data, fields[273].value + 4 * at)[0]
        struct.pack_into("<L", overlapping, fields[279].value + 4 * at, len(data) - start)
    with pytest.raises(BadMedia, match="overlap"):
        upright_rgb(bytes(overlapping), LIMITS)


DECODE = """
import sys
from pathlib import Path
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image import upright
for path in map(Path, sys.argv[1:]):
    try:
        upright(path.read_bytes(), LimitsSpec())
    except BadMedia:
        print(path.name)
"""


@pytest.mark.processes
def test_the_libraries_below_write_nothing_to_stderr(tmp_path: Path) -> None:
    """Neither libtiff's own lines, nor those of the JPEG library in it, nor Pillow's warnings and log lines."""
    compressions = {"tiff_adobe_deflate": "RGB", "tiff_lzw": "RGB", "jpeg": "RGB", "group3": "1", "group4": "1"}
    for name, mode in compressions.items():
        data = encoded(PHOTO.convert(mode), "TIFF", compression=name)
        with Image.open(io.BytesIO(data)) as image:
            start, nbytes = (image.tag_v2[tag][0] for tag in (273, 279))  # type: ignore[attr-defined]
        pixels = start + nbytes // 3
        (tmp_path / name).write_bytes(data[:pixels] + b"\xff\x00\x5a" * 20 + data[pixels + 60 :])
    two = bytearray(encoded(PHOTO, "TIFF"))
    at = two.index(struct.pack("<HHL", 259, 3, 1), struct.unpack_from("<L", two, 4)[0])
    struct.pack_into("<L", two, at + 4, 2)  # Pillow warns of a second value
    (tmp_path / "values").write_bytes(two)
    (tmp_path / "samples").write_bytes(with_field(encoded(PHOTO, "TIFF", compression="tiff_lzw"), 277, 999))
    files = sorted(tmp_path.iterdir())
    command = [sys.executable, "-c", DECODE, *map(str, files)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
    assert done.stderr == ""
    assert {"tiff_adobe_deflate", "tiff_lzw", "samples"} <= set(done.stdout.split())


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", None])
def test_a_tiff_whose_directory_stands_at_its_end_is_refused_wherever_it_is_cut(compression: str | None) -> None:
    data = encoded(PHOTO, "TIFF", compression=compression)
    upright_rgb(data, LIMITS)
    for cut in (1, 2, 4, 5, 12, 60, 120):
        with pytest.raises(BadMedia, match=r"truncated|ends"):
            upright_rgb(data[:-cut], LIMITS)
