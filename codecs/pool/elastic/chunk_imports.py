"""A consumer's side of an elastic pool: chunks are mapped when something lies in them, and dropped when retired.

Which chunk may be used at a position is a word of the producer's, and its descriptor is in the line before any proxy
that needs it. Without shared pages it is a message, which a proxy may overtake; then the proxy's reader waits (see
`mail.py`). While this process has a lease that it has not acknowledged, no chunk that the lease touches is retired, so
what was said of them stands still from the look at `lease` to the last read: a mapping that matches it is the right
one, and one that does not is never used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from tensorferry.codecs.errors import StaleLease
from tensorferry.codecs.memory.memory import Arriving, Handle, let_go
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.control import AckPage
from tensorferry.codecs.pool.elastic.chunks import span
from tensorferry.codecs.pool.elastic.descriptor_line import Arrived


class Notices(Protocol):
    """The producer's statements about its chunks: its control page, or its messages."""

    def chunk(self, position: int) -> int:
        """The serial of the chunk that may be used at a position, 0: none."""

    def is_over(self, position: int, serial: int) -> bool:
        """Whether a chunk that was handed over takes no more leases."""

    def retired(self) -> Sequence[tuple[int, int]]:
        """Position and serial of the chunks that it asks to be dropped, and that may never have come here."""


class Line(Protocol):
    """Where chunks come from: a `descriptor_line.Receiver`, or the producer's messages."""

    def receive(self) -> Arrived | None: ...
    def shut(self) -> None: ...
    def close(self) -> None: ...


class ChunksHere(NamedTuple):
    """Serials of the chunks that one process has of a pool, by position."""

    mapped: dict[int, int]
    arrived: dict[int, int]  #: not mapped yet


