"""How our processes stop, and what their exit status says: each in a real process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.process.run_process import Stop
from tensorferry.pipeline.process.tether import TETHER_VARIABLE, Tether

PROGRAM = Path(__file__).parents[2] / "programs" / "life.py"
DEADLINE_S = 20.0


class Life:
    """A process of `life.py`."""

    def __init__(self, behaviour: str, tether: Tether | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(PROGRAM), behaviour],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ({TETHER_VARIABLE: str(tether)} if tether else {}),
            pass_fds=[tether.lifeline, tether.status] if tether else [],
            process_group=0,
        )

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def heard(self, line: str) -> None:
        """Wait until it prints this line."""
        assert self.process.stdout is not None
        while (said := self.process.stdout.readline()) != f"{line}\n":
            assert said, self.process.stderr and self.process.stderr.read()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def ends(self) -> tuple[int, str, str]:
        """Exit status, and what more it said on stdout and stderr."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@pytest.fixture
def start(may_start_processes: None) -> Iterator[Callable[..., Life]]:
    with ExitStack() as lives:

        def begin(behaviour: str, tether: Tether | None = None) -> Life:
            life = Life(behaviour, tether)
            lives.callback(life.close)
            return life

        yield begin


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains(start: Callable[..., Life], number: signal.Signals) -> None:
    life = start("drains")
    life.heard("uvloop")
    life.heard("ready")
    life.signal(number)
    status, out, _ = life.ends()
    assert (status, "drained" in out) == (0, True)


