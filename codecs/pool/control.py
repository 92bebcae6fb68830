"""The control words of a pool, and the fence through which every process looks at them.

Two kinds of pages, both sealed memfds, each with exactly one writer:
the producer's *control page* has `lease`, `ready` and `poison`, one word per slot; a consumer's *ack page* has one
word per slot of one pool. Every word is a generation, 0 at first. A header names what the page is, so that a
descriptor of another page is refused: magic (8 bytes), version, slots, then the pool's and the writer's nonces, and
the number of positions.

Pools with chunks (see `elastic/chunks.py`) have one word more per position at the end of each page, a serial: in the
control page the chunk that may be used there, 0 for none; in an ack page the last one of which that consumer holds
nothing.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

import numpy as np

from tensorferry.codecs.errors import AttachRefused
from tensorferry.codecs.memory.host import HostSegment
from tensorferry.codecs.pool.ledger import Words

PAGE_VERSION = 1
STORES_S = 5.0  #: that queued stores may take to land before a page is given back all the same
_CONTROL_MAGIC, _ACK_MAGIC = b"TFCTRL\0\0", b"TFACKS\0\0"
_HEADER = struct.Struct("<8sIIQQI")
_HEADER_NBYTES = 64


class Page:
    """A page of control words, `columns` words for each slot, then one for each position of a pool with chunks.

    To the pool's memory it is a `memory.WordPage`.
    """

    def __init__(self, segment: HostSegment, slots: int, columns: int, positions: int) -> None:
        self.segment = segment
        words = segment.data[_HEADER_NBYTES : _HEADER_NBYTES + 4 * (slots * columns + positions)].view(np.uint32)
        self._arrays = [words[column * slots : (column + 1) * slots] for column in range(columns)]
        self._arrays.append(words[columns * slots :])
        #: The same words as plain memory: reading one costs a tenth of what numpy takes.
        self._scalars = [array.data for array in self._arrays]
        self._slots = slots
        self.device_address = 0  #: of the page, where a GPU reaches it: see `Memory.adopt`

    @classmethod
    def _create(cls, magic: bytes, columns: int, slots: int, pool: int, writer: int, positions: int) -> Self:
        nbytes = _HEADER_NBYTES + 4 * (slots * columns + positions)
        segment = HostSegment.create(nbytes, "tensorferry-words")
        header = _HEADER.pack(magic, PAGE_VERSION, slots, pool, writer, positions)
        segment.data[: len(header)] = np.frombuffer(header, np.uint8)
        return cls(segment, slots, columns, positions)

    @classmethod
    def _attach(cls, magic: bytes, columns: int, fd: int, slots: int, pool: int, writer: int, positions: int) -> Self:
        segment = HostSegment.attach(fd, _HEADER_NBYTES + 4 * (slots * columns + positions))
        found = _HEADER.unpack(segment.data[: _HEADER.size].tobytes())
        wanted = (magic, PAGE_VERSION, slots, pool, writer, positions)
        if found != wanted:
            segment.close()
            raise AttachRefused(f"a page with header {found}; {wanted} was announced")
        return cls(segment, slots, columns, positions)

    def store(self, column: int, slot: int, generation: int) -> None:
        fence()  # everything that this word vouches for before the word
        self._scalars[column][slot] = generation

    def column(self, column: int) -> list[int]:
        """All slots' words of a column, as they are now."""
        fence()
        return [int(word) for word in self._scalars[column]]

    @property
    def address(self) -> int:
        address: int = self.segment.data.ctypes.data
        return address

    @property
    def nbytes(self) -> int:
        return self.segment.nbytes

    def device_word(self, column: int, slot: int) -> int:
        """Where a GPU reaches a word."""
        return self.device_address + _HEADER_NBYTES + 4 * (column * self._slots + slot)

    def close(self) -> None:
        self._scalars.clear()
        self._arrays.clear()
        self.segment.close()


def await_stores(landed: Callable[[], bool]) -> None:
    """Wait until what is queued on a page has landed, so that giving the page back need not wait in the driver.

    There it would, and other threads' calls with it. Gives up at the deadline: the stream may be held, or its context
    be dead, and then it is the driver's turn.
    """
    until, pause = time.monotonic() + STORES_S, threading.Event()
    while not landed() and time.monotonic() < until:
        pause.wait(0.001)


