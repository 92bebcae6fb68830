"""Encoded images to upright RGB, by one policy, through Pillow; whatever is wrong with them is BadMedia.

What is accepted: JPEG, PNG, WebP, GIF, TIFF, AVIF, uncompressed BMP; told by content, the others refused by
name. Size and structure are checked before Pillow sees the file (`formats.py`), and what it is handed holds
pixels only; Pillow's own bomb check, a warning at first, is switched off and not relied on.

How a picture becomes 8-bit RGB:
- orientation (EXIF's; XMP's where EXIF has none; AVIF's own boxes) is applied; a broken one counts as upright;
- transparency (alpha channel, palette entries, a transparent colour) is laid over white, and so is what the
  first picture of a GIF or an animated WebP leaves of its canvas;
- of an animation or a file of several pictures, the first (of an animated PNG or AVIF, its still picture);
- gray of 9 to 16 bits is scaled, white to 255, never clipped; 32-bit gray is taken for 16-bit gray, and
  refused when a value lies outside 0..65535; colour of 16 bits a channel keeps the high bytes;
- bilevel, gray, palette, YCbCr and CMYK (JPEG's in Adobe's inverted form, YCCK too) are converted by Pillow,
  CIE LAB through its colour management; floating-point pixels have no known white and are refused;
- colour profiles and gamma are ignored, as vision models are trained on pixels read that way;
- a truncated file is refused, never filled up: one that ends early, and one whose pixels end before its size says so
  (`completeness.py`, with what is not found out). A PNG chunk of pixels with a wrong checksum is refused;
- of a GIF or WebP that is sent as an image, what lies behind its first picture is not looked at, and may be damaged or
  missing (but a WebP that is shorter than it says is refused, as its decoder wants the whole file). Sent as a video,
  all pictures up to the last one that is looked at must be whole.
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

#: Importing these is what registers them: `Image.open` must find a format without importing all of Pillow.
PLUGINS = (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

#: EXIF orientation -> what makes the picture upright.
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
    """What is known of an image without decoding it."""

    width: int  #: upright
    height: int  #: upright
    format: str
    mode: str  #: Pillow's, of the stored picture


def header(data: bytes | memoryview, limits: LimitsSpec) -> ImageHeader:
    """Read an image's header. No pixel is decoded, nothing of the picture's size is allocated.

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
    """The container of an encoded image. Raises BadMedia, as `header`, for what Pillow is not asked about."""
    nbytes = memoryview(data).nbytes
    if nbytes > limits.item_mb << 20:
        raise BadMedia(f"{nbytes} bytes; the limit is {limits.item_mb} MiB (limits.item_mb)")
    return read_container(data)


def decoded(container: Container, image: ImageFile.ImageFile, orientation: int) -> Image.Image:
    """The picture that an opened image is at, by the policy above; inside the block of `opened`."""
    size = image.size
    image.load()
    check_complete(container, image)
    rgb = _to_rgb(image, container)
    if rgb.size != size:
        raise BadMedia(f"the picture is {rgb.width}x{rgb.height}, its header says {size[0]}x{size[1]}")
    return rgb.transpose(TURNS[orientation]) if orientation in TURNS else rgb


@contextmanager
def opened(container: Container, limits: LimitsSpec) -> Iterator[tuple[ImageFile.ImageFile, int]]:
    """An image that has passed all checks, opened and not decoded, and its orientation.

    Whatever is raised inside the block, by Pillow or about the picture, leaves it as BadMedia.
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
            raise BadMedia(f"of two readings of its header one finds {container.size}, one {image.size}")
        orientation = container.orientation
        if orientation is None:  # AVIF: Pillow has written it into EXIF of its own making
            exif = bytes(image.info.get("exif", b"")).removeprefix(b"Exif\0\0")
            orientation = exif_orientation(memoryview(exif)) or UPRIGHT
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            orientation = _left_to_turn(image)
        yield image, orientation


def _left_to_turn(image: TiffImagePlugin.TiffImageFile) -> int:
    """The orientation of a TIFF that Pillow does not apply while it decodes, as it does with EXIF's, whose size it
    swaps at once. Directories inside the EXIF, which Pillow would read then, are forgotten."""
    exif = image.getexif()
    found = exif.get(ORIENTATION, UPRIGHT)
    for tag in [tag for tag in exif if tag != ORIENTATION or tag not in image.tag_v2]:
        del exif[tag]
    return UPRIGHT if ORIENTATION in image.tag_v2 else found


@contextmanager
def explained(kind: str) -> Iterator[None]:
    """Whatever is raised inside the block about a file of this format leaves it as BadMedia."""
    try:
        yield
    except BadMedia:
        raise
    except UnidentifiedImageError:
        raise BadMedia(f"starts like {kind} but cannot be read as such") from None
    except Exception as problem:  # a plugin raises whatever a broken file leads it to
        text = str(problem)[:200] or "no reason given"
        raise BadMedia(f"{kind}: {type(problem).__name__}: {text}") from problem


def _check_pixels(size: tuple[int, int] | None, coded_pixels: int, limits: LimitsSpec) -> None:
    """Raise BadMedia where a picture, or what its decoder makes on the way, is over the limit."""
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
    """The picture with one colour of the decoded image made white: a PNG's transparent colour."""
    decoded = np.asarray(image.convert("L") if image.mode == "1" else image)
    found = decoded == clear[0] if decoded.ndim == 2 else (decoded == clear).all(axis=2)
    if not found.any():
        return rgb
    rgb = rgb.copy()
    rgb.paste(WHITE, mask=Image.fromarray(found))
    return rgb


Conversion = Callable[[Image.Image, Container], Image.Image]
#: Pillow's mode of a decoded picture -> how it becomes RGB; modes that are missing are refused.
CONVERSIONS: dict[str, Conversion] = {
    **dict.fromkeys(("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB"), _plain),
    **dict.fromkeys(("LA", "PA", "RGBA"), _over_white),
    **dict.fromkeys(("I;16", "I;16L", "I;16B", "I"), _wide_gray),
}
