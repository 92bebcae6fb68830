"""GIF and WebP files. Their headers have all that is checked."""

from __future__ import annotations

from struct import unpack_from

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image_headers.container import UPRIGHT, Container, xmp_orientation
from tensorferry.stages.processors.image_headers.exif import exif_orientation
from tensorferry.stages.processors.image_headers.work import Work


def read_gif(view: memoryview) -> Container:
    """Walk a GIF to its first picture. The canvas is the screen, or the picture if it reaches further.

    The part of the canvas that the picture does not cover is empty.
    """
    width, height, flags = unpack_from("<HHB", view, 6)
    work = Work("a GIF", len(view))
    position = 13 + table_nbytes(flags)
    while True:
        work.piece()
        kind = view[position]
        if kind == 0x2C:  # a picture
            left, top, across, down, _ = unpack_from("<HHHHB", view, position + 1)
            if not across or not down:
                raise BadMedia(f"the first picture of the GIF is {across}x{down}; each side needs a pixel")
            box = (left, top, left + across, top + down)
            size = (max(width, box[2]), max(height, box[3]))
            return Container("GIF", view, size, covered=None if box == (0, 0, *size) else box)
        if kind == 0x21:  # an extension: its kind, then blocks up to an empty one
            position = blocks_end(view, position + 2, work, steps=4)  # Pillow walks over these too, in Python
        elif kind == 0x3B:
            raise BadMedia("the GIF has no picture")
        else:
            raise BadMedia(f"the GIF has an unknown block 0x{kind:02X}")


def blocks_end(view: memoryview, position: int, work: Work, *, steps: int = 1) -> int:
    """The end, behind the empty block, of the blocks of a GIF's extension or picture that start at `position`. steps:
    work of a block."""
    for blocks in range(work.left // steps):
        nbytes = view[position]
        position += 1 + nbytes
        if not nbytes:
            work.left -= blocks * steps
            return position
    raise work.spent()


def table_nbytes(flags: int) -> int:
    """Bytes of the colour table that a flags byte announces."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def read_webp(view: memoryview) -> Container:
    """Walk a WebP's chunks (RFC 9649): the size of the canvas, which Pillow allocates on opening, and EXIF."""
    end = 8 + unpack_from("<L", view, 4)[0]
    if end > len(view):
        raise BadMedia(f"truncated: the WebP has {len(view)} bytes, and its header says {end}")
    size = _webp_size(view)
    work = Work("a WebP", len(view))
    exif: list[int | None] = []  # of the first block there is, and no other
    xmp: list[int | None] = []
    position = 12
    while position + 8 <= end:
        work.piece()
        name, nbytes = unpack_from("<4sL", view, position)
        if name == b"EXIF" and not exif:
            body = view[position + 8 : position + 8 + nbytes]
            prefixed = bytes(body[:6]) == b"Exif\0\0"  # not of the format, but some writers add it
            exif.append(exif_orientation(body[6:] if prefixed else body))
        elif name == b"XMP " and not xmp:
            xmp.append(xmp_orientation(view[position + 8 : position + 8 + nbytes]))
        elif name == b"ANMF":  # chunks again, behind 16 bytes, over which libwebp walks
            inner, last = position + 24, min(position + 8 + nbytes, end) - 8
            while inner <= last:
                work.piece()
                inner += 8 + (unpack_from("<L", view, inner + 4)[0] + 1 & ~1)
        position += 8 + nbytes + (nbytes & 1)
    return Container("WEBP", _with_alpha(view), size, next(filter(None, exif + xmp), UPRIGHT))


def _with_alpha(view: memoryview) -> bytes | memoryview:
    """Set the transparency flag of an animated WebP; without it, the uncovered part of its canvas would be black."""
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
        raise BadMedia("the WebP does not start with a picture")
    if not all(size):
        raise BadMedia(f"the WebP has size {size[0]}x{size[1]}; each side needs a pixel")
    return size
