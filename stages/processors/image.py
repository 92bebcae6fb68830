"""Decode images to upright RGB, by one policy, through Pillow. Every fault of an image is BadMedia.

JPEG, PNG, WebP, GIF, TIFF, AVIF and uncompressed BMP are accepted, recognised by content; other formats are refused by
name. Size and structure are checked before Pillow sees the file (`formats.py`), and Pillow gets a file with pixels
only. Pillow's own bomb check, which begins with a warning, is switched off and not relied on.

How a picture becomes 8-bit RGB:
- the orientation (EXIF's; XMP's if EXIF has none; AVIF's own boxes) is applied; a broken one counts as upright;
- transparent pixels (alpha channel, palette entries, a transparent colour) become white, and so does the part of the
  canvas that the first picture of a GIF or an animated WebP does not cover;
- an animation, or a file of several pictures, becomes its first picture (an animated PNG or AVIF: its still picture);
- gray of 9 to 16 bits is scaled, white to 255, and never clipped; 32-bit gray counts as 16-bit gray, and is refused if
  a value lies outside 0..65535; colour of 16 bits a channel keeps the high bytes;
- Pillow converts bilevel, gray, palette, YCbCr and CMYK (JPEG's in Adobe's inverted form, YCCK too), and CIE LAB
  through its colour management; floating-point pixels have no known white and are refused;
- colour profiles and gamma are ignored, as vision models are trained on pixels that were read in this way;
- a truncated file is refused and never filled up, whether the file ends early or its pixels do (`completeness.py` lists
  the exceptions). A PNG chunk of pixels, or a deflate TIFF, with a wrong checksum is refused;
- if a GIF or WebP is sent as an image, only its first picture is read, and the rest may be damaged or missing (but a
  WebP that is shorter than its header says is refused, as its decoder needs the whole file). In a video, all pictures
  up to the last sampled one must be whole.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.completeness import check_complete
from tensorferry.stages.processors.image_headers import tiff
from tensorferry.stages.processors.image_headers.container import UPRIGHT, Container
from tensorferry.stages.processors.image_headers.exif import ORIENTATION, exif_orientation
from tensorferry.stages.processors.image_headers.formats import read_container
from tensorferry.stages.processors.libtiff import silence_libtiff

# Set once, before any thread decodes; the limit that holds is LimitsSpec.item_pixels.
Image.MAX_IMAGE_PIXELS = None
# Its debug lines repeat a file's fields: 0.4 s for a TIFF of 16,000 strips, in a process that logs at `debug`. Its
# warnings and errors are about the file too, and the file's sender gets BadMedia.
logging.getLogger("PIL").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", module=r"PIL\.")
silence_libtiff()
# A worker's decode threads are the deployment's choice; AVIF's decoder would add one for each core to each.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

#: Their import registers them: `Image.open` must find a format without importing all of Pillow.
PLUGINS = (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

#: EXIF orientation -> the operation that makes the picture upright.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
#: Orientations whose upright width is the stored height.
SIDEWAYS = frozenset({5, 6, 7, 8})
#: BMP compressions that are accepted: none, and bit fields. Run lengths are decoded in Python, byte by byte.
BMP_PLAIN = (0, 3)
WHITE = (255, 255, 255)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The properties of an image that its header gives."""

    width: int  #: upright
    height: int  #: upright
    format: str
    mode: str  #: Pillow's, of the stored picture


def header(data: bytes | memoryview, limits: LimitsSpec) -> ImageHeader:
    """Read an image's header. No pixel is decoded, and nothing as large as the picture is allocated.

    Raises BadMedia: empty, not an image, not an accepted format, broken, or over `limits` in bytes or pixels.
    """
    container = contained(data, limits)
    with opened(container, limits) as (image, orientation):
        width, height = image.size[::-1] if orientation in SIDEWAYS else image.size
        return ImageHeader(width, height, image.format or "", image.mode)


def upright(data: bytes | memoryview, limits: LimitsSpec) -> Image.Image:
    """Decode an image by the policy above. Returns mode RGB, of the size that `header` gives; the caller's own.

    Pillow decodes and converts without Python's lock. Raises BadMedia.
    """
    container = contained(data, limits)
    with opened(container, limits) as (image, orientation):
        return decoded(container, image, orientation)


def upright_rgb(data: bytes | memoryview, limits: LimitsSpec) -> npt.NDArray[np.uint8]:
    """Decode an image by the policy above, as an array of (height, width, 3). Raises BadMedia."""
    return np.asarray(upright(data, limits))


def contained(data: bytes | memoryview, limits: LimitsSpec) -> Container:
    """Read the container of an encoded image, before Pillow does. Raises BadMedia, as `header` does."""
    nbytes = memoryview(data).nbytes
    if nbytes > limits.item_mb << 20:
        raise BadMedia(f"{nbytes} bytes; the limit is {limits.item_mb} MiB (limits.item_mb)")
    return read_container(data)


def decoded(container: Container, image: ImageFile.ImageFile, orientation: int) -> Image.Image:
    """Decode the current picture of an opened image, by the policy above. Call it inside the block of `opened`."""
    size = image.size
    image.load()
    check_complete(container, image)
    rgb = _to_rgb(image, container)
    if rgb.size != size:
        raise BadMedia(f"the picture is {rgb.width}x{rgb.height}, its header says {size[0]}x{size[1]}")
    return rgb.transpose(TURNS[orientation]) if orientation in TURNS else rgb


