"""Everything a replay will send, made before its clock starts.

Decoding, resizing and encoding images between two sends is the classic way for a replayer to fall behind its
own schedule. Equal images are made once and shared.
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
from tensorferry.replay.workload.photos import Photo, PhotoError, names
from tensorferry.replay.workload.token_ids import TokenSource

#: Pixels of different invented images: about two seconds of two cores. Above it fewer photos share the work,
#: down to one for each size; sizes are never changed.
PIXEL_BUDGET = 256_000_000
MAX_PREPARED_PIXELS = 12_000_000_000  #: about 2 GiB of JPEG
MAX_FILE_NBYTES = 256 << 20
#: Up to so many invented token ids (256 MiB) are made beforehand; in a longer trace each prompt is made when it
#: is sent, which costs the sender some 10 us a thousand tokens.
HELD_TOKENS = 64 << 20

Part = str | bytes | npt.NDArray[np.int32]
#: progress(done, total): of the images that have to be read or made.
Progress = Callable[[int, int], None]


class UnusableSize(FerryError):
    """The deployment's processor takes no image of this size."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class ImageSizer(Protocol):
    """What a replay needs to know of the deployment's processor. Both raise UnusableSize."""

    def rows_for(self, width: int, height: int) -> int:
        """Placeholder tokens of an image of this size."""

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        """A (width, height) near that aspect ratio with `rows` placeholder tokens, or as near as can be."""


class Invented(msgspec.Struct):
    """What the trace did not say and the replay made up; the report prints it."""

    photos: list[str]
    image_model: str = ""  #: what images of modelled size are like, if there are any
    images_recorded: int = 0  #: bytes in the trace, or from files it names
    images_of_given_size: int = 0  #: size recorded, picture invented
    images_of_given_tokens: int = 0  #: tokens recorded, size chosen to match, picture invented
    images_off_their_tokens: int = 0  #: of those, how many the processor cannot match exactly
    images_of_modelled_size: int = 0  #: only their number recorded; size and picture invented
    different_images: int = 0  #: different contents among all of the above
    encoded_nbytes: int = 0  #: of those different images together
    prompts: int = 0  #: requests whose token ids are invented (their number was recorded)
    answers: int = 0  #: requests before which the answers of earlier turns stand, whose token ids are invented
    prompts_without_text: int = 0  #: images took all of the recorded context, so no tokens are left for text


class Prepared(msgspec.Struct, frozen=True):
    """A request and what it sends."""

    request: Request
    images: tuple[bytes, ...]
    text_tokens: int  #: to invent; 0 where there is none, or where `request.text` is sent
    ids: npt.NDArray[np.int32] | None
    before: tuple[Prepared, ...] = ()  #: the turns whose prompts and answers stand in front of it, oldest first

    @property
    def complete(self) -> bool:
        """Whether nothing is left to make when it is sent."""
        return not self.before and (self.ids is not None or not self.text_tokens)

    @property
    def all_images(self) -> list[Image]:
        """As the trace knows them, those of the conversation so far included."""
        return [image for prepared in (*self.before, self) for image in prepared.request.images]

    def parts(self, tokens: TokenSource) -> list[Part]:
        """What is sent: the conversation so far, then its own words and images as they follow each other."""
        parts: list[Part] = []
        for earlier in self.before:
            parts += earlier.own(tokens)
            if earlier.request.output_tokens:
                parts.append(tokens.answer(earlier.request))
        return parts + self.own(tokens)

    def own(self, tokens: TokenSource) -> list[Part]:
        """Without the conversation so far."""
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
    drops: list[Drop]  #: those that cannot be made
    invented: Invented
    payload_sha256: str = ""  #: of all that will be sent: equal for equal files, seeds and sizes


Key = tuple[int, int, int] | Path | bytes  #: photo, width, height; or a file; or the bytes themselves


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
    """Choose every size and make every byte. Blocks for seconds; call it off the event loop.

    model: what images are that the trace only counts; None: `SizeModel`. roots: folders, beside the trace's own, below
    which it may name files: it may be somebody else's, and what it names is sent. An image file that is not there, or
    elsewhere, drops the one request that names it; one that is there and damaged is sent as it is, since what a
    deployment makes of it is a result. Raises PhotoError when the trace asks for more different images than memory
    should hold.
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
    """Of every request's own parts, in their order. Two builds that were sent the same have the same."""
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
    """For each request of a trace, in its order, the images it will send."""

    def __init__(self, invented: Invented) -> None:
        self.keys: list[tuple[Key, ...]] = []
        self.rows: dict[int | str, int] = {}  #: by place: placeholder tokens, where the text gets what they leave
        self.problems: dict[int | str, tuple[str, str]] = {}  #: by place
        self.invented = invented

    def wanted(self) -> list[Key]:
        """Each different image once, in the order of first use."""
        return list(dict.fromkeys(key for keys in self.keys for key in keys))

    def pixels(self) -> int:
        return sum(key[1] * key[2] for key in self.wanted() if isinstance(key, tuple))


def _choose_images(trace: Trace, photos: Sequence[Photo], sizer: ImageSizer, seed: int, model: ImageModel) -> _Choices:
    """Sizes are given by the trace or the model; with how many different photos each is shown is ours to choose."""
    variants = len(photos)
    while True:
        choices = _choose_with(trace, photos, sizer, seed, model, variants)
        pixels = choices.pixels()
        if pixels <= PIXEL_BUDGET or variants == 1:
            break
        variants = variants * 2 // 3
    if pixels > MAX_PREPARED_PIXELS:
        raise PhotoError(str(trace.path), f"its images have {pixels} different pixels to make; take fewer with --limit")
    return choices


def _choose_with(
    trace: Trace, photos: Sequence[Photo], sizer: ImageSizer, seed: int, model: ImageModel, variants: int
) -> _Choices:
    invented = Invented(names(photos))
    choices = _Choices(invented)
    folder = _folder(trace)
    by_tokens: dict[tuple[int, int], tuple[int, int]] = {}
    by_size: dict[tuple[int, int], int] = {}

    def rows_for(size: tuple[int, int]) -> int:
        if size not in by_size:
            by_size[size] = sizer.rows_for(*size)
        return by_size[size]

    def choose_image(place: int | str, index: int, image: Image) -> Key:
        """What to send for it."""
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
    """The bytes of each image, or why a file has none. Pillow works outside the interpreter lock, so threads are enough
    to use every core."""

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
        pool.shutdown(cancel_futures=True)  # after Ctrl-C: what is being made is finished, the rest is not begun
    return made


def _read(path: Path, roots: Roots) -> bytes | Unusable:
    """A recorded image, byte for byte: re-encoding it would replay another picture."""
    try:
        return roots.read(path, MAX_FILE_NBYTES)
    except OutsideRoots as problem:
        return "forbidden_image", f"{path}: {problem.strerror}; --media-root allows more"
    except OSError as problem:
        return "missing_image", f"{path}: {problem.strerror or problem}"
