"""A container's first process, PID 1, for which no signal has a default action."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LOCAL = Path(__file__).parents[3] / "configs" / "local.yaml"
PROGRAMS = Path(__file__).parents[2] / "programs"
DEADLINE_S = 60.0

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("can_unshare")]


@pytest.fixture(scope="module")
def can_unshare() -> None:
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")


@pytest.mark.parametrize("command", [["up"], ["start", "scheduler"]], ids=["up", "start"])
def test_sigterm_during_the_imports_stops_it(command: list[str], tmp_path: Path) -> None:
    python = [*UNSHARE, sys.executable, "-X", "importtime", "-m", "tensorferry"]
    process = subprocess.Popen(
        [*python, *command, "--config", str(LOCAL), "--set", f"runtime_dir={tmp_path}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        stop = threading.Timer(DEADLINE_S, process.kill)
        stop.start()
        try:
            assert process.stderr is not None
            assert any("tensorferry.codecs.errors" in line for line in process.stderr)  # of the first imports
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(DEADLINE_S) == 0
            assert "before it was ready" not in rest  # which is what `run_process` would say, much later
        finally:
            stop.cancel()
            process.kill()


REAPS = """
import subprocess, time
from tensorferry.pipeline.process.orphans import reap
own = subprocess.Popen(["sh", "-c", "exit 7"])
orphan = int(subprocess.run(["sh", "-c", "sleep 0.3 >/dev/null & echo $!"], capture_output=True).stdout)
deadline, reaped = time.monotonic() + 20, []
while orphan not in reaped and time.monotonic() < deadline:
    reaped += reap([own.pid])
    own.poll()
assert reaped == [orphan], (reaped, orphan)
assert own.wait() == 7
"""


def test_an_orphan_is_reaped_and_the_status_of_a_child_is_left_to_its_owner() -> None:
    done = subprocess.run([*UNSHARE, sys.executable, "-c", REAPS], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    """Whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield Path(path)


def test_a_supervisor_reaps_orphans_also_while_it_drains(folder: Path) -> None:
    program, journal = str(PROGRAMS / "deployment.py"), folder / "journal"
    command = [*UNSHARE, sys.executable, program, str(folder / "run"), str(journal), "leaves_an_orphan"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with process:
        stop = threading.Timer(DEADLINE_S, process.kill)
        stop.start()
        try:
            assert process.stderr is not None
            assert any(line.replace(" ", "").rstrip().isdigit() for line in process.stderr)  # all are ready
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(DEADLINE_S) == 0, rest
        finally:
            stop.cancel()
            process.kill()
    assert journal.read_text().count("orphan reaped") == 4


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_up_reaps_the_orphans_of_its_container(folder: Path) -> None:
    """One that somebody else has started there, and left; it ends when it is told to."""
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    settings = [argument for each in (f"runtime_dir={folder}/run", "transport=shm") for argument in ("--set", each)]
    up = [*UNSHARE, "--mount-proc", sys.executable, "-m", "tensorferry", "up", "--config", str(LOCAL), *settings]
    with subprocess.Popen(up, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        stop = threading.Timer(2 * DEADLINE_S, process.kill)
        stop.start()
        try:
            assert process.stdout is not None
            assert "is ready" in process.stdout.readline()
            [first] = children_of(process.pid)  # of unshare's: the namespace's PID 1
            stages = children_of(first)
            leaves = ["sh", "-c", f"read word < {fifo} & exit"]
            subprocess.run(["nsenter", "--target", str(first), "--pid", *leaves], check=True, timeout=DEADLINE_S)
            [orphan] = children_of(first) - stages
            fifo.write_text("end\n")
            deadline = time.monotonic() + DEADLINE_S
            while Path(f"/proc/{orphan}").exists():
                assert time.monotonic() < deadline, "it is a zombie"
                select.select([], [], [], 0.05)
            assert children_of(first) == stages
            os.kill(first, signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            stop.cancel()
            process.kill()
