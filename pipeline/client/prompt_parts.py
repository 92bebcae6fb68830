"""The parts of a prompt, and their form in a message."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadRequest, BadTensor, UnsupportedDtype
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.system.files import read_regular
from tensorferry.codecs.tensors import CODES, view_of
from tensorferry.pipeline.client.data_url import is_data_url, read_data_url

Source = bytes | memoryview | str | Path  #: one file: its bytes, a path, or a `data:` URL
_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")  # a URL; a path that looks like one is given as a Path
_SOURCES = "the bytes of a file, its path or a `data:` URL"


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image, one item of a prompt. Its plain bytes may be given instead."""

    file: Source


@dataclass(frozen=True, slots=True)
class Video:
    """A video, one item of a prompt: encoded pictures of one size in order, or one animated file (GIF, PNG, WebP)."""

    frames: Sequence[bytes | memoryview] | Source
    #: Pictures a second. None: unknown, so all pictures are used. An animated file has its own timing. A fraction is
    #: exact: 20/3 is `Fraction(20, 3)`. The message has thousandths of a frame a second.
    fps: float | Fraction | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Ready embeddings, one item of a prompt that no encoder gets."""

    #: Tensors of torch or numpy by name, as the deployment's model makes them: `embeddings`, (rows, width), and others.
    outputs: Mapping[str, Any]
    modality: str = "image"  #: one of MODALITIES, whose placeholders it fills


#: One part of a prompt: text, token ids (int32), an encoded image, a video, or embeddings.
Part = str | bytes | memoryview | npt.NDArray[np.int32] | Image | Video | Embeddings
KINDS = "text, token ids (a numpy array), an encoded image (bytes or Image), Video or Embeddings"
MODALITIES = ("image", "video")  #: the modalities that have placeholders
FILE_NBYTES = 64 << 20  #: the default limit of one file, equal to that of `limits.item_mb`


def prompt_on_wire(
    parts: Sequence[Part], frames: list[Buffer], *, file_nbytes: int = FILE_NBYTES
) -> tuple[wire.Part, ...]:
    """Apply `on_wire` to each part. Raises BadRequest, which names the part by its index, or the number of parts."""
    try:
        given = list(parts)
    except TypeError:
        raise BadRequest(f"parts is a {type(parts).__name__}; a list is needed, of {KINDS}") from None
    if not 1 <= len(given) <= wire.MOST_PARTS:
        raise BadRequest(f"{len(given)} parts; give 1 to {wire.MOST_PARTS}")
    made = []
    for index, part in enumerate(given):
        try:
            made.append(on_wire(part, frames, file_nbytes=file_nbytes))
        except BadRequest as problem:
            raise BadRequest(f"part {index}: {problem}") from problem
    return tuple(made)


def on_wire(part: Part, frames: list[Buffer], *, file_nbytes: int = FILE_NBYTES) -> wire.Part:
    """Return the part of a message, and append its bytes to the message's frames.

    file_nbytes: a larger file is refused. Raises BadRequest, also for an object that is no part.
    """
    match part:
        case str():
            return _text(part)
        case np.ndarray():
            return _tokens(part)
        case Video():
            return _video(part, frames, file_nbytes)
        case Embeddings():
            return _embeddings(part, frames)
        case Image():
            frames.append(_read(part.file, file_nbytes))
        case bytes() | memoryview():
            frames.append(part)
        case _:
            raise BadRequest(f"a {type(part).__name__}; it must be {KINDS}")
    return wire.ImagePart(len(frames) - 1)


def _text(text: str) -> wire.TextPart:
    if len(text) > wire.MOST_TEXT:
        raise BadRequest(
            f"a text of {len(text)} characters; at most {wire.MOST_TEXT} are taken, so split it into several parts"
        )
    if (problem := _surrogate(text)) is not None:
        raise BadRequest(f"a text is not valid Unicode: {problem}")
    return wire.TextPart(text)


def _surrogate(text: str) -> str | None:
    """Describe why a text cannot be UTF-8: it has a lone surrogate, as `surrogateescape` makes of other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        return f"character {problem.start} is the lone surrogate {text[problem.start]!a}; decode its bytes differently"
    return None


def _tokens(ids: npt.NDArray[np.int32]) -> wire.TokensPart:
    if ids.dtype.kind not in "iu" or ids.ndim != 1 or (ids.size and not 0 <= ids.min() <= ids.max() < 1 << 31):
        raise BadRequest(f"token ids of {ids.dtype} {ids.shape}; give one row of integers from 0 to 2^31-1")
    if 4 * len(ids) > wire.MOST_TOKENS_NBYTES:
        raise BadRequest(f"{len(ids)} token ids; at most {wire.MOST_TOKENS_NBYTES // 4} are taken")
    return wire.TokensPart(ids.astype("<i4").tobytes())


