"""A deployment seen live: the table of `top`, what heartbeats tell, and a dashboard of metrics that there are."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

from tensorferry.cli.top import Look, view
from tensorferry.codecs.messages import Gauge, Member

DASHBOARD = Path(__file__).parent.parent / "docs" / "grafana.json"
TRACE = Path(__file__).parent / "data" / "traces" / "servegen.jsonl"


def member(stage: str, epoch: int = 1, state: str = "ready", **gauges: float) -> Member:
    return Member(stage, 0, epoch, state, tuple(Gauge(name, value) for name, value in gauges.items()))


def shown(before: Look, now: Look) -> str:
    written = io.StringIO()
    Console(file=written, width=200).print(view("local", before, now))
    return written.getvalue()


def test_rates_are_of_the_last_period_and_pools_of_now() -> None:
    mib = float(1 << 20)
    pool = {"pool_capacity_nbytes": 64 * mib, "pool_lent_nbytes": 16 * mib, "drafts_pool_full": 3.0}
    before = Look([member("tokenizer", requests_ok=10), member("encoder", encoded_items=5)], 100.0)
    now = Look(
        [
            member("tokenizer", requests_ok=30, requests_failed=2, requests_busy=1, in_flight=4, **pool),
            member("encoder", encoded_items=15, cache_hits=3, cache_misses=1),
        ],
        102.0,
    )
    tokenizer, encoder = shown(before, now).splitlines()[2:4]
    for part in (
        "tokenizer-0",
        "ready",
        "10.0 requests",
        "16.0 MiB of 64.0 MiB",
        "███░░░░░░░░░",
        " 4 ",
        " 3 ",
        " 2 ",
        " 1",
    ):
        assert part in tokenizer, part
    for part in ("encoder-0", "5.0 items", "75%"):
        assert part in encoder, part


def test_another_life_of_a_process_has_no_rate_yet() -> None:
    before = Look([member("tokenizer", requests_ok=1000)], 1.0)
    now = Look([member("tokenizer", epoch=2, requests_ok=3), member("scheduler", state="gone")], 2.0)
    said = shown(before, now)
    assert "requests" not in said.splitlines()[2]
    assert "gone" in said


# --- a real deployment --------------------------------------------------------------------------------------------


DEPLOYMENT = """
name: top-test
transport: shm
runtime_dir: {runtime}/run
model: {{adapter: fingerprint}}
pool: {{budget_mb: 16}}
embeddings_pool: {{budget_mb: 16}}
encoder: {{cache_mb: 16}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0}}
telemetry: {{log_level: error, prometheus_port: {port}}}
"""


def three_free_ports() -> int:
    """The first of three that nobody has at the moment."""
    for port in range(20_000, 60_000, 3):
        sockets = [socket.socket() for _ in range(3)]
        try:
            for offset, one in enumerate(sockets):
                one.bind(("127.0.0.1", port + offset))
            return port
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no three ports are free")


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A deployment that has answered a few requests: its file, and its first port of metrics."""
    port = three_free_ports()
    program = [sys.executable, "-P", "-m", "tensorferry"]
    with tempfile.TemporaryDirectory(prefix="tf-") as runtime:
        file = tmp_path / "deployment.yaml"
        file.write_text(DEPLOYMENT.format(runtime=runtime, port=port))
        with subprocess.Popen([*program, "up", "--config", str(file)], stdout=subprocess.PIPE, text=True) as up:
            try:
                assert up.stdout is not None
                assert "is ready" in up.stdout.readline()
                replay = [*program, "replay", str(TRACE), "--config", str(file), "--attach", "--speed", "max"]
                subprocess.run(replay, check=True, capture_output=True, timeout=60)
                yield file, port
                up.send_signal(signal.SIGINT)
                assert up.wait(30) == 0
            finally:
                up.kill()


@pytest.mark.timeout(180)
def test_what_runs_is_shown_and_the_dashboard_asks_for_metrics_that_there_are(serving: tuple[Path, int]) -> None:
    file, port = serving
    asked = [sys.executable, "-P", "-m", "tensorferry", "top", "--config", str(file), "--once", "--every", "0.3"]
    top = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert top.returncode == 0, top.stderr
    for process in ("tokenizer-0", "encoder-0", "scheduler-0"):
        assert process in top.stdout, process
    assert re.search(r"^tokenizer-0 .* of 16\.0 MiB", top.stdout, re.MULTILINE), top.stdout  # not folded
    asked.remove("--once")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        seen = [line.split()[0] for line in islice((line for line in watching.stdout if line.strip()), 10)]
        watching.stdout.close()  # as `head` does
        assert "Traceback" not in watching.stderr.read()
        assert watching.wait(30) == 1
    assert seen[:5] == seen[5:10]
    assert "tokenizer-0" in seen
    metrics = ""
    for offset in range(3):
        with urllib.request.urlopen(f"http://127.0.0.1:{port + offset}/metrics", timeout=10) as answer:
            metrics += answer.read().decode()
    assert re.search(r"^tensorferry_requests_ok_total\{.*\} 6\.0$", metrics, re.MULTILINE)
    there = set(re.findall(r"^(tensorferry_\w+)", metrics, re.MULTILINE))
    dashboard = json.loads(DASHBOARD.read_text())
    wanted = set(re.findall(r"tensorferry_\w+", json.dumps([panel["targets"] for panel in dashboard["panels"]])))
    assert len(wanted) >= 15
    assert wanted <= there
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
