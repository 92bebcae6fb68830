"""AVIF files: the true size of their coded pictures (ISO/IEC 23008-12 boxes around AV1 sequence headers)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import unpack_from

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image_headers.av1 import coded_pixels
from tensorferry.stages.processors.image_headers.container import ACCEPTED, Container
from tensorferry.stages.processors.image_headers.work import Work

IN_FILE, IN_IDAT = 0, 1  #: where an item's bytes lie
#: Bound for the number of item references times the number of items. libavif searches its list of items, one by one,
#: for each reference, in a nanosecond or two. A grid of 512 transparent cells has 1,026 items and 4,100 references.
MOST_SEARCHES = 1 << 23
Place = tuple[int, int, int]  #: IN_FILE or IN_IDAT, offset, bytes


def read_avif(view: memoryview) -> Container:
    """Find every coded picture of a file and read its size from the place where the decoder reads it.

    The container's size (`ispe`) bounds nothing, because a decoded picture is only scaled to it. Of an animation the
    still picture beside it is kept, as the file's `avif` brand promises one. EXIF is cleared, because by the format it
    does not affect how a picture is shown. Rotation and mirror are boxes of their own, which Pillow reports as an
    orientation.
    """
    work = Work("an AVIF", len(view))
    changes: list[tuple[int, bytes]] = []  # offset, what stands there instead
    metas: list[tuple[int, int]] = []
    for box, kind, start, end in _boxes(view, 0, len(view), work):
        if kind == b"ftyp":
            work.piece((end - start) // 16)
            places_of_brands = (start, *range(start + 8, end - 3, 4))
            brands = {bytes(view[at : at + 4]) for at in places_of_brands}
            if not brands & {b"avif", b"avis"} and any(brand[:3] in (b"hei", b"hev") for brand in brands):
                raise BadMedia(f"HEIC is not accepted; {ACCEPTED}")
            # Of two readings, an animation and a still, the latter.
            changes += [(at, b"avif") for at in places_of_brands if bytes(view[at : at + 4]) == b"avis"]
        elif kind == b"moov":
            changes.append((box + 4, b"free"))
        elif kind == b"meta":
            metas.append((start, end))
    if len(metas) != 1:
        raise BadMedia(f"an AVIF of {len(metas)} meta boxes is not accepted; 1 is")
    parts: dict[bytes, tuple[int, int]] = {}
    named: list[int] = []  # ids of items, each as often as it is named
    for _, kind, start, end in _boxes(view, metas[0][0] + 4, metas[0][1], work):
        if kind in parts and kind in (b"iinf", b"iloc", b"idat"):
            raise BadMedia(f"an AVIF of several {kind!r} boxes is not accepted")
        parts[kind] = (start, end)
        if kind == b"iprp":
            named += _described(view, start, end, work)
        elif kind in (b"iref", b"grpl"):
            named += _linked(view, kind, start, end, work)
    if b"iinf" not in parts or b"iloc" not in parts:
        raise BadMedia("an AVIF without a list of its items")
    places = _places(view, *parts[b"iloc"], work)
    items = list(_items(view, *parts[b"iinf"], work))
    named += [item for item, _, _ in items] + list(places)
    searches = len(named) * len(set(named))
    if searches > MOST_SEARCHES:
        raise BadMedia(
            f"an AVIF that refers {len(named)} times to {len(set(named))} items is not accepted; the product is "
            f"{searches}, the limit {MOST_SEARCHES}"
        )
    idat = view[slice(*parts.get(b"idat", (0, 0)))]
    coded: list[int] = []
    gathered = 0
    for item, kind, position in items:
        if kind == b"Exif":
            changes.append((position, b"none"))
        elif kind == b"av01":
            pieces = places.get(item, [])
            gathered += sum(nbytes for _, _, nbytes in pieces)
            if gathered > len(view):  # of pictures that share no bytes they are fewer
                raise BadMedia(f"an AVIF whose pictures have {gathered} bytes in a file of {len(view)} is not accepted")
            coded.append(coded_pixels(_gather(view, idat, pieces), work))
    if not coded:
        raise BadMedia("an AVIF without a picture")
    # A picture has an alpha plane, a thumbnail and a gain map beside it at most; a grid has many small ones.
    return Container("AVIF", _changed(view, changes), None, None, coded_pixels=max(*coded, sum(coded) // 4))


def _boxes(view: memoryview, start: int, end: int, work: Work) -> Iterator[tuple[int, bytes, int, int]]:
    """The boxes between two offsets. Each has its start, its kind, and start and end of its contents."""
    while start + 8 <= end:
        work.piece()
        nbytes, kind = unpack_from(">L4s", view, start)
        head = 8
        if nbytes == 1:
            (nbytes,), head = unpack_from(">Q", view, start + 8), 16
        elif nbytes == 0:  # up to the end
            nbytes = end - start
        if nbytes < head or start + nbytes > end:
            raise BadMedia(f"truncated: an AVIF box {kind!r} runs over the end")
        yield start, kind, start + head, start + nbytes
        start += nbytes


def _items(view: memoryview, start: int, end: int, work: Work) -> Iterator[tuple[int, bytes, int]]:
    """The items of an `iinf` box. Each has its id, its kind, and the offset of the kind."""
    for _, name, at, _ in _boxes(view, start + (6 if view[start] == 0 else 8), end, work):
        if name == b"infe" and view[at] in (2, 3):
            wide = view[at] == 3
            (item,) = unpack_from(">L" if wide else ">H", view, at + 4)
            position = at + (10 if wide else 8)
            yield item, bytes(view[position : position + 4]), position


def _described(view: memoryview, start: int, end: int, work: Work) -> Iterator[int]:
    """The items that an `iprp` box refers to: the entries of its `ipma` boxes. The properties (`ipco`) are counted."""
    for _, kind, at, stop in _boxes(view, start, end, work):
        if kind == b"ipco":
            for _ in _boxes(view, at, stop, work):
                pass
        elif kind == b"ipma":
            id_code, index_nbytes = ">L" if view[at] else ">H", 2 if view[at + 3] & 1 else 1
            entries, cursor = unpack_from(">L", view, at + 4)[0], at + 8
            for _ in range(entries):
                (item,) = unpack_from(id_code, view, cursor)
                cursor += 4 if view[at] else 2
                work.piece(1 + view[cursor] // 4)
                cursor += 1 + index_nbytes * view[cursor]
                if cursor > stop:
                    raise BadMedia("truncated: an AVIF's item properties run over their box")
                yield item


def _linked(view: memoryview, kind: bytes, start: int, end: int, work: Work) -> Iterator[int]:
    """The items that an `iref` or a `grpl` box refers to: both ends of each reference, the members of each group."""
    wide = kind == b"grpl" or bool(view[start])
    for _, _, at, stop in _boxes(view, start if kind == b"grpl" else start + 4, end, work):
        if kind == b"grpl":  # version and flags, the group's id, how many members
            cursor = at + 12
        else:  # an item's id, how many it refers to
            cursor = at + (6 if wide else 4)
            yield unpack_from(">L" if wide else ">H", view, at)[0]
        nbytes = 4 if wide else 2
        count = max(0, stop - cursor) // nbytes
        work.piece(1 + count // 2)
        yield from unpack_from(f">{count}{'L' if wide else 'H'}", view, cursor)


def _places(view: memoryview, start: int, end: int, work: Work) -> dict[int, list[Place]]:
    """Item id -> the places of its extents, from an `iloc` box."""
    cursor = start + 4

    def number(nbytes: int) -> int:
        nonlocal cursor
        if cursor + nbytes > end:
            raise BadMedia("truncated: an AVIF's item locations run over their box")
        cursor += nbytes
        return int.from_bytes(view[cursor - nbytes : cursor])

    version = view[start]
    if version > 2:
        raise BadMedia(f"AVIF item locations of version {version} are not known")
    sizes, more = number(1), number(1)
    offset_nbytes, length_nbytes, base_nbytes = sizes >> 4, sizes & 15, more >> 4
    index_nbytes = more & 15 if version else 0
    found: dict[int, list[Place]] = {}
    for _ in range(number(4 if version == 2 else 2)):
        item = number(4 if version == 2 else 2)
        method = number(2) & 15 if version else IN_FILE
        number(2)  # data reference: always this file
        base = number(base_nbytes)
        if item in found or method not in (IN_FILE, IN_IDAT):
            raise BadMedia(f"an AVIF item {item} with a second or a derived location is not accepted")
        extents = number(2)
        work.piece(3 + extents)
        found[item] = []
        for _ in range(extents):
            number(index_nbytes)
            offset = base + number(offset_nbytes)
            found[item].append((method, offset, number(length_nbytes)))
    return found


def _gather(view: memoryview, idat: memoryview, places: list[Place]) -> memoryview:
    """The bytes of an item. If they have one extent, the usual case, they are not copied."""
    pieces = []
    for method, offset, nbytes in places:
        source = view if method == IN_FILE else idat
        if offset + nbytes > len(source):
            raise BadMedia("truncated: the AVIF ends before a picture of it does")
        pieces.append(source[offset : offset + nbytes])
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _changed(view: memoryview, changes: Sequence[tuple[int, bytes]]) -> bytes:
    """Copy the file once, with these places changed."""
    pieces: list[memoryview | bytes] = []
    position = 0
    for offset, new in sorted(changes):
        if offset < position:
            raise BadMedia("an AVIF whose boxes overlap")
        pieces += (view[position:offset], new)
        position = offset + len(new)
    return b"".join((*pieces, view[position:]))
