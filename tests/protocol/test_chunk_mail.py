"""Every order of what is said of chunks by message: the real mail, ledger of chunks and mapping, over memory of names.

A message that was said once may be heard at any later time, any number of times, or never. One position, whose chunk
comes, is lent, retired, and comes again. What is searched are states, each reached by replaying a shortest way to it;
TENSORFERRY_PROTOCOL=long searches more of them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs.messages import Confirmed, Proxy, Released
from tensorferry.codecs.pool.elastic import mail
from tensorferry.codecs.pool.elastic.chunk_imports import ChunkImports
from tensorferry.codecs.pool.elastic.chunks import Chunks
from tensorferry.codecs.pool.elastic.descriptor_line import Arrived
from tensorferry.codecs.pool.elastic.mail import ChunkMail, ReleaseMail

POOL, PRODUCER, CONSUMER = 11, 22, 33
LIVES = 2  #: chunks that come to the position
LONG_RUN = os.environ.get("TENSORFERRY_PROTOCOL") == "long"
STATES = 40_000 if LONG_RUN else 3_000  #: that are searched at most
Event = tuple[str, int]


class Broken(AssertionError):
    """A law of the protocol does not hold."""


class Memory:
    """Opens a name only while the chunk of that name is there."""

    nbytes = 1

    def __init__(self) -> None:
        self.there: set[int] = set()
        self.mapped: set[int] = set()

    def map(self, position: int, handle: bytes) -> None:
        if handle[0] not in self.there:
            raise Broken(f"chunk {handle[0]} is opened, and is gone")
        self.mapped.add(handle[0])

    def unmap(self, position: int) -> None:
        self.mapped.clear()


class Acks:
    def __init__(self) -> None:
        self.acks, self.dropped = np.zeros(1, np.uint32), np.zeros(1, np.uint32)

    def words(self) -> Any:
        return self.acks

    def dropped_words(self) -> Any:
        return self.dropped

    def acknowledged(self, slot: int) -> int:
        return int(self.acks[slot])

    def drop(self, position: int, serial: int) -> None:
        self.dropped[position] = serial


class World:
    def __init__(self) -> None:
        self.memory, self.acks = Memory(), Acks()
        self.chunks, self.told = Chunks(1, 1), ChunkMail(POOL, CONSUMER, None)
        acks: Any = self.acks
        self.releases = ReleaseMail(POOL, PRODUCER, CONSUMER, acks, 1, 1)
        self.given_back = [0]
        memory: Any = self.memory
        self.mapping = ChunkImports(memory, self.releases, acks, self.releases, 1, self.given_back)
        self.said: dict[Any, None] = {}
        self.generation = 0
        self.lent = 0  #: the generation that is out
        self.lies_in = 0  #: the chunk that it lies in
        self.proxies: list[Proxy] = []

    @property
    def position(self) -> int | None:
        """The serial of the chunk that is there."""
        return self.chunks.serial(0) if self.chunks.mapped else None

    def events(self) -> Iterator[Event]:
        serial = self.position
        if serial is None and not self.chunks.retiring_nbytes and self.chunks.last_serial < LIVES:
            yield "come", 0
        if serial is not None and not self.lent:
            yield "retire", 0
            if self.generation < LIVES:
                yield "lend", 0
        yield "say", 0
        yield "upkeep", 0
        if self.proxies and self.mapping.has_come(self.proxies[0], 1):
            yield "read", 0
        for number in range(len(self.said)):
            yield "hear", number

    def do(self, event: Event) -> None:
        what, number = event
        match what:
            case "come":
                self.chunks.begin(0)
                serial = self.chunks.came(0, 0)
                self.memory.there.add(serial)
                assert self.told.send(serial, 0, bytes([serial]))
                self.chunks.sent(0, 0)
            case "lend":
                self.generation += 1
                self.lent, self.lies_in = self.generation, self.chunks.serial(0)
                self.proxies.append(Proxy(POOL, 0, self.generation, 0, 1, (1,)))
            case "retire":
                serial = self.chunks.serial(0)
                self.told.retire(serial, 0)
                self.chunks.retire(0)
                self.memory.there.discard(serial)
                self.chunks.unmapped(0)
            case "say":
                self.said |= dict.fromkeys(self.letters())
            case "upkeep":
                self.mapping.upkeep()
            case "read":
                proxy = self.proxies.pop()
                self.mapping.use(proxy, 1)
                if self.memory.mapped != {self.lies_in}:
                    raise Broken(f"a lease in chunk {self.lies_in} is read in {self.memory.mapped}")
                self.given_back[0] = int(proxy.generation)
                self.acks.acks[0] = proxy.generation
            case "hear":
                self.said |= dict.fromkeys(self.hear(list(self.said)[number]))
        self.check()

    def letters(self) -> list[Any]:
        letters = [*self.told.due(0.0), *filter(None, [self.releases.due(0.0)])]
        return [letter.message for letter in letters]

    def hear(self, message: Any) -> list[Any]:
        """Bring it to whom it is for; the answer, if there is one."""
        if not isinstance(message, Released):
            self.releases.hear(message)
            return []
        self.told.answered(message.taken, message.dropped)
        self.chunks.let_go(0, message.dropped)
        if (0, self.lent) in message.leases:
            self.lent = 0
        return [Confirmed(POOL, CONSUMER, message.leases)] if message.leases else []

    def check(self) -> None:
        """C3: no more memory than positions, whoever holds it."""
        gone = self.memory.mapped - {self.position}
        if gone and not self.chunks.retiring_nbytes:
            raise Broken(f"chunks {gone} are mapped by the consumer, and count no more")

    def settle(self) -> None:
        """With a post that works, everything comes back."""
        for _ in range(4):
            for message in self.letters():
                for answer in self.hear(message):
                    self.hear(answer)
            if self.proxies and self.mapping.has_come(self.proxies[0], 1):
                self.do(("read", 0))
            self.mapping.upkeep()
            self.check()
        if self.lent or self.proxies or self.chunks.retiring_nbytes or self.letters():
            raise Broken("not everything has come back")

    @property
    def state(self) -> Any:
        known = self.releases
        return (
            (tuple(self.chunks.mapped), self.chunks.retiring_nbytes, self.chunks.last_serial),
            (tuple(self.told._mapped), tuple(self.told._retired)),
            (tuple(known._mapped), tuple(known._retired), tuple(known._to_answer), *map(tuple, (known._taken,))),
            (tuple(known._dropped), tuple(known._confirmed.tolist()), tuple(known._handles)),
            (tuple(self.mapping._mapped.items()), tuple(self.mapping._arrived.items())),
            (int(self.acks.acks[0]), int(self.acks.dropped[0]), self.lent, self.lies_in, len(self.proxies)),
            frozenset(self.said),
        )


def replay(way: tuple[Event, ...]) -> World:
    world = World()
    for event in way:
        world.do(event)
    return world


def search() -> int:
    """States that were found, breadth first; from each of them everything can come back. Raises Broken."""
    seen, ways = {World().state}, deque[tuple[Event, ...]]([()])
    while ways and len(seen) < STATES:
        way = ways.popleft()
        for event in list(replay(way).events()):
            world = replay(way)
            try:
                world.do(event)
                state = world.state
                if state in seen:
                    continue
                seen.add(state)
                world.settle()
            except Broken as problem:
                problem.add_note(f"after {[*way, event]}")
                raise
            ways.append((*way, event))
    return len(seen)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "REPEAT_S", 0.0)


@pytest.mark.slow
@pytest.mark.timeout(1200 if LONG_RUN else 120)
def test_no_order_of_messages_breaks_a_law(record_property: Callable[[str, object], None]) -> None:
    found = search()
    record_property("protocol", f"chunk mail: {found:,} states")
    assert found >= STATES


def came_in_any_order(self: ReleaseMail, chunk: Any) -> None:
    self._taken.add(chunk.serial)
    if chunk.serial != self._mapped[chunk.position]:
        self._mapped[chunk.position] = chunk.serial
        self._handles.append(Arrived(chunk.serial, chunk.position, chunk.handle))


FAULTS: dict[str, tuple[type, str, Any]] = {
    "a chunk is believed whenever it is heard of": (ReleaseMail, "is_over", lambda self, position, serial: False),
    "of two chunks the one heard of last is the one that is there": (ReleaseMail, "_came", came_in_any_order),
    "a name is opened ahead of need": (ChunkImports, "_look_at", lambda self, position: self._take(position)),
    "retired is dropped, whatever is mapped": (
        ReleaseMail,
        "_went",
        lambda self, chunk: (self._dropped.add(chunk.serial), self._retired.__setitem__(chunk.position, chunk.serial)),
    ),
    "a retirement is said once": (
        ChunkMail,
        "retire",
        lambda self, serial, position: self._mapped.pop(serial, None),
    ),
    "an acknowledgement is said once": (
        ReleaseMail,
        "due",
        lambda self, now: None,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, method, planted = FAULTS[fault]
    monkeypatch.setattr(kind, method, planted)
    with pytest.raises(Broken):
        search()
