"""The Azure traces: CSV, one request a row.

Source: github.com/Azure/AzurePublicDataset, CC-BY-4.0. `TIMESTAMP,ContextTokens,GeneratedTokens` (LLM, 2023
and 2024) and `TIMESTAMP,NumImages,ContextTokens,GeneratedTokens` (LMM, 2025). In the LMM trace ContextTokens
counts text and image tokens together, and NumImages is all it says of the images.
"""

from __future__ import annotations

import csv

from tensorferry.pipeline.replay.request import (
    MAX_IMAGES,
    MAX_OUTPUT_TOKENS,
    MAX_TOKENS,
    BrokenRow,
    Image,
    Request,
)
from tensorferry.pipeline.replay.values import number, wall_clock, whole

DELIMITERS = ",;\t"
REQUIRED = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
IMAGES = "NumImages"
_UNKNOWN = Image()


class Azure:
    """Rows by the names in the header: their order and further columns do not matter."""

    wall = True

    def __init__(self, header: list[str], delimiter: str, line: int) -> None:
        """header: the cells of the header line, with all of REQUIRED among them; line: its number."""
        self._column = {name.strip().casefold(): index for index, name in enumerate(header)}
        self._width, self._delimiter = len(header), delimiter
        self._time, self._context, self._generated = (self._column[name.casefold()] for name in REQUIRED)
        self._images = self._column.get(IMAGES.casefold())
        self._zoned: bool | None = None  #: whether the first good row named its zone
        self.first_line = line + 1

    @property
    def name(self) -> str:
        return "azure-llm" if self._images is None else "azure-lmm"

    def parse(self, line: str, number_of_line: int) -> Request:
        """The request of one row. Raises BrokenRow."""
        cells = split(line, self._delimiter)
        if len(cells) != self._width:
            raise BrokenRow("field_count", f"{len(cells)} fields; the header has {self._width}")
        at_ns, zoned = wall_clock(cells[self._time], "TIMESTAMP")
        if self._zoned is None:
            self._zoned = zoned
        if zoned != self._zoned:
            raise BrokenRow("mixed_zones", "some rows name a time zone and some do not: they cannot be compared")
        count = 0
        if self._images is not None:
            count = whole(number(cells[self._images], IMAGES), IMAGES, MAX_IMAGES)
        context = whole(number(cells[self._context], "ContextTokens"), "ContextTokens", MAX_TOKENS)
        generated = number(cells[self._generated], "GeneratedTokens")
        if not context and not count:
            raise BrokenRow("empty", "neither tokens nor images")
        return Request(
            line=number_of_line,
            at_ns=at_ns,
            output_tokens=whole(generated, "GeneratedTokens", MAX_OUTPUT_TOKENS),
            text_tokens=None if count else context,
            context_tokens=context if count else None,
            images=(_UNKNOWN,) * count,
        )


def split(line: str, delimiter: str) -> list[str]:
    """The cells of one line. A quoted cell ends on its own line, so a stray quote costs that line alone.

    Raises BrokenRow (bad_csv).
    """
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error as problem:
        raise BrokenRow("bad_csv", f"not CSV: {problem}") from None
