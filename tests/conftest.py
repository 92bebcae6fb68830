"""What all tests share: nothing may be left behind, every wait has a deadline, and peers are real processes."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import multiprocessing.resource_tracker
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import msgspec
import psutil
import pytest
import structlog
from hypothesis import Phase, settings
from tests import process_guard

from tensorferry.codecs.memory import cuda_vmm
from tensorferry.codecs.memory.cuda_driver import Driver
from tensorferry.codecs.messages import ItemReport, Mark
from tensorferry.codecs.pool.control import AckPage, ControlPage
from tensorferry.codecs.pool.export import Attachment, Export
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.recording.request import Request
from tensorferry.replay.results.report import write_report
from tensorferry.replay.results.summary import Setup, summarise
from tensorferry.replay.run.gauge_samples import PoolUse, Sample
from tensorferry.replay.run.schedule import Speed
from tensorferry.replay.run.sender import Outcome, Replay
from tensorferry.replay.trace.loaded_trace import Trace
from tensorferry.replay.workload.prepare import Invented, Preparation, Prepared
from tensorferry.replay.workload.token_ids import TokenSource

TESTS = Path(__file__).parent
MS = 1_000_000
DEADLINE_S = 20.0  #: for anything one process waits for from another

# Two runs of the same tree test the same examples, and a slow machine is no failure.
settings.register_profile("tensorferry", deadline=None, derandomize=True, database=None)
#: What fails is told as it was found, where it only matters that it fails: see benchmarks/mutants.py.
settings.register_profile("unshrunk", settings.get_profile("tensorferry"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk" if os.environ.get("TENSORFERRY_SHRINK") == "no" else "tensorferry")


def pytest_configure(config: pytest.Config) -> None:
    # Threads of torch's in several processes on few cores wait for each other by spinning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.pluginmanager.register(process_guard)
    config.addinivalue_line("markers", "leaves(reason): this test is allowed to leave something behind, and why")


# --- nothing is left behind ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Belongings:
    """What this process has that outlives a function: descriptors, mapped memfds, children."""

    descriptors: Counter[str]
    memfds: Counter[str]
    children: Counter[str]

    @classmethod
    def now(cls) -> Self:
        tracker: Any = multiprocessing.resource_tracker._resource_tracker  # lives on, if somebody started it
        descriptors: Counter[str] = Counter()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the listing's own
                target = os.readlink(f"/proc/self/fd/{name}")
                if int(name) != tracker._fd and not target.endswith(".ttf"):  # matplotlib keeps the fonts it has used
                    descriptors[target] += 1
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        memfds = Counter(line.split(maxsplit=5)[5] for line in maps if "/memfd:" in line)
        # psutil reads all of /proc for it: only where there may be one.
        children = psutil.Process().children(recursive=True) if process_guard.own_children() else []
        return cls(descriptors, memfds, Counter(f"process {c.pid}" for c in children if c.pid != tracker._pid))

    def gained_since(self, before: Belongings) -> list[str]:
        """What is here now and was not then."""
        return [
            *(f"descriptor {name}" for name in self.descriptors - before.descriptors),
            *(f"mapping {name}" for name in self.memfds - before.memfds),
            *(self.children - before.children),
        ]


def left_since(before: Belongings, patience_s: float = 2.0) -> list[str]:
    """What is left, after the garbage is collected and threads that are just closing something had their time."""
    until = time.monotonic() + patience_s
    while (left := Belongings.now().gained_since(before)) and time.monotonic() < until:
        gc.collect()
        threading.Event().wait(0.02)
    return left


FAILED = pytest.StashKey[list[bool]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash.setdefault(FAILED, []).append(report.failed)
    return report


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No descriptor, memfd mapping or child process outlives a test that passed.

    (The traceback of one that failed keeps everything alive that its frames hold.) Mark a test
    `leaves("why")` to be excused.
    """
    before = Belongings.now()
    yield
    if request.node.get_closest_marker("leaves") or any(request.node.stash.get(FAILED, [])):
        return
    if left := left_since(before):
        pytest.fail(f"left behind: {', '.join(left)}", pytrace=False)


