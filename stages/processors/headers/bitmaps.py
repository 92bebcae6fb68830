"""BMP, GIF and WebP files: their headers say all there is to check."""

from __future__ import annotations

from struct import unpack_from

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.headers.container import UPRIGHT, Container, xmp_orientation
from tensorferry.stages.processors.headers.exif import exif_orientation

#: Blocks before the first picture of a GIF, and chunks of a WebP; Pillow walks a GIF's one by one, in Python.
MAX_BLOCKS = 1 << 16

#: BMP compression -> whether it is accepted; the rest are run lengths (decoded in Python, byte by byte),
#: or a JPEG or PNG inside.
_BMP_PLAIN = {0: "none", 3: "bit fields"}


def read_bmp(view: memoryview) -> Container:
    """Read a BMP's header (OS/2's of 12 bytes, or Windows's)."""
    (header_nbytes,) = unpack_from("<L", view, 14)
    if header_nbytes == 12:
        width, height = unpack_from("<HH", view, 18)
    else:
        width, height = unpack_from("<ll", view, 18)
        (compression,) = unpack_from("<L", view, 30)
        if compression not in _BMP_PLAIN:
            raise BadMedia(f"a BMP of compression {compression} is not accepted; 0 and 3 are")
    if width < 1 or not height:
        raise BadMedia(f"a BMP of size {width}x{height}")
    return Container("BMP", view, (width, abs(height)))  # a negative height: rows from the top


def read_gif(view: memoryview) -> Container:
    """Walk a GIF to its first picture. The canvas is the screen, or the picture where that reaches further.

    What the picture does not cover of the canvas is empty.
    """
    width, height, flags = unpack_from("<HHB", view, 6)
    position = 13 + table_nbytes(flags)
    for _ in range(MAX_BLOCKS):
        kind = view[position]
        if kind == 0x2C:  # a picture
            left, top, across, down, _ = unpack_from("<HHHHB", view, position + 1)
            if not across or not down:
                raise BadMedia(f"a GIF whose first picture is {across}x{down}")
            box = (left, top, left + across, top + down)
            size = (max(width, box[2]), max(height, box[3]))
            return Container("GIF", view, size, covered=None if box == (0, 0, *size) else box)
        if kind == 0x21:  # an extension: its kind, then blocks up to an empty one
            position, _ = blocks_end(view, position + 2)
        elif kind == 0x3B:
            raise BadMedia("a GIF without a picture")
        else:
            raise BadMedia(f"a GIF with an unknown block 0x{kind:02X}")
    raise BadMedia(f"a GIF of more than {MAX_BLOCKS} blocks before its first picture is not accepted")


def blocks_end(view: memoryview, position: int) -> tuple[int, int]:
    """Where the blocks of a GIF's extension or picture that start at `position` end, behind the empty one; and how many
    they are."""
    for blocks in range(1, MAX_BLOCKS + 1):
        nbytes = view[position]
        position += 1 + nbytes
        if not nbytes:
            return position, blocks
    raise BadMedia(f"a GIF extension or picture of more than {MAX_BLOCKS} blocks is not accepted")


def table_nbytes(flags: int) -> int:
    """Bytes of the colour table that a flags byte announces."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def read_webp(view: memoryview) -> Container:
    """Walk a WebP's chunks (RFC 9649): the size of the canvas, which Pillow allocates on opening, and EXIF."""
    end = 8 + unpack_from("<L", view, 4)[0]
    if end > len(view):
        raise BadMedia("truncated: the WebP ends before it says")
    size = _webp_size(view)
    exif: int | None = None
    xmp: int | None = None
    position = 12
    for _ in range(MAX_BLOCKS):
        if position + 8 > end:
            return Container("WEBP", _with_alpha(view), size, exif or xmp or UPRIGHT)
        name, (nbytes,) = bytes(view[position : position + 4]), unpack_from("<L", view, position + 4)
        body = view[position + 8 : position + 8 + nbytes]
        if name == b"EXIF":
            prefixed = bytes(body[:6]) == b"Exif\0\0"  # not of the format, but some writers add it
            exif = exif_orientation(body[6:] if prefixed else body)
        elif name == b"XMP ":
            xmp = xmp_orientation(body)
        position += 8 + nbytes + (nbytes & 1)
    raise BadMedia(f"a WebP of more than {MAX_BLOCKS} chunks is not accepted")


def _with_alpha(view: memoryview) -> bytes | memoryview:
    """An animated WebP made to say that it has transparency: what its pictures leave of the canvas is black if not."""
    if bytes(view[12:16]) != b"VP8X" or not view[20] & 0x02 or view[20] & 0x10:
        return view
    return b"".join((view[:20], bytes([view[20] | 0x10]), view[21:]))


def _webp_size(view: memoryview) -> tuple[int, int]:
    """(width, height) of the canvas, from the first chunk."""
    kind = bytes(view[12:16])
    if kind == b"VP8 " and bytes(view[23:26]) == b"\x9d\x01\x2a":
        width, height = unpack_from("<HH", view, 26)
        size = (width & 0x3FFF, height & 0x3FFF)
    elif kind == b"VP8L" and view[20] == 0x2F:
        (bits,) = unpack_from("<L", view, 21)
        size = ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    elif kind == b"VP8X":
        across, down = (int.from_bytes(view[at : at + 3], "little") for at in (24, 27))
        size = (across + 1, down + 1)
    else:
        raise BadMedia("a WebP that starts with no picture")
    if not all(size):
        raise BadMedia(f"a WebP of size {size[0]}x{size[1]}")
    return size
