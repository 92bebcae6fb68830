"""JPEG files, marker by marker (ITU-T T.81, annex B)."""

from __future__ import annotations

from struct import unpack_from

import numpy as np

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image_headers.container import UPRIGHT, Container, xmp_orientation
from tensorferry.stages.processors.image_headers.exif import exif_orientation
from tensorferry.stages.processors.image_headers.work import Work

#: Each scan of a progressive file goes over the whole picture, however few bytes it has, so a small file can
#: hold minutes of work. Encoders write about ten.
MAX_SCANS = 64

SOI, EOI, SOS, DQT, DRI, DHP, EXP, TEM = 0xD8, 0xD9, 0xDA, 0xDB, 0xDD, 0xDE, 0xDF, 0x01
APP0, APP1, APP14, APP15, COM = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
RESTARTS = range(0xD0, 0xD8)
ARITHMETIC = frozenset({0xC9, 0xCA})
#: Bytes that a whole scan never reads, and that a short scan decodes as noise.
TAIL = bytes((7 * at * at + 31 * at + 90) % 251 + 1 for at in range(509))
#: Start of frame: all of 0xC0..0xCF but DHT, JPG and DAC.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: Baseline, extended, progressive, and the latter two with arithmetic coding: what libjpeg decodes.
DECODABLE = frozenset({0xC0, 0xC1, 0xC2, 0xC9, 0xCA})

#: The two segments that say how colours are coded.
COLOUR_SEGMENTS = frozenset({(APP0, b"JFIF\0"), (APP14, b"Adobe")})

#: Bytes that are searched for a marker at once: they and their masks fit in a core's cache.
_BLOCK = 1 << 16
_TABLE_PIECES = 4  #: of work, for Pillow to read a segment, or one of its quantization tables
_SEARCH_PIECES = 8  #: of work, to search if no marker stands at the position


