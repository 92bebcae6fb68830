"""The pieces of a prompt, as a client has them and as they travel."""

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

Source = bytes | memoryview | str | Path  #: of one file: its bytes, a path, or a `data:` URL
_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")  # a URL; a path may have the characters, and then is a Path
_SOURCES = "the bytes of a file, its path or a `data:` URL"


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image, one item of a prompt; where its bytes are at hand, they may stand for it."""

    file: Source


@dataclass(frozen=True, slots=True)
class Video:
    """A video, one item of a prompt: encoded pictures of one size in order, or one animated file (GIF, PNG, WebP)."""

    frames: Sequence[bytes | memoryview] | Source
    #: How many pictures are a second. None: not known, and all are looked at. An animated file has its own timing.
    #: Exactly as it is: 20/3 is `Fraction(20, 3)`. The wire has thousandths of a frame a second.
    fps: float | Fraction | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """An item whose embeddings are there already, one item of a prompt: no encoder sees it."""

    #: By name, torch or numpy: `embeddings`, (rows, width), as the deployment's model makes them, and others it makes.
    outputs: Mapping[str, Any]
    modality: str = "image"  #: one of MODALITIES: whose placeholders stand for it


#: A piece of a prompt, in order: text, token ids (int32), an encoded image, a video, or embeddings.
Part = str | bytes | memoryview | npt.NDArray[np.int32] | Image | Video | Embeddings
KINDS = "text, token ids (a numpy array), an encoded image (bytes or Image), Video or Embeddings"
MODALITIES = ("image", "video")  #: that have placeholders
FILE_NBYTES = 64 << 20  #: of one file, where nothing else is said; as `limits.item_mb`


def prompt_on_wire(
    parts: Sequence[Part], frames: list[Buffer], *, file_nbytes: int = FILE_NBYTES
) -> tuple[wire.Part, ...]:
    """`on_wire` of each part. Raises BadRequest, naming the part by its place, or how many there are."""
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
    """The part of a message; its bytes are added to the message's frames.

    file_nbytes: at most so much of a file is read. Raises BadRequest, also for what is no part.
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
        raise BadRequest(f"a text of {len(text)} characters; at most {wire.MOST_TEXT} are taken, so give it in several")
    if (problem := _surrogate(text)) is not None:
        raise BadRequest(f"a text that is no Unicode: {problem}")
    return wire.TextPart(text)


def _surrogate(text: str) -> str | None:
    """What keeps a text from being UTF-8: half of a character, as `surrogateescape` makes them of other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        return f"character {problem.start} is the lone surrogate {text[problem.start]!a}; decode its bytes another way"
    return None


def _tokens(ids: npt.NDArray[np.int32]) -> wire.TokensPart:
    if ids.dtype.kind not in "iu" or ids.ndim != 1 or (ids.size and not 0 <= ids.min() <= ids.max() < 1 << 31):
        raise BadRequest(f"token ids of {ids.dtype} {ids.shape}: a row of integers from 0 to 2^31-1 is needed")
    if 4 * len(ids) > wire.MOST_TOKENS_NBYTES:
        raise BadRequest(f"{len(ids)} token ids; at most {wire.MOST_TOKENS_NBYTES // 4} are taken")
    return wire.TokensPart(ids.astype("<i4").tobytes())


def _video(video: Video, frames: list[Buffer], file_nbytes: int) -> wire.Part:
    pictures, fps = video.frames, video.fps
    number = isinstance(fps, Real) and not isinstance(fps, bool)  # Real: numpy's numbers, too
    if fps is not None and not (number and 0.001 <= fps <= 1e6):
        raise BadRequest(f"a video at {fps!r} fps; give 0.001 to 1000000, as a number, or None where it is not known")
    if isinstance(pictures, Source):
        if fps is not None:
            raise BadRequest(f"an animated file at {fps} fps; it has its own timing, so leave fps away")
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
    rate = fps if isinstance(fps, Fraction) else float(fps or 0)  # numpy's integers would run over
    return wire.VideoPart(len(frames) - len(pictures), len(pictures), round(rate * 1000))


def _embeddings(item: Embeddings, frames: list[Buffer]) -> wire.EmbeddingsPart:
    """`embeddings` come first, whatever the mapping's order."""
    given: object = item.outputs  # callers need not have checked their types
    if not isinstance(given, Mapping):
        problem = f"embeddings in a {type(given).__name__}; give the tensors by name, such as"
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
        outputs.append(wire.Output(name, wire.Inline(len(frames), CODES[view.dtype], view.shape)))
        frames.append(view.data)
    return wire.EmbeddingsPart(tuple(outputs), item.modality)


def _check_name(name: object) -> None:
    """Raise BadRequest unless an output may be called so."""
    if not isinstance(name, str) or not 1 <= len(name) <= wire.MOST_NAME:
        raise BadRequest(
            f"output {name!r:.100}: its name must be a text of 1 to {wire.MOST_NAME} characters, "
            "as the deployment's model calls it"
        )
    if (problem := _surrogate(name)) is not None:
        raise BadRequest(f"output {name!a}: its name is no Unicode: {problem}")


def _read(source: Source, most_nbytes: int) -> Buffer:
    """The bytes of a file; of a `data:` URL (RFC 2397) those in it. Never waits: it may be called in an event loop."""
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
        raise BadRequest(f"{source[:80]!r} is an address, and nothing is ever fetched; give {_SOURCES}")
    try:
        return read_regular(Path(source), most_nbytes)
    except OSError as problem:
        raise BadRequest(f"cannot read {str(source)!r}: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise BadRequest(f"cannot read {str(source)!r}: {problem}") from None
