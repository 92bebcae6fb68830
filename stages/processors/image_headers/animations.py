"""Animated GIF, PNG and WebP files: how long each picture is shown, and checks before Pillow walks to it.

Two facts are checked here that Pillow would find picture by picture, with memory already taken: every picture lies on
the canvas, and the number of pictures is bounded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from struct import unpack_from

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image_headers.container import Container
from tensorferry.stages.processors.image_headers.gif_webp import blocks_end, table_nbytes
from tensorferry.stages.processors.image_headers.png import read_png
from tensorferry.stages.processors.image_headers.work import Work

MOST_PICTURES = 4096  #: of one file: as many as a message may have frames
#: A duration below SHORTEST_MS counts as DEFAULT_MS, as in browsers (Chromium's DeferredImageDecoder, Firefox's
#: FrameTimeout): most such files mean "at once", and no viewer ever showed them that fast.
SHORTEST_MS, DEFAULT_MS = 11, 100


@dataclass(frozen=True, slots=True)
class Animation:
    """The facts about an animated file that decoding it safely needs."""

    container: Container  #: the file for Pillow, with all pictures
    size: tuple[int, int]  #: of the canvas, and so of every picture
    shown_ms: Sequence[int]  #: the duration of each picture, above 0
    skipped: int = 0  #: pictures that Pillow counts, but that are not of the animation: a PNG's default image


@dataclass(frozen=True, slots=True)
class _Picture:
    """A part of the canvas that a file redraws, and the duration of the result."""

    left: int
    top: int
    width: int
    height: int
    ms: int


def read_animation(data: bytes | memoryview, container: Container) -> Animation:
    """Read the structure of an animated file, which may have a single picture. Nothing is decoded.

    container: the result of `read_container` for the same data. Raises BadMedia for another format (which it names), a
    broken file, a picture off the canvas, and more than MOST_PICTURES.
    """
    read = _READERS.get(container.format)
    if read is None:
        raise BadMedia(f"{container.format} is not accepted as a video; {', '.join(_READERS)} or a list of pictures is")
    view = memoryview(data).cast("B")
    try:
        return read(view, container)
    except (IndexError, OverflowError, struct.error):
        raise BadMedia(f"truncated: the {container.format} ends within a picture") from None


def _animation(container: Container, pictures: Sequence[_Picture], skipped: int = 0) -> Animation:
    assert container.size is not None
    width, height = container.size
    for number, picture in enumerate(pictures):
        right, bottom = picture.left + picture.width, picture.top + picture.height
        if right > width or bottom > height:
            raise BadMedia(f"frame {number} reaches to {right}x{bottom} on a canvas of {width}x{height}")
    shown_ms = [picture.ms if picture.ms >= SHORTEST_MS else DEFAULT_MS for picture in pictures]
    return Animation(container, container.size, shown_ms, skipped)


def _add(pictures: list[_Picture], picture: _Picture) -> None:
    if len(pictures) == MOST_PICTURES:
        raise BadMedia(f"more than {MOST_PICTURES} frames; that is the limit of one file")
    pictures.append(picture)


def _read_gif(view: memoryview, container: Container) -> Animation:
    """Source: GIF89a, sections 20 and 23. The time is in hundredths of a second, in the block before the picture."""
    pictures: list[_Picture] = []
    position = 13 + table_nbytes(view[10])
    work = Work("a GIF", len(view))
    hundredths, clear = 0, False
    while True:
        work.piece()
        kind = view[position]
        if kind == 0x3B:
            return _animation(replace(container, covered=None), pictures)
        if kind == 0x2C:
            left, top, width, height, flags = unpack_from("<HHHHB", view, position + 1)
            if not pictures and container.covered is not None and not clear:
                raise BadMedia(
                    "a GIF whose first picture leaves some of its canvas without a colour is not accepted as a video"
                )
            _add(pictures, _Picture(left, top, width, height, 10 * hundredths))
            hundredths, clear = 0, False
            position = blocks_end(view, position + 11 + table_nbytes(flags), work)
        elif kind == 0x21:
            if view[position + 1] == 0xF9:
                clear, hundredths = bool(view[position + 3] & 1), unpack_from("<H", view, position + 4)[0]
            position = blocks_end(view, position + 2, work)
        else:
            raise BadMedia(f"a GIF with an unknown block 0x{kind:02X}")


def _read_webp(view: memoryview, container: Container) -> Animation:
    """Source: RFC 9649, section 2.7.1.2: a chunk ANMF for each picture, the time in milliseconds."""
    pictures: list[_Picture] = []
    position, end = 12, 8 + unpack_from("<L", view, 4)[0]
    while position + 8 <= end:  # `read_container` has counted the chunks
        nbytes = unpack_from("<L", view, position + 4)[0]
        if bytes(view[position : position + 4]) == b"ANMF":
            left, top, width, height, ms = (
                int.from_bytes(view[at : at + 3], "little") for at in range(position + 8, position + 23, 3)
            )
            _add(pictures, _Picture(2 * left, 2 * top, width + 1, height + 1, ms))
        position += 8 + nbytes + (nbytes & 1)
    return _animation(container, pictures or [_still(container)])


def _read_png(view: memoryview, container: Container) -> Animation:
    """Source: W3C PNG, third edition, sections 11.3.6: a chunk fcTL before each picture. If one comes before the
    first IDAT, the default image is the first picture; otherwise it is no picture of the animation."""
    if container.clear is not None:
        raise BadMedia("an animated PNG with a transparent colour is not accepted; an alpha channel or a palette is")
    pictures: list[_Picture] = []
    position, default_is_first, declared = 8, False, None
    while True:  # `read_png` has walked over it, up to its end
        nbytes, name = unpack_from(">L4s", view, position)
        if name == b"acTL":
            declared = int(unpack_from(">L", view, position + 8)[0])
        elif name == b"fcTL":
            _, width, height, left, top, numerator, denominator = unpack_from(">LLLLLHH", view, position + 8)
            _add(pictures, _Picture(left, top, width, height, 1000 * numerator // (denominator or 100)))
        elif name == b"IDAT":
            default_is_first |= bool(pictures)
        elif name == b"IEND":
            break
        position += 12 + nbytes
    if declared is None or declared == len(pictures) == 0:
        return _animation(container, [_still(container)])
    if declared != len(pictures):
        truncated = "truncated: " if declared > len(pictures) else ""
        raise BadMedia(f"{truncated}the PNG declares {declared} pictures and has {len(pictures)}")
    whole = read_png(view, animated=True)
    return _animation(whole, pictures, skipped=0 if default_is_first else 1)


def _still(container: Container) -> _Picture:
    assert container.size is not None
    return _Picture(0, 0, *container.size, ms=0)


_READERS: Mapping[str, Callable[[memoryview, Container], Animation]] = {
    "GIF": _read_gif,
    "PNG": _read_png,
    "WEBP": _read_webp,
}
