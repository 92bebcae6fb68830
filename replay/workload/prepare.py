"""The preparation of a replay, which makes everything to be sent before the clock starts.

A replayer that decodes, resizes and encodes images between two sends falls behind its own schedule. Equal images are
made once and shared.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.system.files import OutsideRoots, Roots
from tensorferry.pipeline.recording.request import MAX_PIXELS, Drop, Image, Request
from tensorferry.replay.trace.loaded_trace import Trace
from tensorferry.replay.trace.seeds import choose
from tensorferry.replay.trace.trace_file import NAMED_PER_REASON
from tensorferry.replay.workload.image_models import ImageModel
from tensorferry.replay.workload.image_sizes import SizeModel
from tensorferry.replay.workload.photos import Photo, PhotoError
from tensorferry.replay.workload.token_ids import TokenSource

#: The most pixels of different invented images, about two seconds of two cores. Above it fewer photos are used
#: (at least one for each size); sizes are never changed.
PIXEL_BUDGET = 256_000_000
MAX_PREPARED_PIXELS = 12_000_000_000  #: about 2 GiB of JPEG
MAX_FILE_NBYTES = 256 << 20
#: Up to so many invented token ids (256 MiB) are made beforehand. In a longer trace each further prompt is made as it
#: is sent, which costs the sender some 10 us a thousand tokens.
HELD_TOKENS = 64 << 20

Part = str | bytes | npt.NDArray[np.int32]
#: progress(done, total): counts the images to be read or made.
Progress = Callable[[int, int], None]


class UnusableSize(FerryError):
    """The deployment's processor takes no image of this size."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class ImageSizer(Protocol):
    """The part of the deployment's processor that a replay needs. Both methods raise UnusableSize."""

    def rows_for(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens of an image of this size."""

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        """Return a (width, height) near that aspect ratio with `rows` placeholder tokens, or as close as possible."""


class Invented(msgspec.Struct):
    """The parts that the replay invented because the trace lacks them. The report prints them."""

    photos: list[str]
    image_model: str = ""  #: the model of the modelled sizes, if there are any
    images_recorded: int = 0  #: their bytes are in the trace, or in files that it names
    images_of_given_size: int = 0  #: size recorded, picture invented
    images_of_given_tokens: int = 0  #: tokens recorded, size chosen to match, picture invented
    images_off_their_tokens: int = 0  #: of those, how many the processor cannot match exactly
    images_of_modelled_size: int = 0  #: only their number recorded; size and picture invented
    different_images: int = 0  #: different contents among all of the above
    encoded_nbytes: int = 0  #: the sum of those different images
    prompts: int = 0  #: requests whose token ids are invented (their number was recorded)
    answers: int = 0  #: requests that include answers of earlier turns, whose token ids are invented
    prompts_without_text: int = 0  #: images took all of the recorded context, so no tokens are left for text


class Prepared(msgspec.Struct, frozen=True):
    """A request and its content."""

    request: Request
    images: tuple[bytes, ...]
    text_tokens: int  #: how many to invent; 0 if there is no text, or `request.text` is sent
    ids: npt.NDArray[np.int32] | None
    before: tuple[Prepared, ...] = ()  #: the earlier turns whose prompts and answers precede it, oldest first

    @property
    def complete(self) -> bool:
        """Whether nothing remains to be made as it is sent."""
        return not self.before and (self.ids is not None or not self.text_tokens)

    @property
    def all_images(self) -> list[Image]:
        """The images as the trace describes them, with those of earlier turns."""
        return [image for prepared in (*self.before, self) for image in prepared.request.images]

    def parts(self, tokens: TokenSource) -> list[Part]:
        """Return what is sent: the conversation so far, then its own text and images in their order."""
        parts: list[Part] = []
        for earlier in self.before:
            parts += earlier.own(tokens)
            if earlier.request.output_tokens:
                parts.append(tokens.answer(earlier.request))
        return parts + self.own(tokens)

    def own(self, tokens: TokenSource) -> list[Part]:
        """Return its own text and images, without the conversation so far."""
        request = self.request
        parts: list[Part] = [part if isinstance(part, str) else self.images[part] for part in request.layout]
        if not request.layout:
            parts += self.images
        if request.text is not None:
            parts.append(request.text)
        elif self.ids is not None:
            parts.append(self.ids)
        elif self.text_tokens:
            parts.append(tokens.ids(self.request, self.text_tokens))
        return parts


class Preparation(msgspec.Struct, frozen=True):
    requests: list[Prepared]  #: in the order of the trace
    drops: list[Drop]  #: requests that cannot be made
    invented: Invented
    payload_sha256: str = ""  #: of everything to be sent; equal for equal files, seeds and sizes


Key = tuple[int, int, int] | Path | bytes  #: (photo, width, height), a file, or the bytes themselves


def prepare(
    trace: Trace,
    photos: Sequence[Photo],
    sizer: ImageSizer,
    tokens: TokenSource,
    *,
    seed: int,
    model: ImageModel | None = None,
    progress: Progress = lambda done, total: None,
    roots: Sequence[Path] = (),
) -> Preparation:
    """Choose every size and make every byte. Blocks for seconds, so call it off the event loop.

    model: chooses the images that the trace only counts; None: `SizeModel`. roots: folders, beside the trace's own, in
    which it may name files. The limit exists because a trace may come from others, and the files that it names are
    sent. A missing or forbidden image file drops the request that names it. A damaged one is sent as it is, since the
    deployment's reaction is a result. Raises PhotoError if the trace needs more different images than fit in memory.
    """
    choices = _choose_images(trace, photos, sizer, seed, model or SizeModel(seed))
    contents = _make(choices.wanted(), photos, Roots([_folder(trace), *roots]), progress)
    invented = choices.invented
    invented.different_images = sum(isinstance(made, bytes) for made in contents.values())
    invented.encoded_nbytes = sum(len(made) for made in contents.values() if isinstance(made, bytes))
    drops, named = [], Counter[str]()
    requests: list[Prepared] = []
    held = 0
    conversations: dict[str, list[Prepared]] = {}
    for request, keys in zip(trace.requests, choices.keys, strict=True):
        problem = choices.problems.get(request.place) or next(
            (made for made in map(contents.__getitem__, keys) if isinstance(made, tuple)), None
        )
        if problem:
            reason, sentence = problem
            named[reason] += 1
            drops.append(Drop(request.line, reason, sentence if named[reason] <= NAMED_PER_REASON else ""))
            continue
        images = tuple(made for made in map(contents.__getitem__, keys) if isinstance(made, bytes))
        count = request.text_tokens or 0
        if request.context_tokens is not None:
            count = max(0, request.context_tokens - choices.rows[request.place])
            invented.prompts_without_text += not count
        invented.prompts += count > 0
        held += count
        ids = tokens.ids(request, count) if count and held <= HELD_TOKENS else None
        before: tuple[Prepared, ...] = ()
        if request.session and request.continues:
            conversation = conversations.setdefault(request.session, [])
            before = tuple(conversation)
            conversation.append(Prepared(request, images, count, ids))
            invented.answers += bool(before)
        requests.append(Prepared(request, images, count, ids, before))
    return Preparation(requests, drops, invented, _payload_sha256(requests, tokens))


def _payload_sha256(requests: Iterable[Prepared], tokens: TokenSource) -> str:
    """Hash every request's own parts, in their order. Equal loads have equal hashes."""
    whole = hashlib.sha256()
    images: dict[int, bytes] = {}  # by identity: equal images are one object
    for prepared in requests:
        whole.update(f"{prepared.request.place} {prepared.request.output_tokens} {len(prepared.before)}\n".encode())
        for part in prepared.own(tokens):
            if isinstance(part, bytes):
                if id(part) not in images:
                    images[id(part)] = hashlib.sha256(part).digest()
                whole.update(b"image " + images[id(part)])
            elif isinstance(part, str):
                whole.update(b"text " + hashlib.sha256(part.encode()).digest())
            else:
                whole.update(b"tokens " + hashlib.sha256(part.astype("<i4", copy=False).tobytes()).digest())
    return whole.hexdigest()


class _Choices:
    """The images that each request of a trace sends, in the order of the trace."""

    def __init__(self, invented: Invented) -> None:
        self.keys: list[tuple[Key, ...]] = []
        self.rows: dict[int | str, int] = {}  #: by place: placeholder tokens, which context_tokens includes
        self.problems: dict[int | str, tuple[str, str]] = {}  #: by place
        self.invented = invented

    def wanted(self) -> list[Key]:
        """Return each different image once, in the order of first use."""
        return list(dict.fromkeys(key for keys in self.keys for key in keys))

    def pixels(self) -> int:
        return sum(key[1] * key[2] for key in self.wanted() if isinstance(key, tuple))


def _choose_images(trace: Trace, photos: Sequence[Photo], sizer: ImageSizer, seed: int, model: ImageModel) -> _Choices:
    """Choose the images. The trace or the model gives sizes; the number of photos for each size is chosen here."""
    variants = len(photos)
    while True:
        choices = _choose_with(trace, photos, sizer, seed, model, variants)
        pixels = choices.pixels()
        if pixels <= PIXEL_BUDGET or variants == 1:
            break
        variants = variants * 2 // 3
    if pixels > MAX_PREPARED_PIXELS:
        raise PhotoError(
            str(trace.path),
            f"its different images have {pixels} pixels, and at most {MAX_PREPARED_PIXELS} can be made; use --limit",
        )
    return choices


def _choose_with(
    trace: Trace, photos: Sequence[Photo], sizer: ImageSizer, seed: int, model: ImageModel, variants: int
) -> _Choices:
    invented = Invented([photo.name for photo in photos])
    choices = _Choices(invented)
    folder = _folder(trace)
    by_tokens: dict[tuple[int, int], tuple[int, int]] = {}
    by_size: dict[tuple[int, int], int] = {}

    def rows_for(size: tuple[int, int]) -> int:
        if size not in by_size:
            by_size[size] = sizer.rows_for(*size)
        return by_size[size]

    def choose_image(place: int | str, index: int, image: Image) -> Key:
        """Choose the content to send for an image."""
        if image.recorded:
            invented.images_recorded += 1
            return image.data or folder / image.path
        variant = choose(seed, "photo", place, index) % variants
        modelled = not image.tokens and not image.width
        if modelled:
            invented.images_of_modelled_size += 1
            invented.image_model = model.name
            image = model.image(place, index)
        if image.tokens:
            invented.images_of_given_tokens += not modelled
            photo = (choose(seed, "variant", image.tokens) + variant) % len(photos)
            if (image.tokens, photo) not in by_tokens:
                by_tokens[image.tokens, photo] = sizer.size_for(image.tokens, photos[photo].aspect)
            size = by_tokens[image.tokens, photo]
            invented.images_off_their_tokens += rows_for(size) != image.tokens
            if size[0] * size[1] > MAX_PIXELS:
                raise UnusableSize(f"{image.tokens} tokens need {size[0]} x {size[1]} pixels; at most {MAX_PIXELS}")
            return photo, *size
        invented.images_of_given_size += not modelled
        size = image.width, image.height
        return (choose(seed, "variant", *size) + variant) % len(photos), *size

    for request in trace.requests:
        keys: list[Key] = []
        try:
            for index, image in enumerate(request.images):
                keys.append(choose_image(request.place, index, image))
            if request.context_tokens is not None:
                choices.rows[request.place] = sum(rows_for(key[1:]) for key in keys if isinstance(key, tuple))
        except UnusableSize as problem:
            keys = []
            choices.problems[request.place] = ("image_size", problem.problem)
        choices.keys.append(tuple(keys))
    return choices


def _folder(trace: Trace) -> Path:
    return trace.folder or trace.path.resolve().parent


Unusable = tuple[str, str]  #: reason and sentence of a drop


def _make(
    wanted: Sequence[Key], photos: Sequence[Photo], roots: Roots, progress: Progress
) -> dict[Key, bytes | Unusable]:
    """Make the bytes of each image, or say why a file has none. Pillow releases the interpreter lock, so threads use
    every core."""

    def make(key: Key) -> bytes | Unusable:
        if isinstance(key, bytes):
            return key
        if isinstance(key, Path):
            return _read(key, roots)
        photo, width, height = key
        return photos[photo].jpeg(width, height)

    made: dict[Key, bytes | Unusable] = {}
    pool = ThreadPoolExecutor(os.cpu_count() or 1, "replay-prepare")
    try:
        for key, content in zip(wanted, pool.map(make, wanted), strict=True):
            made[key] = content
            progress(len(made), len(wanted))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C images in work are finished, and no other is begun
    return made


def _read(path: Path, roots: Roots) -> bytes | Unusable:
    """Read a recorded image, byte for byte, since encoding it again would change the picture."""
    try:
        return roots.read(path, MAX_FILE_NBYTES)
    except OutsideRoots as problem:
        return "forbidden_image", f"{path}: {problem.strerror}; --media-root allows further folders"
    except OSError as problem:
        return "missing_image", f"{path}: {problem.strerror or problem}"
