"""TIFF files: the checks before and after Pillow reads their first directory (TIFF 6.0)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from math import ceil
from struct import pack

from PIL.TiffImagePlugin import TiffImageFile

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image_headers import jpeg
from tensorferry.stages.processors.image_headers.container import MAX_XMP_NBYTES, Container
from tensorferry.stages.processors.image_headers.exif import MAX_FIELDS, read_directory

#: Values of one field of numbers, such as the strips of a picture. Pillow makes Python objects of each, a hundred times
#: its size in the file.
MAX_VALUES = 1 << 14
_BYTES = (1, 2, 6, 7)  #: kinds of fields that stay bytes
PHOTOMETRIC, COMPRESSION, BITS, PLANAR, SAMPLES = 262, 259, 258, 284, 277
WIDTH, HEIGHT, ROWS_A_STRIP, STRIP_OFFSETS, STRIP_NBYTES = 256, 257, 278, 273, 279
TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_NBYTES = 322, 323, 324, 325
XMP, JPEG_TABLES, COLOUR_MAP = 700, 347, 320
WHITE_IS_ZERO, SEPARATE_PLANES, UNCOMPRESSED = 0, 2, 1
#: Bytes of one field that Pillow gets. It copies them and makes objects of some; longer fields are profiles and layers.
#: The fields that locate the pixels are exempt.
MOST_NBYTES = 1 << 12
_WHOLE = frozenset({BITS, STRIP_OFFSETS, STRIP_NBYTES, TILE_OFFSETS, TILE_NBYTES, JPEG_TABLES, COLOUR_MAP})
#: Fax codes and JPEG: libtiff fills them up without an error if the data end early.
_FILLED = frozenset({2, 3, 4, 7, 32771})
_JPEG = 7
_DEFLATE = frozenset({8, 32946})
#: Bytes that the streams of all strips may have behind their pixels.
MOST_BEHIND = 1 << 20
FILL_ORDER, REVERSED_BITS = 266, 2
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def read_tiff(view: memoryview) -> Container:
    """Bound the cost of reading a TIFF's first directory. Pillow reads its contents."""
    directory = read_directory(view)
    if directory is None:
        raise BadMedia("the TIFF header has an unknown version")
    if directory.count > MAX_FIELDS:
        raise BadMedia(f"a TIFF directory of {directory.count} entries is not accepted; {MAX_FIELDS} are")
    if directory.next + (8 if directory.big else 4) > len(view):
        raise BadMedia(f"truncated: the TIFF's directory of {directory.count} entries runs over the end of the file")
    total = 0
    changes: list[tuple[int, bytes]] = []  # offset, what stands there instead
    for field in directory.fields():
        if field.count > MAX_VALUES and field.kind not in _BYTES:
            raise BadMedia(f"a TIFF with {field.count} values of tag {field.tag} is not accepted; {MAX_VALUES} are")
        if field.value + field.nbytes > len(view):
            raise BadMedia(f"truncated: the TIFF ends before the values of its tag {field.tag}")
        total += field.nbytes
        if total > len(view):
            raise BadMedia(f"truncated: the fields of the TIFF's directory are longer than the file, {len(view)} bytes")
        most = MAX_XMP_NBYTES if field.tag == XMP else MOST_NBYTES
        if field.nbytes > most and field.tag not in _WHOLE:
            count = most * field.count // field.nbytes
            changes.append((field.entry + 4, pack(directory.order + ("Q" if directory.big else "L"), count)))
    return Container("TIFF", _changed(view, changes) if changes else view, None)


def _changed(view: memoryview, changes: list[tuple[int, bytes]]) -> bytes:
    """Copy the file once, with these places, in ascending order, changed."""
    pieces: list[memoryview | bytes] = []
    position = 0
    for offset, new in changes:
        pieces += (view[position:offset], new)
        position = offset + len(new)
    return b"".join((*pieces, view[position:]))


def white(image: TiffImageFile) -> tuple[int, bool]:
    """The largest value of its gray, and whether 0 is white."""
    bits = image.tag_v2.get(BITS, (1,))
    return (1 << min(bits[0], 16)) - 1, image.tag_v2.get(PHOTOMETRIC) == WHITE_IS_ZERO


def tile_pixels(image: TiffImageFile) -> int:
    """The pixels of one tile, which is decoded whole; 0 without tiles."""
    return _number(image, TILE_WIDTH) * _number(image, TILE_HEIGHT)


