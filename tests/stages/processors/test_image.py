"""Encoded images to upright RGB: orientation, modes, broken files. Bombs are in test_image_limits.py."""

from __future__ import annotations

import io
import os
import random
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors import image as image_module
from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image import ImageHeader, header, upright_rgb
from tensorferry.stages.processors.image_headers.container import UPRIGHT

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "images"
DATA = ROOT / "tests" / "data" / "images"
MALFORMED = ROOT / "tests" / "data" / "malformed"
SAMPLES = sorted(path for folder in (EXAMPLES, DATA) for path in folder.iterdir() if path.suffix != ".md")
LIMITS = LimitsSpec()
RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    """A PNG chunk."""
    return struct.pack(">L", len(body)) + name + body + struct.pack(">L", zlib.crc32(name + body))


def png(size: tuple[int, int], depth: int, colour: int, rows: list[bytes], *others: bytes) -> bytes:
    """A PNG of raw rows; `others` are chunks between the header and the picture."""
    head = chunk(b"IHDR", struct.pack(">LLBBBBB", *size, depth, colour, 0, 0, 0))
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(others) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def tiff(order: str, fields: list[tuple[int, int, list[int]]], pixels: bytes) -> bytes:
    """A TIFF of one strip; fields are (tag, type, values) with type 3, SHORT, or 4, LONG."""
    fields = sorted([*fields, (273, 4, [8]), (279, 4, [len(pixels)])])
    codes = {3: "H", 4: "L"}
    start = 8 + len(pixels)
    beyond = start + 2 + 12 * len(fields) + 4
    table, extra = b"", b""
    for tag, kind, values in fields:
        raw = struct.pack(f"{order}{len(values)}{codes[kind]}", *values)
        if len(raw) > 4:
            place = struct.pack(order + "L", beyond + len(extra))
            extra += raw
        else:
            place = raw.ljust(4, b"\0")
        table += struct.pack(order + "HHL", tag, kind, len(values)) + place
    magic = b"II*\0" if order == "<" else b"MM\0*"
    directory = struct.pack(order + "H", len(fields)) + table + struct.pack(order + "L", 0)
    return magic + struct.pack(order + "L", start) + pixels + directory + extra


def tiff_gray(order: str, bits: int, white_is_zero: bool, pixels: bytes, size: tuple[int, int]) -> bytes:
    fields = [(256, 4, [size[0]]), (257, 4, [size[1]]), (258, 3, [bits]), (259, 3, [1])]
    return tiff(order, [*fields, (262, 3, [0 if white_is_zero else 1]), (277, 3, [1]), (278, 4, [size[1]])], pixels)


def exif(orientation: int) -> bytes:
    """An EXIF block of one tag."""
    return b"Exif\0\0II*\0" + struct.pack("<LHHHLHHL", 8, 1, 274, 3, 1, orientation, 0, 0)


def banded() -> Image.Image:
    """24x16 whose left third is red, on blue; no symmetry: the top right corner is green."""
    image = Image.new("RGB", (24, 16), BLUE)
    image.paste(RED, (0, 0, 8, 16))
    image.paste(GREEN, (16, 0, 24, 8))
    return image


# --- the bundled samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_sample_is_what_pillow_makes_of_it_upright_over_white(path: Path):
    with Image.open(path) as opened:
        turned = ImageOps.exif_transpose(opened)
        if turned.mode in ("RGBA", "P"):
            turned = turned.convert("RGBA")
            expected = Image.alpha_composite(Image.new("RGBA", turned.size, "white"), turned).convert("RGB")
        else:
            expected = turned.convert("RGB")
    data = path.read_bytes()
    found = header(data, LIMITS)
    pixels = upright_rgb(data, LIMITS)
    assert (found.width, found.height) == expected.size == (pixels.shape[1], pixels.shape[0])
    assert pixels.dtype == np.uint8
    # Two ways to blend may round differently.
    assert np.abs(pixels.astype(int) - np.asarray(expected)).max() <= (1 if turned.mode == "RGBA" else 0)


