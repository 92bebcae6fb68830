"""The formats of ServeGen (github.com/alibaba/ServeGen): requests of its generator, and its clients.

A client is a pair of files. `chunk-<i>-trace.csv` has, for each window of ten minutes, the rate and the distribution of
the gaps between requests. `chunk-<i>-dataset.json` has, for each six hours, the frequency of each number of tokens and
of images. The files have no requests, so requests are drawn with a seed: as many in each window as its rate gives, with
gaps of the window's distribution, scaled to fill it. Each number of a request is drawn independently.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.recording.request import (
    MAX_ID_CHARACTERS,
    MAX_IMAGES,
    MAX_OUTPUT_TOKENS,
    MAX_TOKENS,
    BrokenRow,
    Drop,
    Image,
    Request,
)
from tensorferry.replay.trace.exact_numbers import NS, whole
from tensorferry.replay.trace.formats.columns import split
from tensorferry.replay.trace.formats.json_lines import json_object, object_at
from tensorferry.replay.trace.formats.times import JsonRows
from tensorferry.replay.trace.seeds import choose

WINDOW_S = 600
CLIENT = re.compile(r"chunk-(\d+)-trace\.csv")
_MAX_RATE = 10_000.0
_PDF_ITEM = re.compile(r"\s*(\d+)\s*:\s*([0-9.eE+-]+)\s*(?:,|$)")
_FIELDS = {
    "text_tokens": MAX_TOKENS,
    "image_tokens": MAX_TOKENS,
    "image_count": MAX_IMAGES,
    "output_tokens": MAX_OUTPUT_TOKENS,
    "audio_count": MAX_IMAGES,
    "video_count": MAX_IMAGES,
}


class ServeGen(JsonRows):
    """Requests of the generator, one JSON object each, with times in seconds and the tokens of each image."""

    name = "servegen"

    def parse(self, line: str, number: int) -> Request:
        row = json_object(line)
        data = object_at(row, "data")
        if data.get("audio_tokens") or data.get("video_tokens"):
            raise BrokenRow("unsupported_media", "it has audio or video, which replay cannot send")
        sizes = data.get("image_tokens", [])
        if not isinstance(sizes, list):
            raise BrokenRow("bad_value", "data.image_tokens is not a list")
        if len(sizes) > MAX_IMAGES:
            raise BrokenRow("out_of_range", f"it has {len(sizes)} images; at most {MAX_IMAGES} can be sent")
        images = tuple(Image(tokens=whole(size, "data.image_tokens[]", MAX_TOKENS, least=1)) for size in sizes)
        tokens = whole(data.get("text_tokens"), "data.text_tokens", MAX_TOKENS)
        if not tokens and not images:
            raise BrokenRow("empty", "it has neither text nor images")
        return Request(
            line=number,
            at_ns=self._at_ns(row),
            output_tokens=whole(data.get("output_tokens"), "data.output_tokens", MAX_OUTPUT_TOKENS),
            id=str(row.get("request_id", ""))[:MAX_ID_CHARACTERS],
            text_tokens=tokens or None,
            images=images,
        )


class Distribution:
    """The distribution of a number, by frequencies."""

    def __init__(self, frequencies: dict[int, float]) -> None:
        """Raises ValueError if these are not frequencies."""
        self._values = list(frequencies)
        self._bounds = list(accumulate(frequencies.values()))
        if not self._bounds or not 0 < self._bounds[-1] < float("inf") or min(frequencies.values()) < 0:
            raise ValueError("no frequencies")

    @classmethod
    def parse(cls, text: str, most: int) -> Distribution:
        """Read a Python dict in a string, as upstream writes it, without `eval`. Raises ValueError."""
        inside = text.strip()
        if not (inside.startswith("{") and inside.endswith("}")):
            raise ValueError(f"{text[:40]!r} is not a table of frequencies")
        inside, at, found = inside[1:-1].rstrip(), 0, dict[int, float]()
        while at < len(inside):
            item = _PDF_ITEM.match(inside, at)
            if item is None or int(item[1]) > most:
                raise ValueError(f"{inside[at : at + 40]!r} is not a value of at most {most} and its frequency")
            found[int(item[1])] = float(item[2])
            at = item.end()
        return cls(found)

    def at(self, share: float) -> int:
        """Return the quantile of that share. share: in [0, 1)."""
        return self._values[min(bisect(self._bounds, share * self._bounds[-1]), len(self._values) - 1)]


class Window(msgspec.Struct, frozen=True):
    """Ten minutes in which a client is not idle."""

    line: int  #: in its file
    start_s: int
    per_s: float
    weibull: bool  #: otherwise the gaps are gamma-distributed
    shape: float


class Client:
    """A client of ServeGen."""

    def __init__(self, trace: Path, number: int) -> None:
        """trace: `chunk-<number>-trace.csv`. Raises TraceError, naming file and line."""
        self.number = number
        dataset = trace.with_name(f"chunk-{number}-dataset.json")
        if not dataset.is_file():
            problem = (
                f"it has the statistics of a ServeGen client, but the other half, {dataset.name}, is not beside it"
            )
            raise TraceError(str(trace), None, f"{problem}. Give the folder of both (docs/traces.md)")
        self.windows = _windows(trace)
        self._spans = _spans(dataset)
        self._starts = sorted(self._spans)

    def draw(self, seed: int) -> Iterator[Request | Drop]:
        """Draw its requests, in the order of time. Their `line` is that of the window."""
        for window in self.windows:
            count = round(window.per_s * WINDOW_S)
            random = np.random.Generator(np.random.PCG64(choose(seed, "servegen", self.number, window.start_s)))
            shape = (window.shape, count + 1)
            gaps = random.weibull(*shape) if window.weibull else random.standard_gamma(*shape)
            ends = np.cumsum(gaps)
            if not ends[-1] > 0:
                continue
            offsets_ns = (ends[:-1] / ends[-1] * (WINDOW_S * NS)).astype(np.int64).tolist()
            span = self._spans[self._starts[max(0, bisect_right(self._starts, window.start_s) - 1)]]
            for offset_ns in offsets_ns:
                yield _request(window, span, window.start_s * NS + offset_ns, random)


class Clients:
    """A folder of clients, drawn together."""

    name = "servegen-clients"
    wall = False
    timed = True
    decided = ""
    first_line = 1

    def __init__(self, traces: Sequence[Path], seed: int) -> None:
        matches = [(int(match[1]), path) for path in traces if (match := CLIENT.fullmatch(path.name))]
        self._clients = [Client(path, number) for number, path in sorted(matches)]
        self._seed = seed

    def rows(self) -> Iterator[Request | Drop]:
        """Draw all requests, in the order of time. Their `line` counts them."""
        drawn = heapq.merge(*(self._of(client) for client in self._clients), key=lambda one: one[0])
        for number, (_, client, row) in enumerate(drawn, 1):
            if isinstance(row, Drop):
                yield Drop(number, row.reason, f"client {client}, line {row.line}: {row.problem}")
            else:
                yield msgspec.structs.replace(row, line=number, id=f"{client}:{number}")

    def _of(self, client: Client) -> Iterator[tuple[int, int, Request | Drop]]:
        last_ns = 0
        for row in client.draw(self._seed):
            last_ns = row.at_ns if isinstance(row, Request) else last_ns
            yield last_ns, client.number, row

    def parse(self, line: str, number: int) -> Request:
        raise AssertionError("clients are drawn, not read line by line")


def _windows(path: Path) -> list[Window]:
    windows: list[Window] = []
    for number, line in enumerate(path.read_text("ascii", "replace").splitlines(), 1):
        cells = split(line, ",")
        try:
            start, rate, _, pattern, shape, _ = cells
            per_s = float(rate)
            if per_s == 0:
                continue
            window = Window(number, int(start), per_s, pattern == "Weibull", float(shape))
            if pattern not in ("Gamma", "Weibull") or not 0 < per_s <= _MAX_RATE or not 0 < window.shape < 1e6:
                raise ValueError
        except ValueError:
            what = "start, rate, CV, Gamma or Weibull, shape, scale"
            raise TraceError(
                str(path), number, f"{line[:80]!r} is not a window of a ServeGen client ({what})"
            ) from None
        windows.append(window)
    return windows


def _spans(path: Path) -> dict[int, dict[str, Distribution]]:
    """Read the distributions of each span, by the second of its start."""
    try:
        document: dict[str, Any] = json_object(path.read_bytes())
        spans = {
            int(start): {name: Distribution.parse(fields.get(name, "{0: 1.0}"), most) for name, most in _FIELDS.items()}
            for start, fields in document.items()
        }
    except (BrokenRow, ValueError, AttributeError, TypeError) as problem:
        raise TraceError(str(path), None, f"not the dataset of a ServeGen client: {problem}") from None
    if not spans:
        raise TraceError(str(path), None, "the dataset of a ServeGen client is empty")
    return spans


def _request(window: Window, span: dict[str, Distribution], at_ns: int, random: np.random.Generator) -> Request | Drop:
    def draw(name: str) -> int:
        return span[name].at(random.random())

    if draw("audio_count") or draw("video_count"):
        return Drop(window.line, "unsupported_media", "it has audio or video, which replay cannot send")
    text, output = draw("text_tokens"), draw("output_tokens")
    sizes = (draw("image_tokens") for _ in range(draw("image_count")))
    images = tuple(Image(tokens=size) for size in sizes if size)
    if not text and not images:
        return Drop(window.line, "empty", "it has neither text nor images")
    return Request(line=window.line, at_ns=at_ns, output_tokens=output, text_tokens=text or None, images=images)
