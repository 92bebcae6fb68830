"""Outputs that a producer keeps for those who will ask: so many bytes at most, the oldest that somebody has read first.

Knows no pool and no clock. What it holds may be anything with a size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Keepsake(Generic[T]):
    """One output, and when it was last made or asked for."""

    name: str
    what: T
    nbytes: int
    since: float


class Kept(Generic[T]):
    """See the module."""

    def __init__(self, budget_nbytes: int) -> None:
        self.budget_nbytes, self.nbytes = budget_nbytes, 0
        self._unread: OrderedDict[str, Keepsake[T]] = OrderedDict()
        self._read: OrderedDict[str, Keepsake[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unread) + len(self._read)

    def __contains__(self, name: str) -> bool:
        return name in self._unread or name in self._read

    def __iter__(self) -> Iterator[T]:
        return (kept.what for shelf in (self._unread, self._read) for kept in shelf.values())

    def get(self, name: str) -> T | None:
        found = self._unread.get(name) or self._read.get(name)
        return None if found is None else found.what

    def room_for(self, nbytes: int) -> list[T]:
        """Forget what must go for so many bytes more; it is the caller's to close."""
        gone: list[T] = []
        while self.nbytes + nbytes > self.budget_nbytes and len(self):
            gone.append(self.forget(next(iter(self._read or self._unread))))
        return gone

    def add(self, name: str, what: T, nbytes: int, now: float) -> None:
        """Keep it. The name must not be here."""
        assert name not in self
        self._unread[name] = Keepsake(name, what, nbytes, now)
        self.nbytes += nbytes

    def read(self, name: str, now: float) -> None:
        """Somebody was sent it."""
        found = self._unread.pop(name, None) or self._read.pop(name)
        found.since = now
        self._read[name] = found

    def forget(self, name: str) -> T:
        """Raises KeyError."""
        found = self._unread.pop(name, None) or self._read.pop(name)
        self.nbytes -= found.nbytes
        return found.what

    def older(self, than: float) -> list[T]:
        """Forget what nobody has asked for since; it is the caller's to close."""
        old = [kept.name for shelf in (self._unread, self._read) for kept in shelf.values() if kept.since < than]
        return [self.forget(name) for name in old]
