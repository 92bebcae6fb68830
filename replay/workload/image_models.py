"""Measured image sizes, for the images of a trace that only counts them.

| `--image-model` | the size of an image |
|---|---|
| `modserve` | from the published distribution of the service behind the Azure LMM trace; see `image_sizes.py` |
| `coco` | that of one of 20,288 photos: COCO 2017 test-dev, whose longer side is at most 640 |
| `640x480` | always this width x height |
| a file of sizes | one of those in the CSV file, which has `width`, `height` and perhaps `count` |
| another trace | that of one of its images, or one of so many tokens under the deployment's processor |
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
        """Return image `index` of the request at `place`, with its size or tokens. Equal seeds give equal images."""


class Measured:
    """A model that draws images as often as they were measured."""

    def __init__(self, name: str, counts: Mapping[Image, int], seed: int) -> None:
        """counts: at least one, above 0."""
        self.name, self._seed = name, seed
        self._images = list(counts)
        self._bounds = list(accumulate(counts.values()))

    def image(self, place: int | str, index: int) -> Image:
        drawn = choose(self._seed, "image", place, index) % self._bounds[-1]
        return self._images[bisect(self._bounds, drawn)]


def image_model(spec: str, seed: int) -> ImageModel:
    """Make the model of an `--image-model`. Raises TraceError for an unusable file, ValueError for an unknown name."""
    if spec == "modserve":
        return SizeModel(seed)
    if spec == "coco":
        sizes = resources.files("tensorferry.replay.workload").joinpath("photos", "coco_sizes.csv")
        return Measured(spec, _sizes(spec, sizes.read_text("ascii")), seed)
    if match := _FIXED.fullmatch(spec):
        width, height = int(match[1]), int(match[2])
        if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
            raise ValueError(f"{spec} is out of range; give sides of 1 to {MAX_SIDE} and at most {MAX_PIXELS} pixels")
        return Measured(spec, {Image(width=width, height=height): 1}, seed)
    path = Path(spec)
    if not spec or not path.exists():
        raise ValueError(f"{spec!r} is neither modserve, coco, a size such as 640x480, nor a file that exists")
    return Measured(path.name, _from_file(path), seed)


def _from_file(path: Path) -> Counter[Image]:
    """Read a list of sizes, or the images of a trace."""
    if path.is_file():
        with path.open("rb") as file:
            header = file.readline(4096).decode("utf-8-sig", "replace").casefold()
        if "width" in header and "height" in header and not header.lstrip().startswith("{"):
            if path.stat().st_size > _MAX_SIZES_NBYTES:
                problem = f"it has more than {_MAX_SIZES_NBYTES} bytes; count equal sizes together in a column count"
                raise TraceError(str(path), None, problem)
            return _sizes(str(path), path.read_text("utf-8-sig", "replace"))
    images: Counter[Image] = Counter()
    try:
        recording = Recording(path)
    except TraceError as problem:
        if READABLE not in problem.problem:
            raise
        problem_text = (
            "it is neither a trace that replay knows nor a list of sizes; a list is a CSV file with the columns width "
            "and height"
        )
        raise TraceError(str(path), None, problem_text) from None
    with closing(recording.requests(Tally())) as requests:
        for request in requests:
            images.update(image for image in request.images if image.width or image.tokens)
    if not images:
        raise TraceError(
            str(path), None, "it has no image of a known size or number of tokens; name another trace or model"
        )
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
            raise TraceError(file, row, broken.problem) from None  # a dropped row would change the distribution
        if width * height > MAX_PIXELS:
            raise TraceError(file, row, f"{width} x {height} pixels; at most {MAX_PIXELS}")
        sizes[Image(width=width, height=height)] += count
    if not sizes.total():
        raise TraceError(file, None, "it has no size with a count above 0")
    return +sizes
