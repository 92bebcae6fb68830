"""Who has which bytes, and who still has to give them back: pure decisions, no memory, clock, lock or socket.

A *lease* is one feature's stay in the pool: a range of bytes, a slot of control words and the generation that
says which use of the slot this is. It lives in two states. *Open*: its holder may write the bytes and dispatch
it to consumers, one column each. *Settled*: it is dispatched to no more columns; it ends as soon as the
words say that the bytes are written (`ready`) and that every column it needs has acknowledged, and not before.
To cancel a lease is to settle one that was dispatched to no column, so a cancelled lease waits for its writer too.

Every cost is independent of how many leases are out; finding a range is a binary search over the free ranges,
and a reclaim pass is one vectorised comparison over all slots, or a look at each lease where they are few.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.codecs.errors import LeaseError, PoolFull, StaleLease

#: One control word per slot, as a snapshot or a live page.
Words = npt.NDArray[np.uint32]

LAST_GENERATION = (1 << 31) - 1
#: Up to so many settled leases are looked at one by one: a scan costs as much with one as with thousands, and 50 us
#: where the caches are cold.
FEW = 16
_ALL_BITS = np.uint32(0xFFFFFFFF)
_OFFSET_BITS = 44  # free ranges are sorted by size, then offset, packed into one integer for a fast search


class Grant(NamedTuple):
    """The name of a lease: no two leases of a pool ever have the same."""

    slot: int
    generation: int
    offset: int
    nbytes: int


class Ledger:
    """The leases of one pool."""

    def __init__(self, nbytes: int, slots: int, *, granule: int = 256, first_generation: int = 1) -> None:
        """nbytes: of the pool, 0 for one that is to `grow`; slots: leases at once; granule: bytes that ranges are
        rounded up to, so that every range is aligned; first_generation: for tests that reach the last one."""
        self._granule = granule
        self._capacity = nbytes // granule * granule
        self._ranges = _FreeRanges(self._capacity)
        self._free_slots = deque(range(slots))  # first in, first out: uses of a slot are as far apart as can be
        self._generations = [first_generation - 1] * slots
        self._open: dict[int, tuple[Grant, list[int]]] = {}  # slot -> lease, columns dispatched so far
        self._settled: dict[int, tuple[Grant, list[int]]] = {}
        self._due = np.zeros(slots, np.uint32)  # generation of the settled lease, 0: none
        self._need: dict[int, Words] = {}  # column -> all bits set where that column must still acknowledge
        self.quarantined: set[int] = set()  #: columns that get no more leases, and whose words are not believed
        self._admitted = 0  # columns ever given out
        self._retired_slots = 0
        self.lent_nbytes = self.peak_lent_nbytes = self.peak_lent_slots = 0
        self._scratch = np.empty(slots, np.uint32)
        self._pending = np.empty(slots, np.uint32)

    # --- what there is

    @property
    def admitted(self) -> int:
        """Columns ever given out, from 0 on."""
        return self._admitted

    @property
    def capacity_nbytes(self) -> int:
        return self._capacity

    @property
    def free_nbytes(self) -> int:
        return self._capacity - self.lent_nbytes

    @property
    def longest_free_nbytes(self) -> int:
        return self._ranges.longest

    @property
    def free_ranges(self) -> int:
        return len(self._ranges)

    @property
    def free(self) -> list[tuple[int, int]]:
        """The free ranges, from byte to byte, in no order."""
        return self._ranges.all()

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def retired_slots(self) -> int:
        """Slots whose generations are used up; they are never used again."""
        return self._retired_slots

    @property
    def lent_slots(self) -> int:
        return len(self._open) + len(self._settled)

    @property
    def columns(self) -> frozenset[int]:
        return frozenset(self._need)

    def fits(self, sizes: Iterable[int]) -> bool:
        """Whether leases of these sizes could all be lent now. Changes nothing."""
        rounded = [self.rounded(size) for size in sizes]
        if len(rounded) == 1:  # so it is for nearly every item, and need not be tried out
            return bool(self._free_slots) and rounded[0] <= self._ranges.longest
        taken: list[tuple[int, int]] = []
        try:
            for wanted in rounded:
                offset = self._ranges.take(wanted)
                if offset is None:
                    return False
                taken.append((offset, wanted))
            return len(taken) <= len(self._free_slots)
        finally:
            for offset, wanted in taken:
                self._ranges.give(offset, wanted)

    def leases(self) -> list[Grant]:
        return [grant for grant, _ in (*self._open.values(), *self._settled.values())]

    # --- an elastic pool's size

    def grow(self, offset: int, nbytes: int) -> None:
        """From now on this range may be lent too. It must be new here, and whole granules."""
        self._ranges.give(offset, nbytes)
        self._capacity += nbytes

    def shrink(self, offset: int, nbytes: int) -> bool:
        """Never lend this range again, unless it grows again. False, and nothing has changed, if any of it is lent."""
        if not self._ranges.cut(offset, nbytes):
            return False
        self._capacity -= nbytes
        return True

    # --- consumers

    def admit(self) -> int:
        """A column for a new consumer. A column of a dead consumer is never used again: a producer that does not know
        of the death yet would make the new consumer owe acknowledgements for leases that it was never sent."""
        column = self._admitted
        self._admitted += 1
        self._need[column] = np.zeros_like(self._due)
        return column

    def quarantine(self, column: int) -> None:
        """Lend a consumer nothing more, and believe none of its words: its leases stay out until it is written off."""
        self.quarantined.add(column)

    def strike(self, column: int) -> None:
        """Write off a consumer that is proven dead: no lease needs it any more. Raises KeyError for one that
        has no column."""
        del self._need[column]
        self.quarantined.discard(column)
        for leases in (self._open, self._settled):
            for _, columns in leases.values():
                if column in columns:
                    columns.remove(column)

    # --- a lease's life

    def lend(self, nbytes: int) -> Grant:
        """An open lease of at least nbytes (0 takes a granule too). Raises PoolFull; then nothing has changed."""
        wanted = self.rounded(nbytes)
        offset = self._ranges.take(wanted) if self._free_slots else None
        if offset is None:
            raise PoolFull(nbytes, self._ranges.longest, len(self._free_slots))
        slot = self._free_slots.popleft()
        generation = self._generations[slot] = self._generations[slot] + 1
        grant = Grant(slot, generation, offset, wanted)
        self._open[slot] = (grant, [])
        self.lent_nbytes += wanted
        self.peak_lent_nbytes = max(self.peak_lent_nbytes, self.lent_nbytes)
        self.peak_lent_slots = max(self.peak_lent_slots, self.lent_slots)
        return grant

    def dispatch(self, grant: Grant, columns: Iterable[int]) -> None:
        """These columns are about to be sent the lease. Each must acknowledge it before it can end.

        Raises LeaseError for a column that was never given out, or was written off or quarantined. Then none of them is
        booked.
        """
        named = self._opened(grant)
        columns = tuple(columns)
        for column in columns:
            if column not in self._need:
                raise LeaseError(grant.slot, grant.generation, f"no consumer has column {column}")
            if column in self.quarantined:
                raise LeaseError(grant.slot, grant.generation, f"the consumer of column {column} is quarantined")
        for column in columns:
            if column not in named:
                named.append(column)
                self._need[column][grant.slot] = _ALL_BITS

    def retract(self, grant: Grant, column: int) -> None:
        """This column was certainly not sent the lease (the send refused as a whole).

        No-op for a column that was written off meanwhile. Raises LeaseError for one that owes nothing.
        """
        named = self._opened(grant)
        if column in named:
            named.remove(column)
            self._need[column][grant.slot] = 0
        elif column in self._need or column >= self._admitted:
            raise LeaseError(grant.slot, grant.generation, f"column {column} owes no acknowledgement to take back")

    def settle(self, grant: Grant) -> None:
        """The lease is dispatched to no more columns, and ends as soon as the words allow."""
        lease = (grant, self._opened(grant))
        del self._open[grant.slot]
        self._settled[grant.slot] = lease
        self._due[grant.slot] = grant.generation

    def acknowledge(self, slot: int, generation: int, column: int) -> None:
        """An acknowledgement that came as a message; repeats are refused with StaleLease and change nothing."""
        grant, columns = self._settled.get(slot) or self._open.get(slot) or (None, [])
        if grant is None or grant.generation != generation or column not in columns:
            raise StaleLease(slot, generation, f"column {column} owes no acknowledgement")
        if column in self.quarantined:
            raise StaleLease(slot, generation, f"the consumer of column {column} is quarantined")
        columns.remove(column)
        self._need[column][slot] = 0

    def reclaim(self, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
        """End the settled leases that are ready and acknowledged by all they need; at most `limit` of them.

        ready: the producer's own words; acks: each column's words. A column without words (it acknowledges by
        message) holds its leases until `acknowledge`. Only equality counts: a word that is not the lease's
        own generation, older or newer, frees nothing.
        """
        over = self._looked_up(ready, acks) if len(self._settled) <= FEW else self._scanned(ready, acks)
        return [self._end(slot) for slot in over[:limit]]

    def _looked_up(self, ready: Words, acks: Mapping[int, Words]) -> list[int]:
        """Slots whose lease may end, by a look at each one that is settled."""
        return sorted(slot for slot in self._settled if self._is_over(slot, ready, acks))

    def _is_over(self, slot: int, ready: Words, acks: Mapping[int, Words]) -> bool:
        grant, columns = self._settled[slot]
        if ready[slot] != grant.generation:
            return False
        for column in columns:
            words = acks.get(column) if column not in self.quarantined else None
            if words is None or words[slot] != grant.generation:
                return False
        return True

    def _scanned(self, ready: Words, acks: Mapping[int, Words]) -> list[int]:
        """The same slots, by one comparison over all that there are."""
        pending, scratch = self._pending, self._scratch
        np.bitwise_xor(ready, self._due, out=pending)
        for column, need in self._need.items():
            words = acks.get(column) if column not in self.quarantined else None
            if words is None:
                np.bitwise_or(pending, need, out=pending)
            else:
                np.bitwise_xor(words, self._due, out=scratch)
                np.bitwise_and(scratch, need, out=scratch)
                np.bitwise_or(pending, scratch, out=pending)
        slots: list[int] = np.flatnonzero((pending == 0) & (self._due != 0)).tolist()
        return slots

    def outstanding(self, column: int) -> list[Grant]:
        """The leases that wait for this column."""
        return [grant for grant, columns in (*self._open.values(), *self._settled.values()) if column in columns]

    def rounded(self, nbytes: int) -> int:
        """What a lease of so many bytes takes."""
        return max(1, -(-nbytes // self._granule)) * self._granule

    def check_lent(self, grant: Grant) -> None:
        """Raise LeaseError for a lease that has ended."""
        lease = self._open.get(grant.slot) or self._settled.get(grant.slot)
        if lease is None or lease[0] != grant:
            raise LeaseError(grant.slot, grant.generation, "has ended, or was never lent")

    def _opened(self, grant: Grant) -> list[int]:
        lease = self._open.get(grant.slot)
        if lease is None or lease[0] != grant:
            raise LeaseError(grant.slot, grant.generation, "is not open: it was settled, or never lent")
        return lease[1]

    def _end(self, slot: int) -> Grant:
        grant, columns = self._settled.pop(slot)
        self._due[slot] = 0
        for column in columns:
            self._need[column][slot] = 0
        self._ranges.give(grant.offset, grant.nbytes)
        self.lent_nbytes -= grant.nbytes
        if grant.generation < LAST_GENERATION:
            self._free_slots.append(slot)
        else:
            self._retired_slots += 1
        return grant


class _FreeRanges:
    """The free ranges: neighbours always joined, the smallest that fits given first."""

    def __init__(self, nbytes: int) -> None:
        self._sorted: list[int] = []  # size and offset packed, ascending
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        if nbytes:
            self._add(0, nbytes)

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def longest(self) -> int:
        return self._sorted[-1] >> _OFFSET_BITS if self._sorted else 0

    def all(self) -> list[tuple[int, int]]:
        return [(offset, offset + size) for offset, size in self._size_at.items()]

    def cut(self, offset: int, nbytes: int) -> bool:
        """Take out exactly these bytes, if all of them are free."""
        end = offset + nbytes
        start = next((s for s, size in self._size_at.items() if s <= offset and end <= s + size), None)
        if start is None:
            return False
        size = self._remove(start)
        if start < offset:
            self._add(start, offset - start)
        if end < start + size:
            self._add(end, start + size - end)
        return True

    def take(self, nbytes: int) -> int | None:
        place = bisect_left(self._sorted, nbytes << _OFFSET_BITS)
        if place == len(self._sorted):
            return None
        packed = self._sorted.pop(place)
        size, offset = packed >> _OFFSET_BITS, packed & ((1 << _OFFSET_BITS) - 1)
        del self._size_at[offset], self._start_of_end[offset + size]
        if size > nbytes:
            self._add(offset + nbytes, size - nbytes)
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        start = self._start_of_end.get(offset)
        if start is not None:
            nbytes += self._remove(start)
            offset = start
        if offset + nbytes in self._size_at:
            nbytes += self._remove(offset + nbytes)
        self._add(offset, nbytes)

    def _add(self, offset: int, nbytes: int) -> None:
        insort(self._sorted, nbytes << _OFFSET_BITS | offset)
        self._size_at[offset] = nbytes
        self._start_of_end[offset + nbytes] = offset

    def _remove(self, offset: int) -> int:
        nbytes = self._size_at.pop(offset)
        del self._start_of_end[offset + nbytes]
        del self._sorted[bisect_left(self._sorted, nbytes << _OFFSET_BITS | offset)]
        return nbytes
