"""`tensorferry doctor` on this machine and with stub drivers agrees with what a deployment then does (B14, B17)."""

from __future__ import annotations

import asyncio
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tests.codecs.machine.machine_facts import host

from tensorferry.cli import doctor
from tensorferry.cli.main import main
from tensorferry.codecs import messages as wire
from tensorferry.codecs.machine.advice import Check, checkup
from tensorferry.codecs.machine.facts import CudaFacts, Facts, Gpu, HostFacts, Trial
from tensorferry.codecs.machine.transport import AVAILABLE, TRANSPORTS
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment

DEADLINE_S = 60.0
WORKS = Trial(True)
COMMAND = [sys.executable, "-m", "tensorferry"]

HOST = host(shm_nbytes=1 << 31)
H200 = Gpu("NVIDIA H200", "GPU-0001", vmm=True, posix_fd=True, fabric=True)
FULL = CudaFacts(driver=13020, gpus=(H200,), words=WORKS, ipc=WORKS, posix_fd=WORKS)


def run(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], env=environ, capture_output=True, text=True, timeout=DEADLINE_S)


# --- the command, end to end


@pytest.mark.processes
def test_p9_this_machine_end_to_end() -> None:
    ran = run("doctor", "--json")
    report = json.loads(ran.stdout)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert list(report["transports"]) == ["cpu", "shm", "cuda_ipc", "cuda_vmm"]
    for verdict in report["transports"].values():
        assert verdict.keys() == {"ok", "reason", "remedy"}
        assert verdict["reason"]
        assert verdict["ok"] or verdict["remedy"]
    assert report["transports"]["shm"]["ok"]
    assert report["facts"]["host"]["kernel"] == os.uname().release
    looked_at = {check["name"] for check in report["checks"]}
    assert looked_at >= {"/dev/shm", "memlock", "open files", "seccomp", "IMEX channel", "CUDA driver"}
    if report["facts"]["cuda"]["missing"]:
        assert "no NVIDIA CUDA here" in report["transports"]["cuda_ipc"]["reason"]


@pytest.mark.processes
def test_p9_tables_for_people() -> None:
    ran = run("doctor")
    assert (ran.returncode, ran.stderr) == (0, "")
    for word in ("Transports", "Machine", *TRANSPORTS, "sealed memory", "CUDA driver"):
        assert word in ran.stdout


