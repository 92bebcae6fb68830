"""One recorded request, whatever format it was recorded in; and a row that is none."""

from __future__ import annotations

import msgspec

from tensorferry.codecs.errors import FerryError

#: The most that one request may say. They are the limits of the wire (`codecs.messages.Submit`), so a row
#: beyond them could not be sent to any deployment; a number this check lets pass is safe to allocate for.
MAX_TOKENS = 1 << 22
MAX_IMAGES = 4095
MAX_OUTPUT_TOKENS = 1 << 20
MAX_ID_CHARACTERS = 256
MAX_SIDE = 65_500  # of a JPEG
MAX_PIXELS = 100_000_000


#: What a trace without an answer's length is taken to have asked for; each time counted in `Trace.notes`.
ASSUMED_OUTPUT_TOKENS = 128


class Image(msgspec.Struct, frozen=True, gc=False):
    """One image as far as the trace knows it: its bytes, a path, a size, or a number of tokens.

    With none of the four, the trace knows only that there was an image.
    """

    path: str = ""  #: as written; relative to the folder of the trace file
    width: int = 0
    height: int = 0
    tokens: int = 0
    data: bytes = b""  #: the file as it was sent

    @property
    def recorded(self) -> bool:
        """Whether its bytes exist, rather than being replay's to invent."""
        return bool(self.data or self.path)


class Request(msgspec.Struct, frozen=True, gc=False):
    """One row of a trace.

    Of its text it knows one of: the words (`text`; `layout` where images stand between them), the number of
    tokens (`text_tokens`), or how many tokens text and images have together (`context_tokens`). None of them:
    no text.

    A request of a conversation comes after another one: the one whose `id` is its `parent`, or else the one
    before it in time with the same `session`.
    """

    line: int  #: of the trace file, counted from 1
    at_ns: int  #: on the trace's own clock, whatever its origin
    output_tokens: int
    id: str = ""
    text: str | None = None
    text_tokens: int | None = None
    context_tokens: int | None = None
    images: tuple[Image, ...] = ()
    blocks: tuple[int, ...] = ()  #: identities of the prompt's blocks: equal ids stand for equal tokens
    block_tokens: int = 0  #: how many tokens a block has
    layout: tuple[str | int, ...] = ()  #: words, and the indices of images between them
    session: str = ""
    parent: str = ""
    continues: bool = False  #: it is a new turn alone: what the session said before has to be put in front of it
    think_ns: int | None = None  #: recorded from the end of the request before it
    took_ns: int | None = None  #: recorded from its arrival to the end of its answer
    turn: int = 0  #: which of the requests on its line
    notes: tuple[str, ...] = ()  #: what is worth counting: roles_not_sent, output_tokens_assumed, ...

    @property
    def place(self) -> int | str:
        """Where in the file it is: what is invented for it depends on that."""
        return f"{self.line}.{self.turn}" if self.turn else self.line

    @property
    def words(self) -> tuple[str | int, ...]:
        """`layout`, or what it would be: the images, then the text."""
        return self.layout or (*range(len(self.images)), *((self.text,) if self.text else ()))


class Drop(msgspec.Struct, frozen=True):
    """A row that was read and is not sent, and why."""

    line: int
    reason: str  #: a word to count by: missing, not_json, negative, ...
    problem: str  #: a sentence; empty for all but the first few of a reason


class BrokenRow(FerryError):
    """One row of a trace cannot be used; the rows around it can."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(reason, problem)
        self.reason, self.problem = reason, problem

    def __str__(self) -> str:
        return self.problem
