"""The machine and the date of a run are in its numbers and on its page, and comparisons name differences."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import psutil
import pytest
from click.testing import CliRunner, Result

from tensorferry import __version__
from tensorferry.cli.main import main
from tensorferry.replay.results.comparison import compare, find_runs, grouped
from tensorferry.replay.results.html.comparison import report as compared
from tensorferry.replay.results.html.run import report
from tensorferry.replay.results.machine import Machine, this_machine
from tensorferry.replay.results.result_folder import read_run

MakeRun = Callable[..., Path]
LOCAL = Path(__file__).parents[3] / "configs" / "local-fingerprint.yaml"
TRACE = Path(__file__).parents[2] / "data" / "traces" / "servegen.jsonl"

HOST = Machine("a", "AMD EPYC", 2, 8 << 30, ("NVIDIA H200",) * 2, "6.18.44", "580.159.04", "3.12.3", "2.13.0")


def cli(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def with_machine(folder: Path, machine: Machine | None, **changed: str) -> Path:
    """None: as an earlier version wrote it."""
    summary = json.loads((folder / "summary.json").read_text())
    if machine is None:
        del summary["machine"], summary["run"]["date"], summary["per_second"]["window_s"]
    else:
        summary["machine"] = msgspec.to_builtins(machine)
        summary["run"]["date"] = "2026-12-01T03:00:00+00:00"
    (folder / "summary.json").write_text(json.dumps(summary | changed))
    return folder


def warned(folder: Path) -> str:
    return "\n".join(compare(grouped(find_runs([folder]))).warnings)


# --- what is known ------------------------------------------------------------------------------------------------


def test_a_run_says_when_and_where_it_was_made(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("replay", TRACE, "--config", LOCAL, "--dry-run", "--out", out).exit_code == 0
    summary = json.loads((out / "summary.json").read_text())
    made = datetime.fromisoformat(summary["run"]["date"])
    assert made.utcoffset() == timedelta(0)
    machine = summary["machine"]
    assert machine["host"] == socket.gethostname()
    assert machine["kernel"] == os.uname().release
    assert machine["python"] == platform.python_version()
    assert machine["cpu"]
    assert machine["cpus"] == len(os.sched_getaffinity(0))
    assert machine["memory_nbytes"] == psutil.virtual_memory().total
    installed = {found.name for found in importlib.metadata.distributions()}
    assert machine["torch"] == (importlib.metadata.version("torch") if "torch" in installed else "")
    assert summary["tensorferry"] == __version__


def test_gpus_and_driver_are_those_the_driver_shows(tmp_path: Path) -> None:
    """As seen on a machine with an H200; twice, for two."""
    driver = tmp_path / "proc" / "driver" / "nvidia"
    for bus in ("0000:00:06.0", "0000:00:07.0"):
        (driver / "gpus" / bus).mkdir(parents=True)
        (driver / "gpus" / bus / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 41\n")
    said = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \n"
    (driver / "version").write_text(said + "GCC version:  gcc version 15.3.0 (GCC) \n")
    found = this_machine(tmp_path)
    assert (found.gpus, found.driver) == (("NVIDIA H200", "NVIDIA H200"), "580.159.04")
    assert dict(found.facts())["GPU"] == "2 x NVIDIA H200"
    assert found.cpu == platform.machine()  # no /proc/cpuinfo there
    assert "memory" not in dict(found.facts())


def test_the_driver_before_it_was_open_says_its_version_elsewhere(tmp_path: Path) -> None:
    driver = tmp_path / "proc" / "driver" / "nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n")
    assert this_machine(tmp_path).driver == "535.183.01"


@pytest.mark.processes
def test_nothing_is_imported_and_no_name_server_asked() -> None:
    program = """
import socket, sys
def refuse(*arguments):
    raise AssertionError("a name server was asked")
socket.getaddrinfo = socket.gethostbyname = socket.gethostbyaddr = socket.getfqdn = refuse
from tensorferry.replay.results.machine import this_machine
this_machine()
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# --- said ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
def test_the_page_says_it_too(make_run: MakeRun, tmp_path: Path) -> None:
    page = report(read_run(with_machine(make_run(tmp_path), HOST))).decode()
    for part in ("2026-12-01T03:00:00+00:00", "2 of AMD EPYC", "2 x NVIDIA H200", "8.0 GiB", "6.18.44", "580.159.04"):
        assert part in page, part


def test_a_comparison_says_where_runs_were_made_elsewhere(make_run: MakeRun, tmp_path: Path) -> None:
    other = msgspec.structs.replace(HOST, host="b", gpus=(), driver="")
    with_machine(make_run(tmp_path / "1"), HOST)
    with_machine(make_run(tmp_path / "2"), other, tensorferry="0.0.9")
    said = warned(tmp_path)
    one, two = tmp_path / "1", tmp_path / "2"
    assert f"host differs: a ({one}); b ({two})" in said
    assert f"GPU differs: 2 x NVIDIA H200 ({one}); none ({two})" in said
    assert f"driver differs: 580.159.04 ({one}); none ({two})" in said
    assert f"tensorferry differs: {__version__} ({one}); 0.0.9 ({two})" in said
    assert said.count("differs") == 4
    assert "host differs" in cli("compare", tmp_path).stdout


def test_runs_of_one_machine_differ_in_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    for number in range(3):
        with_machine(make_run(tmp_path / str(number)), HOST)
    assert "differ" not in warned(tmp_path)
    assert "earlier version" not in warned(tmp_path)


def test_of_many_runs_some_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    for number in range(6):
        with_machine(make_run(tmp_path / str(number)), HOST if number else msgspec.structs.replace(HOST, host="b"))
    assert "and 2 more)" in warned(tmp_path)


# --- folders of earlier versions ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
def test_folders_of_earlier_versions_are_read(make_run: MakeRun, tmp_path: Path) -> None:
    config = {"name": "a", "pool": {"budget_mb": 64}}
    old = with_machine(make_run(tmp_path / "old", config=config), None)
    text = (old / "summary.json").read_text()
    (old / "summary.json").write_text(text.replace("ab" * 32, hashlib.sha256(TRACE.read_bytes()).hexdigest()))
    assert cli("report", old).exit_code == 0
    planned = cli("plan", TRACE, "--config", LOCAL, "--measured", old)
    assert planned.exit_code == 0, planned.output
    with_machine(make_run(tmp_path / "new", config=config), HOST)
    groups = grouped(find_runs([tmp_path]))
    assert compared(groups, compare(groups))
    said = warned(tmp_path)
    assert f"an earlier version did not record the machine of {old}" in said
    assert f"an earlier version counted the rates of {old} over another window" in said
    assert "differs" not in said
