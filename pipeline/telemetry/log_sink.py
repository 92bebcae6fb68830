"""Log lines are written whole and without waiting, or lost. No log may end or delay a process.

A line is lost when the disk is full, the reader of a pipe has stopped or gone, or a terminal is held (Ctrl-S). The next
line that is written has the number of lost lines.
"""

from __future__ import annotations

import os
import socket
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO


class Sink:
    """A stream with the methods of a structlog logger, one for every level."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost = 0  #: lines lost since the last one that was written
        self._torn = False  # the last write ended within a line
        self._write = self._writer()

    def msg(self, message: str) -> None:
        line = f"\n{message}\n" if self._torn else f"{message}\n"
        data = line.encode(errors="backslashreplace")
        try:
            written = self._write(data)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.lost += 1
            return
        self._torn = written < len(data)
        self.lost = int(self._torn)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg

    def _writer(self) -> Callable[[bytes], int]:
        """Return a function that writes without waiting and returns a number of bytes. Raises OSError, ValueError."""
        try:
            fd = self.stream.fileno()
            kind = stat.S_IFMT(os.fstat(fd).st_mode)
        except (OSError, ValueError):  # it has no descriptor, as in a test
            return self._print
        if kind == stat.S_IFSOCK:
            with suppress(OSError):
                copy = socket.socket(fileno=os.dup(fd))
                weakref.finalize(self, copy.close)
                return lambda data: copy.send(data, socket.MSG_DONTWAIT)
        if kind in (stat.S_IFIFO, stat.S_IFCHR):
            # Opened again, because O_NONBLOCK belongs to the open file that we share with our parent process.
            with suppress(OSError):
                again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, again)
                return lambda data: os.write(again, data)
        return lambda data: os.write(fd, data)

    def _print(self, data: bytes) -> int:
        self.stream.write(data.decode())
        self.stream.flush()
        return len(data)