@pytest.mark.processes
def test_p9_a_deployment_file_is_judged(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: a\n")
    ran = run("doctor", "--json", "--config", str(file), "--set", "transport=cpu")
    choice = json.loads(ran.stdout)["deployment"]
    assert (ran.returncode, choice["ok"], choice["transport"], choice["file"]) == (0, True, "cpu", str(file))
    assert f"{file} asks for auto; gets " in run("doctor", "--config", str(file)).stdout.splitlines()[-1]


@pytest.mark.processes
def test_wrong_usage(tmp_path: Path) -> None:
    assert run("doctor", "--set", "transport=cpu").returncode == 2
    missing = run("doctor", "--config", str(tmp_path / "none.yaml"))
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "none.yaml: cannot be read" in missing.stderr


@pytest.mark.processes
def test_p9_with_a_stub_gpu(stub_cuda) -> None:
    """On a machine that can do everything, doctor says which transports this version does not have yet."""
    stub_cuda.plan(gpus=[{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}], fail={"cuMemCreate fabric": DENIED})
    report = json.loads(run("doctor", "--json", environ=stub_cuda.environ).stdout)
    for rung in ("cuda_ipc", "cuda_vmm"):
        verdict = report["transports"][rung]
        assert verdict["ok"] == (rung in AVAILABLE)
        assert ("second process" in verdict["reason"]) if verdict["ok"] else ("this machine can" in verdict["reason"])
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["CUDA driver"]["found"] == "API 13.0, 2 GPUs"
    assert checks["GPU 0 peers"]["found"] == "1"
    assert checks["FABRIC handles"]["found"] == f"create: cuMemCreate: {DENIED}"
    assert checks["FABRIC handles"]["ok"] is None, "they do not work, and nothing here needs them"
    assert "needed only between nodes" in checks["FABRIC handles"]["advice"]
    (row,) = (line for line in run("doctor", environ=stub_cuda.environ).stdout.splitlines() if "FABRIC handles" in line)
    assert [cell.strip() for cell in row.split("│")][2:3] == ["-"]


@pytest.mark.processes
def test_b15_a_bad_variable_is_named_and_no_traceback(stub_cuda) -> None:
    ran = run("doctor", "--json", environ=stub_cuda.environ | {"CUDA_VISIBLE_DEVICES": "0,0"})
    report = json.loads(ran.stdout)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert report["transports"]["cuda_ipc"]["reason"] == "CUDA_VISIBLE_DEVICES='0,0' names 0 twice"


DENIED = "CUDA_ERROR_NOT_PERMITTED"

# --- verdicts and exit status, from facts


def invoke(monkeypatch: pytest.MonkeyPatch, facts: Facts, *arguments: str) -> Any:
    monkeypatch.setattr(doctor, "gather", lambda environ: facts)
    return CliRunner().invoke(main, ["doctor", *arguments], catch_exceptions=False)


NO_MEMFD = Facts(
    HostFacts(
        kernel="5.4.0",
        memfd=Trial(False, "create", "Operation not permitted"),
        shm_nbytes=64 << 20,
        available_nbytes=1 << 30,
        memlock_nbytes=64 << 10,
        open_files=1024,
        seccomp=2,
        nested_pids=True,
        imex=False,
        mps=True,
    ),
    CudaFacts("libcuda.so.1 cannot be loaded", missing=True),
)


def test_exit_status_without_a_pool_is_1(monkeypatch) -> None:
    result = invoke(monkeypatch, NO_MEMFD, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"]) == (1, False)
    assert [verdict["ok"] for verdict in report["transports"].values()] == [True, False, False, False]


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("transport: cpu", 0, "cpu: the deployment file asks for it"),
        ("transport: auto", 0, "cpu: every pool was refused"),
        ("transport: shm", 1, "shm will not work here: sealed memory cannot"),
        ("transport: cuda_ipc", 1, "cuda_ipc will not work here: there is no NVIDIA CUDA"),
        ("transport: cpu\nnodes: 2", 1, "asks for cpu; 2 nodes come with a later version; use 1 until then"),
        ("nodes: 2", 1, "asks for auto; 2 nodes come with a later version"),
    ],
)
def test_exit_status_with_a_file_is_its_choice(monkeypatch, tmp_path, text: str, status: int, words: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"name: a\n{text}\n")
    result = invoke(monkeypatch, NO_MEMFD, "--config", str(file))
    assert result.exit_code == status
    assert words in result.stdout.replace("\n", " ")


def test_a_file_that_asks_for_too_much_fails_though_others_would_work(monkeypatch, tmp_path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: a\ntransport: cuda_vmm\n")
    assert invoke(monkeypatch, Facts(HOST, CudaFacts("none", missing=True)), "--config", str(file)).exit_code == 1


def test_transports_are_judged_for_the_deployment() -> None:
    facts = Facts(HOST, FULL)
    alone = doctor.examine(facts)
    assert "is of one node" not in alone.transports["cuda_ipc"].reason
    two = doctor.examine(facts, Deployment(name="a", nodes=2), "a.yaml")
    assert "is of one node" in two.transports["shm"].reason + two.transports["cuda_ipc"].reason
    assert "NVLink domain" in two.transports["cuda_vmm"].reason
    assert two.deployment is not None
    assert [refusal.rung for refusal in two.deployment.refusals] == ["cuda_vmm"]


# --- checks


def found(facts: Facts) -> dict[str, Check]:
    checks = checkup(facts)
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.ok or check.advice for check in checks), "what is wrong has a remedy"
    return {check.name: check for check in checks}


def test_p9_a_good_machine_has_nothing_to_complain_of() -> None:
    assert [check.name for check in checkup(Facts(HOST, FULL)) if check.ok is False] == []