def test_header_names_size_upright_format_and_mode():
    assert header((EXAMPLES / "coffee_exif_orientation6.jpg").read_bytes(), LIMITS) == ImageHeader(
        600, 400, "JPEG", "RGB"
    )
    assert header((EXAMPLES / "coffee_cmyk.jpg").read_bytes(), LIMITS) == ImageHeader(300, 200, "JPEG", "CMYK")
    assert header((DATA / "png_bytes_named.jpg").read_bytes(), LIMITS).format == "PNG"


def test_memoryview_is_read_as_bytes_are():
    data = (EXAMPLES / "coffee_palette_trns.png").read_bytes()
    frame = memoryview(bytearray(b"x" + data))[1:]
    assert np.array_equal(upright_rgb(frame, LIMITS), upright_rgb(data, LIMITS))


# --- orientation (B34) --------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 95, "subsampling": 0}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("AVIF", {"quality": 95, "subsampling": "4:4:4"}),
    ],
)
def test_orientation_is_applied_on_every_format(kind: str, options: dict[str, object], orientation: int):
    if kind == "TIFF":
        options = {**options, "tiffinfo": {274: orientation}}
    else:
        options = {**options, "exif": exif(orientation)}
    data = encoded(banded(), kind, **options)
    found = header(data, LIMITS)
    pixels = upright_rgb(data, LIMITS)
    turns = {1: 0, 2: 0, 3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}  # quarters, counter-clockwise, then the mirror
    expected = np.rot90(np.asarray(banded()), turns[orientation])
    if orientation in (2, 4):
        expected = expected[:, ::-1]
    elif orientation in (5, 7):
        expected = expected[::-1]
    assert (found.height, found.width) == expected.shape[:2] == pixels.shape[:2]
    tolerance = 0 if kind in ("PNG", "WEBP", "TIFF") else 40
    assert np.abs(pixels.astype(int) - expected).max() <= tolerance


def test_orientation_6_of_24_by_16_has_the_left_band_on_top():
    pixels = upright_rgb(encoded(banded(), "PNG", exif=exif(6)), LIMITS)
    assert pixels.shape == (24, 16, 3)
    assert (pixels[:8] == RED).all()
    assert not (pixels[8:] == RED).all(axis=2).any()


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"xmp": XMP}),
        ("WEBP", {"xmp": XMP, "lossless": True}),
        ("TIFF", {"tiffinfo": {700: XMP}}),
        ("PNG", {"pnginfo": "xmp"}),
        ("PNG", {"pnginfo": "legacy"}),
        ("PNG", {"pnginfo": "legacy, compressed"}),
    ],
)
def test_orientation_that_stands_elsewhere_is_found(kind: str, options: dict[str, object]):
    from PIL import PngImagePlugin

    if "pnginfo" in options:
        info = PngImagePlugin.PngInfo()
        if options["pnginfo"] == "xmp":
            info.add_itxt("XML:com.adobe.xmp", XMP.decode())
        else:
            block = exif(6)
            text = f"\nexif\n{len(block):8}\n{block.hex()}\n"
            info.add_text("Raw profile type exif", text, zip="compressed" in str(options["pnginfo"]))
        options = {"pnginfo": info}
    assert header(encoded(banded(), kind, **options), LIMITS).height == 24


def test_picture_that_pillow_turns_by_itself_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """As it would with a TIFF while decoding, by an orientation that XMP alone has."""
    data = encoded(banded(), "TIFF", tiffinfo={700: XMP})
    monkeypatch.setattr(image_module, "_left_to_turn", lambda image: UPRIGHT)
    with pytest.raises(BadMedia, match="the picture is 16x24, its header says 24x16"):
        upright_rgb(data, LIMITS)


def test_exif_that_says_upright_outweighs_xmp():
    assert header(encoded(banded(), "JPEG", exif=exif(1), xmp=XMP), LIMITS).height == 16


