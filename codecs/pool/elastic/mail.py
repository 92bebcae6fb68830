"""Messages between a pool and a consumer that share no pages, as on two nodes: each side's half.

Messages may be lost, repeated, late, or out of order. So each of them states what is, not what changed, and is repeated
until the other side has answered. Nothing here sends: `due` returns the messages that are due now, and its caller sends
them. An unanswered message is due again after REPEAT_S.

The consumer keeps an ack page all the same, which no other process sees. Its GPU stores words there behind the last
read, and the messages repeat these words. So an acknowledgement is sent once the reads are done, and no thread waits
for a stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from tensorferry.codecs.memory.memory import Handle
from tensorferry.codecs.messages import MOST_TOLD, Chunk, Chunks, Confirmed, Released, Retired
from tensorferry.codecs.pool.control import AckPage
from tensorferry.codecs.pool.elastic.descriptor_line import Arrived, Sender

REPEAT_S = 0.5  #: without an answer


class Letter(NamedTuple):
    """A message and its receiver."""

    to: int  #: epoch of the process that it is for
    message: Chunks | Retired | Released | Confirmed


class ChunkMail:
    """The producer's half, for one consumer: which chunks there are. Not thread-safe: the pool's lock is held."""

    def __init__(self, pool: int, consumer: int, line: Sender | None) -> None:
        """Takes over the line, for descriptors; None: handles are FABRIC handles, and travel in the message."""
        self._pool, self._consumer, self._line = pool, consumer, line
        self._mapped: dict[int, Chunk] = {}  # by serial: chunks that the consumer has not confirmed
        self._retired: dict[int, Chunk] = {}  # retired chunks that it has not confirmed to have dropped
        self._said: set[int] = set()
        self._repeated_at = 0.0

    @property
    def is_shut(self) -> bool:
        return self._line is not None and self._line.is_shut

    def send(self, serial: int, position: int, handle: Handle) -> bool:
        """See `line.Sender`; a descriptor is in the line before the message can be there."""
        if self._line is not None and not self._line.send(serial, position, handle):
            return False
        self._mapped[serial] = Chunk(position, serial, handle if isinstance(handle, bytes) else b"")
        return True

    def retire(self, serial: int, position: int) -> None:
        """A chunk that it was sent is retired."""
        self._mapped.pop(serial, None)
        self._said.discard(serial)
        self._retired[serial] = Chunk(position, serial)

    def answered(self, taken: Collection[int], dropped: Collection[int]) -> None:
        for serial in (*taken, *dropped):
            self._mapped.pop(serial, None)
        for serial in dropped:
            self._retired.pop(serial, None)

    def due(self, now: float) -> list[Letter]:
        """now: of time.monotonic()."""
        if now - self._repeated_at >= REPEAT_S:
            self._said.clear()
            self._repeated_at = now
        letters: list[Letter] = []
        if mapped := self._unsaid(self._mapped):
            letters.append(Letter(self._consumer, Chunks(self._pool, self._consumer, mapped)))
        if retired := self._unsaid(self._retired):
            letters.append(Letter(self._consumer, Retired(self._pool, self._consumer, retired)))
        return letters

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    def _unsaid(self, chunks: Mapping[int, Chunk]) -> tuple[Chunk, ...]:
        unsaid = [chunk for serial, chunk in chunks.items() if serial not in self._said][:MOST_TOLD]
        self._said.update(chunk.serial for chunk in unsaid)
        return tuple(unsaid)


class ReleaseMail:
    """The consumer's half: acknowledgements to send, and what it has received about chunks. Thread-safe.

    To `ChunkImports` it is what a control page would be, and with FABRIC handles the line too.
    """

    def __init__(self, pool: int, producer: int, consumer: int, acks: AckPage, slots: int, positions: int) -> None:
        """acks: the consumer's own, until `end`. producer, consumer: their epochs."""
        self.producer = producer
        self._pool, self._consumer = pool, consumer
        self._acks: AckPage | None = acks
        self._words = np.zeros(slots, np.uint32)  # as they were in the end
        self._said = np.zeros(slots, np.uint32)
        self._confirmed = np.zeros(slots, np.uint32)
        self._mapped, self._retired = [0] * positions, [0] * positions  # the highest serials received
        self._to_answer: dict[int, int] = {}  # retired chunks that the producer asks about: serial -> position
        self._taken: set[int] = set()
        self._dropped: set[int] = set()
        self._handles: deque[Arrived] = deque()
        self._repeated_at = 0.0
        self._lock = threading.Lock()

    # --- receiving

    def hear(self, message: Chunks | Retired | Confirmed) -> None:
        """Messages for a previous epoch, or about positions that the pool does not have, are ignored."""
        if message.pool != self._pool or message.to != self._consumer:
            return
        with self._lock:
            match message:
                case Confirmed():
                    words = self._landed()
                    for slot, generation in message.leases:
                        if slot < len(words) and words[slot] == generation:  # else it is of an earlier lease
                            self._confirmed[slot] = generation
                case Chunks():
                    for chunk in message.chunks:
                        if chunk.position < len(self._mapped):
                            self._came(chunk)
                case Retired():
                    for chunk in message.chunks:
                        if chunk.position < len(self._mapped):
                            self._went(chunk)

    def _came(self, chunk: Chunk) -> None:
        position, serial = chunk.position, chunk.serial
        self._taken.add(serial)
        if serial > max(self._mapped[position], self._retired[position]):
            self._mapped[position] = serial
            if chunk.handle:
                self._handles.append(Arrived(serial, position, chunk.handle))

    def _went(self, chunk: Chunk) -> None:
        position, serial = chunk.position, chunk.serial
        self._retired[position] = max(self._retired[position], serial)
        if self._acks is None or serial < self._retired[position]:
            self._dropped.add(serial)  # a later one has been here, so it was dropped
        else:
            self._to_answer[serial] = position

    def chunk(self, position: int) -> int:
        """The serial of the chunk that may be used at a position, 0: none is known here."""
        serial = self._mapped[position]
        return serial if serial > self._retired[position] else 0

    def is_over(self, position: int, serial: int) -> bool:
        """Whether this chunk is retired. A chunk that is not known here yet is not."""
        return serial <= self._retired[position] or serial < self._mapped[position]

    def retired(self) -> list[tuple[int, int]]:
        """Position and serial of the chunks that the producer asks about."""
        with self._lock:
            return [(position, serial) for serial, position in self._to_answer.items()]

    # --- as a line

    def receive(self) -> Arrived | None:
        return self._handles.popleft() if self._handles else None

    def shut(self) -> None: ...

    def close(self) -> None:
        self._handles.clear()

    # --- sending

    def due(self, now: float) -> Letter | None:
        """now: of time.monotonic()."""
        with self._lock:
            words = self._landed()
            if now - self._repeated_at >= REPEAT_S:
                np.copyto(self._said, self._confirmed)
                self._repeated_at = now
            slots = np.flatnonzero((words != self._said) & (words != self._confirmed))[:MOST_TOLD].tolist()
            leases = tuple((slot, int(words[slot])) for slot in slots)
            for slot, generation in leases:
                self._said[slot] = generation
            self._look_for_dropped()
            taken, dropped = _some(self._taken), _some(self._dropped)
        if leases or taken or dropped:
            return Letter(self.producer, Released(self._pool, self._consumer, leases, taken, dropped))
        return None

    def end(self) -> None:
        """The pool is unmapped here and the ack page goes: all its words have landed, and all chunks are dropped."""
        with self._lock:
            np.copyto(self._words, self._landed())
            self._acks = None
            self._dropped.update(self._to_answer)
            self._to_answer.clear()

    # --- under the lock

    def _landed(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return self._words if self._acks is None else self._acks.words()

    def _look_for_dropped(self) -> None:
        """Answer for the chunks of which nothing is held any more."""
        if self._acks is not None and self._to_answer:
            words = self._acks.dropped_words()
            for serial, position in list(self._to_answer.items()):
                if words[position] >= serial:
                    self._dropped.add(serial)
                    del self._to_answer[serial]


def _some(serials: set[int]) -> tuple[int, ...]:
    """Take as many as a message has room for."""
    taken = tuple(sorted(serials)[:MOST_TOLD])
    serials.difference_update(taken)
    return taken
