"""TIFF files: what is checked before Pillow reads their first directory, and after (TIFF 6.0)."""

from __future__ import annotations

from math import ceil

from PIL.TiffImagePlugin import TiffImageFile

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.headers.container import Container
from tensorferry.stages.processors.headers.exif import MAX_FIELDS, read_directory

#: Values of one field of numbers, such as the strips of a picture: each becomes Python objects in Pillow, a hundred
#: times its size in the file.
MAX_VALUES = 1 << 14
_BYTES = (1, 2, 6, 7)  #: kinds of fields that stay bytes
PHOTOMETRIC, COMPRESSION, BITS, PLANAR, SAMPLES = 262, 259, 258, 284, 277
WIDTH, HEIGHT, ROWS_A_STRIP, STRIP_OFFSETS, STRIP_NBYTES = 256, 257, 278, 273, 279
TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_NBYTES = 322, 323, 324, 325
WHITE_IS_ZERO, SEPARATE_PLANES, UNCOMPRESSED = 0, 2, 1


def read_tiff(view: memoryview) -> Container:
    """Check what a TIFF's first directory costs to read; what it says, Pillow reads."""
    directory = read_directory(view)
    if directory is None:
        raise BadMedia("a TIFF header of an unknown version")
    if directory.count > MAX_FIELDS:
        raise BadMedia(f"a TIFF directory of {directory.count} entries is not accepted; {MAX_FIELDS} are")
    total = 0
    for field in directory.fields():
        if field.count > MAX_VALUES and field.kind not in _BYTES:
            raise BadMedia(f"a TIFF with {field.count} values of tag {field.tag} is not accepted; {MAX_VALUES} are")
        total += field.nbytes
        if total > len(view):
            raise BadMedia(f"truncated: the fields of the TIFF's directory are longer than the file, {len(view)} bytes")
    return Container("TIFF", view, None)


def white(image: TiffImageFile) -> tuple[int, bool]:
    """The largest value of its gray, and whether 0 is white."""
    bits = image.tag_v2.get(BITS, (1,))
    return (1 << min(bits[0], 16)) - 1, image.tag_v2.get(PHOTOMETRIC) == WHITE_IS_ZERO


def tile_pixels(image: TiffImageFile) -> int:
    """Of one tile, which is decoded whole; 0 where it has none."""
    return _number(image, TILE_WIDTH) * _number(image, TILE_HEIGHT)


def check_whole(image: TiffImageFile) -> None:
    """Raise BadMedia where the strips or tiles of a picture are fewer, or shorter, than its size asks for: libtiff
    would leave the rest black."""
    width, height = _number(image, WIDTH), _number(image, HEIGHT)
    planes = _number(image, SAMPLES, 1) if image.tag_v2.get(PLANAR) == SEPARATE_PLANES else 1
    if TILE_OFFSETS in image.tag_v2:
        across, down = _number(image, TILE_WIDTH), _number(image, TILE_HEIGHT)
        wanted, what, nbytes = ceil(width / max(across, 1)) * ceil(height / max(down, 1)), "tiles", TILE_NBYTES
        found = len(image.tag_v2[TILE_OFFSETS])
    else:
        rows = _number(image, ROWS_A_STRIP, height) or height
        wanted, what, nbytes = ceil(height / min(rows, height)), "strips", STRIP_NBYTES
        found = len(image.tag_v2.get(STRIP_OFFSETS, ()))
    if found < wanted * planes:
        raise BadMedia(
            f"truncated: the TIFF has {found} of the {wanted * planes} {what} of its {width}x{height} pixels"
        )
    if image.tag_v2.get(COMPRESSION, UNCOMPRESSED) == UNCOMPRESSED and nbytes in image.tag_v2:
        bits = image.tag_v2.get(BITS, (1,))
        row = ceil(width * (sum(bits) if len(bits) > 1 else bits[0] * _number(image, SAMPLES, 1)) / 8)
        written = sum(image.tag_v2[nbytes])
        if planes == 1 and written < row * height:
            raise BadMedia(
                f"truncated: the TIFF has {written} of the {row * height} bytes of its {width}x{height} pixels"
            )


def _number(image: TiffImageFile, tag: int, otherwise: int = 0) -> int:
    value = image.tag_v2.get(tag, otherwise)
    return value if isinstance(value, int) else otherwise
