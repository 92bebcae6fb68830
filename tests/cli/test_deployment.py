"""`tensorferry status` and `tensorferry down` work on a deployment that another process has started."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tensorferry.cli.down import command as down
from tensorferry.cli.status import health
from tensorferry.codecs.errors import DeploymentError
from tensorferry.codecs.messages import Gauge, Member
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.tether import is_stopped

DEADLINE_S = 60.0

pytestmark = pytest.mark.timeout(120)


def tensorferry(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tensorferry", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def status(file: Path, *more: object) -> tuple[int, dict[str, Any]]:
    done = tensorferry("status", "--config", file, "--json", *more)
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, {process["process"]: process for process in json.loads(done.stdout)}


@pytest.fixture
def file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        file = Path(folder) / "deployment.yaml"
        file.write_text(
            f"name: elsewhere\nruntime_dir: {folder}/run\nmodel: {{adapter: fingerprint}}\nencoder: {{ranks: 2}}\n"
            "scheduler: {options: {service_ms: 60000}}\npool: {budget_mb: 4}\nembeddings_pool: {budget_mb: 4}\n"
            "timeouts: {heartbeat_s: 0.1, quarantine_s: 1.0, drain_s: 20.0}\ntelemetry: {log_level: error}\n",
            encoding="utf-8",
        )
        yield file
        assert not [path for path in (Path(folder) / "run").rglob("*") if not path.is_dir()]


@pytest.fixture
def up(may_start_processes: None, file: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tensorferry", "up", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], DEADLINE_S)[0]
            assert process.stdout.readline().startswith("elsewhere is ready")
            yield process
            process.terminate()
            process.wait(DEADLINE_S)  # and so its stages, which are still removing their files otherwise
        finally:
            process.kill()
            process.communicate()


@pytest.mark.processes
def test_status_tells_the_ready_from_the_silent_and_down_ends_them_all(
    file: Path, up: subprocess.Popen[str], until: Callable[..., None]
) -> None:
    code, found = status(file)
    assert code == 0
    assert {name: process["state"] for name, process in found.items()} == dict.fromkeys(
        ("tokenizer-0", "encoder-0", "encoder-1", "scheduler-0"), "ready"
    )
    pid = found["encoder-1"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: status(file)[1]["encoder-1"]["state"] == "quarantined", DEADLINE_S)
    code, found = status(file)
    assert (code, found["encoder-0"]["state"]) == (3, "ready")
    os.kill(pid, signal.SIGCONT)

    done = tensorferry("down", "--config", file)
    assert (done.returncode, done.stdout) == (0, "elsewhere has ended\n")
    assert up.wait(DEADLINE_S) == 0


@pytest.mark.processes
def test_a_silent_tokenizer_is_said_to_be_so_and_the_wait_has_an_end(file: Path, up: subprocess.Popen[str]) -> None:
    _, found = status(file)
    os.kill(found["tokenizer-0"]["pid"], signal.SIGSTOP)
    code, found = status(file, "--timeout", "0.5")
    assert (code, found["tokenizer-0"]["state"]) == (3, "silent")
    os.kill(found["tokenizer-0"]["pid"], signal.SIGCONT)


@pytest.mark.processes
def test_down_now_cancels_what_would_take_too_long(file: Path, up: subprocess.Popen[str]) -> None:
    asked = [sys.executable, "-m", "tensorferry", "submit", "--config", str(file), "--text", "x", "--timeout", "50"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as asking:
        try:
            while not status(file)[1]["scheduler-0"]["busy_s"]:
                assert asking.poll() is None
            done = tensorferry("down", "--config", file, "--now")
            assert (done.returncode, done.stdout) == (0, "elsewhere has ended\n")
            assert up.wait(DEADLINE_S) == 130
        finally:
            asking.kill()


@pytest.mark.processes
def test_down_now_cancels_also_who_is_too_busy_to_see_the_first_signal_before_the_second(
    file: Path, up: subprocess.Popen[str], until: Callable[..., None]
) -> None:
    os.kill(up.pid, signal.SIGSTOP)
    with subprocess.Popen([sys.executable, "-m", "tensorferry", "down", "--config", str(file), "--now"]) as down:
        try:
            until(lambda: {signal.SIGINT, signal.SIGTERM} <= pending(up.pid), DEADLINE_S)
            os.kill(up.pid, signal.SIGCONT)
            assert up.wait(DEADLINE_S) == 130
            assert down.wait(DEADLINE_S) == 0
        finally:
            down.kill()


def pids(file: Path) -> dict[tuple[str, int], int]:
    """Return the owners of the locks whose files name them."""
    runtime = Runtime.of(load(file))
    members = [("deployment", 0), ("tokenizer", 0), ("encoder", 0), ("encoder", 1), ("scheduler", 0)]
    owners = {(stage, rank): runtime.owner(stage, rank) for stage, rank in members}
    return {member: owner.pid for member, owner in owners.items() if owner is not None}


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.processes
def test_lock_files_that_somebody_removed_are_made_again_and_down_finds_everybody(
    file: Path, up: subprocess.Popen[str], until: Callable[..., None]
) -> None:
    before = pids(file)
    assert before["deployment", 0] == up.pid
    for lock in Runtime.of(load(file)).directory.glob("*.lock"):
        lock.unlink()
    until(lambda: pids(file) == before, DEADLINE_S)
    done = tensorferry("down", "--config", file)
    assert (done.returncode, done.stdout) == (0, "elsewhere has ended\n")
    assert up.wait(DEADLINE_S) == 0


@pytest.mark.processes
def test_a_second_up_is_refused_also_where_somebody_has_removed_the_whole_folder(
    file: Path, up: subprocess.Popen[str], until: Callable[..., None]
) -> None:
    before, directory = pids(file), Runtime.of(load(file)).directory
    for pid in before.values():
        os.kill(pid, signal.SIGSTOP)  # so that nobody makes his files again before the second one looks
    shutil.rmtree(directory)
    beside = tensorferry("up", "--config", file)
    assert beside.returncode == 1
    assert f"'elsewhere' is already running: it is process {up.pid}" in words(beside.stderr)
    assert f"kill -TERM {up.pid}" in words(beside.stderr)
    assert not directory.exists()
    for pid in before.values():
        os.kill(pid, signal.SIGCONT)
    until(lambda: pids(file) == before, DEADLINE_S)
    assert up.poll() is None


@pytest.mark.processes
@pytest.mark.parametrize("how", ["removed", "empty"])
def test_down_does_not_say_that_a_deployment_has_ended_whose_supervisor_has_no_name(
    file: Path, up: subprocess.Popen[str], until: Callable[..., None], how: str
) -> None:
    """Otherwise it would end the stages, and the supervisor would start them again."""
    before, lock = pids(file), Runtime.of(load(file)).lock("deployment", 0)
    os.kill(up.pid, signal.SIGSTOP)  # so that it cannot make its lock again
    if how == "removed":
        lock.unlink()
    else:
        os.truncate(lock, 0)
    done = tensorferry("down", "--config", file)
    assert done.returncode == 1
    assert "'elsewhere' is running" in words(done.stderr)
    assert f"kill -TERM {up.pid}" in words(done.stderr)
    beside = tensorferry("up", "--config", file)
    assert beside.returncode == 1
    assert any(says in words(beside.stderr) for says in ("is already running", "runs already"))
    os.kill(up.pid, signal.SIGCONT)
    until(lambda: pids(file) == before, DEADLINE_S)
    assert up.poll() is None


@pytest.mark.processes
def test_down_ends_stages_that_were_started_by_hand(file: Path, until: Callable[..., None]) -> None:
    members = [("tokenizer", 0), ("encoder", 0), ("encoder", 1), ("scheduler", 0)]
    command = [sys.executable, "-m", "tensorferry", "start"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for stage, rank in members:
            started.append(subprocess.Popen([*command, stage, "--rank", str(rank), "--config", str(file)]))
        until(lambda: len(pids(file)) == len(members), DEADLINE_S)
        until(lambda: status(file)[0] == 0, DEADLINE_S)
        done = tensorferry("down", "--config", file)
        assert (done.returncode, done.stdout) == (0, "elsewhere has ended\n")
        assert [process.wait(DEADLINE_S) for process in started] == [0] * len(members)
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_of_a_supervisor_that_is_stopped_down_says_how_to_have_it_go_on(
    file: Path, up: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(up.pid, signal.SIGSTOP)
    monkeypatch.setattr("tensorferry.cli.down.CANCEL_S", 0.1)
    monkeypatch.setattr("tensorferry.cli.down.KILL_S", 0.1)
    done = CliRunner().invoke(down, ["--config", str(file), "--now"])
    assert isinstance(done.exception, DeploymentError)
    assert f"its supervisor (process {up.pid})" in str(done.exception)
    assert f"kill -CONT {up.pid}" in str(done.exception)
    os.kill(up.pid, signal.SIGCONT)
    assert up.wait(DEADLINE_S) == 130


def pending(pid: int) -> set[int]:
    """Return the pending signals of a process. Source: proc_pid_status(5)."""
    fields = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    mask = int(fields["ShdPnd"], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


@pytest.mark.processes
def test_of_a_deployment_that_is_not_running_both_say_so(file: Path) -> None:
    done = tensorferry("down", "--config", file)
    assert (done.returncode, done.stdout) == (0, "elsewhere is not running\n")
    done = tensorferry("status", "--config", file)
    assert done.returncode == 1
    assert "'elsewhere' is not running" in " ".join(done.stderr.split())


@pytest.mark.processes
def test_status_of_a_deployment_whose_processes_were_all_killed_says_that_it_is_not_running(file: Path) -> None:
    """Its files remain, with the process ids of ended processes."""
    runtime = Runtime.of(load(file))
    with subprocess.Popen(["sleep", "0"]) as dead:
        pass
    runtime.prepare()
    for stage, rank in (("deployment", 0), ("tokenizer", 0), ("encoder", 0), ("encoder", 1), ("scheduler", 0)):
        said = {"pid": dead.pid, "host": "here", "started_at": "2026-01-01T00:00:00+00:00"}
        runtime.lock(stage, rank).write_text(json.dumps(said))
    try:
        done = tensorferry("status", "--config", file, "--timeout", "0.2")
        assert done.returncode == 1, done.stdout
        assert "'elsewhere' is not running" in words(done.stderr)
    finally:
        runtime.sweep()


@pytest.mark.processes
def test_status_of_a_process_that_has_not_come_up_yet_says_that_it_starts(
    file: Path, until: Callable[..., None]
) -> None:
    """A process that does not run is `gone`."""
    command = [sys.executable, "-m", "tensorferry", "start", "encoder", "--config", str(file)]
    with subprocess.Popen(command) as encoder:
        try:
            until(lambda: pids(file), DEADLINE_S)
            code, found = status(file, "--timeout", "0.2")
            assert (code, found["encoder-0"]["state"], found["encoder-0"]["pid"]) == (3, "starting", encoder.pid)
            assert (found["tokenizer-0"]["state"], found["tokenizer-0"]["pid"]) == ("gone", None)
            os.kill(encoder.pid, signal.SIGSTOP)
            until(lambda: is_stopped(encoder.pid), DEADLINE_S)
            assert status(file, "--timeout", "0.2")[1]["encoder-0"]["state"] == "silent"
            os.kill(encoder.pid, signal.SIGCONT)
        finally:
            encoder.terminate()
            encoder.wait(DEADLINE_S)


@pytest.mark.processes
def test_a_number_that_is_another_process_s_by_now_is_left_alone(file: Path) -> None:
    """A lock file that a killed supervisor left names its process id, which another process may now have."""
    runtime = Runtime.of(load(file))
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            runtime.prepare()
            runtime.lock("deployment", 0).write_text(
                json.dumps({"pid": bystander.pid, "host": "here", "started_at": "2026-01-01"})
            )
            assert runtime.pidfd("deployment", 0) is None
            assert tensorferry("down", "--config", file).stdout == "elsewhere is not running\n"
            assert bystander.poll() is None
        finally:
            bystander.kill()
            runtime.sweep()


def test_one_that_is_at_the_same_work_for_longer_than_a_request_may_take_is_stuck(file: Path) -> None:
    deployment = load(file)
    longest_s = deployment.limits.request_timeout_s

    def state(busy_s: float) -> str:
        members = [Member("encoder", 0, 7, "ready", (Gauge("busy_s", busy_s), Gauge("in_flight", 3.0)))]
        found = {process.process: process for process in health(deployment, members)}
        assert found["encoder-0"].in_flight == 3
        assert found["encoder-1"].state == "gone", "nobody has told of it"
        return found["encoder-0"].state

    assert [state(0.0), state(longest_s), state(longest_s + 1)] == ["ready", "ready", "stuck"]