class ChunkImports:
    """The chunks of one pool, as they are mapped here. Thread-safe; its lock is held for one chunk at a time."""

    def __init__(
        self,
        memory: Arriving,
        notices: Notices,
        acks: AckPage,
        line: Line,
        chunk_nbytes: int,
        acknowledged: Sequence[int],
    ) -> None:
        """Takes over the line; the rest is the reader's, and is closed after this.

        acknowledged: of each slot, the last generation that this process has given back; its word may be on its way."""
        self._memory, self._notices, self._acks, self._line = memory, notices, acks, line
        self._chunk_nbytes, self._acknowledged = chunk_nbytes, acknowledged
        self._mapped: dict[int, int] = {}  # position -> serial
        self._arrived: dict[int, tuple[int, Handle]] = {}  # position -> serial and handle, not mapped yet
        self._read: dict[int, dict[int, int]] = {}  # position -> slot -> last generation that was read there
        self._closed = False
        self._lock = threading.Lock()

    def use(self, proxy: Proxy, nbytes: int) -> None:
        """See that all chunks of a living lease are mapped. Raises StaleLease for one that lies where none is, and
        what the memory raises."""
        with self._lock:
            for position in span(proxy.offset, nbytes, self._chunk_nbytes):
                serial = self._notices.chunk(position)
                if self._mapped.get(position) != serial or not serial:
                    self._map(position, serial, proxy)
                self._read.setdefault(position, {})[proxy.slot] = proxy.generation

    def has_come(self, proxy: Proxy, nbytes: int) -> bool:
        """Whether all chunks of a living lease are here, mapped or not."""
        with self._lock:
            return all(self._is_here(position) for position in span(proxy.offset, nbytes, self._chunk_nbytes))

    def here(self) -> ChunksHere:
        with self._lock:
            return ChunksHere(dict(self._mapped), {position: chunk[0] for position, chunk in self._arrived.items()})

    def upkeep(self) -> None:
        """Drop what was retired, and map what has come, ahead of need.

        Every position is looked at, and then the first problem of the memory's is raised.
        """
        with self._lock:
            if self._closed:
                return
            retired = (
                self._notices.retired()
            )  # before the line is emptied: every chunk that it names has been sent by now
            self._receive()
            for position, asked in retired:
                if asked not in (self._mapped.get(position), self._arrived.get(position, (0, 0))[0]):
                    self._acks.drop(position, asked)
            arrived, mapped = list(self._arrived), list(self._mapped)
        problems = [*_problems(self._drop_if_over, mapped), *_problems(self._look_at, arrived)]
        if problems:
            raise problems[0]

    def close(self) -> None:
        """Give all chunks up, and store that they are dropped. No lease may be open. Waits for the device."""
        with self._lock:
            self._closed = True
            self._line.shut()  # what is not in it yet can no longer be sent, so nothing is missed below
            try:
                if self._mapped:
                    self._memory.settle()
                problems = _problems(self._drop, list(self._mapped))
                if problems:  # the memory will unmap these chunks, and the producer is not notified
                    raise problems[0]
            finally:
                self._receive()
                for position in list(self._arrived):
                    self._refuse(position)
                self._line.close()

    # --- one position at a time

    def _drop_if_over(self, position: int) -> None:
        with self._lock:
            serial = None if self._closed else self._mapped.get(position)
            if serial is not None and self._notices.is_over(position, serial) and self._has_landed(position):
                self._drop(position)

    def _look_at(self, position: int) -> None:
        """Map a chunk ahead of need if its handle is a descriptor, which keeps it alive. A FABRIC handle is a name, and
        its chunk may be gone by now unless we have a lease there: such a chunk is only given up, if it is retired."""
        with self._lock:
            if position not in self._arrived:
                return
            serial, handle = self._arrived[position]
            if isinstance(handle, int) or self._notices.is_over(position, serial):
                self._take(position)

    # --- under the lock

    def _is_here(self, position: int) -> bool:
        serial = self._notices.chunk(position)
        if serial and self._mapped.get(position) != serial and self._arrived.get(position, (0, 0))[0] != serial:
            self._receive()
        return bool(serial) and serial in (self._mapped.get(position), self._arrived.get(position, (0, 0))[0])

    def _map(self, position: int, serial: int, proxy: Proxy) -> None:
        """Map the chunk of this serial, which should be in the line."""
        if not serial:
            problem = f"lies at position {position}, where there is no chunk"
            raise StaleLease(proxy.slot, proxy.generation, problem)
        if self._arrived.get(position, (0, 0))[0] != serial:
            self._receive()
        if position in self._arrived:
            self._take(position)
        if self._mapped.get(position) != serial:
            problem = f"lies in chunk {serial} of position {position}, which has not come"
            raise StaleLease(proxy.slot, proxy.generation, problem)

    def _receive(self) -> None:
        """Empty the line."""
        while (chunk := self._line.receive()) is not None:
            serial, position, handle = chunk
            known = position in self._arrived or position in self._mapped
            if not known and position * self._chunk_nbytes < self._memory.nbytes:
                if handle is not None:
                    self._arrived[position] = serial, handle
                else:
                    self._acks.drop(position, serial)
            else:  # no producer that keeps the protocol sends this: the last one is not dropped yet
                let_go(handle)

    def _take(self, position: int) -> None:
        """Map a chunk that has come, or drop it if it was retired meanwhile. If it cannot be mapped, it stays."""
        serial, handle = self._arrived[position]
        if self._notices.is_over(position, serial):
            self._refuse(position)
            return
        self._memory.map(position, handle)
        del self._arrived[position]
        let_go(handle)
        self._mapped[position] = serial

    def _refuse(self, position: int) -> None:
        serial, handle = self._arrived.pop(position)
        let_go(handle)
        self._acks.drop(position, serial)

    def _has_landed(self, position: int) -> bool:
        """Whether the acknowledgements of all that was read there can be seen: then nothing is queued on it.

        Where the producer keeps the protocol they can, or it had not retired the chunk. Unmapping never waits, and
        would cost this process its GPU.
        """
        for slot, generation in self._read.get(position, {}).items():
            if self._acks.acknowledged(slot) != generation and self._acknowledged[slot] <= generation:
                return False
        return True

    def _drop(self, position: int) -> None:
        self._memory.unmap(position)
        serial = self._mapped.pop(position)
        self._read.pop(position, None)
        self._acks.drop(position, serial)


def _problems(work: Callable[[int], None], positions: Iterable[int]) -> list[Exception]:
    """Do it to each position, also after a failure at another. Returns the failures."""
    problems = []
    for position in positions:
        try:
            work(position)
        except Exception as problem:
            problems.append(problem)
    return problems
