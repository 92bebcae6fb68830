"""A deployment under supervision: started whole, watched, drained in order, and never left behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from structlog.testing import capture_logs

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.deployment.spec import Deployment, EncoderSpec, RestartsSpec, TimeoutsSpec
from tensorferry.pipeline.process import supervisor as module
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.supervisor import Supervisor, digest, start_command
from tensorferry.pipeline.process.tether import TETHER_VARIABLE

PROGRAMS = Path(__file__).parents[2] / "programs"
DEADLINE_S = 20.0
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
STAGES = ["tokenizer-0", "encoder-0", "encoder-1", "scheduler-0"]
FILE = Path("deployment.yaml")


@dataclass
class Place:
    """Where a test's deployment lives, and what its stages write down."""

    runtime_dir: Path
    journal: Path

    def deployment(self, **timeouts: float) -> Deployment:
        return Deployment(
            name="supervised",
            runtime_dir=str(self.runtime_dir),
            encoder=EncoderSpec(ranks=2),
            timeouts=TimeoutsSpec(**timeouts),
        )

    def command(self, usual: str = "drains", **others: str) -> Callable[[str, int], list[str]]:
        """All stages behave as usual, save those named `encoder_1=...`."""

        def command(stage: str, rank: int) -> list[str]:
            behaviour = others.get(f"{stage}_{rank}", usual)
            program = [sys.executable, "-W", "error", str(PROGRAMS / "stage.py")]
            return [*program, behaviour, stage, str(rank), str(self.journal)]

        return command

    def running(
        self,
        usual: str = "drains",
        *,
        timeouts: dict[str, float] | None = None,
        restarts: RestartsSpec | None = None,
        **others: str,
    ) -> Any:
        command = self.command(usual, **others)
        deployment = self.deployment(**timeouts or {})
        if restarts is not None:
            deployment = msgspec.structs.replace(deployment, restarts=restarts)
        return Supervisor.running(deployment, FILE, command=command)

    @property
    def notes(self) -> list[str]:
        return self.journal.read_text(encoding="utf-8").splitlines() if self.journal.exists() else []

    @property
    def children(self) -> list[int]:
        """The pids of what the stages have started."""
        return [int(note.split()[-1]) for note in self.notes if " child " in note]

    @property
    def files(self) -> list[str]:
        """What is in the runtime directory."""
        return [str(path.relative_to(self.runtime_dir)) for path in self.runtime_dir.rglob("*")]


@pytest.fixture
def place(may_start_processes: None) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="ferry-") as folder:
        place = Place(Path(folder) / "run", Path(folder) / "journal")
        yield place
        assert place.files == []


