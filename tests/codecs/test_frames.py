"""Frames: limits are checked on sizes alone, and an inline payload is what its header says or an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs.errors import BadMessage, BadTensor, FerryError, UnsupportedDtype
from tensorferry.codecs.frames import Limits, decode, encode, open_inline
from tensorferry.codecs.messages import Cancel, Drain, Inline, Origin
from tensorferry.codecs.tensors import CODES, DTYPES

MESSAGE = Drain(Origin("encoder", 0, 1))
HEADER = encode(MESSAGE)[0]
LIMITS = Limits(frames=4, header_nbytes=len(HEADER), inline_nbytes=100)


def aligned(nbytes: int, off: int = 0) -> memoryview:
    """A buffer that starts `off` bytes after a multiple of 64."""
    room = np.zeros(nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + off
    return room[start : start + nbytes].data


def test_what_is_within_the_limits_is_taken() -> None:
    message, inline = decode([HEADER, bytes(60), b"", bytes(40)], LIMITS)
    assert message == MESSAGE
    assert [len(frame) for frame in inline] == [60, 0, 40]


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([], "no frames"),
        ([HEADER, b"", b"", b"", b""], "5 frames; the limit is 4"),
        ([HEADER + b"\xc0"], f"header of {len(HEADER) + 1} bytes; the limit is {len(HEADER)}"),
        ([HEADER, bytes(101)], "101 inline bytes; the limit is 100"),
        ([HEADER, bytes(51), bytes(50)], "101 inline bytes"),
        ([b"", bytes(5)], "truncated"),
    ],
)
def test_each_limit_is_kept(frames: list[bytes], problem: str) -> None:
    with pytest.raises(BadMessage, match=problem):
        decode(frames, LIMITS)


def test_limits_come_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(header: bytes) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr("tensorferry.codecs.frames._decode", decoded)
    for frames in ([HEADER] * 5, [HEADER + b"\xc0"], [HEADER, bytes(101)]):
        with pytest.raises(BadMessage):
            decode(frames, LIMITS)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer_is_a_frame(make: Callable[[bytes], Any]) -> None:
    """What ZeroMQ hands out differs by size and version."""
    message, inline = decode([make(HEADER), make(b"\x01\x02")], LIMITS)
    assert message == MESSAGE
    assert open_inline(Inline(0, CODES["uint8"], (2,)), inline).numpy().tolist() == [1, 2]


def test_the_frames_of_a_message_are_its_header_and_the_buffers_themselves() -> None:
    buffers = [bytes(3), bytearray(2)]
    assert [id(frame) for frame in encode(Cancel(bytes(16), 0), buffers)[1:]] == [id(buffer) for buffer in buffers]


# --- inline payloads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "error", "problem"),
    [
        (Inline(2, CODES["uint8"], (4,)), BadMessage, "frame 2 of 2"),
        (Inline(65535, CODES["uint8"], ()), BadMessage, "frame 65535 of 2"),
        (Inline(0, CODES["uint8"], (5,)), BadMessage, "has 4 bytes"),
        (Inline(0, CODES["uint8"], (3,)), BadMessage, "has 4 bytes"),
        (Inline(0, CODES["float32"], (2,)), BadMessage, "has 4 bytes.*needs 8"),
        (Inline(1, CODES["uint8"], ()), BadMessage, "has 0 bytes"),
        (Inline(0, 99, (1,)), UnsupportedDtype, "number 99"),
        (Inline(0, CODES["uint8"], (1 << 20, 1 << 20)), BadMessage, "has 4 bytes"),
        (Inline(0, CODES["float64"], (1 << 39, 1 << 39)), BadTensor, "spans"),
        (Inline(0, CODES["uint8"], (-4,)), BadTensor, "negative"),
    ],
)
def test_b31_an_inline_payload_that_lies_is_refused_before_anything_is_allocated(
    payload: Inline,
    error: type[FerryError],
    problem: str,
    allocates_under: Callable[[int], AbstractContextManager[None]],
) -> None:
    frames = [b"\x01\x02\x03\x04", b""]
    assert open_inline(Inline(0, CODES["float32"], ()), frames).data.tobytes() == frames[0]  # this one tells the truth
    with allocates_under(1 << 20), pytest.raises(error, match=problem):
        open_inline(payload, frames)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("off", [0, 1, 2, 4, 8, 16, 32])
def test_a_view_is_aligned_and_copied_only_where_it_must_be(dtype: str, off: int) -> None:
    itemsize = DTYPES[dtype]
    frame = aligned(4 * itemsize, off)
    view = open_inline(Inline(0, CODES[dtype], (4,)), [frame])
    assert view.data.ctypes.data % itemsize == 0
    assert np.shares_memory(view.data, np.asarray(frame)) == (off % itemsize == 0)
    assert view.data.tobytes() == frame.tobytes()


@pytest.mark.parametrize("off", [0, 1])
def test_a_frame_that_may_not_be_written_is_read_all_the_same(off: int) -> None:
    frame = aligned(8, off).toreadonly()
    view = open_inline(Inline(0, CODES["float32"], (2,)), [frame])
    assert view.numpy().tolist() == [0.0, 0.0]
    assert view.torch().tolist() == [0.0, 0.0]
