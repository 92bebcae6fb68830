"""JPEG files, marker by marker (ITU-T T.81, annex B)."""

from __future__ import annotations

import re
from struct import unpack_from

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.headers.container import UPRIGHT, Container, xmp_orientation
from tensorferry.stages.processors.headers.exif import exif_orientation

#: Markers that may be walked over; a photo has a few dozen, with a long ICC profile or extended XMP hundreds.
MAX_MARKERS = 4096
#: Each scan of a progressive file goes over the whole picture, however few bytes it has, so a small file can
#: hold minutes of work. Encoders write about ten.
MAX_SCANS = 64

SOI, EOI, SOS, DHP, EXP, TEM = 0xD8, 0xD9, 0xDA, 0xDE, 0xDF, 0x01
APP0, APP1, APP14, APP15, COM = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
RESTARTS = range(0xD0, 0xD8)
#: Start of frame: all of 0xC0..0xCF but DHT, JPG and DAC.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: Baseline, extended, progressive, and the latter two with arithmetic coding: what libjpeg decodes.
DECODABLE = frozenset({0xC0, 0xC1, 0xC2, 0xC9, 0xCA})

#: The two segments that say how colours are coded.
COLOUR_SEGMENTS = frozenset({(APP0, b"JFIF\0"), (APP14, b"Adobe")})

_MARKER = re.compile(rb"\xff[^\x00\xff]")
_MARKER_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


def read_jpeg(view: memoryview) -> Container:
    """Walk a JPEG from SOI to EOI and keep tables, frame and scans, and the two segments that say how colours
    are coded (JFIF's APP0, Adobe's APP14). What comes after EOI (second pictures, films) is left behind.

    Bytes between segments that belong to none are skipped, as libjpeg does. Raises BadMedia where the end
    is missing: libjpeg would invent it and fill the rest with gray.
    """
    kept: list[bytes | memoryview] = [b"\xff\xd8"]
    size: tuple[int, int] | None = None
    exif: int | None = None
    xmp: int | None = None
    scans, position = 0, 2
    for _ in range(MAX_MARKERS):
        found = _MARKER.search(view, position)
        if not found:
            raise BadMedia("truncated: the JPEG has no end-of-image marker")
        start, position = found.span()
        marker = view[start + 1]
        if marker == EOI:
            break
        if marker in RESTARTS or marker == TEM:  # stand alone, and mean nothing here
            continue
        if marker == SOI:
            raise BadMedia("a JPEG starts anew within itself")
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
            following = _MARKER_AFTER_SCAN.search(view, end)
            if not following:
                raise BadMedia("truncated: the JPEG has no end-of-image marker")
            end = following.start()
        elif APP0 <= marker <= APP15 or marker == COM:
            label = bytes(segment[:29])
            if marker == APP1 and exif is None and label.startswith(b"Exif\0\0"):
                exif = exif_orientation(segment[6:])
            elif marker == APP1 and xmp is None and label == b"http://ns.adobe.com/xap/1.0/\0":
                xmp = xmp_orientation(segment)
            if (marker, label[:5]) not in COLOUR_SEGMENTS:
                position = end
                continue
        kept.append(view[start:end])
        position = end
    else:
        raise BadMedia(f"a JPEG of more than {MAX_MARKERS} segments is not accepted")
    if not size or not scans:
        raise BadMedia("a JPEG without a picture")
    kept.append(b"\xff\xd9")
    return Container("JPEG", b"".join(kept), size, exif or xmp or UPRIGHT)


def _read_frame(marker: int, segment: memoryview) -> tuple[int, int]:
    """(width, height) of a start-of-frame segment."""
    if marker not in DECODABLE:
        raise BadMedia(f"JPEG coding process 0x{marker:02X} (lossless or hierarchical) is not accepted")
    precision, height, width, components = unpack_from(">BHHB", segment)
    if precision != 8:
        raise BadMedia(f"JPEG of {precision} bits a sample is not accepted; 8 is")
    if components not in (1, 3, 4):
        raise BadMedia(f"JPEG of {components} components is not accepted; 1, 3 and 4 are")
    if not width or not height:  # height 0: to be told after the first scan (DNL), which libjpeg refuses too
        raise BadMedia(f"a JPEG of size {width}x{height}")
    return width, height
