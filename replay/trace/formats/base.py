"""What every format is: a way from one line to its requests."""

from __future__ import annotations

from typing import Protocol

from tensorferry.pipeline.recording.request import Drop, Request

#: Of one line: its request; or, where a line is a whole conversation, its turns and those that are broken.
Parsed = Request | list[Request | Drop]


class Format(Protocol):
    """How the rows of one trace are read. One is made for each pass over a file and sees its lines in their order,
    so it may remember what a later row refers to."""

    @property
    def name(self) -> str: ...

    @property
    def wall(self) -> bool:
        """Whether its times are dates, rather than time since some start."""

    @property
    def timed(self) -> bool:
        """Whether it says when. Otherwise `at_ns` is from the start of the line's own conversation."""

    @property
    def decided(self) -> str:
        """A sentence, where the trace does not say the unit of its times and the numbers had to."""

    @property
    def first_line(self) -> int:
        """The number of the first line that is a row."""

    def parse(self, line: str, number: int, /) -> Parsed:
        """What is on that line. Raises BrokenRow."""
