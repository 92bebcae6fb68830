"""Work that takes effect later, as on a GPU: an `Order` whose stores land once the work before them is done."""

from __future__ import annotations

from typing import ClassVar

from tensorferry.codecs.memory.memory import Arrival, Bytes
from tensorferry.codecs.pool.control import Page


class Stream:
    """Work is queued, by its user, until `finish`. What is stored in the meantime, and what comes after a mark of a
    stream that is not finished, waits."""

    latest: ClassVar[Stream]
    _marks: ClassVar[dict[int, Stream]] = {}

    def __init__(self) -> None:
        self._stores: list[tuple[Page, int, int, int]] = []
        self._finished = self._landed = False
        self._before: set[Stream] = set()  # those this one comes after
        self._behind: set[Stream] = set()

    @classmethod
    def begin(cls, *_: object) -> Stream:
        """Another one; the `latest` from now on."""
        cls.latest = cls()
        return cls.latest

    def finish(self) -> None:
        """The work is done."""
        self._finished = True
        self._flush()

    def _flush(self) -> None:
        if not self._finished or self._before:
            return
        self._landed = True
        for page, column, slot, generation in self._stores:
            page.store(column, slot, generation)
        self._stores.clear()
        for stream in self._behind:
            stream._before.discard(self)
            stream._flush()
        self._behind.clear()

    # --- as an Order

    def check(self) -> None: ...

    def store(self, page: Page, column: int, slot: int, generation: int) -> None:
        self._stores.append((page, column, slot, generation))
        self._flush()

    def join(self) -> None: ...

    def mark(self) -> int:
        number = len(self._marks) + 1
        self._marks[number] = self
        return number

    def after(self, mark: int) -> None:
        earlier = self._marks[mark]
        if not earlier._landed and earlier is not self:
            self._before.add(earlier)
            earlier._behind.add(self)

    def to_host(self, data: Bytes) -> Arrival:
        raise AssertionError("host memory is never staged: these lives send no draft of it inline")
