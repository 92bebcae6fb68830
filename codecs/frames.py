"""Multipart frames: a msgpack header, then the bytes that its inline payloads point at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tensorferry.codecs.errors import BadMessage, FerryError
from tensorferry.codecs.messages import Inline, Message
from tensorferry.codecs.tensors import DTYPES, View, dtype_of, nbytes_of

#: Any object with a buffer, as ZeroMQ sends and returns them.
Buffer = Any

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest message that a receiver takes. Sizes alone are checked, before a byte is decoded."""

    frames: int = 4097
    header_nbytes: int = 32 << 20
    inline_nbytes: int = 1 << 30  #: of all frames after the header together


def encode(message: Message, inline: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frames of one message; `inline` are the buffers its payloads count, in order."""
    return [_encode(message), *inline]


def decode(frames: Sequence[Buffer], limits: Limits) -> tuple[Message, Sequence[Buffer]]:
    """The message and its inline frames. Raises BadMessage naming the problem; never anything else."""
    if not frames:
        raise BadMessage("a message of no frames")
    if len(frames) > limits.frames:
        raise BadMessage(f"{len(frames)} frames; the limit is {limits.frames}")
    header, inline = frames[0], frames[1:]
    if len(header) > limits.header_nbytes:
        raise BadMessage(f"a header of {len(header)} bytes; the limit is {limits.header_nbytes}")
    inline_nbytes = sum(map(len, inline))
    if inline_nbytes > limits.inline_nbytes:
        raise BadMessage(f"{inline_nbytes} inline bytes; the limit is {limits.inline_nbytes}")
    try:
        return _decode(header), inline
    except (msgspec.MsgspecError, FerryError, RecursionError, UnicodeDecodeError) as problem:
        raise BadMessage(f"{type(problem).__name__}: {problem}") from None


def open_inline(payload: Inline, frames: Sequence[Buffer]) -> View:
    """A view over an inline payload's frame; aligned for its dtype, so copied only where the frame is not.

    Raises BadMessage when the frame is missing or its length is not what dtype and shape say; UnsupportedDtype,
    BadTensor. Allocates nothing before that.
    """
    if payload.frame >= len(frames):
        raise BadMessage(f"payload points at frame {payload.frame} of {len(frames)}")
    data = np.frombuffer(frames[payload.frame], np.uint8) if len(frames[payload.frame]) else np.empty(0, np.uint8)
    dtype = dtype_of(payload.dtype)
    nbytes = nbytes_of(dtype, payload.shape)
    if data.nbytes != nbytes:
        raise BadMessage(f"frame {payload.frame} has {data.nbytes} bytes; {dtype} {payload.shape} needs {nbytes}")
    if data.ctypes.data % DTYPES[dtype]:
        data = data.copy()
    return View(data, dtype, payload.shape)
