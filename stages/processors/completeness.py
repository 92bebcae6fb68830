"""Check that a decoded picture had all of its data. Some decoders fill up missing data without an error.

A picture that was filled up shows it at its end, so the last pixels prove most pictures whole. Only if these equal the
pixels that the decoder fills up with, an exact check follows, which costs about as much as decoding.

Some faults are not found: a JPEG that lacks less than one block of pixels, or that has lost data in its middle; a
progressive JPEG whose first scan is whole, and whose later scans are not, so that it is blurred; a JPEG with arithmetic
coding; a TIFF of JPEG's first, abandoned form (compression 6).
"""

from __future__ import annotations

import io

from PIL import Image, ImageChops, TiffImagePlugin

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image_headers import jpeg, png, tiff
from tensorferry.stages.processors.image_headers.container import Container

MID_GRAY = (127, 128)  #: libjpeg's colours where it has no data; 127 if they are inverted
NEAR = 3  #: the distance in brightness that neighbours' chroma may cause in such a pixel


def check_complete(container: Container, image: Image.Image) -> None:
    """Raise BadMedia if a loaded picture was filled up, or if a checksum of a deflate TIFF is wrong.

    The strips of a TIFF, and PNG animations, are counted before they are decoded (`tiff.check_whole`,
    `png.check_whole`). The other decoders report missing data themselves.
    """
    if container.format == "JPEG":
        found, wanted = jpeg.restarts(container.data)
        if found < wanted:
            size = f"{image.width}x{image.height}"
            raise BadMedia(f"truncated: the JPEG has {found} of the {wanted} restart markers of its {size} pixels")
        if _ends_gray(image):
            _check_longer("JPEG", jpeg.with_tails(container.data), image)
    elif isinstance(image, TiffImagePlugin.TiffImageFile):
        tiff.check_checksums(container.data, image)
        _check_longer("TIFF", tiff.with_tails(container.data), image)
    elif container.format == "PNG" and not container.several and _ends_black(image):
        png.check_whole(container.data)


def _ends_gray(image: Image.Image) -> bool:
    last = image.getpixel((image.width - 1, image.height - 1))
    if image.mode == "RGB":
        assert isinstance(last, tuple)
        red, green, blue = last
        return abs(0.299 * red + 0.587 * green + 0.114 * blue - 128) <= NEAR
    return (last[-1] if isinstance(last, tuple) else last) in MID_GRAY


def _ends_black(image: Image.Image) -> bool:
    """Whether the last row has no bit that is set. Any interlaced picture counts, since the last row of its last pass
    may be another row."""
    last = image.crop((0, image.height - 1, image.width, image.height))
    return bool(image.info.get("interlace")) or not any(last.tobytes())


def _check_longer(kind: str, longer: bytes | None, image: Image.Image) -> None:
    """Raise BadMedia if more bytes behind the file's data change the picture: they were then read as pixels."""
    if longer is None:
        return
    size = f"{image.width}x{image.height}"
    with Image.open(io.BytesIO(longer), formats=[kind]) as again:
        try:
            again.load()
        except (OSError, SyntaxError):
            raise BadMedia(f"truncated: the {kind}'s data end before its {size} pixels") from None
        differs = ImageChops.difference(image, again).getbbox(alpha_only=False)
    if differs is not None:
        raise BadMedia(f"truncated: the {kind}'s data end before its {size} pixels, at row {differs[1]}")