BROKEN_EXIF = {
    "empty": b"Exif\0\0",
    "cut": exif(6)[:-12],
    "no tiff": b"Exif\0\0" + b"\xff" * 40,
    "unknown version": b"Exif\0\0II\x2b\0" + exif(6)[10:],
    "directory beyond the end": b"Exif\0\0II*\0" + struct.pack("<L", 1 << 31),
    "65535 entries": b"Exif\0\0II*\0" + struct.pack("<LH", 8, 65535),
    "value beyond the end": b"Exif\0\0II*\0" + struct.pack("<LHHHLLL", 8, 1, 274, 3, 1 << 30, 1 << 30, 0),
    "orientation is text": b"Exif\0\0II*\0" + struct.pack("<LHHHL4sL", 8, 1, 274, 2, 1, b"6\0\0\0", 0),
    "orientation 0": exif(0),
    "orientation 9": exif(9),
    "no count": b"Exif\0\0II*\0" + struct.pack("<LHHHLHHL", 8, 1, 274, 3, 0, 6, 0, 0),
}


@pytest.mark.parametrize("block", BROKEN_EXIF.values(), ids=BROKEN_EXIF.keys())
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_malformed_exif_counts_as_upright(kind: str, block: bytes):
    plain = encoded(banded(), kind)
    if kind == "JPEG":
        data = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + plain[2:]
    elif kind == "PNG":
        data = plain[:33] + chunk(b"eXIf", block.removeprefix(b"Exif\0\0")) + plain[33:]
    else:
        data = encoded(banded(), kind, exif=block) if block != b"Exif\0\0" else plain
    assert np.array_equal(upright_rgb(data, LIMITS), upright_rgb(plain, LIMITS))


@pytest.mark.parametrize("block", BROKEN_EXIF.values(), ids=BROKEN_EXIF.keys())
def test_exif_has_no_say_in_an_avif(block: bytes):
    room = Image.Exif()
    room[271] = "m" * 100
    data = bytearray(encoded(banded(), "AVIF", exif=room))
    at = data.index(room.tobytes().removeprefix(b"Exif\0\0"))
    data[at : at + len(block) - 6] = block[6:]
    assert header(bytes(data), LIMITS).height == 16


def test_corrupt_exif_sample_loads_without_a_warning():
    assert upright_rgb((MALFORMED / "corrupt_exif.jpg").read_bytes(), LIMITS).shape == (20, 20, 3)


# --- modes (B35) --------------------------------------------------------------------------------------------


def gray(values: list[int]) -> list[tuple[int, int, int]]:
    return [(value, value, value) for value in values]


def image(mode: str, pixels: list[object], palette: list[int] | None = None) -> Image.Image:
    made = Image.new(mode, (len(pixels), 1))
    if palette:
        made.putpalette(palette)
    made.putdata(pixels)
    return made


