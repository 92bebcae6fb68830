"""PNG files, chunk by chunk (W3C PNG, third edition)."""

from __future__ import annotations

import re
import zlib
from struct import unpack_from

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.headers.container import UPRIGHT, Container, xmp_orientation
from tensorferry.stages.processors.headers.exif import exif_orientation

#: Chunks that may be walked over: enough for 64 MiB in pieces of 1 KiB.
MAX_CHUNKS = 1 << 16

GRAY, COLOUR, PALETTE = 0, 2, 3
_KEPT = frozenset({b"IHDR", b"PLTE", b"IDAT", b"IEND"})
_ANIMATED = _KEPT | {b"acTL", b"fcTL", b"fdAT"}
#: Where ImageMagick keeps EXIF, as lines of hexadecimal digits, from the days before PNG had a chunk for it.
_LEGACY = re.compile(rb"Raw profile type (?:exif|APP1)\0", re.IGNORECASE)
_LEGACY_NBYTES = 1 << 18  #: of its text; EXIF has at most 64 KiB
_XMP = b"XML:com.adobe.xmp\0\0\0"  #: keyword, then "not compressed"


def read_png(view: memoryview, *, animated: bool = False) -> Container:
    """Walk a PNG from IHDR to IEND and keep the chunks that make the first picture of it, or (animated) all.

    Policy: a chunk that makes pixels and whose checksum is wrong is refused, as strict decoders do; Pillow
    alone would show what a damaged IDAT happens to inflate to. Animations are their default image.
    """
    wanted = _ANIMATED if animated else _KEPT
    kept: list[bytes | memoryview] = [view[:8]]
    exif: int | None = None
    legacy: int | None = None
    xmp: int | None = None
    shape: tuple[int, int, int, int] | None = None
    clear: tuple[int, ...] | None = None
    pictured = False
    position = 8
    for _ in range(MAX_CHUNKS):
        if position + 12 > len(view):
            raise BadMedia("truncated: the PNG has no IEND chunk")
        nbytes = unpack_from(">L", view, position)[0]
        name, body = bytes(view[position + 4 : position + 8]), view[position + 8 : position + 8 + nbytes]
        end = position + 12 + nbytes
        if end > len(view):
            raise BadMedia(f"truncated: the PNG ends within a chunk {name!r}")
        sound = zlib.crc32(view[position + 4 : end - 4]) == unpack_from(">L", view, end - 4)[0]
        if shape is None:
            if name != b"IHDR" or not sound:
                raise BadMedia("a PNG that does not start with a sound IHDR chunk")
            shape = _read_header(body)
        elif name == b"IHDR":
            raise BadMedia("a PNG of two IHDR chunks")
        if name in wanted or (name == b"tRNS" and shape[3] == PALETTE):
            if not sound:
                raise BadMedia(f"the checksum of a PNG chunk {name!r} is wrong")
            kept.append(view[position:end])
            pictured |= name == b"IDAT"
        elif name == b"tRNS":
            if not sound:
                raise BadMedia(f"the checksum of a PNG chunk {name!r} is wrong")
            clear = _read_clear(body, depth=shape[2], colour=shape[3])
        elif name == b"eXIf" and sound:
            exif = exif_orientation(body)
        elif name in (b"tEXt", b"zTXt") and legacy is None and sound:
            legacy = _legacy_orientation(name, body)
        elif name == b"iTXt" and body[: len(_XMP)] == _XMP and sound:
            xmp = xmp_orientation(body)
        elif not name[0] & 0x20:
            raise BadMedia(f"a PNG chunk {name!r} that must be understood is not known")
        position = end
        if name == b"IEND":
            break
    else:
        raise BadMedia(f"a PNG of more than {MAX_CHUNKS} chunks is not accepted")
    if not pictured:
        raise BadMedia("a PNG without a picture")
    return Container("PNG", b"".join(kept), shape[:2], exif or legacy or xmp or UPRIGHT, clear=clear)


def _read_header(body: memoryview) -> tuple[int, int, int, int]:
    """(width, height, bit depth, colour type) of an IHDR."""
    if len(body) != 13:
        raise BadMedia(f"a PNG header of {len(body)} bytes; 13 are right")
    width, height, depth, colour = unpack_from(">LLBB", body)
    if not (0 < width < 1 << 31 and 0 < height < 1 << 31):
        raise BadMedia(f"a PNG of size {width}x{height}")
    return width, height, depth, colour


def _read_clear(body: memoryview, depth: int, colour: int) -> tuple[int, ...] | None:
    """The transparent colour of a tRNS chunk, as Pillow decodes it: gray of less than 8 bits scaled up."""
    if colour == GRAY:
        gray = unpack_from(">H", body)[0]
        return (gray * 255 // ((1 << depth) - 1) if depth < 8 else gray,)
    if colour == COLOUR:
        if depth != 8:  # Pillow keeps only the high bytes, so near colours would become transparent too
            raise BadMedia("a PNG of 16 bits a channel with a transparent colour is not accepted")
        return tuple(unpack_from(">HHH", body))
    return None


def _legacy_orientation(name: bytes, body: memoryview) -> int | None:
    """The orientation in a text chunk that holds a raw EXIF profile; None for every other or broken one."""
    found = _LEGACY.match(body)
    if not found:
        return None
    text = body[found.end() :]
    try:
        if name == b"zTXt":  # a byte that names the compression comes first; there is only one
            text = memoryview(zlib.decompressobj().decompress(text[1:], _LEGACY_NBYTES))
        # An empty line, the profile's name, its length, then the digits.
        digits = b"".join(bytes(text[:_LEGACY_NBYTES]).split(b"\n")[3:])
        block = bytes.fromhex(digits.decode("ascii"))
    except (zlib.error, ValueError):
        return None
    return exif_orientation(memoryview(block.removeprefix(b"Exif\0\0")))
