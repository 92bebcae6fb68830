"""The pieces of a prompt, as a client has them and as they travel."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import numpy.typing as npt

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadRequest, BadTensor, UnsupportedDtype
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.tensors import CODES, view_of

Source = bytes | memoryview | str | Path  #: of one file: its bytes, a path, or a `data:` URL


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image, one item of a prompt; where its bytes are at hand, they may stand for it."""

    file: Source


@dataclass(frozen=True, slots=True)
class Video:
    """A video, one item of a prompt: encoded pictures of one size in order, or one animated file (GIF, PNG, WebP)."""

    frames: Sequence[bytes | memoryview] | Source
    #: How many pictures are a second. None: not known, and all are looked at. An animated file has its own timing.
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """An item whose embeddings are there already, one item of a prompt: no encoder sees it."""

    #: By name, torch or numpy: `embeddings`, (rows, width), as the deployment's model makes them, and others it makes.
    outputs: Mapping[str, Any]
    modality: str = "image"  #: or video: whose placeholders stand for it


#: A piece of a prompt, in order: text, token ids (int32), an encoded image, a video, or embeddings.
Part = str | bytes | memoryview | npt.NDArray[np.int32] | Image | Video | Embeddings


def on_wire(part: Part, frames: list[Buffer]) -> wire.Part:
    """The part of a message; its bytes are added to the message's frames. Raises BadRequest."""
    match part:
        case str():
            return wire.TextPart(part)
        case np.ndarray():
            return _tokens(part)
        case Video():
            return _video(part, frames)
        case Embeddings():
            return _embeddings(part, frames)
    frames.append(_read(part.file) if isinstance(part, Image) else part)
    return wire.ImagePart(len(frames) - 1)


def _tokens(ids: npt.NDArray[np.int32]) -> wire.TokensPart:
    if ids.dtype.kind not in "iu" or ids.ndim != 1 or (ids.size and not 0 <= ids.min() <= ids.max() < 1 << 31):
        raise BadRequest(f"token ids of {ids.dtype} {ids.shape}: a row of integers from 0 to 2^31-1 is needed")
    return wire.TokensPart(ids.astype("<i4").tobytes())


def _video(video: Video, frames: list[Buffer]) -> wire.Part:
    if isinstance(video.frames, Source):
        if video.fps is not None:
            raise BadRequest(f"an animated file at {video.fps} fps; it has its own timing, so leave fps away")
        frames.append(_read(video.frames))
        return wire.AnimationPart(len(frames) - 1)
    if not video.frames or (video.fps is not None and not 0.001 <= video.fps <= 1e6):
        raise BadRequest(f"a video of {len(video.frames)} frames at {video.fps} fps; give one frame or more, fps > 0")
    frames += video.frames
    return wire.VideoPart(len(frames) - len(video.frames), len(video.frames), round((video.fps or 0.0) * 1000))


def _embeddings(item: Embeddings, frames: list[Buffer]) -> wire.EmbeddingsPart:
    """`embeddings` come first, whatever the mapping's order."""
    names = sorted(item.outputs, key=lambda name: name != "embeddings")
    if not names or names[0] != "embeddings":
        raise BadRequest(f"an item of embeddings with the outputs {names}; `embeddings` must be among them")
    outputs = []
    for name in names:
        try:
            view = view_of(item.outputs[name]).host()
        except (BadTensor, UnsupportedDtype) as problem:
            raise BadRequest(f"output {name!r}: {problem}") from problem
        outputs.append(wire.Output(name, wire.Inline(len(frames), CODES[view.dtype], view.shape)))
        frames.append(view.data)
    return wire.EmbeddingsPart(tuple(outputs), item.modality)


def _read(source: Source) -> Buffer:
    """The bytes of a file; of a `data:` URL (RFC 2397) those in it."""
    if isinstance(source, bytes | memoryview):
        return source
    if isinstance(source, str) and source[:5].lower() == "data:":
        head, comma, data = source.partition(",")
        if not comma:
            raise BadRequest(f"{source[:40]!r} is no data URL: no comma stands before its data")
        try:
            return base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
        except binascii.Error as problem:
            raise BadRequest(f"the data of {head[:40]!r} is not base64: {problem}") from None
    try:
        return Path(source).read_bytes()
    except (OSError, ValueError) as problem:
        raise BadRequest(f"cannot read {str(source)!r}: {problem}") from None