CMYK_OF_RGB = [(0, 255, 255, 0), (255, 0, 255, 0), (0, 0, 0, 0), (0, 0, 0, 255)]
#: What it is -> (the file, its pixels in one row).
MODES: dict[str, tuple[bytes, list[tuple[int, int, int]]]] = {
    "png 1": (encoded(image("1", [0, 255, 0]), "PNG"), gray([0, 255, 0])),
    "png 2 bits": (png((4, 1), 2, 0, [b"\x1b"]), gray([0, 85, 170, 255])),
    "png 4 bits": (png((2, 1), 4, 0, [b"\x1f"]), gray([17, 255])),
    "png L": (encoded(image("L", [0, 7, 255]), "PNG"), gray([0, 7, 255])),
    "png LA": (encoded(image("LA", [(10, 255), (10, 0), (0, 128)]), "PNG"), gray([10, 255, 127])),
    "png P": (encoded(image("P", [0, 1], [*RED, *BLUE]), "PNG"), [RED, BLUE]),
    "png P, one clear": (encoded(image("P", [0, 1], [*RED, *BLUE]), "PNG", transparency=0), [WHITE, BLUE]),
    "png P, by degrees": (
        encoded(image("P", [0, 1, 2], [*RED, *BLUE, *GREEN]), "PNG", transparency=bytes([255, 0, 51])),
        [RED, WHITE, (204, 255, 204)],
    ),
    "png RGB": (encoded(image("RGB", [RED, (1, 2, 3)]), "PNG"), [RED, (1, 2, 3)]),
    "png RGB, one clear": (encoded(image("RGB", [RED, (1, 2, 3)]), "PNG", transparency=RED), [WHITE, (1, 2, 3)]),
    "png L, one clear": (encoded(image("L", [9, 10]), "PNG", transparency=9), gray([255, 10])),
    "png 1, black clear": (png((2, 1), 1, 0, [b"\x40"], chunk(b"tRNS", b"\0\0")), gray([255, 255])),
    "png 1, white clear": (png((2, 1), 1, 0, [b"\x40"], chunk(b"tRNS", b"\0\1")), gray([0, 255])),
    "png 2 bits, one clear": (png((4, 1), 2, 0, [b"\x1b"], chunk(b"tRNS", b"\0\1")), gray([0, 255, 170, 255])),
    "png 4 bits, one clear": (png((2, 1), 4, 0, [b"\x12"], chunk(b"tRNS", b"\0\2")), gray([17, 255])),
    "png RGBA": (encoded(image("RGBA", [(*RED, 255), (*RED, 0), (*RED, 51)]), "PNG"), [RED, WHITE, (255, 204, 204)]),
    "png 16 bits": (
        png((5, 1), 16, 0, [struct.pack(">5H", 0, 128, 256, 32768, 65535)]),
        gray([0, 0, 1, 128, 255]),
    ),
    "png 16 bits, one clear": (
        png((3, 1), 16, 0, [struct.pack(">3H", 300, 301, 65535)], chunk(b"tRNS", struct.pack(">H", 300))),
        gray([255, 1, 255]),
    ),
    "png 16 bits a channel": (png((1, 1), 16, 2, [struct.pack(">3H", 0xFF80, 0x1234, 0)]), [(255, 0x12, 0)]),
    "png LA 16 bits": (png((2, 1), 16, 4, [struct.pack(">4H", 0x1234, 0xFFFF, 0, 0)]), gray([0x12, 255])),
    "tiff 16 bits": (encoded(image("I;16", [0, 257, 65535]), "TIFF"), gray([0, 1, 255])),
    "tiff 16 bits, big-endian": (
        tiff_gray(">", 16, False, struct.pack(">3H", 0, 25700, 65535), (3, 1)),
        gray([0, 100, 255]),
    ),
    "tiff 16 bits, 0 is white": (
        tiff_gray("<", 16, True, struct.pack("<3H", 0, 257, 65535), (3, 1)),
        gray([255, 254, 0]),
    ),
    "tiff 16 bits, 0 is white, lzw": (
        encoded(image("I;16", [0, 257, 65535]), "TIFF", compression="tiff_lzw", tiffinfo={262: 0}),
        gray([255, 254, 0]),
    ),
    "tiff 12 bits": (tiff_gray("<", 12, False, b"\x00\x0f\xff", (2, 1)), gray([0, 255])),
    "tiff 8 bits, 0 is white": (tiff_gray("<", 8, True, b"\x00\xff", (2, 1)), gray([255, 0])),
    "tiff 32 bits that hold 16": (encoded(image("I", [0, 25700, 65535]), "TIFF"), gray([0, 100, 255])),
    "tiff RGBA": (encoded(image("RGBA", [(*RED, 255), (*RED, 0)]), "TIFF"), [RED, WHITE]),
    "tiff CMYK": (encoded(image("CMYK", CMYK_OF_RGB), "TIFF"), [RED, GREEN, WHITE, BLACK]),
    "tiff YCbCr": (
        encoded(image("YCbCr", [(255, 128, 128), (0, 128, 128)]), "TIFF", compression="tiff_lzw"),
        [WHITE, BLACK],
    ),
    "tiff big": (encoded(image("RGB", [RED, BLUE]), "TIFF", big_tiff=True), [RED, BLUE]),
    "gif": (encoded(image("P", [0, 1], [*RED, *BLUE]), "GIF"), [RED, BLUE]),
    "gif, one clear": (encoded(image("P", [0, 1], [*RED, *BLUE]), "GIF", transparency=1), [RED, WHITE]),
    "gif of gray, one clear": (encoded(image("L", [0, 9]), "GIF", transparency=0), gray([255, 9])),
    "bmp 24 bits": (encoded(image("RGB", [RED, BLUE]), "BMP"), [RED, BLUE]),
    "bmp 1 bit": (encoded(image("1", [0, 255]), "BMP"), gray([0, 255])),
    "bmp RGBA": (encoded(image("RGBA", [(*RED, 255), (*RED, 0)]), "BMP"), [RED, RED]),  # its alpha has no meaning
    "webp RGBA": (
        encoded(image("RGBA", [(*RED, 255), (*RED, 0)]), "WEBP", lossless=True, exact=True),
        [RED, WHITE],
    ),
}


