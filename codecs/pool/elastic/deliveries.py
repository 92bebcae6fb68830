"""Brings an elastic pool's chunks to its consumers, and learns what these have dropped.

A chunk's handle is with every consumer before anything is lent there, so a proxy never finds it missing. A consumer
that cannot take it yet is sent it again later, or when a lease there is dispatched to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from tensorferry.codecs.errors import LeaseError
from tensorferry.codecs.memory.memory import Handle
from tensorferry.codecs.pool.control import AckPage
from tensorferry.codecs.pool.elastic.chunks import Chunks
from tensorferry.codecs.pool.elastic.descriptor_line import Sender
from tensorferry.codecs.pool.elastic.mail import ChunkMail
from tensorferry.codecs.pool.ledger import Grant


class Holder(Protocol):
    """The part of a consumer that is used here."""

    @property
    def page(self) -> AckPage | None: ...
    @property
    def line(self) -> Sender | ChunkMail | None: ...


class Deliveries:
    """The deliveries of one pool. Every method is called under the pool's lock."""

    def __init__(self, chunks: Chunks, consumers: Mapping[int, Holder]) -> None:
        """Both are the pool's; consumers: by column."""
        self.has_unsent = False  #: whether a consumer lacks a chunk that it may take later
        self._chunks, self._consumers = chunks, consumers
        self._handles: dict[int, Handle] = {}  # of mapped chunks, by position; the memory's

    # --- to consumers

    def offer(self, position: int, handle: Handle) -> None:
        """Send a chunk that has just been mapped to every consumer."""
        self._handles[position] = handle
        for column in self._consumers:
            self._send(column, position)

    def admitted(self, column: int) -> None:
        """Send a new consumer every chunk that is mapped."""
        for position in self._chunks.mapped:
            self._send(column, position)

    def send_again(self) -> None:
        """Send what could not be sent before."""
        if self.has_unsent:
            self.has_unsent = False
            for column in self._consumers:
                for position in self._chunks.mapped:
                    if not self._chunks.is_sent(position, column):
                        self._send(column, position)

    def check_sent(self, column: int, grant: Grant) -> None:
        """Send a consumer what it lacks of a lease's chunks. Raises LeaseError where it does not take them."""
        for position in self._chunks.span(grant.offset, grant.nbytes):
            if not self._chunks.is_sent(position, column) and not self._send(column, position):
                problem = f"the consumer of column {column} does not take its chunk at {position}"
                raise LeaseError(grant.slot, grant.generation, problem)

    def withdraw(self, position: int) -> None:
        """Notify consumers, by message where they share no pages, that a chunk is about to be retired."""
        for column, consumer in self._consumers.items():
            if isinstance(consumer.line, ChunkMail) and self._chunks.is_sent(position, column):
                consumer.line.retire(self._chunks.serial(position), position)
        del self._handles[position]

    # --- from consumers

    def look_for_dropped(self, quarantined: Collection[int]) -> None:
        """Read in the ack pages what consumers have dropped. The words of quarantined columns are not believed."""
        if self._chunks.retiring_nbytes:
            for column, consumer in self._consumers.items():
                if consumer.page is not None and column not in quarantined:
                    self._chunks.dropped(column, consumer.page.dropped_words())

    def invalid_words(self, column: int) -> int:
        """How many words of a consumer name a chunk that there never was."""
        page = self._consumers[column].page
        return 0 if page is None else int((page.dropped_words() > self._chunks.last_serial).sum())

    def answered(self, column: int, mail: ChunkMail, taken: Collection[int], dropped: Collection[int]) -> int:
        """Book a consumer's message about chunks. Returns how many chunks in it there never were: where there are any,
        nothing of it is booked."""
        invalid = sum(serial > self._chunks.last_serial for serial in (*taken, *dropped))
        if not invalid:
            mail.answered(taken, dropped)
            self._chunks.let_go(column, dropped)
        return invalid

    def _send(self, column: int, position: int) -> bool:
        line = self._consumers[column].line
        if line is None or not line.send(self._chunks.serial(position), position, self._handles[position]):
            self.has_unsent |= line is not None and not line.is_shut
            return False
        self._chunks.sent(position, column)
        return True
