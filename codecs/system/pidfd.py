"""Proof of death: a descriptor that a process has sent of itself. Not its number, which may be another's by now."""

from __future__ import annotations

import select

from tensorferry.codecs.errors import AttachRefused


def check_pidfd(fd: int) -> None:
    """Raise AttachRefused unless `fd` names a process: of anything else, `is_dead` would be nonsense.

    Source: Linux, fs/pidfs.c and proc(5): the fdinfo of a pidfd, and of nothing else, has a line `Pid:`.
    """
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as fdinfo:
        if not any(line.startswith("Pid:") for line in fdinfo):
            raise AttachRefused(f"descriptor {fd} is no pidfd")


def is_dead(pidfd: int) -> bool:
    """Whether the process behind a pidfd has ended (Linux pidfd_open(2): readable once it has)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
