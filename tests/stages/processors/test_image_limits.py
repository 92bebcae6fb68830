"""Files that ask for more than they are worth (B31, B32): refused for little, in a process that has no more to give."""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors import image as image_module
from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image import header, upright, upright_rgb
from tensorferry.stages.processors.image_headers.formats import read_container

MALFORMED = Path(__file__).parents[2] / "data" / "malformed"
LIMITS = LimitsSpec()

#: Reads every file of a folder with 128 MiB of address space to spare, and says what came of each.
CHILD = """
import json, resource, sys, time
from pathlib import Path
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image import header, upright

def peak_mib():  # not ru_maxrss, which begins at the peak of the process that started this one
    Path("/proc/self/clear_refs").write_text("5")  # from here on
    return reached_mib()

def reached_mib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

def address_space():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

files = {path.name: path.read_bytes() for path in Path(sys.argv[1]).iterdir()}
resource.setrlimit(resource.RLIMIT_AS, (address_space() + (128 << 20),) * 2)
outcomes = {}
for name, data in files.items():
    before, start, problems = peak_mib(), time.process_time(), []
    for read in (header, upright):
        try:
            read(data, LimitsSpec())
            problems.append("accepted")
        except BadMedia as problem:
            problems.append(str(problem))
    outcomes[name] = [problems, time.process_time() - start, reached_mib() - before]
json.dump(outcomes, sys.stdout)
"""


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">L", len(body)) + name + body + struct.pack(">L", zlib.crc32(name + body))


SMALL = Image.new("RGB", (16, 16), (200, 100, 50))


def patched(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def png_with(*chunks: bytes) -> bytes:
    data = encoded(SMALL, "PNG")
    return data[:33] + b"".join(chunks) + data[33:]


def deflated(mib: int) -> bytes:
    """So many MiB of zeros as a zlib stream, made without holding them."""
    squeeze = zlib.compressobj()
    return b"".join(squeeze.compress(bytes(1 << 20)) for _ in range(mib)) + squeeze.flush()


def tiff_of(entries: list[tuple[int, int, int, int]], body: bytes = b"", count: int | None = None) -> bytes:
    """A little-endian TIFF of (tag, type, count, value or offset); the body follows the directory."""
    table = b"".join(struct.pack("<HHLL", *entry) for entry in sorted(entries))
    return b"II*\0" + struct.pack("<LH", 8, len(entries) if count is None else count) + table + bytes(4) + body


def gray_tiff(width: int, height: int, *others: tuple[int, int, int, int], body: bytes = b"") -> bytes:
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1)]
    return tiff_of([*tags, *others], body)


def webp_animation() -> bytes:
    return encoded(SMALL, "WEBP", save_all=True, append_images=[Image.new("RGB", (16, 16))])


