"""The orientation in a block of EXIF, and image file directories, which EXIF and TIFF share (TIFF 6.0, section 2)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

ORIENTATION = 274
#: Entries of a directory that are searched for it: cameras write a few dozen, in ascending order of tags.
MAX_FIELDS = 512

#: Bytes of one value of each field type; BigTIFF adds the last three.
FIELD_NBYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
#: Field types that hold a whole number >= 0 -> its struct code.
_WHOLE = {1: "B", 3: "H", 4: "L", 16: "Q"}


@dataclass(frozen=True, slots=True)
class Field:
    """One entry of a directory: `count` values of type `kind`."""

    tag: int
    kind: int
    count: int
    entry: int  #: offset of the entry in the file
    value: int  #: offset of its values; a wrong file may put it beyond the end

    @property
    def nbytes(self) -> int:
        return self.count * FIELD_NBYTES.get(self.kind, 0)


@dataclass(frozen=True, slots=True)
class Directory:
    """The first image file directory of a TIFF structure. Offsets are checked when they are used, not here."""

    view: memoryview
    order: str  #: "<" or ">"
    big: bool  #: BigTIFF: 64-bit offsets
    count: int  #: entries that it declares
    start: int  #: of its entries

    @property
    def entry_nbytes(self) -> int:
        return 20 if self.big else 12

    @property
    def next(self) -> int:
        """The place of the next directory's offset."""
        return self.start + self.count * self.entry_nbytes

    def fields(self) -> Iterator[Field]:
        """The entries, in file order. Raises struct.error if the file ends before them."""
        head, inline = ("HHQ", 8) if self.big else ("HHL", 4)
        for entry in range(self.start, self.next, self.entry_nbytes):
            tag, kind, count = struct.unpack_from(self.order + head, self.view, entry)
            value = entry + self.entry_nbytes - inline
            if count * FIELD_NBYTES.get(kind, 0) > inline:
                value = struct.unpack_from(self.order + ("Q" if self.big else "L"), self.view, value)[0]
            yield Field(tag, kind, count, entry, value)

    def whole(self, field: Field) -> int | None:
        """The first value of a field of whole numbers; None for any other. Raises struct.error."""
        code = _WHOLE.get(field.kind)
        if code is None or not field.count:
            return None
        value: int = struct.unpack_from(self.order + code, self.view, field.value)[0]
        return value

    def numbers(self, field: Field) -> tuple[int, ...]:
        """All values of a field of whole numbers; empty for any other. Raises struct.error."""
        code = _WHOLE.get(field.kind)
        return struct.unpack_from(f"{self.order}{field.count}{code}", self.view, field.value) if code else ()


def read_directory(view: memoryview) -> Directory | None:
    """Read the first directory of a TIFF structure; None for other data. Raises struct.error if it is truncated."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(view[:2]))
    if order is None:
        return None
    version = struct.unpack_from(order + "H", view, 2)[0]
    if version == 42:
        start = struct.unpack_from(order + "L", view, 4)[0]
        return Directory(view, order, False, struct.unpack_from(order + "H", view, start)[0], start + 2)
    if version == 43:
        start = struct.unpack_from(order + "Q", view, 8)[0]
        return Directory(view, order, True, struct.unpack_from(order + "Q", view, start)[0], start + 8)
    return None


def exif_orientation(block: memoryview) -> int | None:
    """The orientation, 1..8, of an EXIF block (a TIFF structure, without the `Exif` prefix).

    A broken block gives None, because a broken tag is no reason to refuse a picture.
    """
    try:
        directory = read_directory(block)
        if directory is None or directory.big:
            return None
        for field in islice(directory.fields(), MAX_FIELDS):
            if field.tag == ORIENTATION:
                value = directory.whole(field)
                return value if value is not None and 1 <= value <= 8 else None
    except (struct.error, OverflowError):
        pass
    return None