def check_whole(image: TiffImageFile) -> None:
    """Raise BadMedia if the strips or tiles of a picture are fewer, or shorter, than its size needs, because libtiff
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
        row = _row_nbytes(image, width)
        written = sum(image.tag_v2[nbytes])
        if planes == 1 and written < row * height:
            raise BadMedia(
                f"truncated: the TIFF has {written} of the {row * height} bytes of its {width}x{height} pixels"
            )


def with_tails(data: bytes | memoryview) -> bytes | None:
    """Add meaningless bytes behind every strip or tile of fax codes or JPEG. The file decodes to the same picture
    exactly if each has all of its data. None: another compression, which needs no check."""
    view = memoryview(data)
    directory = read_directory(view)
    assert directory is not None
    fields = {field.tag: field for field in directory.fields()}
    compression = directory.whole(fields[COMPRESSION]) if COMPRESSION in fields else None
    places = fields.get(TILE_OFFSETS, fields.get(STRIP_OFFSETS))
    lengths = fields.get(TILE_NBYTES, fields.get(STRIP_NBYTES))
    if compression not in _FILLED or places is None or lengths is None:
        return None
    pieces: list[bytes | memoryview] = []
    end = len(view)
    stored = list(zip(directory.numbers(places), directory.numbers(lengths), strict=False))
    moved: dict[tuple[int, int], tuple[int, int]] = {}  # equal strips may lie in the same place
    _check_overlap(stored, len(view))
    for start, nbytes in stored:
        if (start, nbytes) not in moved:
            strip = view[start : start + nbytes]
            longer = jpeg.with_tails(strip) if compression == _JPEG else b"".join((strip, jpeg.TAIL))
            pieces.append(strip if longer is None else longer)
            moved[start, nbytes] = end, len(pieces[-1])
            end += len(pieces[-1])
    starts, counts = zip(*(moved[place] for place in stored), strict=True)
    code, kind = ("Q", 16) if directory.big else ("L", 4)
    changes = []
    for field, numbers in ((places, starts), (lengths, counts)):
        values = pack(f"{directory.order}{len(numbers)}{code}", *numbers)
        at = pack(directory.order + code, end) if len(numbers) > 1 else values
        changes.append((field.entry, pack(f"{directory.order}HH{code}", field.tag, kind, len(numbers)) + at))
        pieces.append(values)
        end += len(values)
    return b"".join((_changed(view, sorted(changes)), *pieces))


def check_checksums(data: bytes | memoryview, image: TiffImageFile) -> None:
    """Inflate each strip or tile of a deflate TIFF, and keep nothing. Raises BadMedia if a zlib stream is damaged or
    its checksum is wrong: libtiff stops when it has all pixels, before the checksum."""
    if image.tag_v2.get(COMPRESSION) not in _DEFLATE:
        return
    view = memoryview(data)
    tiled = TILE_OFFSETS in image.tag_v2
    places, lengths = (TILE_OFFSETS, TILE_NBYTES) if tiled else (STRIP_OFFSETS, STRIP_NBYTES)
    stored = dict.fromkeys(zip(image.tag_v2.get(places, ()), image.tag_v2.get(lengths, ()), strict=False))
    _check_overlap(stored, len(view))
    height = _number(image, HEIGHT)
    rows = _number(image, TILE_HEIGHT) if tiled else min(_number(image, ROWS_A_STRIP, height) or height, height)
    wanted = rows * _row_nbytes(image, _number(image, TILE_WIDTH if tiled else WIDTH))
    left = MOST_BEHIND
    for number, (start, nbytes) in enumerate(stored):
        what = f"{'tile' if tiled else 'strip'} {number} of the TIFF"
        stream = zlib.decompressobj()
        piece: bytes | memoryview = view[start : start + nbytes]
        if image.tag_v2.get(FILL_ORDER) == REVERSED_BITS:
            piece = bytes(piece).translate(_REVERSED)
        found = 0
        try:
            while piece and not stream.eof and found <= wanted + left:
                found += len(stream.decompress(piece, 1 << 18))
                piece = stream.unconsumed_tail
        except zlib.error as problem:
            raise BadMedia(f"{what} cannot be inflated: {problem}") from None
        left -= max(found - wanted, 0)
        if left < 0:
            raise BadMedia(f"{what} has more than the {wanted} bytes of its pixels")
        if not stream.eof:
            raise BadMedia(f"truncated: {what} ends before its checksum")


def _check_overlap(stored: Iterable[tuple[int, int]], nbytes: int) -> None:
    """Raise BadMedia if strips share so many bytes that a small file would cost much. stored: (offset, bytes)."""
    total = sum(length for _, length in set(stored))
    if total > 2 * nbytes:
        raise BadMedia(f"a TIFF whose strips overlap is not accepted: they have {total} bytes, the file {nbytes}")


def _row_nbytes(image: TiffImageFile, width: int) -> int:
    """Bytes of a row of all samples."""
    bits = image.tag_v2.get(BITS, (1,))
    return ceil(width * (sum(bits) if len(bits) > 1 else bits[0] * _number(image, SAMPLES, 1)) / 8)


def _number(image: TiffImageFile, tag: int, otherwise: int = 0) -> int:
    value = image.tag_v2.get(tag, otherwise)
    return value if isinstance(value, int) else otherwise