@contextmanager
def opened(container: Container, limits: LimitsSpec) -> Iterator[tuple[ImageFile.ImageFile, int]]:
    """Open an image that passes all checks; the result is not decoded, and comes with its orientation.

    Every exception inside the block leaves it as BadMedia.
    """
    _check_pixels(container.size, container.coded_pixels, limits)
    with explained(container.format), Image.open(io.BytesIO(container.data), formats=[container.format]) as image:
        _check_pixels(image.size, 0, limits)
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            _check_pixels(None, tiff.tile_pixels(image), limits)
            tiff.check_whole(image)
        if isinstance(image, BmpImagePlugin.BmpImageFile) and image.info["compression"] not in BMP_PLAIN:
            raise BadMedia(f"a BMP of compression {image.info['compression']} is not accepted; 0 and 3 are")
        if container.size not in (None, image.size):
            raise BadMedia(f"two readings of its header disagree: {container.size} and {image.size}")
        orientation = container.orientation
        if orientation is None:  # AVIF: Pillow has written it into EXIF of its own making
            exif = bytes(image.info.get("exif", b"")).removeprefix(b"Exif\0\0")
            orientation = exif_orientation(memoryview(exif)) or UPRIGHT
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            orientation = _left_to_turn(image)
        yield image, orientation


def _left_to_turn(image: TiffImagePlugin.TiffImageFile) -> int:
    """The orientation of a TIFF that remains after Pillow has decoded it. Pillow applies the directory's own while it
    decodes, and swaps the size at once. This removes directories inside the EXIF, which Pillow would read then."""
    exif = image.getexif()
    found = exif.get(ORIENTATION, UPRIGHT)
    for tag in [tag for tag in exif if tag != ORIENTATION or tag not in image.tag_v2]:
        del exif[tag]
    return UPRIGHT if ORIENTATION in image.tag_v2 else found


@contextmanager
def explained(kind: str) -> Iterator[None]:
    """Turn every exception inside the block, about a file of this format, into BadMedia."""
    try:
        yield
    except BadMedia:
        raise
    except UnidentifiedImageError:
        raise BadMedia(f"the file starts like {kind} but cannot be read as {kind}") from None
    except Exception as problem:  # a broken file may make a plugin raise any exception
        text = str(problem)[:200] or "no reason given"
        raise BadMedia(f"{kind}: {type(problem).__name__}: {text}") from problem


def _check_pixels(size: tuple[int, int] | None, coded_pixels: int, limits: LimitsSpec) -> None:
    """Raise BadMedia if a picture, or an intermediate picture of its decoder, is over the limit."""
    width, height = size or (0, 0)
    if width * height > limits.item_pixels:
        problem = f"{width}x{height} is {width * height} pixels"
    elif coded_pixels > limits.item_pixels:
        problem = f"its coded picture has {coded_pixels} pixels"
    else:
        return
    raise BadMedia(f"{problem}; the limit is {limits.item_pixels} (limits.item_pixels)")


def _to_rgb(image: Image.Image, container: Container) -> Image.Image:
    """A decoded picture as RGB, over white where it is transparent."""
    convert = CONVERSIONS.get(image.mode)
    if convert is None:
        raise BadMedia(f"pixels of Pillow's mode {image.mode} have no known white; use 8 or 16 bits a channel")
    if "transparency" in image.info:  # a palette entry, a gray index of GIF
        convert = _over_white
    rgb = convert(image, container)
    if container.clear is not None:
        rgb = _without(container.clear, image, rgb)
    if container.covered is not None:
        canvas = Image.new("RGB", rgb.size, WHITE)
        canvas.paste(rgb.crop(container.covered), container.covered)
        return canvas
    return rgb


def _plain(image: Image.Image, _: Container) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image, _: Container) -> Image.Image:
    rgba = image.convert("RGBA")
    canvas = Image.new("RGB", rgba.size, WHITE)
    canvas.paste(rgba, mask=rgba.getchannel("A"))
    return canvas


def _wide_gray(image: Image.Image, _: Container) -> Image.Image:
    """Gray of more than 8 bits, scaled to 8 and rounded."""
    gray = np.asarray(image)
    if image.mode == "I" and gray.size and (gray.min() < 0 or gray.max() > 0xFFFF):
        raise BadMedia("32-bit gray with values outside 0..65535 has no known white")
    white, inverted = 0xFFFF, False
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        most, inverted = tiff.white(image)
        white = 0xFFFF if image.mode == "I" else most
    scaled = (np.minimum(gray, white).astype(np.uint32) * 255 + white // 2) // white
    return Image.fromarray((255 - scaled if inverted else scaled).astype(np.uint8)).convert("RGB")


def _without(clear: tuple[int, ...], image: Image.Image, rgb: Image.Image) -> Image.Image:
    """The picture with one colour of the decoded image, a PNG's transparent colour, made white."""
    decoded = np.asarray(image.convert("L") if image.mode == "1" else image)
    found = decoded == clear[0] if decoded.ndim == 2 else (decoded == clear).all(axis=2)
    if not found.any():
        return rgb
    rgb = rgb.copy()
    rgb.paste(WHITE, mask=Image.fromarray(found))
    return rgb


Conversion = Callable[[Image.Image, Container], Image.Image]
#: Pillow's mode of a decoded picture -> its conversion to RGB; other modes are refused.
CONVERSIONS: dict[str, Conversion] = {
    **dict.fromkeys(("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB"), _plain),
    **dict.fromkeys(("LA", "PA", "RGBA"), _over_white),
    **dict.fromkeys(("I;16", "I;16L", "I;16B", "I"), _wide_gray),
}