class Watched:
    """Processes that must end; those that have not are killed with the block."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds = [os.pidfd_open(pid) for pid in pids]

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        for pidfd in self._pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)

    def are_gone(self, within_s: float = DEADLINE_S) -> bool:
        until = time.monotonic() + within_s
        return all(select.select([pidfd], [], [], max(0.0, until - time.monotonic()))[0] for pidfd in self._pidfds)


# --- in this process ----------------------------------------------------------------------------------------


async def test_it_starts_whole_and_drains_upstream_first(place: Place) -> None:
    async with place.running() as supervisor:
        assert [f"{stage}-{rank}" for stage, rank in supervisor.processes] == STAGES
        pids = list(supervisor.processes.values())
        assert all(os.getpgid(pid) == pid for pid in pids)
        assert place.notes == []
    assert not any(map(psutil.pid_exists, pids))
    notes = place.notes
    assert sorted(note for note in notes if note.endswith("drained")) == sorted(f"{stage} drained" for stage in STAGES)
    encoders = [notes.index(f"encoder-{rank} {what}") for rank in (0, 1) for what in ("draining", "drained")]
    assert notes.index("tokenizer-0 drained") < min(encoders)
    assert max(encoders) < notes.index("scheduler-0 draining")


async def test_without_restarts_a_stage_that_is_killed_ends_the_block_with_its_name(place: Place) -> None:
    async def kill_one() -> None:
        async with asyncio.timeout(DEADLINE_S), place.running(restarts=RestartsSpec(most=0)) as supervisor:
            os.kill(supervisor.processes["encoder", 1], signal.SIGKILL)
            await asyncio.Event().wait()

    with pytest.raises(DeploymentError, match=r"^encoder-1 was killed by SIGKILL, so the deployment was stopped"):
        await kill_one()
    assert sorted(note for note in place.notes if note.endswith("drained")) == [
        "encoder-0 drained",
        "scheduler-0 drained",
        "tokenizer-0 drained",
    ]


async def test_a_stage_that_is_killed_is_started_again_and_drained_like_the_others(place: Place) -> None:
    async with asyncio.timeout(DEADLINE_S), place.running() as supervisor:
        for _ in range(2):
            before = dict(supervisor.processes)
            os.kill(before["encoder", 1], signal.SIGKILL)
            while supervisor.processes == before:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert supervisor.processes.items() - before.items() == {(("encoder", 1), supervisor.processes["encoder", 1])}
    assert not any(map(psutil.pid_exists, supervisor.processes.values()))


async def test_a_stage_that_dies_again_and_again_stops_the_deployment_with_the_reason(place: Place) -> None:
    async def kill_whenever_ready() -> None:
        async with asyncio.timeout(DEADLINE_S), place.running(restarts=RestartsSpec(most=3)) as supervisor:
            while True:
                while not supervisor.is_ready("scheduler", 0):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                before = supervisor.processes["scheduler", 0]
                os.kill(before, signal.SIGKILL)
                while supervisor.processes["scheduler", 0] == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)

    reason = r"^scheduler-0 was killed by SIGKILL, so .* died 4 times within 10 s;"
    with capture_logs() as logs, pytest.raises(DeploymentError, match=reason):
        await kill_whenever_ready()
    started = [log["rank"] for log in logs if log["event"] == "stage_started" and log["stage"] == "scheduler"]
    assert len(started) == 4


async def test_a_long_life_makes_up_for_short_ones(place: Place) -> None:
    restarts = RestartsSpec(most=1, healthy_s=0.001)
    async with asyncio.timeout(DEADLINE_S), place.running(restarts=restarts) as supervisor:
        for _ in range(3):
            before = supervisor.processes["tokenizer", 0]
            async with asyncio.timeout(DEADLINE_S):
                while not supervisor.is_ready("tokenizer", 0):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.01)
            os.kill(before, signal.SIGKILL)
            while supervisor.processes["tokenizer", 0] == before:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.mark.processes
@pytest.mark.parametrize("most", [5, 1])
async def test_b22_a_stage_that_cannot_be_started_again_now_is_tried_later(place: Place, most: int) -> None:
    """For want of descriptors, memory or processes; not for ever."""
    usual, refusals = place.command(), iter([True, True])
    ended = False

    def command(stage: str, rank: int) -> list[str]:
        if ended and stage == "encoder" and rank == 1 and next(refusals, False):
            return ["/nowhere"]
        return usual(stage, rank)

    deployment = msgspec.structs.replace(place.deployment(), restarts=RestartsSpec(most=most))
    refused = nullcontext() if most > 1 else pytest.raises(DeploymentError, match="encoder-1 cannot be started")
    with refused:
        async with asyncio.timeout(DEADLINE_S), Supervisor.running(deployment, FILE, command=command) as supervisor:
            pid, ended = supervisor.processes["encoder", 1], True
            os.kill(pid, signal.SIGKILL)
            while supervisor.processes["encoder", 1] == pid or not supervisor.is_ready("encoder", 1):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_stage_that_cannot_start_is_named(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    how = "encoder-0 exited with status 1 before it was ready, so the deployment was stopped"
    with pytest.raises(DeploymentError, match=rf"^{how}: there is no such file$"):
        async with place.running(encoder_0="dies_at_start"):
            pytest.fail("it is not running")
    assert "encoder-0: there is no such file\n" in capfd.readouterr().err
    how = "encoder-0 exited with status 9 before it was ready, so the deployment was stopped"
    with pytest.raises(DeploymentError, match=rf"^{how}; its last log lines may say why$"):
        async with place.running(encoder_0="vanishes_at_start"):
            pytest.fail("it is not running")


async def test_those_that_are_late_are_named(place: Place) -> None:
    late = {"tokenizer_0": "is_never_ready", "encoder_1": "is_never_ready"}
    with pytest.raises(DeploymentError, match=r"^not ready within 2.0 s: tokenizer-0, encoder-1; .*timeouts.start_s"):
        async with place.running(timeouts={"start_s": 2.0}, **late):
            pytest.fail("it is not running")


@pytest.mark.processes
async def test_a_command_that_is_not_there_is_an_error(place: Place) -> None:
    def command(stage: str, rank: int) -> list[str]:
        return ["/there/is/no/such/program"] if stage == "encoder" else place.command()(stage, rank)

    with pytest.raises(DeploymentError, match=r"^encoder-0 cannot be started: .*No such file"):
        async with Supervisor.running(place.deployment(), FILE, command=command):
            pytest.fail("it is not running")


async def test_a_drain_that_takes_too_long_is_an_error(place: Place) -> None:
    said = r"^not drained within 2\.0 s .*: encoder-0, scheduler-0; tokenizer [\d.]+ s, encoder [12]"
    with pytest.raises(DeploymentError, match=said):
        async with place.running(encoder_0="never_drains", timeouts={"drain_s": 2.0}):
            pass
    assert "encoder-1 drained" in place.notes
    assert "scheduler-0 cancelled" in place.notes


async def test_a_stage_that_hears_nothing_is_killed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANCEL_S", 0.5)
    with (
        capture_logs() as logs,
        pytest.raises(DeploymentError, match=r"^not drained within .*: tokenizer-0, encoder-0"),
    ):
        async with place.running(tokenizer_0="hears_nothing", timeouts={"drain_s": 0.5}):
            pass
    assert {"event": "stage_killed", "log_level": "warning", "stage": "tokenizer", "rank": 0} in logs


async def test_a_stage_that_fails_to_drain_is_an_error(place: Place) -> None:
    with pytest.raises(DeploymentError, match=r"^encoder-0 exited with status 1 while it drained$"):
        async with place.running(encoder_0="fails_to_drain"):
            pass
    assert "scheduler-0 drained" in place.notes


async def test_an_error_of_the_block_comes_through_as_it_is(place: Place) -> None:
    problem, cause = ValueError("of the block"), KeyError("its cause")
    with pytest.raises(ValueError, match="of the block") as raised:
        async with place.running():
            raise problem from cause
    assert raised.value is problem
    assert (problem.__cause__, problem.__context__) == (cause, None)
    assert "scheduler-0 drained" in place.notes


async def test_a_cancelled_block_cancels_the_stages(place: Place) -> None:
    with pytest.raises(TimeoutError):
        async with place.running(), asyncio.timeout(0):
            await asyncio.Event().wait()
    place.journal.unlink()

    async def cancelled() -> None:
        async with place.running():
            running.set()
            await asyncio.Event().wait()

    running = asyncio.Event()
    task = asyncio.create_task(cancelled())
    async with asyncio.timeout(DEADLINE_S):
        await running.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert sorted(place.notes) == sorted(f"{stage} cancelled" for stage in STAGES)


@pytest.mark.parametrize("others", ["drains", "is_never_ready"])
@pytest.mark.parametrize("late", ["imports", "blocks_its_loop"])
async def test_a_stop_while_stages_start_waits_for_none_that_cannot_hear_of_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, late: str, others: str
) -> None:
    monkeypatch.setattr(module, "CANCEL_S", 3600.0)

    async def start() -> None:
        async with place.running(others, encoder_1=late):
            pytest.fail("it is not ready")

    with capture_logs() as logs:
        starting = asyncio.create_task(start())
        async with asyncio.timeout(DEADLINE_S):
            while "encoder-1 starting" not in place.notes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        starting.cancel()
        ended, _ = await asyncio.wait([starting], timeout=DEADLINE_S)
        starting.cancel()  # which kills them all, where this has failed
        await asyncio.wait([starting])
        assert ended
        assert starting.cancelled()
    pids = [log["pid"] for log in logs if log["event"] == "stage_started"]
    assert len(pids) == 4
    assert not any(map(psutil.pid_exists, pids))
    killed = [f"{log['stage']}-{log['rank']}" for log in logs if log["event"] == "stage_killed"]
    if late == "blocks_its_loop":
        assert "encoder-1" in killed
    else:
        assert "encoder-1" not in killed, "the signal alone ends it"


async def test_cancelled_while_draining_it_still_leaves_nothing(place: Place) -> None:
    async def draining() -> None:
        async with place.running("never_drains") as supervisor:
            pids.extend(supervisor.processes.values())

    pids: list[int] = []
    task = asyncio.create_task(draining())
    async with asyncio.timeout(DEADLINE_S):
        while "tokenizer-0 draining" not in place.notes:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert len(pids) == 4
    assert not any(map(psutil.pid_exists, pids))


async def test_a_second_one_is_refused_and_told_who_is_there(place: Place) -> None:
    async with place.running():
        with pytest.raises(DeploymentError, match=rf"already running: it is process {os.getpid()} .*{FILE}"):
            async with place.running():
                pytest.fail("there are two")


async def test_what_dead_stages_left_is_swept(place: Place) -> None:
    runtime = Runtime.of(place.deployment())
    runtime.prepare()
    runtime.lock("encoder", 7).touch()
    async with place.running():
        assert not runtime.lock("encoder", 7).exists()
        runtime.lock("encoder", 0).touch()  # one that is killed now, say


async def test_stages_inherit_the_tether_alone_and_share_the_cores(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    try:
        async with place.running("looks_around"):
            pass
    finally:
        os.close(reading)
        os.close(writing)
    assert place.notes.count("encoder-1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=7") == 1
    assert [note for note in place.notes if "descriptors" in note and not note.endswith("descriptors [0, 1, 2]")] == []


async def test_what_a_stage_has_started_goes_with_it(place: Place) -> None:
    with ExitStack() as undo:
        async with place.running("has_a_child"):
            children = undo.enter_context(Watched(place.children))
        assert children.are_gone()


def test_stages_are_started_by_this_interpreter_with_the_same_settings() -> None:
    command = start_command(Path("a file.yaml"), ["pool.slots=8", "name=x y"])
    assert command("encoder", 3) == [
        *(sys.executable, "-P", "-m", "tensorferry", "start", "encoder", "--rank", "3", "--config", "a file.yaml"),
        *("--set", "pool.slots=8", "--set", "name=x y"),
    ]


def test_a_digest_is_of_every_value() -> None:
    assert digest(Deployment(name="a")) == digest(Deployment(name="a"))
    assert digest(Deployment(name="a")) != digest(Deployment(name="b"))
    assert digest(Deployment(name="a")) != digest(Deployment(name="a", encoder=EncoderSpec(ranks=2)))
    plain = Deployment(name="a")
    changed = dict(changes(plain))
    assert len(changed) > 40
    same = {digest(plain)}
    for key, deployment in changed.items():
        assert digest(deployment) not in same, f"{key} is as good as another, or none"
        same.add(digest(deployment))


def changes(spec: Any) -> Iterator[tuple[str, Any]]:
    """Each number and switch in it, by its key, changed alone."""
    for name in spec.__struct_fields__:
        value = getattr(spec, name)
        if isinstance(value, msgspec.Struct):
            found = [(f"{name}.{key}", other) for key, other in changes(value)]
        else:
            other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else value
            found = [] if other == value else [(name, other)]
        for key, other in found:
            yield key, msgspec.structs.replace(spec, **{name: other})


# --- as a process of its own --------------------------------------------------------------------------------


class Up:
    """A process of `deployment.py`, all stages ready, leading a session as one does that a terminal has started."""

    def __init__(self, place: Place, *behaviours: str, session: bool = True) -> None:
        self._errors = tempfile.NamedTemporaryFile("w+", dir=place.journal.parent, prefix="stderr-", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "deployment.py"), str(place.runtime_dir), str(place.journal), *behaviours],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=session,
        )

    def ready(self) -> list[int]:
        """The pids of its stages."""
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until and self.process.poll() is None:
            for line in self.errors.splitlines():
                if line.replace(" ", "").isdigit():
                    return [int(pid) for pid in line.split()]
            select.select([], [], [], 0.01)
        pytest.fail(f"not ready: {self.errors}")

    @property
    def errors(self) -> str:
        return Path(self._errors.name).read_text(encoding="utf-8")

    def ends(self) -> int:
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._errors.close()


@pytest.fixture
def up(may_start_processes: None, place: Place) -> Iterator[Callable[..., Up]]:
    with ExitStack() as undo:

        def start(*behaviours: str, session: bool = True) -> Up:
            started = Up(place, *behaviours, session=session)
            undo.callback(started.close)
            return started

        yield start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_in_order_even_from_a_terminal(
    place: Place, up: Callable[..., Up], number: signal.Signals
) -> None:
    started = up("drains")
    pids = started.ready()
    os.killpg(started.process.pid, number)  # what Ctrl-C in a terminal does: the whole foreground group gets it
    assert started.ends() == 0
    assert not any(map(psutil.pid_exists, pids))
    assert place.notes.index("tokenizer-0 drained") < place.notes.index("encoder-0 draining")


def test_the_second_signal_cancels(place: Place, up: Callable[..., Up], until: Callable[..., None]) -> None:
    started = up("never_drains")
    pids = started.ready()
    started.process.send_signal(signal.SIGINT)
    until(lambda: "tokenizer-0 draining" in place.notes)
    started.process.send_signal(signal.SIGINT)
    assert started.ends() == 130
    assert not any(map(psutil.pid_exists, pids))


def test_a_signal_while_it_starts_ends_it(place: Place, up: Callable[..., Up], until: Callable[..., None]) -> None:
    started = up("is_never_ready")
    until(lambda: len(place.notes) == 4)
    started.process.send_signal(signal.SIGTERM)
    assert started.ends() == 0


def test_a_stage_that_cannot_be_kept_alive_is_the_last_word(up: Callable[..., Up]) -> None:
    started = up("leaves_when_ready")
    assert started.ends() == 1
    assert " exited with status 0, so the deployment was stopped" in started.errors.splitlines()[-1]


@pytest.mark.processes
@pytest.mark.parametrize("stopped", [False, True])
def test_b45_nothing_survives_a_supervisor_that_is_killed(
    place: Place, up: Callable[..., Up], until: Callable[..., None], stopped: bool
) -> None:
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            started = up("has_a_child")
            pids = started.ready()
            assert len(place.children) == 4
            with Watched([*pids, *place.children]) as family:
                if stopped:
                    os.kill(pids[1], signal.SIGSTOP)
                    until(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED)
                started.process.kill()
                started.process.wait(DEADLINE_S)
                assert family.are_gone(DEADLINE_S), started.errors
            assert bystander.poll() is None
            assert "Traceback" not in started.errors
        finally:
            bystander.kill()
    until(lambda: place.files == [])


@pytest.fixture
def adopted() -> Iterator[list[int]]:
    """This process gets the orphans of its children; those named in the list are waited for."""
    libc, pids = ctypes.CDLL(None), list[int]()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield pids
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
    for pid in pids:
        os.waitpid(pid, 0)


def test_b45_a_stopped_orphan_hears_of_it_also_in_the_session_of_who_adopts_it(
    up: Callable[..., Up], until: Callable[..., None], adopted: list[int]
) -> None:
    """As in a container whose first process has started the supervisor: the kernel then sees no orphaned group."""
    started = up("drains", session=False)
    adopted += started.ready()
    with Watched(adopted) as family:
        for pid in adopted:
            os.kill(pid, signal.SIGSTOP)
            until(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        started.process.kill()
        started.process.wait(DEADLINE_S)
        assert family.are_gone(DEADLINE_S), started.errors


def test_a_second_up_is_refused(place: Place, up: Callable[..., Up]) -> None:
    first = up("drains")
    first.ready()
    second = up("drains")
    assert second.ends() == 1
    assert f"already running: it is process {first.process.pid} " in second.errors.splitlines()[-1]
    first.process.send_signal(signal.SIGTERM)
    assert first.ends() == 0


# --- the commands -------------------------------------------------------------------------------------------


@pytest.fixture
def deployment_file(place: Place) -> Path:
    file = place.journal.with_name("deployment.yaml")
    file.write_text(
        f"name: commands\nruntime_dir: {place.runtime_dir}\nmodel: {{adapter: fingerprint}}\nencoder: {{ranks: 2}}\n"
        "pool: {budget_mb: 4}\nembeddings_pool: {budget_mb: 4}\ntelemetry: {log_level: warning}\n",
        encoding="utf-8",
    )
    return file


def tensorferry(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tensorferry", *map(str, arguments)]


@pytest.mark.processes
@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_out_of_range_is_a_usage_error_that_names_the_range(deployment_file: Path, rank: int) -> None:
    command = tensorferry("start", "encoder", "--rank", rank, "--config", deployment_file)
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    words = " ".join(done.stderr.split())
    assert f"Invalid value for --rank: {rank} is not one of the encoder ranks of" in words
    assert "which are 0 to 1" in words


@pytest.mark.processes
def test_a_stage_that_read_something_else_than_its_supervisor_does_not_start(deployment_file: Path) -> None:
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            tensorferry("start", "encoder", "--config", deployment_file),
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            pass_fds=[reading, writing],
            env=os.environ | {TETHER_VARIABLE: f"{reading}:{writing}:{'0' * 32}"},
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert done.returncode == 2
    assert "deployment.yaml: it was changed while the deployment was starting" in " ".join(done.stderr.split())


@pytest.mark.processes
def test_up_says_when_it_is_ready_and_drains_without_a_trace(place: Place, deployment_file: Path) -> None:
    command = tensorferry("up", "--config", deployment_file, "--set", "encoder.ranks=1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "commands is ready (1 tokenizer, 1 encoder, 1 scheduler); Ctrl-C drains and stops it\n"
            os.killpg(process.pid, signal.SIGINT)
            out, _ = process.communicate(timeout=DEADLINE_S)
            assert (process.returncode, out) == (0, "")
        finally:
            process.kill()
