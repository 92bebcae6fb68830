"""The facts about an encoded image that are known before Pillow sees a byte of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: An orientation of EXIF, 1..8; 1 is upright.
UPRIGHT = 1

ACCEPTED = "accepted are JPEG, PNG, WebP, GIF, TIFF, AVIF and BMP"

MAX_XMP_NBYTES = 1 << 18  #: of a packet that are searched
#: The places where Adobe's XMP repeats the orientation: an attribute or an element.
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=[\"']|>)([1-8])")


@dataclass(frozen=True, slots=True)
class Container:
    """The facts about an encoded image that decoding it safely and upright needs.

    `data` is a copy (or a view) of the file. Except for TIFF and BMP it has only the parts that make pixels: no EXIF,
    XMP, ICC profile, text, thumbnail, second picture or orientation. So none of them can cost time, memory or a warning
    inside Pillow, and no plugin turns a picture by itself.
    """

    format: str  #: Pillow's name of the format
    data: bytes | memoryview  #: the file for Pillow
    size: tuple[int, int] | None  #: stored (width, height), before orientation; None: ask Pillow (AVIF, BMP, TIFF)
    orientation: int | None = UPRIGHT  #: None: ask Pillow (AVIF)
    coded_pixels: int = 0  #: the most pixels of one decoded picture, if `size` does not bound them
    clear: tuple[int, ...] | None = None  #: the transparent colour of a mode without alpha, as it decodes
    several: bool = False  #: of a PNG: it has all pictures of the animation
    covered: tuple[int, int, int, int] | None = None  #: (left, top, right, bottom) of a picture on a larger canvas


def xmp_orientation(xmp: bytes | memoryview) -> int | None:
    """The orientation in an XMP packet, or None. It counts only if EXIF has none."""
    found = _XMP_ORIENTATION.search(xmp, 0, MAX_XMP_NBYTES)
    return int(found[1]) if found else None