@pytest.mark.parametrize(("data", "expected"), MODES.values(), ids=MODES.keys())
def test_every_mode_becomes_rgb(data: bytes, expected: list[tuple[int, int, int]]):
    assert header(data, LIMITS).width == len(expected)
    assert upright_rgb(data, LIMITS).tolist() == [[list(pixel) for pixel in expected]]


def test_lab_is_converted_by_colour_management():
    pixels = upright_rgb(encoded(image("LAB", [(255, 128, 128), (0, 128, 128), (136, 208, 195)]), "TIFF"), LIMITS)
    assert np.abs(pixels[0].astype(int) - [WHITE, BLACK, (254, 0, 0)]).max() <= 12


@pytest.mark.parametrize(("extra", "expected"), [(0, RED), (1, (255, 127, 127)), (2, (255, 204, 204))])
def test_tiff_of_four_channels(extra: int, expected: tuple[int, int, int]):
    """By what the fourth says it is: nothing, alpha that the others were multiplied by, alpha."""
    pixel = {0: (255, 0, 0, 51), 1: (128, 0, 0, 128), 2: (255, 0, 0, 51)}[extra]
    size = [(256, 4, [1]), (257, 4, [1]), (278, 4, [1])]
    fields = [*size, (258, 3, [8, 8, 8, 8]), (259, 3, [1]), (262, 3, [2]), (277, 3, [4]), (338, 3, [extra])]
    assert upright_rgb(tiff("<", fields, bytes(pixel)), LIMITS)[0, 0].tolist() == list(expected)


def test_threads_do_not_disturb_each_other():
    files = [path.read_bytes() for path in SAMPLES if not path.name.startswith("retina")] * 4
    alone = [upright_rgb(data, LIMITS) for data in files]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda data: upright_rgb(data, LIMITS), files))
    assert all(map(np.array_equal, alone, together))


def test_png_chunk_that_makes_pixels_must_be_sound():
    data = encoded(image("RGB", [RED, BLUE]), "PNG", transparency=RED)
    at = data.index(b"tRNS")
    with pytest.raises(BadMedia, match="checksum of a PNG chunk b'tRNS'"):
        upright_rgb(data[: at + 10] + b"\0\0\0\0" + data[at + 14 :], LIMITS)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (encoded(image("F", [0.0, 1.0]), "TIFF"), "mode F"),
        (encoded(image("I", [0, 65536]), "TIFF"), r"outside 0\.\.65535"),
        (encoded(image("I", [-1, 0]), "TIFF"), r"outside 0\.\.65535"),
        (png((1, 1), 16, 2, [bytes(6)], chunk(b"tRNS", bytes(6))), "16 bits a channel with a transparent colour"),
        (b"BM" + struct.pack("<LLLLllHHLLllLL", 0, 0, 54, 40, 4, 4, 1, 8, 1, 0, 0, 0, 0, 0), "BMP of compression 1"),
        (encoded(Image.new("RGB", (9, 9)), "JPEG2000"), "JPEG 2000 is not accepted"),
        (encoded(Image.new("RGB", (9, 9)), "PPM"), "PNM is not accepted"),
        (encoded(Image.new("RGB", (16, 16)), "ICO", sizes=[(16, 16)]), "ICO is not accepted"),
        (encoded(Image.new("RGB", (9, 9)), "PDF"), "PDF is not accepted"),
        (b"\0\0\0\x18ftypheic" + bytes(40), "HEIC is not accepted"),
        (b" \n<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"MSCF" + bytes(40), "a compressed file is not accepted"),  # a cabinet file
        (b"\xce\xb2\xcf\x81" + bytes(40), "a compressed file is not accepted"),  # Brotli's framing format
        (b"\x04\x22\x4d\x18" + bytes(40), "a compressed file is not accepted"),  # LZ4
        (b"\x1f\x9d\x90" + bytes(40), "a compressed file is not accepted"),  # compress
        (b"LZIP\x01" + bytes(40), "a compressed file is not accepted"),
        *((start + bytes(106), "a cpio archive is not accepted") for start in (b"070701", b"070702", b"070707")),
        *((start + bytes(40), "a cpio archive is not accepted") for start in (b"\xc7\x71", b"\x71\xc7")),
        (b"!<arch>\n" + bytes(40), "an ar archive is not accepted"),
        (b"ORC" + bytes(40), "an ORC file is not accepted"),
        (b"PAR1" + bytes(40), "a Parquet file is not accepted"),
        (b"ARROW1\0\0" + bytes(40), "an Arrow file is not accepted"),
        (b"Obj\x01" + bytes(40), "an Avro file is not accepted"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), "an HDF5 file is not accepted"),
        (b"\x80\x04\x95", "not an image"),
    ],
)
def test_what_is_refused_is_refused_by_name(data: bytes, problem: str):
    with pytest.raises(BadMedia, match=problem):
        upright_rgb(data, LIMITS)


