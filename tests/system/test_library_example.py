"""The programs of docs/library.md run, and print what it says they print."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "library.md"
PROGRAM = re.compile(r"^```python (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    return dict(PROGRAM.findall(DOCUMENT.read_text(encoding="utf-8")))


def listens(path: Path) -> bool:
    """Whether somebody listens at a UNIX socket. Source: Linux, af_unix.c: the flag __SO_ACCEPTCON is 0x10000."""
    sockets = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
    return any(line.endswith(f" {path}") and line.split()[3] == "00010000" for line in sockets)


@pytest.mark.processes
def test_the_programs_hand_over_a_tensor(
    programs: dict[str, str], tmp_path: Path, until: Callable[[Callable[[], object]], None]
) -> None:
    for name, program in programs.items():
        (tmp_path / name).write_text(program, encoding="utf-8")
    path = tmp_path / "ferry"

    def run(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", str(tmp_path / name), str(path)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    with run("producer.py") as producer:
        until(lambda: listens(path) or producer.poll() is not None)
        with run("consumer.py") as consumer:
            said = consumer.communicate(timeout=20)[0], producer.communicate(timeout=20)[0]
    assert said == ("sum: 524288.0\n", "leases that came back: 1\n")
    document = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"`{line.strip()}`" in document for line in said)


def test_they_are_short(programs: dict[str, str]) -> None:
    lengths = {name: len(program.splitlines()) for name, program in programs.items()}
    assert lengths.keys() == {"producer.py", "consumer.py"}
    assert all(length <= 20 for length in lengths.values()), lengths
