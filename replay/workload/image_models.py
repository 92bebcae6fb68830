"""Where the images of a trace come from that only counts them: sizes that somebody measured.

| `--image-model` | what an image is |
|---|---|
| `modserve` | of a published distribution, that of the service behind the Azure LMM trace; see `sizes.py` |
| `coco` | of the size of one of 20,288 photos: COCO 2017 test-dev, whose longer side is capped at 640 |
| `640x480` | always that size: width x height |
| a file of sizes | of one of them: CSV with `width`, `height` and, where it is there, `count` |
| another trace | like one of its images: of that size, or of so many tokens under the deployment's processor |
"""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.recording.request import MAX_PIXELS, MAX_SIDE, BrokenRow, Image
from tensorferry.replay.trace.exact_numbers import number, whole
from tensorferry.replay.trace.formats.columns import DELIMITERS, split
from tensorferry.replay.trace.formats.registry import READABLE
from tensorferry.replay.trace.seeds import choose
from tensorferry.replay.trace.trace_file import Recording, Tally
from tensorferry.replay.workload.image_sizes import SizeModel

_FIXED = re.compile(r"(\d{1,100})x(\d{1,100})", re.ASCII)
_COLUMNS = frozenset({"width", "height", "count"})
_MAX_COUNT = 10**15
_MAX_SIZES_NBYTES = 64 << 20


class ImageModel(Protocol):
    @property
    def name(self) -> str: ...

    def image(self, place: int | str, index: int) -> Image:
        """Image `index` of the request at `place`: its size or its tokens. Seeded: always the same one."""


class Measured:
    """Images as often as they were measured."""

    def __init__(self, name: str, counts: Mapping[Image, int], seed: int) -> None:
        """counts: at least one, above 0."""
        self.name, self._seed = name, seed
        self._images = list(counts)
        self._bounds = list(accumulate(counts.values()))

    def image(self, place: int | str, index: int) -> Image:
        drawn = choose(self._seed, "image", place, index) % self._bounds[-1]
        return self._images[bisect(self._bounds, drawn)]


def image_model(spec: str, seed: int) -> ImageModel:
    """The model of an `--image-model`. Raises TraceError for a file that is none, ValueError for what names none."""
    if spec == "modserve":
        return SizeModel(seed)
    if spec == "coco":
        sizes = resources.files("tensorferry.replay.workload").joinpath("photos", "coco_sizes.csv")
        return Measured(spec, _sizes(spec, sizes.read_text("ascii")), seed)
    if match := _FIXED.fullmatch(spec):
        width, height = int(match[1]), int(match[2])
        if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
            raise ValueError(f"{spec}: sides of 1 to {MAX_SIDE} and at most {MAX_PIXELS} pixels")
        return Measured(spec, {Image(width=width, height=height): 1}, seed)
    path = Path(spec)
    if not spec or not path.exists():
        raise ValueError(f"{spec!r} is neither modserve, coco, a size such as 640x480, nor a file that exists")
    return Measured(path.name, _from_file(path), seed)


def _from_file(path: Path) -> Counter[Image]:
    """A list of sizes, or the images of a trace."""
    if path.is_file():
        with path.open("rb") as file:
            header = file.readline(4096).decode("utf-8-sig", "replace").casefold()
        if "width" in header and "height" in header and not header.lstrip().startswith("{"):
            if path.stat().st_size > _MAX_SIZES_NBYTES:
                problem = f"more than {_MAX_SIZES_NBYTES} bytes of sizes; count equal ones together"
                raise TraceError(str(path), None, problem)
            return _sizes(str(path), path.read_text("utf-8-sig", "replace"))
    images: Counter[Image] = Counter()
    try:
        recording = Recording(path)
    except TraceError as problem:
        if READABLE not in problem.problem:
            raise
        problem_text = (
            "not a trace that replay knows, and no list of sizes: a CSV file with the columns width and height"
        )
        raise TraceError(str(path), None, problem_text) from None
    with closing(recording.requests(Tally())) as requests:
        for request in requests:
            images.update(image for image in request.images if image.width or image.tokens)
    if not images:
        raise TraceError(str(path), None, "no image in it of a known size or number of tokens")
    return images


def _sizes(file: str, text: str) -> Counter[Image]:
    lines = text.splitlines()
    delimiter = max(DELIMITERS, key=lines[0].count)
    names = [cell.strip().casefold() for cell in split(lines[0], delimiter)]
    sizes: Counter[Image] = Counter()
    for row, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        try:
            cells = split(line, delimiter)
            if len(cells) != len(names):
                raise BrokenRow("field_count", f"{len(cells)} fields; the header has {len(names)}")
            values = {name: number(cell, name) for name, cell in zip(names, cells, strict=True) if name in _COLUMNS}
            width = whole(values.get("width"), "width", MAX_SIDE, least=1)
            height = whole(values.get("height"), "height", MAX_SIDE, least=1)
            count = whole(values.get("count", 1), "count", _MAX_COUNT)
        except BrokenRow as broken:
            raise TraceError(file, row, broken.problem) from None  # a model has no rows to spare
        if width * height > MAX_PIXELS:
            raise TraceError(file, row, f"{width} x {height} pixels; at most {MAX_PIXELS}")
        sizes[Image(width=width, height=height)] += count
    if not sizes.total():
        raise TraceError(file, None, "sizes, and not one of them")
    return +sizes