@pytest.fixture(autouse=True)
def logging_is_as_it_was() -> Iterator[None]:
    """Commands that a test runs in this process set up logging for good."""
    logger, last_resort = structlog.get_config(), logging.lastResort
    yield
    structlog.configure(**logger)
    logging.lastResort = last_resort


@pytest.fixture
def belongings() -> Callable[[], Belongings]:
    """The check itself, for tests that want it in the middle, or that test it."""
    return Belongings.now


@pytest.fixture
def left() -> Callable[[Belongings], list[str]]:
    return left_since


@pytest.fixture
def allocates_under() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """`with allocates_under(nbytes):` fails when the block allocates more than that, even if it frees it again.

    Counts what Python and numpy ask for, touched or not: a lie about a size must be found before that.
    """

    @contextlib.contextmanager
    def under(nbytes: int) -> Iterator[None]:
        tracemalloc.start()
        try:
            start, _ = tracemalloc.get_traced_memory()
            yield
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak - start < nbytes, f"allocated {peak - start} bytes; {nbytes} are allowed"

    return under


# --- deadlines ------------------------------------------------------------------------------------------------


@pytest.fixture
def until() -> Callable[..., None]:
    """`until(condition)` waits for what another process or thread does, at most `DEADLINE_S`."""

    def wait(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, f"not within {deadline_s} s"
            threading.Event().wait(0.005)

    return wait


# --- peers ------------------------------------------------------------------------------------------------------


class PeerError(Exception):
    """What a peer's command raised: `kind` is the class name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Peer:
    """Another process running `programs/peer.py`; `ask` runs one of its commands. Dies with the block."""

    def __init__(self, program: str = "peer.py", warnings: str = "error", **environment: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(DEADLINE_S)
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-W", warnings, str(TESTS / "programs" / program), str(number)]
            self._process = subprocess.Popen(command, pass_fds=[number], env={**os.environ, **environment})
        self.pid = self._process.pid

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, command: str, *arguments: Any, fds: Sequence[int] = ()) -> Any:
        """Run a command there; its descriptors, if it gives any, come as `self.fds`. Raises PeerError."""
        self.send(command, *arguments, fds=fds)
        return self.answer()

    def send(self, command: str, *arguments: Any, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._socket, [msgspec.msgpack.encode((command, arguments))], list(fds))

    def answer(self) -> Any:
        data, fds, _, _ = socket.recv_fds(self._socket, 1 << 20, 16, socket.MSG_CMSG_CLOEXEC)
        assert data, f"peer {self.pid} is gone ({self._process.poll()})"
        outcome, value = msgspec.msgpack.decode(data)
        self.fds = fds
        if outcome != "ok":
            raise PeerError(outcome, value)
        return value

    def join(self, pool: Pool) -> int:
        """Give it a pool of ours to read; its column."""
        export, fds = pool.export()
        answer = self.ask("attach", msgspec.msgpack.encode(export), fds=fds)
        for fd in fds:
            os.close(fd)
        return pool.admit(msgspec.msgpack.decode(answer, type=Attachment), self.fds)

    def offer(self, reader: Reader) -> tuple[int, int]:
        """Have a reader of ours take its pool: our column, and the pool."""
        export = msgspec.msgpack.decode(self.ask("export"), type=Export)
        attachment, fds = reader.attach(export, self.fds)
        column: int = self.ask("admit", msgspec.msgpack.encode(attachment), fds=fds)
        for fd in fds:
            os.close(fd)
        return column, export.description.pool

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def wait(self) -> int:
        return self._process.wait(DEADLINE_S)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._socket.close()


@pytest.fixture
def start_peer(may_start_processes: None) -> Iterator[Callable[..., Peer]]:
    """Starts processes of this test's own; see Peer for what it takes."""
    with contextlib.ExitStack() as peers:
        yield lambda *arguments, **options: peers.enter_context(Peer(*arguments, **options))


@pytest.fixture(scope="module")
def _peer(may_start_processes: None) -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


@pytest.fixture
def peer(_peer: Peer) -> Iterator[Peer]:
    """A process that the tests of a module share; it must be as it was when a test ends."""
    before = _peer.ask("belongings")
    yield _peer
    _peer.ask("reset")
    assert _peer.ask("belongings") == before, "the peer has something left"


@pytest.fixture
def refused() -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """`with refused("BadTensor", "reaches past"):` expects a peer's command to raise that."""

    def expect(kind: str, text: str = "") -> contextlib.AbstractContextManager[Any]:
        return pytest.raises(PeerError, match=f"^{kind}: .*{text}")

    return expect


# --- a driver without a GPU ---------------------------------------------------------------------------------------


class StubCuda:
    """The stub driver of `stub_cuda/`: what it should be like, and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = os.environ | {
            "STUB_CUDA": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS / "stub_cuda"), os.environ.get("PYTHONPATH")])),
        }
        self.plan()

    def plan(self, **plan: Any) -> StubCuda:
        """See `stub_cuda/stub_driver.py`."""
        (self.folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        (self.folder / "calls.log").write_text("")
        return self

    def beside(self) -> Any:
        """The stub as a module of this very process, which keeps the real one. Changing its PLAN takes effect."""
        spec = importlib.util.spec_from_file_location("stub_driver", TESTS / "stub_cuda" / "stub_driver.py")
        assert spec is not None
        assert spec.loader is not None
        stub: Any = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STUB_CUDA", str(self.folder))
            spec.loader.exec_module(stub)
        return stub

    def calls(self) -> list[tuple[str, str]]:
        """(call, result) of every process with this environment, in order; an import is a call too."""
        lines = (self.folder / "calls.log").read_text().splitlines()
        return [tuple(line.split(maxsplit=2)[1:]) for line in lines]  # type: ignore[misc]


@pytest.fixture
def stub_cuda(tmp_path: Path) -> StubCuda:
    """Processes with its `environ` see two H200 by default; set `plan(...)` for others, and for faults."""
    folder = tmp_path / "stub-cuda"
    folder.mkdir()
    return StubCuda(folder).plan(gpus=[{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}])


class Stub:
    """The stub driver, and its device in the place of torch's, in this process."""

    def __init__(self, driver: Any, device: Any, environ: dict[str, str]) -> None:
        self.driver, self.device = driver, device
        self.environ = environ

    def refuse(self, call: str, result: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Let a driver call of this process fail from now on."""
        self.driver.PLAN.setdefault("fail", {})[call] = result

    def allow(self) -> None:
        self.driver.PLAN["fail"] = {}


@pytest.fixture
def stub(stub_cuda: StubCuda, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Elastic pools of this process lie in the stub driver's memory; those of a peer with its `environ`, too."""
    monkeypatch.syspath_prepend(str(TESTS / "stub_cuda"))
    import stub_device  # type: ignore[import-not-found]

    bindings = stub_cuda.beside()
    monkeypatch.setattr(cuda_vmm, "CudaDevice", stub_device.StubDevice)
    monkeypatch.setattr(stub_device.StubDevice, "held", None)
    monkeypatch.setattr(cuda_vmm, "Driver", type("Loaded", (Driver,), {"load": lambda: Driver(bindings)}))
    wanted = {name: stub_cuda.environ[name] for name in ("STUB_CUDA", "PYTHONPATH")}
    return Stub(bindings, stub_device.StubDevice, wanted)


# --- a process that writes wrong words -----------------------------------------------------------------------------


class Pages:
    """The pages of words that this process has made since the test began, in order."""

    def __init__(self) -> None:
        self.acks, self.control = list[AckPage](), list[ControlPage]()


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """Lets a test write words that the pool or reader of a page would not. Ask for it before what makes the pages."""
    found = Pages()

    def keep_in(made: list[Any], create: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*arguments: Any) -> Any:
            made.append(create(*arguments))
            return made[-1]

        return kept

    monkeypatch.setattr(AckPage, "create", keep_in(found.acks, AckPage.create))
    monkeypatch.setattr(ControlPage, "create", keep_in(found.control, ControlPage.create))
    return found


# --- what a run has searched ------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    seen = [(name, value) for report in reports for name, value in report.user_properties]
    lines = [str(value) for name, value in seen if name in ("protocol", "schedules")]
    if not lines:
        return
    terminalreporter.section("lease protocol")
    for line in lines:
        terminalreporter.write_line(line)
    total = {name: sum(value for each, value in seen if each == name) for name in ("worlds", "steps", "found", "walks")}
    if total["worlds"]:
        terminalreporter.write_line(
            f"{total['worlds']:,} worlds and {total['steps']:,} steps, all orders of events; "
            f"{total['walks']:,} seeds; {total['found']} planted faults found"
        )


# --- what replays leave --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def plots() -> None:
    """For tests that draw."""
    pytest.importorskip("matplotlib", reason="pip install 'tensorferry[report]'")


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run() -> MakeRun:
    """Writes what `replay --out` would, for requests that are 50 ms apart and took so long as is said."""

    def make(
        folder: Path,
        latencies_ms: Sequence[float] = (10, 20, 30),
        *,
        inline: Collection[int] = (),
        failed: Collection[int] = (),
        text: str = "what",
        config: Mapping[str, object] = MappingProxyType({"name": "local"}),
        speed: str = "1",
        without: Collection[str] = (),
    ) -> Path:
        """inline: the requests whose item fell back; failed: those that failed; without: marks that none has. The item
        of each has 1 MB."""
        requests = [
            Request(line=n + 1, at_ns=n * 50 * MS, output_tokens=1, text=text) for n in range(len(latencies_ms))
        ]
        prepared = [Prepared(request, (), 0, None) for request in requests]
        trace = Trace(Path("day.jsonl"), "ab" * 32, "tensorferry", False, len(requests), requests, [], 0, {})
        replay = Replay(prepared, TokenSource(9, [], 0), Speed.parse(speed), deadline_s=1.0)
        replay.start_ns = 1
        for n, took_ms in enumerate(latencies_ms):
            at_ns = n * 50 * MS
            done_ns = at_ns + round(took_ms * MS)
            item = ItemReport(0, (1, 4, 4), 4, "inline" if n in inline else "shm", 1_000_000, b"")
            steps = [("received", 0.05), ("planned", 0.1), ("processed", 0.2), ("sent", 0.2), ("encoding", 0.5)]
            steps += [("read-0", 0.5), ("encoded", 0.9), ("collected", 0.95)]
            kept = ((step, part) for step, part in steps if step not in without)
            marks = tuple(Mark(step, 1 + at_ns + round(part * took_ms * MS)) for step, part in kept)
            outcome = Outcome(prepared[n], at_ns, at_ns, False, done_ns, "ok", items=(item,), marks=marks)
            if n in failed:
                outcome = Outcome(prepared[n], at_ns, at_ns, False, done_ns, "failed", "busy", "full")
            replay.outcomes.append(outcome)
        setup = Setup("local", "shm", replay._speed, 0, None, pooled_from_nbytes=32 << 10, config=config)
        gauges = {"pool_lent_nbytes": 5e5, "pool_capacity_nbytes": 1e6, "pool_refused": float(len(inline))}
        samples = [Sample(at_ms, "tokenizer-0", gauges) for at_ms in (0.0, 50.0)]
        preparation = Preparation(prepared, [], Invented([]), "cd" * 32)
        pools = {"tokenizer-0": PoolUse(1 << 20, 1 << 19, len(inline))}
        write_report(folder, summarise(trace, preparation, replay, setup, pools=pools), replay.outcomes, [], 1, samples)
        return folder

    return make
