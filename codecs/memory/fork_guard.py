"""What a child forked from a process with CUDA must not keep: the descriptors of the NVIDIA driver.

A forked child that holds them keeps its dead parent's GPU work running, so the parent's pidfd proves nothing any more
(seen in 60 of 60 kills on an H200, and in none of 10 once the child closes them). A child made by exec has none of
them, and one forked by C code without Python escapes this: processes with CUDA spawn or exec their children.
"""

from __future__ import annotations

import os
from contextlib import suppress

NVIDIA = "/dev/nvidia"

_registered = False


def close_in_forked_children() -> None:
    """From now on, for the life of this process. A second call changes nothing."""
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=close_descriptors)


def close_descriptors(prefix: str = NVIDIA) -> None:
    """Close every descriptor of a file whose path begins so."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one the listing was read from
            if os.readlink(f"/proc/self/fd/{name}").startswith(prefix):
                os.close(int(name))
