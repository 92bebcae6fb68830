"""What is known of an encoded image before Pillow sees a byte of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: An orientation of EXIF, 1..8; 1 is upright.
UPRIGHT = 1

ACCEPTED = "accepted are JPEG, PNG, WebP, GIF, TIFF, AVIF and BMP"

#: Where Adobe's XMP repeats the orientation, as an attribute or an element.
MAX_XMP_NBYTES = 1 << 18  #: of a packet that are searched
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=[\"']|>)([1-8])")


@dataclass(frozen=True, slots=True)
class Container:
    """An encoded image, understood as far as is needed to decode it safely and upright.

    `data` is a copy (or a view) of the file. But for TIFF and BMP it has nothing in it but what makes pixels: no EXIF,
    XMP, ICC profile, text, thumbnail, second picture or orientation, so that none of them can cost time, memory or a
    warning inside Pillow, and no plugin turns a picture by itself.
    """

    format: str  #: Pillow's name of the format
    data: bytes | memoryview  #: what to hand to Pillow
    size: tuple[int, int] | None  #: stored (width, height), before orientation; None: ask Pillow (AVIF, BMP, TIFF)
    orientation: int | None = UPRIGHT  #: None: ask Pillow (AVIF)
    coded_pixels: int = 0  #: the most pixels the decoder makes of one picture, where `size` does not bound it
    clear: tuple[int, ...] | None = None  #: the one opaque-mode colour that means transparent, as it decodes
    several: bool = False  #: of a PNG: all pictures of the animation are in it
    covered: tuple[int, int, int, int] | None = None  #: (left, top, right, bottom) of a picture on a larger canvas


def xmp_orientation(xmp: bytes | memoryview) -> int | None:
    """The orientation that an XMP packet repeats, or None. It counts only where EXIF has none."""
    found = _XMP_ORIENTATION.search(xmp, 0, MAX_XMP_NBYTES)
    return int(found[1]) if found else None