def jpeg_of_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is there `count` times."""
    data = encoded(SMALL, "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + b"\xff\xd9"


def bombs() -> dict[str, tuple[bytes, str]]:
    """What it is -> the file, and what its refusal says."""
    too_large = r"is \d+ pixels; the limit is 40000000"
    jpeg = encoded(SMALL, "JPEG")
    gif = encoded(SMALL.convert("P"), "GIF")
    webp = encoded(SMALL, "WEBP")
    lossless = encoded(SMALL, "WEBP", lossless=True)
    bmp = encoded(SMALL, "BMP")
    zeros = deflated(512)
    many = 60_000
    overlapping = [(1000 + n, 1, 1 << 20, 0) for n in range(many)]
    strips = 1 << 20
    exif = (
        b"II*\0"
        + struct.pack("<LH", 8, 5000)
        + b"".join(struct.pack("<HHLL", 1000 + n, 1, 60_000, 0) for n in range(5000))
    )
    app1 = b"".join(
        b"\xff\xe1" + struct.pack(">H", 8 + len(exif[at : at + 60_000])) + b"Exif\0\0" + exif[at : at + 60_000]
        for at in range(0, len(exif), 60_000)
    )
    return {
        "sample header.png": ((MALFORMED / "bomb_header_60000x60000.png").read_bytes(), too_large),
        "sample real.png": ((MALFORMED / "bomb_real_1bit_20000x20000.png").read_bytes(), too_large),
        "sample sof.jpg": ((MALFORMED / "bomb_sof_65500x65500.jpg").read_bytes(), too_large),
        "gif, huge screen": (patched(gif, 6, struct.pack("<HH", 65535, 65535)), too_large),
        "gif, huge picture on a small screen": (
            patched(gif, gif.index(b",\0\0\0\0") + 5, struct.pack("<HH", 65535, 65535)),
            too_large,
        ),
        "gif, picture far off the screen": (
            patched(gif, gif.index(b",\0\0\0\0") + 1, struct.pack("<HH", 65000, 65000)),
            too_large,
        ),
        "gif, blocks without end": (
            b"GIF89a" + struct.pack("<HHBBB", 16, 16, 0, 0, 0) + b"!\xfe" + b"\1x" * 10_000_000,
            "too many pieces for its size",
        ),
        "webp, huge lossy": (patched(webp, 26, struct.pack("<HH", 16383, 16383)), too_large),
        "webp, huge lossless": (patched(lossless, 21, struct.pack("<L", (1 << 28) - 1)), too_large),
        "webp, huge canvas": (patched(webp_animation(), 24, b"\xff\xff\0\xff\xff\0"), too_large),
        "bmp, huge": (patched(bmp, 18, struct.pack("<ll", 100_000, 100_000)), too_large),
        "bmp, huge from the top": (patched(bmp, 18, struct.pack("<ll", 100_000, -100_000)), too_large),
        "bmp, run lengths": (patched(bmp, 30, struct.pack("<L", 1)), "BMP of compression 1"),
        "tiff, huge": (gray_tiff(100_000, 100_000, (273, 4, 1, 8), (279, 4, 1, 1)), too_large),
        "tiff, huge tile": (
            gray_tiff(16, 16, (322, 4, 1, 100_000), (323, 4, 1, 100_000), (324, 4, 1, 8), (325, 4, 1, 9)),
            "coded picture has 10000000000 pixels",
        ),
        "tiff, tags that share their bytes": (tiff_of(overlapping, bytes(1 << 20)), "directory of 60000 entries"),
        "tiff, strips without end": (
            gray_tiff(1000, 1000, (273, 4, strips, 8), (279, 4, strips, 8), body=bytes(4 * strips)),
            f"{strips} values of tag 273",
        ),
        "tiff, entries that are not there": (tiff_of([], count=65535), "directory of 65535 entries"),
        "jpeg, scans without end": (jpeg_of_scans(5000), "more than 64 scans"),
        "jpeg, segments without end": (
            jpeg[:2] + b"\xff\xfe\0\2" * 1_000_000 + jpeg[2:],
            "too many pieces for its size",
        ),
        "jpeg, two frames": (
            jpeg[: jpeg.index(b"\xff\xc0")] + b"\xff\xc0\0\x0b\x08\xff\xff\xff\xff\1\1\x11\0" + jpeg[2:],
            "several frames",
        ),
        "png, chunks without end": (png_with(chunk(b"teXt", b"") * 1_000_000), "too many pieces for its size"),
        "png, two headers": (
            png_with(chunk(b"IHDR", struct.pack(">LLBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))),
            "two IHDR",
        ),
        # These are harmless once what makes no pixels is left out, so they are pictures like any other.
        "png, text of half a gigabyte": (png_with(chunk(b"zTXt", b"k\0\0" + zeros)), "accepted"),
        "png, profile of half a gigabyte": (png_with(chunk(b"iCCP", b"k\0\0" + zeros)), "accepted"),
        "png, old exif of half a gigabyte": (
            png_with(chunk(b"zTXt", b"Raw profile type exif\0\0" + zeros)),
            "accepted",
        ),
        "png, exif of shared bytes": (png_with(chunk(b"eXIf", tiff_of(overlapping, bytes(1 << 20)))), "accepted"),
        "jpeg, exif of shared bytes": (jpeg[:2] + app1 + jpeg[2:], "accepted"),
        "jpeg, junk without end": (jpeg[:20] + bytes(20_000_000) + jpeg[20:], "accepted"),
        "jpeg, fill without end": (jpeg[:2] + b"\xff" * 20_000_000 + jpeg[2:], "accepted"),
        "png, more picture than it has": (
            encoded(SMALL, "PNG")[:33] + chunk(b"IDAT", zeros) + chunk(b"IEND", b""),
            "accepted",
        ),
    }


@pytest.mark.processes
def test_bombs_cost_little_time_and_memory(tmp_path: Path):
    expected = bombs()
    for name, (data, _) in expected.items():
        (tmp_path / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, timeout=100, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert outcomes.keys() == expected.keys()
    for name, (problems, cpu_s, grown_mib) in outcomes.items():
        for problem in problems:
            assert re.search(expected[name][1], problem), (name, problem)
        assert cpu_s < 2, (name, cpu_s)
        assert grown_mib < 16, (name, grown_mib)
    assert not done.stderr


@pytest.mark.processes
def test_memory_that_does_not_suffice_is_bad_media(tmp_path: Path):
    """A picture within the limits, in a process too small for it."""
    (tmp_path / "large.png").write_bytes(encoded(Image.new("L", (7000, 5500)), "PNG"))
    child = CHILD.replace("128 << 20", "16 << 20")
    done = subprocess.run(
        [sys.executable, "-c", child, str(tmp_path)], capture_output=True, timeout=60, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    problems, *_ = json.loads(done.stdout)["large.png"]
    assert problems[0] == "accepted"
    assert "MemoryError" in problems[1]


# --- AVIF, whose container may lie about its picture --------------------------------------------------------


def with_ispe(data: bytes, width: int, height: int) -> bytes:
    return patched(data, data.index(b"ispe") + 8, struct.pack(">LL", width, height))


@pytest.mark.parametrize("sequence", [False, True])
def test_avif_is_measured_by_what_its_decoder_makes(sequence: bool):
    """1000x1000 are coded; the container says 64x64. An animation's headers are of AV1's long form."""
    limits = LimitsSpec(item_pixels=500_000)
    large = Image.new("RGB", (1000, 1000), (1, 2, 3))
    more = {"save_all": True, "append_images": [large]} if sequence else {}
    data = with_ispe(encoded(large, "AVIF", speed=10, **more), 64, 64)
    assert upright(data, LIMITS).size == (64, 64)  # Pillow alone would go along
    with pytest.raises(BadMedia, match="coded picture has 1000000 pixels; the limit is 500000"):
        header(data, limits)


def test_avif_that_would_be_blown_up_is_refused():
    data = with_ispe(encoded(SMALL, "AVIF"), 16_000, 16_000)
    with pytest.raises(BadMedia, match="16000x16000 is 256000000 pixels"):
        header(data, LIMITS)


def test_avif_items_are_all_measured():
    """Here the alpha plane is the large one."""
    data = encoded(Image.new("RGBA", (64, 64), (1, 2, 3, 100)), "AVIF", speed=10)
    assert header(data, LimitsSpec(item_pixels=4096)).mode == "RGBA"
    assert data.count(b"av01") >= 2
    large = encoded(Image.new("L", (1000, 1000), 100), "AVIF", speed=10)
    picture = large[large.rindex(b"mdat") + 4 :]
    iloc = data.index(b"iloc")
    # Version 0, offsets and lengths of 4 bytes, each item: id, reference, extents, offset, length.
    assert data[iloc + 8 : iloc + 12] == b"\x44\0\0\2"
    swapped = patched(data, iloc + 12 + 14 + 6, struct.pack(">LL", len(data) + 8, len(picture)))
    swapped += struct.pack(">L4s", 8 + len(picture), b"mdat") + picture
    with pytest.raises(BadMedia, match="coded picture has 1000000 pixels"):
        header(swapped, LimitsSpec(item_pixels=500_000))


@pytest.mark.parametrize("size", [(1, 1), (64, 64), (65, 33), (1000, 17), (255, 256), (300, 1025)])
@pytest.mark.parametrize("subsampling", ["4:2:0", "4:4:4"])
def test_avif_at_the_limit_is_accepted(size: tuple[int, int], subsampling: str):
    data = encoded(Image.new("RGB", size, (9, 9, 9)), "AVIF", speed=10, subsampling=subsampling)
    pixels = size[0] * size[1]
    assert upright_rgb(data, LimitsSpec(item_pixels=pixels)).shape == (size[1], size[0], 3)
    if pixels > 1:
        with pytest.raises(BadMedia, match="the limit is"):
            header(data, LimitsSpec(item_pixels=pixels - 1))


def test_two_readings_of_a_size_must_agree(monkeypatch: pytest.MonkeyPatch):
    data = encoded(SMALL, "PNG")
    read = read_container(data)
    monkeypatch.setattr(image_module, "read_container", lambda _: replace(read, size=(1, 2)))
    with pytest.raises(BadMedia, match=r"disagree: \(1, 2\) and \(16, 16\)"):
        header(data, LIMITS)


def test_a_bmp_of_a_height_that_two_programs_read_differently_is_over_the_limit():
    """0xFE000000 is -2^25 for Windows, but Pillow takes only 0xFF in front for a sign."""
    data = patched(encoded(SMALL, "BMP"), 18, struct.pack("<LL", 1, 0xFE00_0000))
    with pytest.raises(BadMedia, match="1x4261412864 is 4261412864 pixels"):
        header(data, LIMITS)


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_pixel_limit_is_exact(kind: str):
    data = encoded(Image.new("RGB", (40, 30)), kind)
    assert header(data, LimitsSpec(item_pixels=1200)).width == 40
    with pytest.raises(BadMedia, match=r"1200 pixels; the limit is 1199 \(limits.item_pixels\)"):
        header(data, LimitsSpec(item_pixels=1199))


def test_byte_limit():
    data = encoded(SMALL, "PNG") + bytes(1 << 20)
    assert header(data, LimitsSpec(item_mb=2))
    with pytest.raises(BadMedia, match=r"the limit is 1 MiB \(limits.item_mb\)"):
        header(data, LimitsSpec(item_mb=1))


def test_byte_limit_is_exact():
    small = encoded(SMALL, "PNG")
    assert header(small + bytes((1 << 20) - len(small)), LimitsSpec(item_mb=1))
    with pytest.raises(BadMedia, match=f"{(1 << 20) + 1} bytes; the limit is 1 MiB"):
        header(small + bytes((1 << 20) + 1 - len(small)), LimitsSpec(item_mb=1))


def test_limit_above_pillows_own_holds(recwarn: pytest.WarningsRecorder):
    """Pillow warns above 89 million pixels and refuses above 179 million; neither is our limit."""
    data = encoded(Image.new("1", (20_000, 10_000)), "PNG")
    assert header(data, LimitsSpec(item_pixels=200_000_000)).width == 20_000
    assert not recwarn.list
