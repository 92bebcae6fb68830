"""The size of an AV1 picture, from its sequence headers (AV1 Bitstream & Decoding Process, 5.3 to 5.5)."""

from __future__ import annotations

from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.processors.image_headers.work import Work

SEQUENCE_HEADER = 1
#: A sequence header is shorter than this unless it describes 32 operating points with full timing.
MAX_HEADER_NBYTES = 512
_HEADER_PIECES = 64  #: of work, to read one of 32 operating points bit by bit


def coded_pixels(picture: memoryview, work: Work) -> int:
    """The most pixels that one decoded picture may have, by the largest of its sequence headers.

    A still picture's header (`reduced_still_picture_header`) is exact. Otherwise a frame may differ from the
    header, up to the largest number that its size fields can hold. Encoders choose these fields as narrow as
    possible, so they hold less than twice the header's numbers. So a quarter of their product counts here.
    work: counts the file's units. Raises BadMedia for a picture without a sequence header.
    """
    largest, position = 0, 0
    while position < len(picture):
        work.piece()
        head = picture[position]
        position += 2 if head & 0b100 else 1  # with an extension byte
        nbytes = len(picture) - position
        if head & 0b10:  # a size is given
            nbytes, position = _leb128(picture, position)
        if position + nbytes > len(picture):
            raise BadMedia("truncated: an AV1 picture ends within a unit")
        if head >> 3 & 15 == SEQUENCE_HEADER:
            work.piece(_HEADER_PIECES)
            largest = max(largest, _sequence_pixels(picture[position : position + nbytes]))
        position += nbytes
    if not largest:
        raise BadMedia("an AV1 picture without a sequence header")
    return largest


def _leb128(data: memoryview, position: int) -> tuple[int, int]:
    """Read a number in seven bits a byte, least first. Returns it and its end."""
    value = 0
    for shift in range(0, 56, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, position
    raise BadMedia("an AV1 unit with a broken size")


class _Bits:
    """Bits of a header, most significant first. Raises IndexError beyond the end."""

    def __init__(self, data: memoryview) -> None:
        head = data[:MAX_HEADER_NBYTES]
        self._value, self._left = int.from_bytes(head), 8 * len(head)

    def take(self, count: int) -> int:
        if count > self._left:
            raise IndexError("header too short")
        self._left -= count
        return self._value >> self._left & (1 << count) - 1

    def skip_uvlc(self) -> None:
        zeros = 0
        while not self.take(1):
            zeros += 1
            if zeros > 32:
                raise BadMedia("an AV1 sequence header with a number of more than 32 bits")
        if zeros < 32:
            self.take(zeros)


def _sequence_pixels(header: memoryview) -> int:
    """The pixels of one sequence header; see `coded_pixels`."""
    bits = _Bits(header)
    bits.take(3)  # profile
    bits.take(1)  # still picture
    reduced = bits.take(1)
    if reduced:
        bits.take(5)  # level
    else:
        _skip_operating_points(bits)
    across, down = bits.take(4) + 1, bits.take(4) + 1
    pixels = (bits.take(across) + 1) * (bits.take(down) + 1)
    return pixels if reduced else max(pixels, (1 << across + down) // 4)


def _skip_operating_points(bits: _Bits) -> None:
    """Skip timing, decoder model and operating points."""
    delay_bits = 0
    if bits.take(1):  # timing
        bits.take(64)
        if bits.take(1):
            bits.skip_uvlc()
        if bits.take(1):  # decoder model
            delay_bits = bits.take(5) + 1
            bits.take(42)
    display_delays = bits.take(1)
    for _ in range(bits.take(5) + 1):
        bits.take(12)
        if bits.take(5) > 7:  # level; above it a tier follows
            bits.take(1)
        if delay_bits and bits.take(1):
            bits.take(2 * delay_bits + 1)
        if display_delays and bits.take(1):
            bits.take(4)
