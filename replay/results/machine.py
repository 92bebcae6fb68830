"""The machine of a replay and its versions, which may make equal runs differ."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

_GIB = 1 << 30


class Machine(msgspec.Struct, frozen=True):
    """Facts of a machine. An empty value or 0 means that it is absent, or that this system does not say it."""

    host: str = ""  #: the system's own name; no name server is asked
    cpu: str = ""
    cpus: int = 0  #: how many the process may run on
    memory_nbytes: int = 0  #: of the node
    gpus: tuple[str, ...] = ()  #: a name for each that NVIDIA's driver shows here
    kernel: str = ""
    driver: str = ""  #: NVIDIA's
    python: str = ""
    torch: str = ""  #: of the installed package, which need not have been used

    def facts(self) -> Iterator[tuple[str, str]]:
        """Return the known facts as pairs of name and text."""
        gpus = [f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus)]
        values = {
            "host": self.host,
            "CPU": f"{self.cpus} of {self.cpu or 'unknown'}" if self.cpus else self.cpu,
            "memory": f"{self.memory_nbytes / _GIB:.1f} GiB" if self.memory_nbytes else "",
            "GPU": ", ".join(gpus),
            "kernel": self.kernel,
            "driver": self.driver,
            "python": self.python,
            "torch": self.torch,
        }
        yield from ((name, value) for name, value in values.items() if value)


def this_machine(root: Path = Path("/")) -> Machine:
    """Read the facts of this machine. root: the folder of /proc. Nothing is started or asked over a network."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    # Source: the NVIDIA driver's README, "The /proc Interface".
    driver = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", _text(root / "proc/driver/nvidia/version"))
    shown = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    names = (re.search(r"^Model:\s*(.+)$", _text(file), re.MULTILINE) for file in shown)
    return Machine(
        host=socket.gethostname(),
        cpu=cpu[1].strip() if cpu else platform.machine(),  # an Arm machine has no such line
        cpus=len(os.sched_getaffinity(0)),
        memory_nbytes=int(memory[1]) << 10 if memory else 0,
        gpus=tuple(name[1].strip() for name in names if name),
        kernel=platform.release(),
        driver=driver[1] if driver else "",
        python=platform.python_version(),
        torch=_installed("torch"),
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
