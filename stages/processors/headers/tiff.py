"""TIFF files: the first directory, checked and cleared of all that makes no pixels (TIFF 6.0)."""

from __future__ import annotations

import struct

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.headers.container import UPRIGHT, Container, xmp_orientation
from tensorferry.stages.processors.headers.exif import ORIENTATION, Directory, Field, read_directory

#: Entries of a directory; cameras write a few dozen.
MAX_FIELDS = 4096
#: Values of one field of numbers: strips or tiles of a picture, or a colour map of 16 bits (3 x 65,536).
#: Each becomes Python objects in Pillow, a hundred times its size in the file.
MAX_VALUES = 1 << 18

WIDTH, HEIGHT, BITS, PHOTOMETRIC, XMP, TILE_WIDTH, TILE_HEIGHT = 256, 257, 258, 262, 700, 322, 323
WHITE_IS_ZERO = 0
#: What makes pixels: size, samples, strips, tiles, colour map, codec tables, YCbCr. All others are cleared.
_KEPT = frozenset(
    {
        *(WIDTH, HEIGHT, BITS, 259, PHOTOMETRIC, 266, 273, 277, 278, 279, 284, 292, 293, 317, 320),
        *(TILE_WIDTH, TILE_HEIGHT, 324, 325, 332, 338, 339, 347, 512, 513, 514, 515, 517, 518, 519, 520, 521),
        *(529, 530, 531, 532, 0xBC01),
    }
)
#: An entry that says nothing: a private tag of one byte.
_NOTHING_TAG = 65_000


def read_tiff(view: memoryview) -> Container:
    """Check a TIFF's first picture and hand on a copy of the file whose directory has nothing but it.

    Orientation is taken out too: Pillow would turn a TIFF by itself, and only while decoding.
    """
    directory = read_directory(view)
    if directory is None:
        raise BadMedia("a TIFF header of an unknown version")
    if directory.count > MAX_FIELDS:
        raise BadMedia(f"a TIFF directory of {directory.count} entries is not accepted; {MAX_FIELDS} are")
    copy = bytearray(view)
    kept: dict[int, Field] = {}
    exif: int | None = None
    xmp: int | None = None
    for field in directory.fields():
        if field.tag in _KEPT:
            _check(field, len(view))
            if field.tag in kept:
                raise BadMedia(f"a TIFF that has tag {field.tag} twice")
            kept[field.tag] = field
            continue
        if field.tag == ORIENTATION:
            value = _number(directory, field)
            exif = value if 1 <= value <= 8 else None
        elif field.tag == XMP:
            xmp = xmp_orientation(view[field.value : field.value + field.nbytes])
        _clear(directory, field, copy)
    # One picture: the offset of a next directory becomes 0.
    struct.pack_into("<Q" if directory.big else "<L", copy, directory.next, 0)
    numbers = {tag: _number(directory, field) for tag, field in kept.items()}
    width, height = numbers.get(WIDTH, 0), numbers.get(HEIGHT, 0)
    if width < 1 or height < 1:
        raise BadMedia(f"a TIFF of size {width}x{height}")
    return Container(
        "TIFF",
        bytes(copy),
        (width, height),
        exif or xmp or UPRIGHT,
        coded_pixels=numbers.get(TILE_WIDTH, 0) * numbers.get(TILE_HEIGHT, 0),  # one tile is decoded whole
        white=(1 << min(numbers.get(BITS, 1), 16)) - 1,
        inverted=numbers.get(PHOTOMETRIC) == WHITE_IS_ZERO,
    )


def _number(directory: Directory, field: Field) -> int:
    """The first value of a field of whole numbers; -1 where it is none."""
    try:
        value = directory.whole(field)
    except struct.error:
        return -1
    return -1 if value is None else value


def _check(field: Field, file_nbytes: int) -> None:
    if field.count > MAX_VALUES and field.kind not in (1, 2, 6, 7):  # bytes stay bytes
        raise BadMedia(f"a TIFF with {field.count} values of tag {field.tag} is not accepted; {MAX_VALUES} are")
    if field.value + field.nbytes > file_nbytes:
        raise BadMedia(f"truncated: the TIFF ends before the values of its tag {field.tag}")


def _clear(directory: Directory, field: Field, copy: bytearray) -> None:
    """Make an entry say nothing, in place, so that no offset moves."""
    count, room = ("Q", 8) if directory.big else ("L", 4)
    layout = f"{directory.order}HH{count}{room}x"
    struct.pack_into(layout, copy, field.entry, _NOTHING_TAG, 1, 1)
