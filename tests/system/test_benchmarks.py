"""Every benchmark runs to its end, and every contender hands over what it was given. Of speed nothing is asserted."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
from benchmarks import chaos, fuzz, soak
from benchmarks.codec import Twins, request
from benchmarks.contenders import CONTENDERS, OURS
from benchmarks.pair import Pair
from benchmarks.results import Measurement, Outcome, Verdict, measurement, quantile, speedup
from benchmarks.run import BENCHMARKS, Report
from benchmarks.sides import Answered, Setup
from benchmarks.tables import table
from click.testing import CliRunner

from tensorferry.codecs import messages as wire

ROOT = Path(__file__).parents[2]
NBYTES = 64 << 10
#: Ten times what the longest of them takes on two cores that have nothing else to do.
SMOKE_S = 300.0
END_S = 60.0
pytestmark = pytest.mark.timeout(SMOKE_S + END_S)

_KILLED = """if True:
    import os, sys, tempfile, time
    from pathlib import Path
    from benchmarks.cpu import DEPLOYMENT, STAGES, pid_of, running
    from tensorferry.pipeline.process.runtime_dir import Runtime
    with running(Path(sys.argv[1]), DEPLOYMENT) as deployment:
        up = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        print(*up, *(pid_of(Runtime.of(deployment), stage) for stage in STAGES), flush=True)
        sys.stdin.read()
