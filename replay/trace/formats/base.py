"""The protocol of all formats, which turn one line into its requests."""

from __future__ import annotations

from typing import Protocol

from tensorferry.pipeline.recording.request import Drop, Request

#: The request of one line, or the turns and broken turns of a line that is a whole conversation.
Parsed = Request | list[Request | Drop]


class Format(Protocol):
    """A reader of the rows of one trace. One is made for each pass over a file, and gets its lines in their order, so
    it may remember what a later row refers to."""

    @property
    def name(self) -> str: ...

    @property
    def wall(self) -> bool:
        """Whether its times are dates instead of times since a start."""

    @property
    def timed(self) -> bool:
        """Whether it has times. Otherwise `at_ns` counts from the start of the line's own conversation."""

    @property
    def decided(self) -> str:
        """A sentence, if the numbers decided the unit of times because the trace does not say it."""

    @property
    def first_line(self) -> int:
        """The number of the first line that is a row."""

    def parse(self, line: str, number: int, /) -> Parsed:
        """Read the content of that line. Raises BrokenRow."""
