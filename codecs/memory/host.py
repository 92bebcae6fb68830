"""Host memory that other processes can map: sealed memfds whose pages exist before anybody relies on them.

Nothing here has a name in a file system, so nothing can be left behind: the memory goes with the last process
that has it mapped or holds its descriptor, however that process ends. Not limited by the size of /dev/shm.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import numpy as np
import numpy.typing as npt

from tensorferry.codecs.errors import AttachRefused, FerryError
from tensorferry.codecs.memory.free_memory import available_nbytes
from tensorferry.codecs.memory.memory import Arrival, Bytes, GpuHandle, Order, WordPage

#: Linux 5.1; Python 3.13 names it fcntl.F_SEAL_FUTURE_WRITE: mappings made from now on are read-only, the
#: owner's own, made before, stays writable.
F_SEAL_FUTURE_WRITE = 0x0010
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

STEP_NBYTES = 16 << 20
_MADV_DONTFORK = 10
_MADV_POPULATE_READ = 22  # Linux 5.14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1


class NoMemory(FerryError):
    """The kernel will not give this much shared memory."""

    def __init__(self, nbytes: int, problem: str) -> None:
        super().__init__(nbytes, problem)
        self.nbytes, self.problem = nbytes, problem

    def __str__(self) -> str:
        return f"no {self.nbytes} bytes of shared memory: {self.problem}; lower the pool's budget_mb"


class HostOrder:
    """The order of the host: what is done is done. See `memory.Order`."""

    def check(self) -> None: ...

    def store(self, page: WordPage, column: int, slot: int, generation: int) -> None:
        page.store(column, slot, generation)

    def join(self) -> None: ...

    def mark(self) -> int:
        return 0

    def after(self, mark: int) -> None: ...

    def to_host(self, data: Bytes) -> Arrival:
        return _Here(data)


class _Here:
    done = True

    def __init__(self, data: Bytes) -> None:
        self.data = data


HOST_ORDER = HostOrder()


class HostSegment:
    """Bytes of a memfd, mapped here. `data` is uint8 of shape (nbytes,), writable only for the creator.

    Holds: a descriptor (`fd`, until `close_fd`) and a mapping, with the duplicate of the descriptor that Python's
    mmap keeps beside it (until `close`; views that are still out keep these two alive until they go).
    """

    on_host = borrowed = True

    def __init__(self, fd: int, mapping: mmap.mmap, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._mapping: mmap.mmap | None = mapping
        self.data: npt.NDArray[np.uint8] = np.asarray(_Span(mapping, nbytes))

    @classmethod
    def create(cls, nbytes: int, name: str, go_on: Callable[[], None] = lambda: None) -> HostSegment:
        """A new segment with every page present: using it never faults for space, here or in a reader.

        name: shown in /proc/PID/maps. go_on: called every STEP_NBYTES, and may raise to give it up. Raises NoMemory,
        having left nothing behind.
        """
        if nbytes < 1:
            raise NoMemory(nbytes, "a segment has one byte at least")
        if nbytes > (available := available_nbytes()):
            raise NoMemory(nbytes, f"{available} are available")
        with ExitStack() as undo:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, fd)
            try:
                for start, length in _steps(nbytes):
                    go_on()
                    os.posix_fallocate(fd, start, length)
            except OSError as problem:
                raise NoMemory(nbytes, problem.strerror or "refused") from None
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            undo.callback(mapping.close)
            for start, length in _steps(nbytes):
                go_on()
                _populate(mapping, start, length)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            undo.pop_all()
        return cls(fd, mapping, nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> HostSegment:
        """Map a peer's segment read-only. The caller keeps `fd` and may close it at once.

        Raises AttachRefused unless it is a memfd of exactly nbytes that can neither shrink, grow nor be mapped
        writable (an unsealed one could be truncated under us, which kills readers with SIGBUS), with all of its
        pages present (else reading it here would make them, at our expense).
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as problem:
            raise AttachRefused(f"not a memfd: {problem.strerror}") from None
        if seals & SEALS != SEALS:
            raise AttachRefused(f"a memfd with seals {seals:#x}; {SEALS:#x} are needed")
        found = os.fstat(fd)
        if nbytes <= 0 or found.st_size != nbytes:
            raise AttachRefused(f"a memfd of {found.st_size} bytes; {nbytes} were announced")
        if found.st_blocks * 512 < nbytes:
            raise AttachRefused(f"a memfd with {found.st_blocks * 512} of its {nbytes} bytes present")
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        for start, length in _steps(nbytes):
            _advise(mapping, _MADV_DONTFORK, start, length)
            _advise(mapping, _MADV_POPULATE_READ, start, length)
        return cls(-1, mapping, nbytes)

    def close_fd(self) -> None:
        """Close the descriptor; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        self.close_fd()
        mapping, self._mapping = self._mapping, None
        self.data = np.empty(0, np.uint8)
        if mapping is not None:
            with suppress(BufferError):  # a view is still out; the mapping goes with it
                mapping.close()

    # --- as a pool's memory

    def order(self) -> Order:
        return HOST_ORDER

    def lend(self, offset: int, nbytes: int, order: Order) -> Bytes:
        return self.data[offset : offset + nbytes]

    def copy_out(self, offset: int, into: Bytes, order: Order) -> None:
        np.copyto(into, self.data[offset : offset + into.nbytes])

    def returned(self, order: Order) -> None: ...

    def private(self, nbytes: int) -> Bytes | None:
        return None

    def adopt(self, page: WordPage) -> None: ...

    def disown(self, page: WordPage) -> None: ...

    def descriptors(self) -> list[int]:
        return [os.dup(self.fd)]

    def handle(self) -> GpuHandle | None:
        return None


class _Span:
    """An address range as numpy sees it, keeping its mapping alive.

    numpy would mark an array over a read-only mapping as not writable, and torch then warns at every view; the
    kernel already forbids the store, so the flag is left writable and a stray store is a segmentation fault.
    """

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        self._view = memoryview(mapping)
        address = np.frombuffer(self._view, np.uint8).ctypes.data
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def _steps(nbytes: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the steps that memory is made and mapped in.

    Python holds its lock during a madvise, so one over all of a large pool would stop the process's other threads,
    heartbeats too, for seconds.
    """
    for start in range(0, nbytes, STEP_NBYTES):
        yield start, min(STEP_NBYTES, nbytes - start)


def _populate(mapping: mmap.mmap, start: int, length: int) -> None:
    """Make every page present and writable, as huge pages where the kernel will."""
    _advise(mapping, _MADV_DONTFORK, start, length)
    if not _advise(mapping, _MADV_POPULATE_WRITE, start, length):
        for page in range(start, start + length, mmap.PAGESIZE):
            mapping[page] = 0  # before Linux 5.14; fallocate has reserved the space
    _advise(mapping, _MADV_COLLAPSE, start, length)


def _advise(mapping: mmap.mmap, advice: int, start: int, length: int) -> bool:
    try:
        mapping.madvise(advice, start, length)
    except OSError:  # an older kernel, or no huge page to be had
        return False
    return True
