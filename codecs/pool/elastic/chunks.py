"""Which chunks an elastic pool has, and which may come or go: pure decisions, no memory, clock, lock or socket.

The pool's address space is cut into *positions*, one chunk each. A position is

- *absent*: nothing is there, and a chunk may come;
- *coming*: its chunk is being made;
- *mapped*: its chunk has a *serial*, a number that no other chunk of this pool ever has;
- *retiring*: its chunk takes no more leases. Its memory is still held: by this process until it has unmapped it, and
  by every consumer that was sent it until that one has dropped it, or is proven dead. Only then is the
  position absent again, so that there is never more memory than positions: the budget holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tensorferry.codecs.pool.ledger import Words

LAST_SERIAL = (1 << 32) - 1
Range = tuple[int, int]  #: from byte to byte of the pool
Flags = npt.NDArray[np.bool_]  #: one for each position


@dataclass(slots=True)
class _Retiring:
    serial: int
    owed: set[int]  #: columns that have not dropped it
    here: bool = True  #: this process has it mapped


@dataclass(slots=True)
class _Mapped:
    serial: int
    used_ns: int  #: when its last lease ended, or later: when a chunk came, for then there was need of all
    sent: set[int] = field(default_factory=set)  #: columns that have its descriptor, or had it


class Chunks:
    """The positions of one pool. Times are of any clock that goes forward, in nanoseconds."""

    def __init__(self, positions: int, chunk_nbytes: int, *, first_serial: int = 1) -> None:
        """first_serial: for tests that reach the last one."""
        self.positions, self.chunk_nbytes = positions, chunk_nbytes
        self._mapped: dict[int, _Mapped] = {}
        self._retiring: dict[int, _Retiring] = {}
        self._coming: set[int] = set()
        self._serial = first_serial - 1

    # --- what there is

    @property
    def mapped(self) -> list[int]:
        return sorted(self._mapped)

    @property
    def mapped_nbytes(self) -> int:
        return self.chunk_nbytes * (len(self._mapped) + len(self._coming))

    @property
    def retiring_nbytes(self) -> int:
        return self.chunk_nbytes * len(self._retiring)

    def serial(self, position: int) -> int:
        """Of a mapped chunk. Raises KeyError."""
        return self._mapped[position].serial

    def span(self, offset: int, nbytes: int) -> range:
        """The positions that a range touches; an empty one touches its offset's."""
        return span(offset, nbytes, self.chunk_nbytes)

    # --- growing

    def needed(self, free: Iterable[Range], sizes: Sequence[int]) -> list[int]:
        """Positions whose chunks have yet to come for ranges of all these sizes to fit, beside each other.

        free: what the ledger could lend now. sizes: of at least a byte. As few as will do for each size in turn, the
        lowest of equally few; a size that all chunks which may come would not make room for is passed over. Asked under
        the pool's lock and on event loops, so it looks at all positions at once: 0.1 ms a size for 4,096 of them.
        """
        if len(self._mapped) + len(self._retiring) == self.positions:
            return []
        real = _joined(free)
        absent = np.ones(self.positions, np.bool_)
        absent[list(self._mapped)] = False
        absent[list(self._retiring)] = False
        absent[np.flatnonzero(absent)[LAST_SERIAL - self._serial :]] = False
        planned: list[int] = []
        for size in sizes:
            if not any(end - start >= size for start, end in real):
                more = self._fewest(real, absent, size)
                if not more:
                    continue
                planned += more
                absent[more] = False
                real = _joined([*real, *map(self._range, more)])
            start, end = min((r for r in real if r[1] - r[0] >= size), key=lambda r: (r[1] - r[0], r[0]))
            real.remove((start, end))
            if end - start > size:
                real.append((start + size, end))
        return planned

    def _fewest(self, real: list[Range], absent: Flags, size: int) -> list[int]:
        """The absent positions under the window of this size that touches the fewest of them; none: there is none."""
        runs = np.flatnonzero(np.diff(absent, prepend=False, append=False)).reshape(-1, 2) * self.chunk_nbytes
        there = _joined([*real, *((start, end) for start, end in runs.tolist())])  # when all have come
        ranges = [(start, end) for start, end in there if end - start >= size]
        if not ranges:
            return []
        starts, ends = np.array(ranges, np.int64).T
        borders = np.arange(self.positions, dtype=np.int64) * self.chunk_nbytes
        within = np.searchsorted(starts, borders, "right") - 1  # the range that a border lies in, or behind
        borders = borders[(within >= 0) & (borders + size <= ends[within])]
        windows = np.concatenate((starts, borders))  # any other touches what one that begins earlier in its chunk does
        firsts, behind = windows // self.chunk_nbytes, (windows + size - 1) // self.chunk_nbytes + 1
        below = np.concatenate(([0], np.cumsum(absent)))  # absent positions before each
        touched = below[behind] - below[firsts]
        best = np.argmin(touched * (self.positions + 1) + below[firsts])
        more: list[int] = (np.flatnonzero(absent[firsts[best] : behind[best]]) + firsts[best]).tolist()
        return more

    def begin(self, position: int) -> None:
        """A chunk for an absent position is being made: `came` or `failed` follows."""
        if not self._is_absent(position):
            raise ValueError(f"position {position} is not absent")
        self._coming.add(position)

    def came(self, position: int, now_ns: int) -> int:
        """It is mapped here; its serial."""
        self._coming.remove(position)
        self._serial += 1
        self._mapped[position] = _Mapped(self._serial, now_ns)
        for chunk in self._mapped.values():
            chunk.used_ns = now_ns  # else the old spare would be given back before it can be lent with the new chunk
        return self._serial

    def failed(self, position: int) -> None:
        self._coming.remove(position)

    # --- use

    def sent(self, position: int, column: int) -> None:
        """This consumer has been sent the chunk's descriptor."""
        self._mapped[position].sent.add(column)

    def is_sent(self, position: int, column: int) -> bool:
        return column in self._mapped[position].sent

    def touch(self, offset: int, nbytes: int, now_ns: int) -> None:
        """A lease of this range has ended."""
        for position in self.span(offset, nbytes):
            self._mapped[position].used_ns = now_ns

    # --- shrinking

    def idle(self, since_ns: int) -> list[int]:
        """Mapped positions where no lease has ended since, the highest first. There may be leases out all the same."""
        return sorted((p for p, chunk in self._mapped.items() if chunk.used_ns <= since_ns), reverse=True)

    def retire(self, position: int) -> None:
        """Its chunk takes no more leases, and none is left there. Raises KeyError for one that is not mapped."""
        chunk = self._mapped.pop(position)
        self._retiring[position] = _Retiring(chunk.serial, chunk.sent)

    def unmapped(self, position: int) -> None:
        """This process has a retiring chunk no more."""
        self._retiring[position].here = False
        self._settle(position)

    def dropped(self, column: int, words: Words) -> None:
        """What a consumer says: of each position, the last serial of which it holds nothing any more."""
        for position, chunk in list(self._retiring.items()):
            if words[position] == chunk.serial:
                chunk.owed.discard(column)
                self._settle(position)

    def let_go(self, column: int, serials: Collection[int]) -> None:
        """The same, of chunks by their serials."""
        for position, chunk in list(self._retiring.items()):
            if chunk.serial in serials:
                chunk.owed.discard(column)
                self._settle(position)

    def strike(self, column: int) -> None:
        """A consumer is proven dead: it holds nothing."""
        for mapped in self._mapped.values():
            mapped.sent.discard(column)
        for position, chunk in list(self._retiring.items()):
            chunk.owed.discard(column)
            self._settle(position)

    @property
    def last_serial(self) -> int:
        """The last that was given out."""
        return self._serial

    # ---

    def _settle(self, position: int) -> None:
        chunk = self._retiring[position]
        if not chunk.here and not chunk.owed:
            del self._retiring[position]

    def _is_absent(self, position: int) -> bool:
        taken = position in self._mapped or position in self._retiring or position in self._coming
        return 0 <= position < self.positions and not taken

    def _range(self, position: int) -> Range:
        return position * self.chunk_nbytes, (position + 1) * self.chunk_nbytes


def span(offset: int, nbytes: int, chunk_nbytes: int) -> range:
    """The positions that a range of a pool touches; an empty one touches its offset's."""
    return range(offset // chunk_nbytes, (offset + max(1, nbytes) - 1) // chunk_nbytes + 1)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in as few ranges as will do, ascending."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined
