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


@pytest.mark.processes
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


def pytest_of(tests: str, folder: Path, *options: str) -> str:
    """What pytest writes of a module of tests that has the guards of these."""
    here = Path(__file__).parents[1]
    (folder / "tests").mkdir()
    shutil.copy(here / "conftest.py", folder)
    shutil.copy(here / "process_guard.py", folder / "tests")
    (folder / "test_inner.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, *options, str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.processes
def test_the_fixture_fails_a_test_that_leaves_something(tmp_path: Path) -> None:
    written = pytest_of(INNER_TESTS, tmp_path)
    assert "ERROR at teardown of test_leaky" in written
    assert "left behind: descriptor pipe:" in written
    assert "3 passed, 1 error" in written


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


@pytest.mark.processes
def test_a_test_without_the_mark_that_starts_a_process_fails(tmp_path: Path) -> None:
    written = pytest_of(INNER_STARTS, tmp_path, "-rA")
    for way in ("popen", "fork", "spawn", "system", "thread", "quiet", "uvloop", "multiprocessing"):
        assert f"FAILED test_inner.py::test_unmarked[{way}]" in written, way
        assert f"PASSED test_inner.py::test_marked[{way}]" in written, way
    assert "PASSED test_inner.py::test_without_a_process" in written
    assert "ERROR test_inner.py::test_unmarked_fixture" in written
    assert "PASSED test_inner.py::test_marked_fixture" in written


@pytest.mark.processes
def test_the_fast_set_leaves_out_what_a_fixture_or_a_mark_says_to_start_processes(tmp_path: Path) -> None:
    written = pytest_of(INNER_STARTS, tmp_path, "-rA", "-m", "not processes", "-k", "not unmarked")
    assert "1 passed" in written
    assert "PASSED test_inner.py::test_without_a_process" in written


@pytest.mark.processes
def test_a_module_that_starts_a_process_while_it_is_collected_fails(tmp_path: Path) -> None:
    written = pytest_of("import os\nos.system('true')\ndef test_nothing(): pass\n", tmp_path)
    assert "starts a process without the mark `processes`: os.system" in written
    assert "1 error" in written


INNER_STARTS = """
import asyncio, multiprocessing.util, os, subprocess, threading
import pytest, uvloop

def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)

def quiet():
    try:
        subprocess.run(["true"])
    except BaseException:
        pass

def in_thread():
    thread = threading.Thread(target=quiet)
    thread.start()
    thread.join()

def in_uvloop():
    async def start():
        await (await asyncio.create_subprocess_exec("true")).wait()
    uvloop.run(start())

def spawned():
    os.waitpid(multiprocessing.util.spawnv_passfds(b"/bin/true", [b"true"], []), 0)

ways = {
    "popen": lambda: subprocess.run(["true"]),
    "fork": fork,
    "spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "system": lambda: os.system("true"),
    "thread": in_thread,
    "quiet": quiet,
    "uvloop": in_uvloop,
    "multiprocessing": spawned,
}
every_way = pytest.mark.parametrize("start", ways.values(), ids=ways.keys())

@every_way
def test_unmarked(start):
    start()

@pytest.mark.processes
@every_way
def test_marked(start):
    start()

@pytest.fixture
def one():
    subprocess.run(["true"])

@pytest.fixture
def another(may_start_processes):
    subprocess.run(["true"])

def test_unmarked_fixture(one):
    pass

def test_marked_fixture(another):
    pass

def test_without_a_process():
    pass
"""


def test_allocations_are_noticed(allocates_under: Callable[[int], AbstractContextManager[None]]) -> None:
    with pytest.raises(AssertionError, match="are allowed"), allocates_under(1 << 20):
        np.empty(32 << 20, np.uint8)
    with allocates_under(1 << 20):
        np.empty(32 << 10, np.uint8)


async def test_an_event_loop_leaves_nothing() -> None:
    """The check looks after the test's loop is closed, so an async test may use it."""
