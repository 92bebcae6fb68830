"""The marks `processes` and `slow`, and the guard that a test without the first one starts no process.

A test has the mark `processes` if it says so, or if one of its fixtures asks for `may_start_processes`. Any other test
that starts a process fails, in every run, and so does a module that starts one while it is collected. Python's audit
events stop the process before it starts; what reports no event (uvloop, multiprocessing) shows in the children of this
process, alive or waited for.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

STARTS = frozenset(
    ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen")
)


class ProcessGuard:
    """While it is on, an audit event of STARTS fails the test."""

    def __init__(self) -> None:
        self.on = False
        self.refused: list[str] = []  #: also what another thread tried, or a test that caught the failure

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in STARTS:
            self.refused.append(f"{event}{arguments[:2]}")
            pytest.fail(f"starts a process without the mark `processes`: {self.refused[-1]}")


# On its first import, which torch's is too, it asks ldconfig where libdl is: that is no test's doing.
with contextlib.suppress(ImportError):
    import cuda.pathfinder  # noqa: F401

GUARD = ProcessGuard()
sys.addaudithook(GUARD.hear)  # for good: Python has no call that removes one


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    GUARD.on = True
    try:
        return (yield)
    finally:
        GUARD.on = False


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if "may_start_processes" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")


@pytest.fixture(scope="session")
def may_start_processes() -> None:
    """For fixtures that start processes: their tests get the mark `processes`."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    GUARD.on = item.get_closest_marker("processes") is None
    GUARD.refused.clear()
    try:
        return (yield)
    finally:
        GUARD.on = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    before = (waited_for(), own_children()) if GUARD.on else None
    yield
    if before is None:
        return
    if GUARD.refused:
        pytest.fail(f"starts a process without the mark `processes`: {', '.join(GUARD.refused)}", pytrace=False)
    if (waited_for(), own_children()) != before:
        pytest.fail("started a process without the mark `processes`, by a way that reports no event", pytrace=False)


def waited_for() -> int:
    """Page faults of the children that were waited for, of which every process has some."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def own_children() -> set[int]:
    """Of this process, not their own; the dead ones that nobody has waited for, too."""
    lists = list(Path(f"/proc/{os.getpid()}/task").glob("*/children"))
    if not lists:  # a kernel without CONFIG_PROC_CHILDREN
        return {child.pid for child in psutil.Process().children()}
    return {int(pid) for file in lists for pid in read(file).split()}


def read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:  # the thread has ended
        return ""