"""


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A benchmark, ended with all that it has started when it takes too long, its folders removed."""
    # Not a folder of pytest's: its name leaves the addresses of sockets no room.
    with (
        TemporaryDirectory(prefix="smoke-") as folder,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            out, err = process.communicate(timeout=SMOKE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # stages end with their supervisor
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.processes
def test_what_a_late_benchmark_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SMOKE_S", 0.5)
    read, write = os.pipe()
    os.set_inheritable(write, True)
    really = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: really(*args, **more, pass_fds=[write]))
    with pytest.raises(subprocess.TimeoutExpired):
        run(["sh", "-c", "sleep 1000 & wait"])
    os.close(write)
    assert select.select([read], [], [], END_S)[0]  # its end: nobody has the other side any more
    os.close(read)


@pytest.mark.processes
def test_a_deployment_ends_with_the_benchmark_that_started_it() -> None:
    with (
        TemporaryDirectory(prefix="smoke-") as folder,
        subprocess.Popen(
            [sys.executable, "-c", _KILLED, folder], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as benchmark,
    ):
        assert benchmark.stdout is not None
        processes = [os.pidfd_open(int(pid)) for pid in benchmark.stdout.readline().split()]
        try:
            assert len(processes) == 4
            benchmark.kill()
            until = time.monotonic() + END_S
            for process in processes:
                assert select.select([process], [], [], max(0.0, until - time.monotonic()))[0]
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)


@pytest.mark.processes
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs_to_its_table(name: str, tmp_path: Path) -> None:
    if name == "overhead":
        pytest.importorskip("opentelemetry.proto", reason="pip install 'tensorferry[otel]'")
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.run", "--only", name, "--smoke", "--json", str(file)]
    ran = run(command)
    assert ran.returncode == 0, ran.stderr
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert report.machine.cores > 0
    [outcome] = report.outcomes
    assert outcome.name == name
    assert outcome.measurements
    for found in outcome.measurements:
        assert found.samples > 0
        assert found.p10 <= found.p50 <= found.p90
        assert not (found.safe and found.details.get("wrong"))
    assert outcome.title in ran.stdout
    for verdict in outcome.verdicts:
        assert verdict.floor in ran.stdout


@pytest.mark.processes
def test_the_towers_benchmark_runs_to_its_tables(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.gpu_tower", "--smoke", "--json", str(file)]
    ran = run(command)
    assert ran.returncode == 0, ran.stderr
    outcomes = msgspec.json.decode(file.read_bytes(), type=list[Outcome])
    assert [outcome.name for outcome in outcomes] == ["16 of 64x64", "16 of 32x32", "64 of 16x16", "32 sizes"]
    for outcome in outcomes:
        assert outcome.title in ran.stdout
        assert {"transformers", "ours"} < {found.contender for found in outcome.measurements}
        assert [found for found in outcome.measurements if not found.details["max_difference"] < 1e-4] == []


@pytest.mark.processes
def test_the_attention_probe_runs_to_its_end() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")
    command = [sys.executable, "-m", "benchmarks.probes.attention", "--smoke"]
    ran = run(command)
    assert ran.returncode == 0, ran.stderr
    measured = {line[:48].strip() for line in ran.stdout.splitlines() if " ms" in line[48:]}
    assert {"dense, as torch chooses", "fc1 with gelu in it", "4 layers, 32 sizes, as it is"} <= measured


@pytest.mark.processes
def test_the_encoders_benchmark_runs_to_its_table(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.gpu_encoder", "--smoke", "--json", str(file)]
    ran = run(command)
    assert ran.returncode == 0, ran.stderr
    outcome = msgspec.json.decode(file.read_bytes(), type=Outcome)
    assert [found.contender for found in outcome.measurements] == ["bare tower", "shm"]
    assert outcome.title in ran.stdout


@pytest.mark.slow
def test_ranks_are_judged_by_what_one_of_them_does() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tensorferry[hf]'")
    from benchmarks.gpu_encoder import BARE, GPU, Contender, outcome_of

    size = replace(GPU, contenders=(Contender("cuda_vmm"), Contender("cuda_vmm", 2), Contender("cuda_vmm", 4)))
    found = {BARE: [100.0], "cuda_vmm": [90.0], "cuda_vmm, 2 ranks": [170.0], "cuda_vmm, 4 ranks": [330.0]}
    judged = [(verdict.floor, verdict.limit, verdict.met) for verdict in outcome_of(size, found).verdicts]
    assert judged == [
        ("cuda_vmm, share of the bare tower", 0.92, False),
        ("cuda_vmm, 2 ranks, of one rank", 1.85, True),
        ("cuda_vmm, 4 ranks, of one rank", 3.7, False),
    ]


@pytest.mark.processes
@pytest.mark.parametrize("contender", CONTENDERS)
def test_a_contender_hands_over_what_it_was_given(contender: str) -> None:
    with Pair(contender, NBYTES, full=True) as pair:
        found = pair.round(5)
    assert found.wrong == 0
    assert len(found.latencies_ns) == len(found.held_ns) == 5
    assert 0 < min(found.latencies_ns)
    assert max(found.latencies_ns) <= found.elapsed_ns


@pytest.mark.processes
def test_several_may_be_in_flight() -> None:
    with Pair("in place", NBYTES, window=4) as pair:
        rounds = [pair.round(16), pair.round(16)]
    assert [len(found.latencies_ns) for found in rounds] == [16, 16]
    assert rounds[0].wrong == rounds[1].wrong == 0


@pytest.mark.processes
def test_a_contender_that_mixes_up_bytes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair is told that an unsafe rival is safe, which it is not with several messages in flight."""
    unsafe = "msgpack frames, unsafe"
    monkeypatch.setattr(CONTENDERS[unsafe], "safe", True)
    with Pair(unsafe, 4 << 20, window=8) as pair, pytest.raises(RuntimeError, match="messages arrived wrong"):
        pair.round(200)


@pytest.mark.parametrize("full", [False, True])
def test_an_answer_tells_messages_apart(full: bool) -> None:
    setup = Setup("in place", NBYTES, 1, full, NBYTES, "", None)  # type: ignore[arg-type]
    data = np.zeros(NBYTES, np.uint8)
    setup.write(data, 7)
    right = Answered(number=7, read_at_ns=1, total=setup.read(data), faults=0, cpu_ns=0)
    assert setup.is_right(right)
    assert not setup.is_right(right._replace(number=8))
    data[4096 * 3] ^= 1
    assert not setup.is_right(right._replace(total=setup.read(data)))


@pytest.mark.processes
def test_ours_do_not_import_torch() -> None:
    code = "import sys, benchmarks.pair; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=SMOKE_S).returncode == 0
    assert {"in place", "copied in", "inline"} <= OURS < CONTENDERS.keys()


def test_the_unchecked_twin_is_the_same_on_the_wire_and_takes_what_the_checked_refuses() -> None:
    twins = Twins()
    decode = msgspec.msgpack.Decoder(twins.of(wire.Message)).decode
    for message in request():
        assert msgspec.msgpack.encode(twins.like(message)) == msgspec.msgpack.encode(message)
    wrong = msgspec.msgpack.encode(wire.Cancel(b"too short", 0))
    assert decode(wrong).request == b"too short"
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wrong, type=wire.Message)


def test_numbers_are_compared_the_right_way_round() -> None:
    times = Outcome("", "", (measurement("ours", "ms", [1.0]), measurement("theirs", "ms", [4.0])))
    rates = Outcome("", "", (measurement("ours", "GiB/s", [4.0]), measurement("theirs", "GiB/s", [1.0])))
    assert speedup(times, "ours", "theirs") == speedup(rates, "ours", "theirs") == 4
    assert speedup(times, "ours", "nobody") is None
    assert Verdict.of("", 4, ">=", 4).met
    assert not Verdict.of("", math.nextafter(4, 5), "<=", 4).met
    assert not Verdict.of("", None, ">=", 4).met
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(range(100), 0.9) == 90


def test_a_table_is_markdown() -> None:
    outcome = Outcome(
        "name", "Title", (Measurement("one", "ms", 1234.5, 0.01234, 7, 3),), (Verdict("floor", 5.55, "<=", 6, True),)
    )
    assert table(outcome).splitlines() == [
        "### Title",
        "",
        "|     | p50, ms |    p10 | p90 |",
        "| --- | ------- | ------ | --- |",
        "| one |   1,234 | 0.0123 |   7 |",
        "",
        "| floor | measured | limit | met |",
        "| ----- | -------- | ----- | --- |",
        "| floor |     5.55 |  <= 6 | yes |",
    ]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (chaos, ["--seconds", "nan"]),
        (chaos, ["--seconds", "-1"]),
        (chaos, ["--every-s", "0"]),
        (chaos, ["--at-once", "0"]),
        (fuzz, ["--rounds", "0"]),
        (fuzz, ["--per-s", "inf"]),
        (soak, ["--minutes", "nan"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.__name__.rpartition(".")[2],
)
def test_numbers_that_make_no_sense_are_refused(program: Any, arguments: list[str]) -> None:
    done = CliRunner().invoke(program.main, arguments)
    assert done.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in done.output