def read_jpeg(view: memoryview) -> Container:
    """Walk a JPEG from SOI to EOI and keep tables, frame and scans, and the two segments that say how colours
    are coded (JFIF's APP0, Adobe's APP14). Data behind EOI (second pictures, films) are dropped.

    Stray bytes between segments are skipped, as in libjpeg. Raises BadMedia if the end is missing, because libjpeg
    would add it and fill the rest with gray.
    """
    kept: list[bytes | memoryview] = [b"\xff\xd8"]
    size: tuple[int, int] | None = None
    work = Work("a JPEG", len(view))
    exif: list[int | None] = []  # of the first block there is, and no other
    xmp: list[int | None] = []
    scans, position = 0, 2
    while True:
        work.piece()
        start = _marker(view, position, work)
        position = start + 2
        marker = view[start + 1]
        if marker == EOI:
            break
        if marker in RESTARTS or marker == TEM:  # stand alone, and mean nothing here
            continue
        if marker == SOI:
            raise BadMedia("the JPEG has a second start-of-image marker")
        end = position + unpack_from(">H", view, position)[0]
        segment = view[position + 2 : end]
        if end > len(view):
            raise BadMedia("truncated: a JPEG segment runs over the end of the file")
        if marker in FRAMES or marker in (DHP, EXP):
            if size:
                raise BadMedia("a JPEG of several frames is not accepted")
            size = _read_frame(marker, segment)
        elif marker == SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise BadMedia(f"a JPEG of more than {MAX_SCANS} scans is not accepted")
            end = _marker(view, end, work, in_scan=True)
        elif APP0 <= marker <= APP15 or marker == COM:
            label = bytes(segment[:29])
            if marker == APP1 and not exif and label.startswith(b"Exif\0\0"):
                exif.append(exif_orientation(segment[6:]))
            elif marker == APP1 and not xmp and label == b"http://ns.adobe.com/xap/1.0/\0":
                xmp.append(xmp_orientation(segment))
            if (marker, label[:5]) not in COLOUR_SEGMENTS:
                position = end
                continue
        if not scans:  # Pillow reads what comes before the pixels in Python; a table is 65 bytes
            work.piece(_TABLE_PIECES * (1 + len(segment) // 65 if marker == DQT else 1))
        kept.append(view[start:end])
        position = end
    if not size or not scans:
        raise BadMedia("the JPEG has no picture")
    kept.append(b"\xff\xd9")
    return Container("JPEG", b"".join(kept), size, next(filter(None, exif + xmp), UPRIGHT))


def _marker(view: memoryview, position: int, work: Work, *, in_scan: bool = False) -> int:
    """The start of the next marker: 0xFF with a byte behind it that is neither 0 nor 0xFF. in_scan: restart markers are
    part of the scan. Raises BadMedia if there is none."""
    size = 512
    while position + 1 < len(view):
        code = view[position + 1]
        if view[position] == 0xFF and 0 < code < 0xFF and not (in_scan and code in RESTARTS):
            return position  # segments stand side by side
        if size == 512:
            work.piece(_SEARCH_PIECES)
        block = np.frombuffer(view[position : position + size + 1], np.uint8)
        following = block[1:]
        found = (block[:-1] == 0xFF) & (following != 0) & (following != 0xFF)
        if in_scan:
            found &= (following & 0xF8) != RESTARTS.start
        first = int(found.argmax())
        if found[first]:
            return position + first
        position, size = position + size, _BLOCK
    raise BadMedia("truncated: the JPEG has no end-of-image marker")


def _read_frame(marker: int, segment: memoryview) -> tuple[int, int]:
    """(width, height) of a start-of-frame segment."""
    if marker not in DECODABLE:
        raise BadMedia(f"JPEG coding process 0x{marker:02X} (lossless or hierarchical) is not accepted")
    precision, height, width, components = unpack_from(">BHHB", segment)
    if precision != 8:
        raise BadMedia(f"JPEG of {precision} bits a sample is not accepted; 8 is")
    if components not in (1, 3, 4):
        raise BadMedia(f"JPEG of {components} components is not accepted; 1, 3 and 4 are")
    if not width or not height:  # height 0: it follows after the first scan (DNL), and libjpeg refuses that too
        raise BadMedia(f"the JPEG has size {width}x{height}; each side needs a pixel")
    return width, height


def with_tails(data: bytes | memoryview) -> bytes | None:
    """Add meaningless bytes behind every scan of a result of `read_jpeg`, or of a strip of a TIFF. It decodes to the
    same picture exactly if every scan has all of its data. None: unknown, because an arithmetic scan may omit its end.
    Raises BadMedia if the end is missing."""
    view = memoryview(data)
    work = Work("a JPEG", len(view))
    pieces: list[bytes | memoryview] = [view[:2]]
    position = 2
    while True:
        position = _marker(view, position, work)
        marker = view[position + 1]
        if marker == EOI:
            break
        if marker in ARITHMETIC:
            return None
        end = position + 2 + unpack_from(">H", view, position + 2)[0]
        if marker == SOS:
            end = _marker(view, end, work, in_scan=True)
        pieces.append(view[position:end])
        if marker == SOS:
            pieces.append(TAIL)
        position = end
    return b"".join((*pieces, view[position:]))


def restarts(data: bytes | memoryview) -> tuple[int, int]:
    """The number of restart markers in the first scan of a result of `read_jpeg`, and the number that its size needs;
    (0, 0) if it needs none, or if the scan lacks components."""
    view = memoryview(data)
    work, position, interval, units, components = Work("a JPEG", len(view)), 2, 0, 0, 0
    while view[position + 1] != EOI:
        marker, body = view[position + 1], view[position + 4 : position + 2 + unpack_from(">H", view, position + 2)[0]]
        position += 4 + len(body)
        if marker == DRI:
            (interval,) = unpack_from(">H", body)
        elif marker in FRAMES:
            height, width, components = unpack_from(">HHB", body, 1)
            factors = [body[at] for at in range(7, 6 + 3 * components, 3)]
            most = [max(factor >> 4 for factor in factors), max(factor & 15 for factor in factors)]
            across, down = (8, 8) if components == 1 else (8 * most[0], 8 * most[1])
            units = -(-width // across) * -(-height // down)
        elif marker == SOS:
            if not interval or body[0] != components:
                return 0, 0
            scan = np.frombuffer(view[position : _marker(view, position, work, in_scan=True)], np.uint8)
            found = np.count_nonzero((scan[:-1] == 0xFF) & ((scan[1:] & 0xF8) == RESTARTS.start))
            return int(found), -(-units // interval) - 1
    return 0, 0