@pytest.mark.parametrize(("first", "second"), [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_the_second_signal_cancels(start: Callable[..., Life], first: signal.Signals, second: signal.Signals) -> None:
    life = start("never_drains")
    life.heard("ready")
    life.signal(first)
    life.heard("draining")
    life.signal(second)
    status, out, _ = life.ends()
    assert (status, "cleaned up" in out) == (130, True)


def test_a_third_signal_leaves_the_cleaning_up_alone(start: Callable[..., Life]) -> None:
    life = start("cleans_up_at_length")
    life.heard("ready")
    for line in ("draining", "cleaning"):
        life.signal(signal.SIGINT)
        life.heard(line)
    life.signal(signal.SIGINT)
    status, out, _ = life.ends()
    assert (status, "cleaned up" in out) == (130, True)


def test_before_it_is_ready_there_is_nothing_to_drain(start: Callable[..., Life]) -> None:
    life = start("is_never_ready")
    life.heard("starting")
    life.signal(signal.SIGTERM)
    status, out, _ = life.ends()
    assert (status, "cleaned up" in out) == (0, True)


def test_a_drain_that_takes_too_long_is_cancelled(start: Callable[..., Life]) -> None:
    life = start("never_drains")
    life.heard("ready")
    life.signal(signal.SIGTERM)
    status, out, _ = life.ends()
    assert status == 1
    assert "not drained within 0.5 s" in out
    assert "cleaned up" in out


@pytest.mark.parametrize("behaviour", ["is_stuck", "is_deaf", "is_deaf_from_the_start"])
def test_b20_a_process_that_cannot_be_cancelled_says_where_it_is_stuck(
    start: Callable[..., Life], behaviour: str
) -> None:
    life = start(behaviour)
    life.heard("ready")
    life.signal(signal.SIGTERM)
    status, _, err = life.ends()
    assert status == 1
    assert "Timeout (" in err
    assert "most recent call first" in err


def test_b20_a_thread_that_never_ends_keeps_no_process(start: Callable[..., Life]) -> None:
    status, out, err = start("leaves_a_thread").ends()
    assert (status, out) == (1, "done\n")
    assert "Timeout (" in err


def test_done_is_done(start: Callable[..., Life]) -> None:
    assert start("returns").ends() == (0, "done\n", "")


def test_what_a_user_can_be_told_is_one_line(start: Callable[..., Life]) -> None:
    assert start("cannot_go_on").ends() == (1, "", "life-0: port 80 is taken\n")


def test_several_of_them_are_told_once_each(start: Callable[..., Life]) -> None:
    status, _, err = start("cannot_go_on_twice").ends()
    assert status == 1
    assert sorted(err.splitlines()) == ["life-0: another", "life-0: one"]


def test_a_bug_keeps_its_traceback(start: Callable[..., Life]) -> None:
    status, _, err = start("has_a_bug").ends()
    assert status == 1
    assert "Traceback" in err
    assert err.endswith("ZeroDivisionError\nin life-0\n")


@pytest.mark.processes
def test_b22_a_process_takes_as_many_descriptors_as_it_may_have() -> None:
    code = """
import asyncio, resource
from tensorferry.pipeline.process.run_process import run_process
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
assert run_process(lambda stop: asyncio.sleep(0), name="nothing", drain_s=1.0) == 0
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S, cwd="/")


def test_readiness_is_announced_once() -> None:
    announced = []
    stop = Stop(on_ready=lambda: announced.append("ready"))
    stop.announce_ready()
    stop.announce_ready()
    assert announced == ["ready"]


# --- the tether ---------------------------------------------------------------------------------------------


class Ends:
    """The supervisor's ends of a tether."""

    def __init__(self, undo: ExitStack) -> None:
        reading, self._lifeline = os.pipe()
        self.status, writing = os.pipe()
        self.tether = Tether(reading, writing, "digest")
        self._open = [reading, writing, self.status, self._lifeline]
        undo.callback(lambda: self.close(*self._open))

    def close(self, *fds: int) -> None:
        for fd in fds:
            self._open.remove(fd)
            os.close(fd)

    def cancel(self) -> None:
        os.write(self._lifeline, b"x")

    def cut(self) -> None:
        self.close(self._lifeline)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as undo:
        yield Ends(undo)


def test_readiness_is_told_the_supervisor(start: Callable[..., Life], ends: Ends) -> None:
    life = start("drains", ends.tether)
    life.heard("ready")
    ends.close(ends.tether.status)
    assert os.read(ends.status, 64) == b"ready\n"
    assert os.read(ends.status, 64) == b""


def test_why_it_will_never_be_ready_is_told_the_supervisor(start: Callable[..., Life], ends: Ends) -> None:
    status, _, err = start("cannot_go_on_twice", ends.tether).ends()
    assert status == 1
    ends.close(ends.tether.status)
    first, second = (line.removeprefix("life-0: ") for line in err.splitlines())
    assert os.read(ends.status, 4096).decode() == f"{first}; {second}"
    assert os.read(ends.status, 64) == b""


def test_a_byte_in_the_lifeline_cancels(start: Callable[..., Life], ends: Ends) -> None:
    life = start("never_drains", ends.tether)
    life.heard("ready")
    ends.cancel()
    status, out, _ = life.ends()
    assert (status, "cleaned up" in out) == (130, True)


def lifeline_is_cut(life: Life, ends: Ends) -> None:
    ends.cut()


def told_to_cancel_and_cut(life: Life, ends: Ends) -> None:
    ends.cancel()
    ends.cut()


def kernel_tells_first(life: Life, ends: Ends) -> None:
    """Before the last thread of the supervisor is gone, and with it the lifeline."""
    life.signal(signal.SIGHUP)


@pytest.mark.processes
@pytest.mark.parametrize("lose", [lifeline_is_cut, told_to_cancel_and_cut, kernel_tells_first])
@pytest.mark.parametrize("behaviour", ["drains", "never_drains", "is_never_ready"])
def test_b45_an_orphan_cleans_up_and_goes_with_all_it_has_started(
    start: Callable[..., Life], ends: Ends, behaviour: str, lose: Callable[[Life, Ends], None]
) -> None:
    life = start(behaviour, ends.tether)
    life.heard("starting" if behaviour == "is_never_ready" else "ready")
    with subprocess.Popen(["sleep", "1000"], process_group=life.process.pid) as relative:
        try:
            lose(life, ends)
            status, out, _ = life.ends()
            assert status == -signal.SIGKILL
            assert "cleaned up" in out or behaviour == "drains"
            assert relative.wait(DEADLINE_S) == -signal.SIGKILL
        finally:
            relative.kill()


@pytest.mark.processes
def test_b45_a_drain_and_the_loss_of_the_supervisor_at_once(start: Callable[..., Life], ends: Ends) -> None:
    life = start("drains", ends.tether)
    life.heard("ready")
    with subprocess.Popen(["sleep", "1000"], process_group=life.process.pid) as relative:
        try:
            life.stop()
            life.signal(signal.SIGTERM)
            ends.cut()
            life.signal(signal.SIGCONT)
            assert life.ends()[0] == -signal.SIGKILL
            assert relative.wait(DEADLINE_S) == -signal.SIGKILL
        finally:
            relative.kill()


@pytest.mark.parametrize("lose", [lifeline_is_cut, told_to_cancel_and_cut])
def test_b45_a_blocked_loop_makes_no_orphan(
    start: Callable[..., Life], ends: Ends, lose: Callable[[Life, Ends], None]
) -> None:
    life = start("blocks_its_loop", ends.tether)
    life.heard("ready")
    lose(life, ends)
    assert life.ends()[0] == -signal.SIGKILL


def test_children_inherit_nothing_of_the_tether(start: Callable[..., Life], ends: Ends) -> None:
    status, out, _ = start("has_a_child", ends.tether).ends()
    assert (status, out.strip()) == (0, "[0, 1, 2, 3] False")  # 3: of the listing itself


@pytest.mark.parametrize("text", ["", "1:2", "a:b:c", "998:999:digest"])
def test_a_tether_that_does_not_hold_is_an_error(text: str) -> None:
    environ = {TETHER_VARIABLE: text}
    with pytest.raises(DeploymentError, match="is not from a supervisor"):
        Tether.taken_from(environ)
    assert environ == {}


def test_without_a_supervisor_there_is_no_tether() -> None:
    assert Tether.taken_from({}) is None


def holding(tether: Tether) -> Sequence[str]:
    """A process that holds on to its tether and then looks at nothing any more."""
    code = "import os, signal; from tensorferry.pipeline.process.tether import Tether; "
    code += "Tether.taken_from(os.environ).hold(); print('held', flush=True); signal.pause()"
    return [sys.executable, "-c", code]


@pytest.mark.processes
def test_b45_one_that_is_still_starting_dies_with_its_parent(ends: Ends) -> None:
    starter = "import subprocess, sys; child = subprocess.Popen(sys.argv[1:], close_fds=False); "
    starter += "print(child.pid, flush=True); child.wait()"
    parent = subprocess.Popen(
        ["nohup", sys.executable, "-c", starter, *holding(ends.tether)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {TETHER_VARIABLE: str(ends.tether)},
        pass_fds=[ends.tether.lifeline, ends.tether.status],
    )
    assert parent.stdout is not None
    pidfd = os.pidfd_open(int(parent.stdout.readline()))
    try:
        assert parent.stdout.readline() == "held\n"
        parent.kill()
        parent.communicate()
        assert select.select([pidfd], [], [], DEADLINE_S)[0]
    finally:
        os.close(pidfd)


@pytest.mark.processes
def test_b45_one_that_starts_after_its_parent_has_died_does_not_start(ends: Ends) -> None:
    ends.cut()
    orphan = subprocess.run(
        holding(ends.tether),
        stdout=subprocess.PIPE,
        env=os.environ | {TETHER_VARIABLE: str(ends.tether)},
        pass_fds=[ends.tether.lifeline, ends.tether.status],
        timeout=DEADLINE_S,
    )
    assert (orphan.returncode, orphan.stdout) == (-signal.SIGHUP, b"")
