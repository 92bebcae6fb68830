"""PNG files, chunk by chunk (W3C PNG, third edition)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from struct import unpack_from

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image_headers.container import UPRIGHT, Container, xmp_orientation
from tensorferry.stages.processors.image_headers.exif import exif_orientation
from tensorferry.stages.processors.image_headers.work import Work

GRAY, COLOUR, PALETTE = 0, 2, 3
#: Colour type -> (channels, possible bit depths).
_KINDS = {0: (1, (1, 2, 4, 8, 16)), 2: (3, (8, 16)), 3: (1, (1, 2, 4, 8)), 4: (2, (8, 16)), 6: (4, (8, 16))}
_KEPT = frozenset({b"IHDR", b"IDAT", b"IEND"})
_ANIMATED = _KEPT | {b"acTL", b"fcTL", b"fdAT"}
#: ImageMagick's text chunk for EXIF, in hexadecimal digits; it is older than PNG's own chunk.
_LEGACY = re.compile(rb"Raw profile type (?:exif|APP1)\0", re.IGNORECASE)
_LEGACY_NBYTES = 1 << 18  #: of its text; EXIF has at most 64 KiB
_XMP = b"XML:com.adobe.xmp\0\0\0"  #: keyword, then "not compressed"


def read_png(view: memoryview, *, animated: bool = False) -> Container:
    """Walk a PNG from IHDR to IEND and keep the chunks that make its first picture, or (animated) all pictures.

    A chunk that makes pixels is refused if its checksum is wrong, as in strict decoders; Pillow alone would show the
    pixels of a damaged IDAT. A palette picture has one palette, of 1 to 256 whole colours, before its pixels. A tRNS
    chunk out of place or of a wrong length is ignored, as in libpng. An animation becomes its default image.
    """
    wanted = _ANIMATED if animated else _KEPT
    kept: list[bytes | memoryview] = [view[:8]]
    work = Work("a PNG", len(view))
    orientations: dict[str, int | None] = {}  # by place; only the first of each place is read
    shape: tuple[int, int, int, int] | None = None
    clear: tuple[int, ...] | None = None
    colours = 0  # of the palette
    pictured = transparent = False
    position = 8
    while True:
        work.piece()
        if position + 12 > len(view):
            raise BadMedia("truncated: the PNG has no IEND chunk")
        nbytes = unpack_from(">L", view, position)[0]
        name, body = bytes(view[position + 4 : position + 8]), view[position + 8 : position + 8 + nbytes]
        end = position + 12 + nbytes
        if end > len(view):
            raise BadMedia(f"truncated: the PNG ends within a chunk {name!r}")
        if shape is None:
            if name != b"IHDR" or not _is_sound(view[position:end]):
                raise BadMedia("the PNG does not start with a sound IHDR chunk")
            shape = _read_header(body)
        elif name == b"IHDR":
            raise BadMedia("the PNG has two IHDR chunks")
        if name in wanted or name in (b"PLTE", b"tRNS"):
            if not _is_sound(view[position:end]):
                raise BadMedia(f"the checksum of a PNG chunk {name!r} is wrong")
        if name in wanted:
            if name == b"IDAT" and shape[3] == PALETTE and not colours:
                raise BadMedia("the palette PNG is without a palette (PLTE) before its pixels")
            kept.append(view[position:end])
            pictured |= name == b"IDAT"
        elif name == b"PLTE":
            if shape[3] == PALETTE:  # to other pictures it is a suggestion
                colours = _read_palette(body, colours, pictured)
                kept.append(view[position:end])
        elif name == b"tRNS":
            if transparent or pictured:
                pass
            elif shape[3] != PALETTE:
                clear, transparent = _read_clear(body, depth=shape[2], colour=shape[3]), True
            elif 0 < len(body) <= colours:
                kept.append(view[position:end])
                transparent = True
        elif (place := _place(name, body)) is not None:
            if place not in orientations:
                orientations[place] = _ORIENTATION[place](body) if _is_sound(view[position:end]) else None
        elif not name[0] & 0x20:
            raise BadMedia(f"the PNG has a critical chunk {name!r} that is not known")
        position = end
        if name == b"IEND":
            break
    if not pictured:
        raise BadMedia("the PNG has no picture")
    orientation = next((found for place in _ORIENTATION if (found := orientations.get(place))), UPRIGHT)
    return Container("PNG", b"".join(kept), shape[:2], orientation, clear=clear, several=animated)


def _is_sound(chunk: memoryview) -> bool:
    """Whether the checksum of a whole chunk, length to checksum, is right."""
    found: int = unpack_from(">L", chunk, len(chunk) - 4)[0]
    return zlib.crc32(chunk[4:-4]) == found


def _place(name: bytes, body: memoryview) -> str | None:
    """The place for an orientation that a chunk is, or None."""
    if name == b"eXIf":
        return "exif"
    if name in (b"tEXt", b"zTXt") and _LEGACY.match(body):
        return name.decode()
    return "xmp" if name == b"iTXt" and body[: len(_XMP)] == _XMP else None


def _read_header(body: memoryview) -> tuple[int, int, int, int]:
    """(width, height, bit depth, colour type) of an IHDR."""
    if len(body) != 13:
        raise BadMedia(f"a PNG header of {len(body)} bytes; 13 are right")
    width, height, depth, colour = unpack_from(">LLBB", body)
    if not (0 < width < 1 << 31 and 0 < height < 1 << 31):
        raise BadMedia(f"the PNG has size {width}x{height}; each side needs a pixel")
    if colour not in _KINDS or depth not in _KINDS[colour][1]:
        raise BadMedia(f"the PNG has colour type {colour} with {depth} bits a sample, which the format does not have")
    return width, height, depth, colour


def _read_palette(body: memoryview, colours: int, pictured: bool) -> int:
    """The number of colours of a palette. colours: those of an earlier palette. pictured: pixels came before."""
    if colours:
        raise BadMedia("the PNG has two palettes (PLTE)")
    if pictured:
        raise BadMedia("the palette (PLTE) of the PNG comes behind its pixels")
    if len(body) % 3 or not 0 < len(body) <= 3 * 256:
        raise BadMedia(f"the PNG palette has {len(body)} bytes; it must have 3 to 768, three a colour")
    return len(body) // 3


def _read_clear(body: memoryview, depth: int, colour: int) -> tuple[int, ...] | None:
    """The transparent colour of a tRNS chunk, as Pillow decodes it: gray of less than 8 bits is scaled up. Bits above
    the depth are ignored (W3C PNG, 11.3.1.1)."""
    most = (1 << depth) - 1
    if colour == GRAY and len(body) == 2:
        gray = unpack_from(">H", body)[0] & most
        return (gray * 255 // most if depth < 8 else gray,)
    if colour == COLOUR and len(body) == 6:
        if depth != 8:  # Pillow keeps only the high bytes, so near colours would become transparent too
            raise BadMedia("a PNG of 16 bits a channel with a transparent colour is not accepted; use an alpha channel")
        return tuple(sample & most for sample in unpack_from(">HHH", body))
    return None


def _legacy_orientation(body: memoryview, *, inflate: bool = False) -> int | None:
    """The orientation in a text chunk with a raw EXIF profile; None if the profile is broken."""
    found = _LEGACY.match(body)
    assert found is not None
    text = body[found.end() :]
    try:
        if inflate:  # a byte that names the compression comes first; there is only one
            text = memoryview(zlib.decompressobj().decompress(text[1:], _LEGACY_NBYTES))
        # An empty line, the profile's name, its length, then the digits.
        digits = b"".join(bytes(text[:_LEGACY_NBYTES]).split(b"\n")[3:])
        block = bytes.fromhex(digits.decode("ascii"))
    except (zlib.error, ValueError):
        return None
    return exif_orientation(memoryview(block.removeprefix(b"Exif\0\0")))


#: Place of an orientation -> its reader; the first place with an orientation counts.
_ORIENTATION: Mapping[str, Callable[[memoryview], int | None]] = {
    "exif": exif_orientation,
    "tEXt": _legacy_orientation,
    "zTXt": partial(_legacy_orientation, inflate=True),
    "xmp": xmp_orientation,
}


#: Adam7: of each pass the first column and row, and the steps between columns and rows.
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def check_whole(data: bytes | memoryview, first: int = 0, last: int = 0) -> None:
    """Inflate pictures `first` to `last` of a result of `read_png`, numbered as in Pillow, and keep nothing. Raises
    BadMedia if a picture has fewer bytes than its size needs, because Pillow would leave the rest black."""
    view = memoryview(data)
    size = unpack_from(">LL", view, 16)
    picture = _Inflated(view, 0, *size)
    position, pixels_seen = 8, False
    while position < len(view):
        nbytes, name = unpack_from(">L4s", view, position)
        body = view[position + 8 : position + 8 + nbytes]
        position += 12 + nbytes
        if name == b"fcTL" and pixels_seen:  # the next picture; one before all pixels tells of the default image
            if picture.number >= first:
                picture.check()
            if picture.number == last:
                return
            picture = _Inflated(view, picture.number + 1, *unpack_from(">LL", body, 4))
        elif name in (b"IDAT", b"fdAT"):
            pixels_seen = True
            if picture.number >= first:
                picture.add(body if name == b"IDAT" else body[4:])
    if picture.number >= first:
        picture.check()


class _Inflated:
    """One picture of a PNG, while its bytes are counted."""

    def __init__(self, view: memoryview, number: int, width: int, height: int) -> None:
        self.number = number
        self._wanted = _pixel_nbytes(width, height, view[24], view[25], view[28])
        self._found = 0
        self._stream = zlib.decompressobj()

    def add(self, piece: bytes | memoryview) -> None:
        try:
            while piece and not self._stream.eof and self._found < self._wanted:
                self._found += len(self._stream.decompress(piece, 1 << 18))
                piece = self._stream.unconsumed_tail
        except zlib.error as problem:
            raise BadMedia(f"picture {self.number} of the PNG cannot be inflated: {problem}") from None

    def check(self) -> None:
        if self._found < self._wanted:
            raise BadMedia(f"truncated: picture {self.number} of the PNG has {self._found} of its {self._wanted} bytes")


def _pixel_nbytes(width: int, height: int, depth: int, colour: int, interlaced: int) -> int:
    """Bytes of a picture's rows, with a byte for the filter before each."""
    bits = depth * _KINDS[colour][0]
    total = 0
    for left, top, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -((left - width) // across), -((top - height) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits + 7) // 8)
    return total
