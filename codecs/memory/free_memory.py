"""How much memory can be had now.

This must be asked first: the kernel does not refuse shared memory that it has not got. fallocate of a memfd goes on
until the OOM killer ends a process, and that is likely to be the one that asked (seen, Linux 6.18).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

#: Of cgroup v2 and v1: the limit, what is used, and the line of memory.stat that could be reclaimed of it.
#: Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
_V2 = "memory.max", "memory.current", "inactive_file"
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def available_nbytes(root: Path = Path("/")) -> int:
    """The least of what this node has available and what each control group above this process has left.

    An estimate: others allocate too. root: where /proc and /sys are. Source: proc(5), MemAvailable.
    """
    meminfo = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    node = next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable:"))
    return max(0, min([node, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, files = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], _V2
        elif "memory" in controllers.split(","):
            mounts, files = ["sys/fs/cgroup/memory"], _V1
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            for above in (group, *group.parents):  # a path from outside a container ends at its root all the same
                yield from _left_in(root / mount / above, *files)


def _left_in(group: Path, limit: str, used: str, reclaimable: str) -> Iterator[int]:
    """What a group has left, if it has a limit."""
    try:
        most = (group / limit).read_text(encoding="ascii").strip()
        now = int((group / used).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:  # not there: the root group of v2, or a file system mounted elsewhere
        return
    if most != "max":
        yield int(most) - now + int(stat.get(reclaimable, 0))