def test_p9_a_tight_container() -> None:
    checks = found(NO_MEMFD)
    assert {name for name, check in checks.items() if check.ok is False} == {
        "sealed memory",
        "/dev/shm",
        "open files",
        "CUDA driver",
    }
    assert "--shm-size" in checks["/dev/shm"].advice
    assert "nofile" in checks["open files"].advice
    assert checks["seccomp"].found == "filter"
    assert "shareProcessNamespace" in checks["process ids"].advice
    assert checks["memlock"].ok is None, "without CUDA it does not matter"


@pytest.mark.parametrize(
    ("host", "cuda", "name", "words"),
    [
        ({"kernel": "5.15-microsoft-standard-WSL2"}, {}, "kernel", "WSL2"),
        ({"shm_nbytes": None}, {}, "/dev/shm", "--shm-size"),
        ({"visible_problem": "CUDA_VISIBLE_DEVICES='x' names 'x'"}, {}, "CUDA_VISIBLE_DEVICES", "nvidia-smi -L"),
        ({"visible": ("0", "7")}, {}, "CUDA_VISIBLE_DEVICES", "hides itself"),
        ({"max_connections": "1"}, {}, "CUDA_DEVICE_MAX_CONNECTIONS", "8 or more"),
        ({"mps": True}, {}, "MPS", "quarantine"),
        ({}, {"gpus": (H200, H200)}, "GPU 0 peers", "topo -p2p"),
        ({}, {"ipc": Trial(False, "import", "x")}, "CUDA IPC", "tried"),
        ({}, {"peer": Trial(False, "import", "x")}, "CUDA IPC to GPU 1", "tried"),
        ({"memlock_nbytes": 1 << 16}, {"words": Trial(False, "register", "x")}, "memlock", "memlock=-1"),
        ({}, {"gpus": (Gpu("GB200", "GPU-2", mnnvl=True),)}, "IMEX channel", "channel0"),
        ({}, {"gpus": (Gpu("GB200", "GPU-2", mnnvl=True),)}, "FABRIC handles", "tried"),
    ],
)
def test_p9_what_is_wrong_comes_with_what_to_do(host: dict, cuda: dict, name: str, words: str) -> None:
    import msgspec

    facts = Facts(msgspec.structs.replace(HOST, **host), msgspec.structs.replace(FULL, **cuda))
    assert not found(facts)[name].ok
    assert words in found(facts)[name].advice


def test_p9_memlock_that_the_driver_ignores_is_fine() -> None:
    import msgspec

    facts = Facts(msgspec.structs.replace(HOST, memlock_nbytes=1 << 16), FULL)
    assert found(facts)["memlock"].ok


# --- what a deployment then does

