"""A wait that ends within some 50 us of its time. The event loop's own wait is in whole milliseconds, rounded up.

Source: timerfd_create(2). Python has it as `os.timerfd_create` from 3.13 on.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK and TFD_CLOEXEC are these by definition
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


async def rings(at_ns: int) -> None:
    """Return at `at_ns` of CLOCK_MONOTONIC, never before."""
    loop = asyncio.get_running_loop()
    rung: asyncio.Future[None] = loop.create_future()
    fd = _checked(_libc.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS))
    try:
        setting = _Setting(_Timespec(0, 0), _Timespec(*divmod(at_ns, 1_000_000_000)))
        _checked(_libc.timerfd_settime(fd, _ABSOLUTE, ctypes.byref(setting), None))
        loop.add_reader(fd, _ring, loop, fd, rung)
        await rung
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _ring(loop: asyncio.AbstractEventLoop, fd: int, rung: asyncio.Future[None]) -> None:
    loop.remove_reader(fd)  # it would stay readable
    if not rung.done():
        rung.set_result(None)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