class ControlPage(Page):
    """`lease`, `ready` and `poison`, and `chunk` per position; written by the pool's producer alone."""

    LEASE, READY, POISON, CHUNK = range(4)

    @classmethod
    def create(cls, slots: int, pool: int, writer: int, positions: int = 0) -> Self:
        return cls._create(_CONTROL_MAGIC, 3, slots, pool, writer, positions)

    @classmethod
    def attach(cls, fd: int, slots: int, pool: int, writer: int, positions: int = 0) -> Self:
        """The caller keeps `fd` and may close it at once. Raises AttachRefused."""
        return cls._attach(_CONTROL_MAGIC, 3, fd, slots, pool, writer, positions)

    def lend(self, slot: int, generation: int) -> None:
        self._scalars[0][slot] = generation
        fence()

    def set_ready(self, slot: int, generation: int) -> None:
        self.store(self.READY, slot, generation)

    def set_poison(self, slot: int, generation: int) -> None:
        self.store(self.POISON, slot, generation)

    def look(self, slot: int) -> tuple[int, int, int]:
        """(lease, ready, poison) of a slot. Reads of the bytes that follow this call are ordered after these words."""
        words = self._scalars
        lease, ready = words[0][slot], words[1][slot]
        fence()  # poison after ready: a producer that poisons first and then completes is seen to have poisoned
        poison = words[2][slot]
        fence()
        return lease, ready, poison

    def set_chunk(self, position: int, serial: int) -> None:
        """serial: 0 if the chunk there is retired."""
        self.store(self.CHUNK, position, serial)

    def chunk(self, position: int) -> int:
        """The serial of the chunk that may be used at a position, 0: none."""
        serial: int = self._scalars[self.CHUNK][position]
        fence()
        return serial

    def is_over(self, position: int, serial: int) -> bool:
        """Whether a chunk whose word was stored before it was handed over is retired."""
        return self.chunk(position) != serial

    def retired(self) -> tuple[()]:
        """Nothing: the words name all chunks."""
        return ()

    def lease_words(self) -> Words:
        """The latest generation of every slot. The producer itself writes them, so they need no fence."""
        return self._arrays[0]

    def ready_words(self) -> Words:
        fence()
        return self._arrays[1]


class AckPage(Page):
    """`ack` per slot and `dropped` per position of one pool; written by one consumer alone."""

    ACK, DROPPED = range(2)

    @classmethod
    def create(cls, slots: int, pool: int, writer: int, positions: int = 0) -> Self:
        return cls._create(_ACK_MAGIC, 1, slots, pool, writer, positions)

    @classmethod
    def attach(cls, fd: int, slots: int, pool: int, writer: int, positions: int = 0) -> Self:
        """The caller keeps `fd` and may close it at once. Raises AttachRefused."""
        return cls._attach(_ACK_MAGIC, 1, fd, slots, pool, writer, positions)

    def acknowledge(self, slot: int, generation: int) -> None:
        self.store(self.ACK, slot, generation)

    def words(self) -> Words:
        fence()
        return self._arrays[0]

    def acknowledged(self, slot: int) -> int:
        """The generation that has landed."""
        generation: int = self._scalars[self.ACK][slot]
        fence()
        return generation

    def drop(self, position: int, serial: int) -> None:
        """State that the consumer holds no mapping, handle or descriptor of this chunk any more."""
        self.store(self.DROPPED, position, serial)

    def dropped_words(self) -> Words:
        fence()
        return self._arrays[1]


if platform.machine() in ("x86_64", "AMD64"):

    def fence() -> None:
        """Order the memory accesses around a control word.

        x86-64 keeps loads in order, stores in order, and loads before later stores, which is all that the words
        need, and non-temporal stores end with a fence of their own in the copy routine that makes them.
        """

else:
    # A mutex taken and released is a full fence for what happened before it and after it in this thread.
    # Source: POSIX.1-2024, 4.15.2 Memory Synchronization.
    _libc = ctypes.CDLL(None)
    _mutex = ctypes.create_string_buffer(128)  # larger than pthread_mutex_t anywhere; zeros initialise it on Linux

    def fence() -> None:
        """Order the memory accesses around a control word: both calls synchronise memory, by POSIX."""
        _libc.pthread_mutex_lock(_mutex)
        _libc.pthread_mutex_unlock(_mutex)