DEPLOYMENT = """
name: doctor-test
runtime_dir: {runtime_dir}
model: {{adapter: fingerprint}}
tokenizer: {{workers: 2, threads: 1}}
encoder: {{ranks: 1}}
pool: {{budget_mb: 16}}
embeddings_pool: {{budget_mb: 16}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0}}
telemetry: {{log_format: json}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tf-") as runtime_dir:
        path = tmp_path / "deployment.yaml"
        path.write_text(DEPLOYMENT.format(runtime_dir=runtime_dir))
        yield path


class Up:
    """Run `tensorferry up` until `stop`."""

    def __init__(self, file: Path, environ: dict[str, str], *settings: str) -> None:
        arguments = [argument for setting in settings for argument in ("--set", setting)]
        self._process = subprocess.Popen(
            [*COMMAND, "up", "--config", str(file), *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Up:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        assert ready, "not ready"
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def stop(self) -> list[dict[str, Any]]:
        """Drain it, and return its log."""
        self._process.send_signal(signal.SIGINT)
        _, err = self._process.communicate(timeout=DEADLINE_S)
        assert self._process.returncode == 0, err
        return [json.loads(line) for line in err.splitlines()]


def photo(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    with io.BytesIO() as out:
        Image.fromarray(rng.integers(0, 256, (56, 84, 3), dtype=np.uint8)).save(out, "JPEG")
        return out.getvalue()


async def ask(deployment: Deployment, images: int) -> set[str]:
    """Send requests with so many JPEGs, and return how their features travelled."""
    async with Client.connect(deployment, timeout_s=DEADLINE_S) as client:
        answers = await asyncio.gather(*(client.submit(["a ", photo(seed)], output_tokens=1) for seed in range(images)))
        return {item.transport for answer in answers for item in answer.items}


@pytest.mark.processes
def test_p2_auto_on_a_stub_gpu_whose_ipc_fails_is_shm_with_one_line(file: Path, stub_cuda) -> None:
    """B17 through the command line: the flag claims support, the second process denies it; nothing crashes."""
    stub_cuda.plan(fail={"cuIpcOpenMemHandle": "CUDA_ERROR_INVALID_VALUE"})
    with Up(file, stub_cuda.environ, "pool.inline_below_kb=0") as up:
        carried = asyncio.run(ask(load(file), 4))
        logs = up.stop()
    refused = [line for line in logs if line["event"] == "transport_refused"]
    chosen = [line for line in logs if line["event"] == "transport_chosen"]
    assert carried == {"shm"}
    assert [(line["transport"], line["stage"], line["level"]) for line in refused] == [
        ("cuda_ipc", "supervisor", "warning")
    ]
    assert "import: cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE" in refused[0]["reason"]
    assert [(line["transport"], line["handle"], line["host_budget_mib"]) for line in chosen] == [("shm", "memfd", 16)]
    pids = {line.split()[0] for line in (stub_cuda.folder / "calls.log").read_text().splitlines()}
    assert len(pids) == 2, "the probe's two processes, and no stage"


@pytest.mark.processes
def test_b17_an_explicit_choice_stops_at_the_start(file: Path, stub_cuda) -> None:
    stub_cuda.plan(fail={"cuIpcOpenMemHandle": "CUDA_ERROR_INVALID_VALUE"})
    ran = run("up", "--config", str(file), "--set", "transport=cuda_ipc", environ=stub_cuda.environ)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "transport: " in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["cpu", "shm"])
def test_b14_without_gpu_transport_no_process_calls_the_driver(file: Path, stub_cuda, transport: str) -> None:
    """With 20 JPEG requests neither the supervisor nor any stage loads the driver."""
    with Up(file, stub_cuda.environ, f"transport={transport}", "pool.inline_below_kb=0") as up:
        asyncio.run(ask(load(file), 20))
        up.stop()
    assert stub_cuda.calls() == []


@pytest.mark.processes
def test_p2_a_deployment_of_text_alone_reserves_no_pool(file: Path) -> None:
    async def converse() -> tuple[Any, Any, set[str]]:
        async with Client.connect(load(file), timeout_s=DEADLINE_S) as client:
            text = await client.submit(["hello"], output_tokens=1)
            image = await client.submit(["a ", photo(0)], output_tokens=1)
            gauges = {gauge.name for member in await client.refresh() for gauge in member.gauges}
            return text, image, gauges

    with Up(file, dict(os.environ), "model.adapter=text-only") as up:
        text, image, gauges = asyncio.run(converse())
        logs = up.stop()
    assert isinstance(text, wire.Result)
    assert isinstance(image, wire.Failed)
    assert "takes no image, only text" in image.failure.problem
    assert not [name for name in gauges if name.startswith("pool_")]
    (chosen,) = [line for line in logs if line["event"] == "transport_chosen"]
    assert (chosen["transport"], chosen["reason"]) == ("cpu", "the model takes text alone, so no pool is reserved")
    assert "transport_refused" not in {line["event"] for line in logs}


@pytest.mark.processes
def test_one_process_started_by_hand_decides_for_itself(file: Path) -> None:
    """No other process runs, so it is stopped once it has logged its decision."""
    process = subprocess.Popen(
        [*COMMAND, "start", "scheduler", "--config", str(file)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    said = b""
    try:
        assert process.stderr is not None
        until = time.monotonic() + DEADLINE_S
        while b'"started"' not in said:
            ready, _, _ = select.select([process.stderr], [], [], max(0.0, until - time.monotonic()))
            assert ready, said
            said += os.read(process.stderr.fileno(), 1 << 16)
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    events = [json.loads(line) for line in said.splitlines()]
    (chosen,) = [line for line in events if line["event"] == "transport_chosen"]
    assert chosen["stage"] == "scheduler"
    assert chosen["transport"] in ("shm", "cuda_ipc")
