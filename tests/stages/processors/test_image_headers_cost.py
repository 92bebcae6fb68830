"""What it costs to look at a file: for every container the dearest files that can be made, within bounds of its
length."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from tensorferry import Client
from tensorferry.codecs import messages as wire
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image import header
from tensorferry.stages.processors.image_headers.animations import read_animation
from tensorferry.stages.processors.image_headers.formats import read_container

LIMITS = LimitsSpec()
MIB = 1 << 20
CPU_S_A_MIB, MOST_CPU_S = 0.020, 0.200
TRIES = 10  #: the least of so many is what it costs; the others were disturbed
#: CPU time of `yardstick` on the machine for which the bound is, undisturbed: a core that is slower at the moment, as
#: one that is shared is, gets as much more time for a file.
YARDSTICK_S = 0.0024

#: A directory of 5,000 entries without an orientation.
ENTRIES = (
    b"II*\0\x08\0\0\0" + struct.pack("<H", 5000) + b"".join(struct.pack("<HHLL", 999 + n, 3, 1, 0) for n in range(5000))
)
#: What a search for an orientation nearly finds, again and again.
NEARLY_XMP = b"tiff:Orientatio" * 4000


def encoded(kind: str, size: tuple[int, int] = (16, 16), **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB" if kind != "GIF" else "P", size).save(file, kind, **options)
    return file.getvalue()


def filled(head: bytes, piece: bytes, tail: bytes, nbytes: int) -> bytes:
    """head and tail, and between them as many whole pieces as fit."""
    return head + piece * max(1, (nbytes - len(head) - len(tail)) // len(piece)) + tail


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">L", len(body)) + name + body + struct.pack(">L", zlib.crc32(name + body))


PNG_HEAD = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">LLBBBBB", 8, 8, 8, 0, 0, 0, 0))
PNG_PIXELS = chunk(b"IDAT", zlib.compress(bytes(72)))
PNG_END = chunk(b"IEND", b"")


def png(piece: bytes, nbytes: int) -> bytes:
    return filled(PNG_HEAD, piece, PNG_PIXELS + PNG_END, nbytes)


def apng(nbytes: int) -> bytes:
    frame = chunk(b"fcTL", struct.pack(">LLLLLHHBB", 0, 8, 8, 0, 0, 1, 10, 0, 0))
    count = min(4000, nbytes // len(frame) - 10)
    head = PNG_HEAD + chunk(b"acTL", struct.pack(">LL", count, 0))
    return (head + frame * count + PNG_PIXELS).ljust(nbytes - len(PNG_END) - 12, b"\0")[
        : len(head + frame * count + PNG_PIXELS)
    ] + PNG_END


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


JPEG = encoded("JPEG")


def jpeg(piece: bytes, nbytes: int) -> bytes:
    return filled(JPEG[:2], piece, JPEG[2:], nbytes)


def jpeg_scan(piece: bytes, nbytes: int) -> bytes:
    return filled(JPEG[:-2], piece, JPEG[-2:], nbytes)


GIF = encoded("GIF")
GIF_HEAD = 13 + (3 << (GIF[10] & 7) + 1)


def gif(piece: bytes, nbytes: int) -> bytes:
    return filled(GIF[:GIF_HEAD], piece, GIF[GIF_HEAD:], nbytes)


def gif_of_crumbs(nbytes: int) -> bytes:
    return filled(GIF[:GIF_HEAD] + b"!\xfe", b"\1x", b"\0" + GIF[GIF_HEAD:], nbytes)


def gif_of_pictures(nbytes: int) -> bytes:
    picture = GIF[GIF.index(b",", GIF_HEAD) : -1]
    return filled(GIF[:-1], b"!\xf9\4\0\1\0\0\0" + picture, b";", min(nbytes, 4000 * (len(picture) + 8)))


WEBP = encoded("WEBP", lossless=True)


def webp(piece: bytes, nbytes: int) -> bytes:
    body = filled(WEBP[8:], piece, b"", nbytes - 8)
    return b"RIFF" + struct.pack("<L", len(body)) + body


def webp_chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<L", len(body)) + body + bytes(len(body) & 1)


def webp_of_pictures(nbytes: int, within: bytes, count: int) -> bytes:
    """An animated WebP of so many pictures at most, with chunks in each."""
    head = webp_chunk(b"VP8X", bytes((2, 0, 0, 0, 15, 0, 0, 15, 0, 0))) + webp_chunk(b"ANIM", bytes(6))
    picture = webp_chunk(b"ANMF", bytes(6) + b"\x0f\0\0\x0f\0\0\x64\0\0\0" + WEBP[12:] + within)
    body = b"WEBP" + head + picture * max(1, min(count, (nbytes - 100) // len(picture)))
    return b"RIFF" + struct.pack("<L", len(body)) + body


def tiff(entries: list[tuple[int, int, int, int]], nbytes: int) -> bytes:
    known = [(256, 3, 1, 8), (257, 3, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    known += [(277, 3, 1, 1), (278, 4, 1, 8), (279, 4, 1, 64)]
    all_of_them = sorted({entry[0]: entry for entry in known + entries}.values())
    directory = b"".join(struct.pack("<HHLL", *entry) for entry in all_of_them)
    return (b"II*\0\x08\0\0\0" + struct.pack("<H", len(all_of_them)) + directory + bytes(4)).ljust(nbytes, b"\0")


def box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">L4s", 8 + len(body), name) + body


AVIF = encoded("AVIF", (64, 64))


def avif_of_items(nbytes: int, count: int, units: bytes) -> bytes:
    """Items that all lie in the same bytes."""
    brands = box(b"ftyp", b"avif" + bytes(4) + b"avifmif1")
    infe = b"".join(box(b"infe", struct.pack(">LHH4sB", 2 << 24, n, 0, b"av01", 0)) for n in range(count))
    data_at = len(brands) + 8 + 4 + 8 + 6 + len(infe) + 8 + 8 + 16 * count + 8
    iloc = struct.pack(">BBBBBBH", 0, 0, 0, 0, 0x44, 0, count)
    iloc += b"".join(struct.pack(">HHHLL", n, 0, 1, data_at, len(units)) for n in range(count))
    meta = box(b"meta", bytes(4) + box(b"iinf", bytes(4) + struct.pack(">H", count) + infe) + box(b"iloc", iloc))
    known = brands + meta
    return known + box(b"mdat", bytes(max(0, data_at - len(known) - 8)) + units).ljust(nbytes - len(known), b"\0")


def avif_with(meta: Callable[[int], bytes], nbytes: int) -> bytes:
    """An AVIF with boxes of so many bytes, at most, added at the end of its `meta` box. The pictures move."""
    start = AVIF.index(b"meta") - 4
    end = start + struct.unpack_from(">L", AVIF, start)[0]
    return avif_moved(AVIF[start + 4 : end] + meta(nbytes - len(AVIF)))


def avif_described(properties: Callable[[int], bytes], entries: Callable[[int], bytes], nbytes: int) -> bytes:
    """An AVIF with other properties of items (behind its own), and other entries that give them to items."""
    start = AVIF.index(b"meta") - 4
    end = start + struct.unpack_from(">L", AVIF, start)[0]
    whole, own = AVIF.index(b"iprp") - 4, AVIF.index(b"ipco") - 4
    whole_nbytes, own_nbytes = (struct.unpack_from(">L", AVIF, at)[0] for at in (whole, own))
    given = AVIF[own + own_nbytes : whole + whole_nbytes]
    room = nbytes - len(AVIF)
    iprp = box(b"ipco", AVIF[own + 8 : own + own_nbytes] + properties(room)) + (entries(room) or given)
    return avif_moved(AVIF[start + 4 : whole] + box(b"iprp", iprp) + AVIF[whole + whole_nbytes : end])


def avif_moved(meta: bytes) -> bytes:
    """The AVIF with another `meta` box (from its kind on), and its pictures told of at their new place."""
    start, data_at = AVIF.index(b"meta") - 4, AVIF.index(b"mdat") + 4
    before = AVIF[:start] + struct.pack(">L", 4 + len(meta))
    told, moved = (struct.pack(">L", at) for at in (data_at, len(before) + len(meta) + 8))
    locations = meta.index(b"iloc")
    meta = meta[:locations] + meta[locations:].replace(told, moved, 1)
    return before + meta + AVIF[data_at - 8 :]


UNIT = b"\x12\0"  #: an AV1 temporal delimiter, the shortest unit there is

SHAPES: Mapping[str, Callable[[int], bytes]] = {
    "png, old exif profiles": lambda n: png(
        chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n   131072\n" + b"00" * 131_000)), n
    ),
    "png, text profiles": lambda n: png(chunk(b"tEXt", b"Raw profile type APP1\0\nexif\n 9\n" + b"00" * 30_000), n),
    "png, exif": lambda n: png(chunk(b"eXIf", ENTRIES), n),
    "png, xmp": lambda n: png(chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + NEARLY_XMP), n),
    "png, one xmp": lambda n: png(chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + NEARLY_XMP * (n // 61_000)), n),
    "png, empty chunks": lambda n: png(chunk(b"teXt", b""), n),
    "png, pixels in pieces of 1 KiB": lambda n: filled(PNG_HEAD + PNG_PIXELS, chunk(b"IDAT", bytes(1024)), PNG_END, n),
    "png, pixels in one piece": lambda n: PNG_HEAD + chunk(b"IDAT", bytes(n - 200)) + PNG_END,
    "png, animated": apng,
    "jpeg, exif": lambda n: jpeg(segment(0xE1, b"Exif\0\0" + ENTRIES), n),
    "jpeg, xmp": lambda n: jpeg(segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + NEARLY_XMP), n),
    "jpeg, empty segments": lambda n: jpeg(segment(0xFE, b""), n),
    "jpeg, empty segments with junk between": lambda n: jpeg(segment(0xFE, b"") + b"j", n),
    "jpeg, fill": lambda n: jpeg(b"\xff", n),
    "jpeg, junk": lambda n: jpeg(b"\xff\0", n),
    "jpeg, a scan of zeros": lambda n: jpeg_scan(b"\xff\0", n),
    "jpeg, a scan of restarts": lambda n: jpeg_scan(b"\xff\xd0", n),
    "jpeg, tables": lambda n: jpeg(segment(0xDB, bytes(range(65))), n),
    "jpeg, many tables in a segment": lambda n: jpeg(segment(0xDB, bytes(range(65)) * 1000), n),
    "jpeg, colour segments": lambda n: jpeg(segment(0xE0, b"JFIF\0\1\1\1\0\1\0\1\0\0" + bytes(200)), n),
    "gif, crumbs": gif_of_crumbs,
    "gif, empty extensions": lambda n: gif(b"!\xfe\0", n),
    "gif, extensions of crumbs": lambda n: gif(b"!\xfe" + b"\1x" * 1000 + b"\0", n),
    "gif, a comment in large blocks": lambda n: gif(b"!\xfe" + (b"\xff" + bytes(255)) * 255 + b"\0", n),
    "gif, pictures": gif_of_pictures,
    "webp, empty chunks": lambda n: webp(webp_chunk(b"none", b""), n),
    "webp, exif": lambda n: webp(webp_chunk(b"EXIF", ENTRIES), n),
    "webp, xmp": lambda n: webp(webp_chunk(b"XMP ", NEARLY_XMP), n),
    "webp, one chunk": lambda n: webp(webp_chunk(b"none", bytes(n - 100 - len(WEBP))), n),
    "webp, chunks within a picture": lambda n: webp_of_pictures(n, webp_chunk(b"none", b"") * (n // 8 - 99), 1),
    "webp, pictures": lambda n: webp_of_pictures(n, b"", 4000),
    "tiff, xmp": lambda n: tiff([(700, 1, n - 1000, 900)], 900) + (b"tiff:Orientation='x" * (n // 19))[: n - 900],
    "tiff, a profile": lambda n: tiff([(34675, 7, n - 1000, 900)], n),
    "tiff, a text": lambda n: tiff([(270, 2, n - 1000, 900)], n),
    "tiff, many entries": lambda n: tiff([(1000 + at, 7, 4, 8) for at in range(60_000)], n),
    "tiff, entries within the bound": lambda n: tiff([(1000 + at, 7, 4, 8) for at in range(500)], n),
    "tiff, entries of the same bytes": lambda n: tiff([(1000 + at, 7, n - 1000, 8) for at in range(500)], n),
    "tiff, strips": lambda n: tiff([(273, 4, 16_000, 8), (279, 4, 16_000, 8), (257, 4, 1, 16_000), (278, 4, 1, 1)], n),
    "tiff, directories within": lambda n: tiff([(34665, 4, 1, 8), (34853, 4, 1, 8), (40965, 4, 1, 8)], n),
    "avif, a free box": lambda n: AVIF + box(b"free", bytes(n - len(AVIF) - 8)),
    "avif, empty boxes": lambda n: filled(AVIF, box(b"free", b""), b"", n),
    "avif, brands": lambda n: (
        box(b"ftyp", b"avif" + bytes(4) + b"mif1" * (n // 4 - 200)) + AVIF[AVIF.index(b"meta") - 4 :]
    ),
    "avif, items of the same bytes": lambda n: avif_of_items(n, 2000, UNIT * 1000),
    "avif, an item of units": lambda n: avif_of_items(n, 1, UNIT * (n // 2 - 2000)),
    "avif, references": lambda n: avif_with(
        lambda room: box(
            b"iref",
            struct.pack(">L", 1 << 24)
            + b"".join(box(b"cdsc", struct.pack(">LHL", 9 + at, 1, 1)) for at in range(min(10**6, room // 18 - 2))),
        ),
        n,
    ),
    "avif, references of one item": lambda n: avif_with(
        lambda room: box(
            b"iref",
            struct.pack(">L", 1 << 24)
            + b"".join(
                box(
                    b"dimg",
                    struct.pack(">LH60000L", 10**6 + at, 60_000, *range(60_000 * at + 9, 60_000 * (at + 1) + 9)),
                )
                for at in range(room // 240_100)
            ),
        ),
        n,
    ),
    "avif, a group": lambda n: avif_with(
        lambda room: box(
            b"grpl",
            box(
                b"altr",
                struct.pack(">LLL", 0, 7, room // 4 - 20) + struct.pack(f">{room // 4 - 20}L", *range(room // 4 - 20)),
            ),
        ),
        n,
    ),
    "avif, properties": lambda n: avif_described(lambda room: box(b"none", b"") * (room // 8), lambda room: b"", n),
    "avif, items with properties": lambda n: avif_described(
        lambda room: b"",
        lambda room: box(
            b"ipma",
            struct.pack(">LL", 1 << 24, room // 5) + b"".join(struct.pack(">LB", 1 + at, 0) for at in range(room // 5)),
        ),
        n,
    ),
    "avif, as many items as there may be": lambda n: avif_with(
        lambda room: box(
            b"iref", bytes(4) + b"".join(box(b"cdsc", struct.pack(">HHH", 9 + at, 1, 1)) for at in range(2000))
        ),
        n,
    ),
    "bmp": lambda n: encoded("BMP", (512, (n - 2000) // 1536)),
}


def yardstick() -> float:
    """Seconds of CPU that a fixed piece of Python takes now."""
    start = time.process_time()
    made = [(number, str(number)) for number in range(20_000)]
    assert made
    return time.process_time() - start


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected in the block: it would be that of all tests before, 0.4 s of it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def planned(data: memoryview) -> str:
    """What planning an item of this file comes to: as an image, and as a video where it may be one."""
    try:
        header(data, LIMITS)
        container = read_container(data)
        if container.format in ("GIF", "PNG", "WEBP"):
            read_animation(data, container)
    except BadMedia as problem:
        return str(problem)
    return "accepted"


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_looking_at_a_file_is_bounded_by_its_length(shape: str) -> None:
    for mib in (1, 8, 64):
        data = memoryview(SHAPES[shape](mib * MIB - 4096))
        bound = min(CPU_S_A_MIB * mib, MOST_CPU_S)
        for attempt in range(TRIES):
            with no_collection():
                slower = yardstick() / YARDSTICK_S
                start = time.process_time()
                outcome = planned(data)
                cost = (time.process_time() - start) / max(1.0, slower)
            if cost <= bound:
                break
            assert attempt < TRIES - 1, f"{mib} MiB cost {cost:.3f} s of {bound:.3f} s ({outcome})"
        refusals = ("too many pieces", "not accepted", "truncated", "without a sequence header")
        assert outcome == "accepted" or any(refusal in outcome for refusal in refusals)


def test_pillow_s_debug_lines_cost_nothing_in_a_process_that_logs_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    """They repeat all that a file says of itself."""
    caplog.set_level(logging.DEBUG)
    assert planned(memoryview(SHAPES["tiff, strips"](MIB))) == "accepted"
    assert not [record for record in caplog.records if record.name.startswith("PIL")]


def test_what_is_too_dear_is_the_files_own_fault_with_both_numbers() -> None:
    problem = planned(memoryview(SHAPES["png, empty chunks"](MIB)))
    assert problem == (
        "a PNG has too many pieces for its size: a file of this length may have 12288 chunks, segments or boxes "
        "(or 196608 GIF blocks); write it again with any image program"
    )


@pytest.mark.parametrize("shape", ["png, old exif profiles", "png, exif", "jpeg, exif", "webp, exif"])
def test_a_file_of_many_profiles_is_planned_by_its_first(shape: str) -> None:
    assert planned(memoryview(SHAPES[shape](MIB))) == "accepted"


@pytest.mark.processes
@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_a_normal_request_beside_dear_files_is_answered_and_who_is_too_dear_fails_for_good() -> None:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:  # whose path leaves room for the names of sockets
        file = Path(folder) / "deployment.yaml"
        file.write_text(
            f"name: dear\ntransport: shm\nruntime_dir: {folder}/run\nmodel: {{adapter: fingerprint}}\n"
            "tokenizer: {workers: 1, threads: 2}\npool: {budget_mb: 16}\ntelemetry: {log_level: error}\n"
        )
        deployment = load(file)
        profiles = SHAPES["png, old exif profiles"](8 * MIB)  # 25 s of CPU where each profile is looked at
        pieces = SHAPES["png, empty chunks"](8 * MIB)
        async with Supervisor.running(deployment, file), Client.connect(deployment) as client:
            dear = [client.submit_nowait([data], deadline_s=60) for data in (profiles, profiles, pieces, pieces)]
            normal = await client.submit([JPEG], deadline_s=10)
            assert isinstance(normal, wire.Result)
            good, other_good, *bad = await asyncio.gather(*dear)
        assert isinstance(good, wire.Result)
        assert isinstance(other_good, wire.Result)
        for outcome in bad:
            assert isinstance(outcome, wire.Failed)
            assert (outcome.failure.kind, outcome.failure.item, outcome.failure.retryable) == ("BadItem", 0, False)
            assert "too many pieces for its size" in outcome.failure.problem