def _video(video: Video, frames: list[Buffer], file_nbytes: int) -> wire.Part:
    pictures, fps = video.frames, video.fps
    number = isinstance(fps, Real) and not isinstance(fps, bool)  # Real: numpy's numbers, too
    if fps is not None and not (number and 0.001 <= fps <= 1e6):
        raise BadRequest(f"a video at {fps!r} fps; give a number from 0.001 to 1000000, or None if it is unknown")
    if isinstance(pictures, Source):
        if fps is not None:
            raise BadRequest(f"an animated file at {fps} fps; it has its own timing, so omit fps")
        frames.append(_read(pictures, file_nbytes))
        return wire.AnimationPart(len(frames) - 1)
    if not isinstance(pictures, Sequence):
        raise BadRequest(f"a video of a {type(pictures).__name__}; give {_SOURCES}, or a list of encoded pictures")
    if not pictures:
        raise BadRequest("a video of no frames; give one or more")
    if len(pictures) > wire.MOST_FRAMES:
        raise BadRequest(f"a video of {len(pictures)} frames; at most {wire.MOST_FRAMES} are taken")
    for index, picture in enumerate(pictures):
        if not isinstance(picture, bytes | memoryview):
            raise BadRequest(f"frame {index} of a video is a {type(picture).__name__}; give bytes, an encoded picture")
    frames += pictures
    return wire.VideoPart(len(frames) - len(pictures), len(pictures), _rate(fps))


def _rate(fps: Real | float | None) -> tuple[int, int]:
    """Frames a second as a fraction, exactly where it fits: 29.97 is 2997/100."""
    rate = fps if isinstance(fps, Fraction) else Fraction(repr(float(fps or 0)))  # the decimal number that was written
    while rate.numerator >= 1 << 31 or rate.denominator >= 1 << 31:
        rate = rate.limit_denominator(max(1, ((1 << 31) - 1) // (int(rate) + 1)))
    return rate.numerator, rate.denominator


def _embeddings(item: Embeddings, frames: list[Buffer]) -> wire.EmbeddingsPart:
    """Put `embeddings` first, in any order of the mapping."""
    given: object = item.outputs  # its type need not have been checked
    if not isinstance(given, Mapping):
        problem = f"embeddings in a {type(given).__name__}; give a mapping of tensors by name, such as"
        raise BadRequest(f'{problem} {{"embeddings": tensor}}')
    names = sorted(item.outputs, key=lambda name: name != "embeddings")
    if not names or names[0] != "embeddings":
        raise BadRequest(f"an item of embeddings with the outputs {names}; `embeddings` must be among them")
    if len(names) > wire.MOST_PRECOMPUTED:
        raise BadRequest(f"an item of embeddings with {len(names)} outputs; at most {wire.MOST_PRECOMPUTED} are taken")
    if item.modality not in MODALITIES:
        raise BadRequest(f"embeddings of modality {item.modality!r:.80}; {' and '.join(MODALITIES)} have placeholders")
    for name in names:
        _check_name(name)
    outputs = []
    for name in names:
        try:
            view = view_of(item.outputs[name]).host()
        except (BadTensor, UnsupportedDtype) as problem:
            raise BadRequest(f"output {name!r}: {problem}") from problem
        outputs.append(wire.Tensor(name, wire.Inline(len(frames), CODES[view.dtype], view.shape)))
        frames.append(view.data)
    return wire.EmbeddingsPart(tuple(outputs), item.modality)


def _check_name(name: object) -> None:
    """Raise BadRequest unless an output may have this name."""
    if not isinstance(name, str) or not 1 <= len(name) <= wire.MOST_NAME:
        raise BadRequest(
            f"output {name!r:.100}: its name must be a text of 1 to {wire.MOST_NAME} characters, "
            "the name that the deployment's model gives it"
        )
    if (problem := _surrogate(name)) is not None:
        raise BadRequest(f"output {name!a}: its name is not valid Unicode: {problem}")


def _read(source: Source, most_nbytes: int) -> Buffer:
    """Return the bytes of a file or of a `data:` URL (RFC 2397). It never waits, so an event loop may call it."""
    if isinstance(source, bytes | memoryview):
        return source
    if not isinstance(source, str | Path):
        raise BadRequest(f"a file given as a {type(source).__name__}; give {_SOURCES}")
    if isinstance(source, str) and is_data_url(source):
        try:
            return read_data_url(source)
        except ValueError as problem:
            raise BadRequest(f"{source[:40]!r}: {problem}") from None
    if isinstance(source, str) and _ELSEWHERE.match(source):
        raise BadRequest(f"{source[:80]!r} is a URL, and files are never fetched; give {_SOURCES}")
    try:
        return read_regular(Path(source), most_nbytes)
    except OSError as problem:
        raise BadRequest(f"cannot read {str(source)!r}: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise BadRequest(f"cannot read {str(source)!r}: {problem}") from None
