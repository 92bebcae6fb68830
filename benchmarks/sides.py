"""The two sides of a hand-off, as every contender implements them, and what is the same for all.

A *message* is one float32 tensor. Its clock starts before the producer writes the first byte of it and stops
when the consumer has read every page; both clocks are CLOCK_MONOTONIC, which is one for the machine. "Written"
is a byte in every page (`stamp`), in the memory the tensor is handed over from, and "read" is that byte: so the
clock counts what the hand-off costs and not what computing a tensor costs, or using it, which is the same for
everybody and would hide it. The benchmark "every byte" counts those too. The consumer answers with the sum of what
it has read, so a message that was mixed up, overwritten or not there yet is noticed.
"""

from __future__ import annotations

import resource
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

PAGE_NBYTES = 4096
ROW = 1024  #: float32 values in a row of a tensor

Bytes = npt.NDArray[np.uint8]
Send = Callable[[int], None]  #: write the message of this number and hand it over
Answer = Callable[[int, Bytes], None]  #: the consumer has the message of this number, and these are its bytes


class Answered(NamedTuple):
    """What the consumer says of a message."""

    number: int
    read_at_ns: int  #: when its last page was read
    total: int  #: what it has read, added up
    faults: int  #: page faults of the consumer so far
    cpu_ns: int  #: CPU time of the consumer so far


_ONES = 0x0101010101010101  #: a byte, times this, is eight of them
_ANSWER = struct.Struct("<5Q")


@dataclass(frozen=True, slots=True)
class Setup:
    """What both sides of a pair know."""

    contender: str
    nbytes: int  #: of every message; whole rows of float32
    window: int  #: messages in flight at most
    full: bool  #: every byte is written and read, not one in every page
    pool_nbytes: int  #: for the contenders that have one
    address: str  #: where the consumer's ZeroMQ socket listens
    line: socket.socket  #: this side's end of a SEQPACKET pair: descriptors at the start, then answers
    queue: Any = None  #: of torch.multiprocessing, for the contenders that use one

    @property
    def shape(self) -> tuple[int, int]:
        return self.nbytes // 4 // ROW, ROW

    def write(self, data: Bytes, number: int) -> None:
        """The producer's work: the bytes of message `number`, into memory that has been used before."""
        if self.full:
            data.fill(stamp(number))
        else:
            data[::PAGE_NBYTES] = stamp(number)

    def source(self) -> npt.NDArray[np.float32]:
        """Private memory that the producer writes every message into, every page of it present."""
        return np.full(self.shape, 0, np.float32)

    def read(self, data: Bytes) -> int:
        """The consumer's work: what it has read, added up."""
        return int((data.view(np.uint64) if self.full else data[::PAGE_NBYTES]).sum(dtype=np.uint64))

    def is_right(self, answered: Answered) -> bool:
        expected = stamp(answered.number) * self.nbytes // PAGE_NBYTES
        if self.full:
            expected = stamp(answered.number) * _ONES * (self.nbytes // 8) % (1 << 64)
        return answered.total == expected


class Contender(Protocol):
    """A way to hand tensors over. `sender` runs in the producer's process, `receive` in the consumer's."""

    safe: bool  #: the source may be overwritten as soon as a message is handed over
    environment: Mapping[str, str]  #: variables that both processes start with

    def sender(self, setup: Setup) -> AbstractContextManager[Send]: ...

    def receive(self, setup: Setup, answer: Answer) -> Coroutine[Any, Any, None]: ...


def stamp(number: int) -> int:
    """The byte that message `number` is filled with; neighbours differ."""
    return number % 251 + 1


def answering(setup: Setup) -> Answer:
    """What the consumer does with a message: read it, stop the clock, tell the producer."""

    def answer(number: int, data: Bytes) -> None:
        total = setup.read(data)
        read_at_ns = time.monotonic_ns()
        setup.line.send(_ANSWER.pack(number, read_at_ns, total, faults(), time.process_time_ns()))

    return answer


def answered(packet: bytes) -> Answered:
    return Answered(*_ANSWER.unpack(packet))


def faults() -> int:
    """Page faults of this process so far, those that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def bytes_of(tensor: npt.NDArray[Any]) -> Bytes:
    return tensor.reshape(-1).view(np.uint8)