def test_adobe_ycck_jpeg_is_converted():
    """The same file with Adobe's transform flag set: what it stores for C, M and Y is then YCbCr of their inverse."""
    plain = Image.new("CMYK", (16, 16), (60, 120, 180, 40))
    data = bytearray(encoded(plain, "JPEG", quality=100, subsampling=0))
    with Image.open(io.BytesIO(bytes(data))) as stored:
        y, cb, cr, k = (255 - level for level in stored.getpixel((0, 0)))
    at = data.index(b"Adobe")
    assert data[at + 11] == 0
    data[at + 11] = 2
    inverse = (
        y + 1.402 * (cr - 128),
        y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128),
        y + 1.772 * (cb - 128),
    )
    expected = [(255 - min(max(level, 0), 255)) * k / 255 for level in inverse]
    assert np.abs(upright_rgb(bytes(data), LIMITS)[0, 0] - expected).max() <= 3


def test_first_picture_counts():
    frames = [Image.new("RGB", (8, 6), colour) for colour in (RED, BLUE, GREEN)]
    for kind in ("GIF", "WEBP", "PNG", "TIFF", "AVIF"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        pixels = upright_rgb(data, LIMITS)
        assert pixels.shape == (6, 8, 3), kind
        assert np.abs(pixels.astype(int) - RED).max() <= 3, kind
    mpo = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert np.abs(upright_rgb(mpo, LIMITS).astype(int) - RED).max() <= 3


def test_canvas_a_gif_picture_leaves_is_white():
    data = bytearray(encoded(image("P", [0, 1], [*RED, *BLUE]), "GIF"))
    data[6:10] = struct.pack("<HH", 4, 2)  # a larger screen
    at = data.index(b",\0\0\0\0")
    data[at + 1 : at + 5] = struct.pack("<HH", 1, 1)  # the picture in its middle
    assert upright_rgb(bytes(data), LIMITS).tolist() == [
        [list(WHITE)] * 4,
        [list(WHITE), list(RED), list(BLUE), list(WHITE)],
    ]
    data[6:10] = struct.pack("<HH", 1, 1)  # a screen that the picture leaves
    assert header(bytes(data), LIMITS).width == 3


# --- broken files (B33) -------------------------------------------------------------------------------------

PROBLEMS = {
    "bad_idat_crc.png": "checksum of a PNG chunk b'IDAT' is wrong",
    "bomb_header_60000x60000.png": "60000x60000 is 3600000000 pixels; the limit is 40000000",
    "bomb_real_1bit_20000x20000.png": "20000x20000 is 400000000 pixels; the limit is 40000000",
    "bomb_sof_65500x65500.jpg": "65500x65500 is 4290250000 pixels; the limit is 40000000",
    "no_frames.gif": "the GIF has no picture",
    "svg_renamed.png": "SVG, XML or HTML is not accepted",
    "text_renamed.jpg": "not an image",
    "truncated.jpg": "truncated: the JPEG has no end-of-image",
    "truncated.webp": "truncated: the WebP",
    "truncated_header.jpg": "truncated",
    "truncated_idat.png": "truncated: the PNG ends within a chunk b'IDAT'",
    "zero_bytes.jpg": "the file is empty",
    "zero_dim.png": "the PNG has size 0x10",
}


def test_every_malformed_sample_has_an_expectation():
    assert {path.name for path in MALFORMED.iterdir()} == PROBLEMS.keys() | {"corrupt_exif.jpg"}


@pytest.mark.parametrize(("name", "problem"), PROBLEMS.items())
def test_malformed_sample_is_bad_media_at_its_header(name: str, problem: str):
    data = (MALFORMED / name).read_bytes()
    for read in (header, upright_rgb):
        with pytest.raises(BadMedia, match=problem):
            read(data, LIMITS)


PHOTO = Image.open(EXAMPLES / "chelsea.png").convert("RGB").resize((90, 60))
FILES = {
    "jpeg": encoded(PHOTO, "JPEG"),
    "progressive jpeg": encoded(PHOTO, "JPEG", progressive=True),
    "png": encoded(PHOTO, "PNG"),
    "webp": encoded(PHOTO, "WEBP", exif=exif(1)),
    "lossless webp": encoded(PHOTO, "WEBP", lossless=True),
    "gif": encoded(PHOTO, "GIF"),
    "tiff": encoded(PHOTO, "TIFF"),
    "lzw tiff": encoded(PHOTO, "TIFF", compression="tiff_lzw"),
    "bmp": encoded(PHOTO, "BMP"),
    "avif": encoded(PHOTO, "AVIF"),
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES.keys())
def test_cut_anywhere_a_file_is_bad_media_or_still_whole(data: bytes):
    whole = upright_rgb(data, LIMITS)
    assert whole.shape == (60, 90, 3)
    refused = 0
    lengths = {*range(0, 70), *range(70, len(data), len(data) // 50), *range(len(data) - 20, len(data))}
    for length in lengths:
        try:
            pixels = upright_rgb(data[:length], LIMITS)
        except BadMedia:
            refused += 1
        else:  # what is gone made no pixels: a GIF's trailer, padding, a profile behind a TIFF's strips
            assert np.array_equal(pixels, whole)
    assert refused > 0.8 * len(lengths)
    for length in (0, 20, len(data) // 2):
        with pytest.raises(BadMedia):
            upright_rgb(data[:length], LIMITS)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_whatever_bytes_come_only_bad_media_is_raised(name: str):
    data = FILES[name]
    chance = random.Random(name)
    limits = LimitsSpec(item_pixels=100_000)
    outcomes = [0, 0]
    for _ in range(250):
        broken = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.choice((chance.randrange(len(data)), chance.randrange(min(400, len(data)))))
            broken[at] = chance.choice((0, 0xFF, chance.randrange(256)))
        try:
            pixels = upright_rgb(bytes(broken), limits)
        except BadMedia:
            outcomes[1] += 1
        else:
            outcomes[0] += 1
            assert pixels.size <= 3 * 100_000
    assert all(outcomes)


@pytest.mark.parametrize("start", [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0", b"MM\0+", b"BM"])
def test_noise_after_a_signature_is_bad_media(start: bytes):
    for seed in range(100):
        noise = start + random.Random(seed).randbytes(seed * 3)
        with pytest.raises(BadMedia):
            upright_rgb(noise, LIMITS)


# --- the whole collection -----------------------------------------------------------------------------------


@pytest.mark.samples
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_whole_collection():
    root = os.environ.get("TENSORFERRY_SAMPLES")
    if not root:
        pytest.skip("TENSORFERRY_SAMPLES does not name the sample collection")
    seen = 0
    for path in sorted(Path(root, "images").iterdir()):
        if path.suffix in (".md", "") or path.is_dir():
            continue
        data = path.read_bytes()
        found = header(data, LIMITS)
        with Image.open(path) as opened:
            assert (found.width, found.height) == ImageOps.exif_transpose(opened).size, path.name
        assert upright_rgb(data, LIMITS).shape == (found.height, found.width, 3), path.name
        seen += 1
    assert seen >= 20
    for path in Path(root, "images", "malformed").iterdir():
        if path.name != "corrupt_exif.jpg":
            with pytest.raises(BadMedia):
                header(path.read_bytes(), LIMITS)
