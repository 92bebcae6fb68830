"""A process that does not outlive the benchmark that has started it, however that one ends."""

from __future__ import annotations

import os
import sys

#: The request survives execve. Whoever started this may be gone by the time it is made, which then tells nobody.
#: Source: prctl(2), PR_SET_PDEATHSIG = 1.
_TIE = """if True:
    import ctypes, os, signal, sys
    if ctypes.CDLL(None).prctl(1, int(signal.SIGTERM)) or os.getppid() != int(sys.argv[1]):
        sys.exit("cannot be tied to the process that started it")
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def tied(*arguments: str) -> list[str]:
    """The command of a Python process with these arguments, which gets SIGTERM when the thread that starts it ends."""
    return [sys.executable, "-c", _TIE, str(os.getpid()), *arguments]
