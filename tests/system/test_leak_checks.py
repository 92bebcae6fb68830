"""The checks that guard every test are themselves seen to fail."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorferry.codecs.memory.host import HostSegment

Left = Callable[..., list[str]]


def test_a_descriptor_is_noticed(belongings: Callable[[], Any], left: Left) -> None:
    before = belongings()
    reading, writing = os.pipe()
    found = left(before, 0.0)
    os.close(reading)
    os.close(writing)
    assert len(found) == 1
    assert found[0].startswith("descriptor pipe:")
    assert left(before) == []


def test_a_second_descriptor_of_the_same_file_is_noticed(belongings: Callable[[], Any], left: Left) -> None:
    with open(os.devnull) as null:
        before = belongings()
        twin = os.dup(null.fileno())
        found = left(before, 0.0)
        os.close(twin)
    assert found == ["descriptor /dev/null"]


def test_a_mapping_is_noticed(belongings: Callable[[], Any], left: Left) -> None:
    before = belongings()
    segment = HostSegment.create(4096, "tensorferry-leak")
    view = segment.data[:10]
    segment.close()
    found = left(before, 0.0)
    del view
    assert "mapping /memfd:tensorferry-leak (deleted)" in found
    assert left(before) == []


def test_a_child_is_noticed_even_when_it_is_dead(belongings: Callable[[], Any], left: Left) -> None:
    before = belongings()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive = left(before, 0.0)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    dead = left(before, 0.0)
    child.communicate()
    assert f"process {child.pid}" in alive
    assert f"process {child.pid}" in dead
    assert left(before) == []


def test_the_fixture_fails_a_test_that_leaves_something(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1].joinpath("conftest.py"), tmp_path)
    (tmp_path / "test_inner.py").write_text(INNER_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "ERROR at teardown of test_leaky" in ran.stdout
    assert "left behind: descriptor pipe:" in ran.stdout
    assert "3 passed, 1 error" in ran.stdout


INNER_TESTS = """
import os, pytest

kept = []

def test_leaky():
    kept.extend(os.pipe())

@pytest.mark.leaves("to show that it can be excused")
def test_excused():
    kept.extend(os.pipe())

def test_clean():
    for fd in os.pipe():
        os.close(fd)
"""


def test_allocations_are_noticed(allocates_under: Callable[[int], AbstractContextManager[None]]) -> None:
    with pytest.raises(AssertionError, match="are allowed"), allocates_under(1 << 20):
        np.empty(32 << 20, np.uint8)
    with allocates_under(1 << 20):
        np.empty(32 << 10, np.uint8)


async def test_an_event_loop_leaves_nothing() -> None:
    """The check looks after the test's loop is closed, so an async test may use it."""
