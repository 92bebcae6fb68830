"""`top` shows a live deployment by its heartbeats, and the dashboard uses only metrics that exist."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

from tensorferry.cli.top import Look, view
from tensorferry.codecs.messages import Gauge, Member, Result
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.stages.tokenizer.latencies import Latencies

DEADLINE_S = 60.0
PHOTO = Path(__file__).parents[2] / "examples" / "images" / "coffee_lossy.webp"
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
TRACE = Path(__file__).parents[1] / "data" / "traces" / "servegen.jsonl"


def member(stage: str, epoch: int = 1, state: str = "ready", **gauges: float) -> Member:
    return Member(stage, 0, epoch, state, tuple(Gauge(name, value) for name, value in gauges.items()))


def shown(before: Look, now: Look, width: int = 200, height: int | None = None) -> str:
    written = io.StringIO()
    Console(file=written, width=width).print(view("local", before, now, width, height))
    return written.getvalue()


MIB = float(1 << 20)
POOL = {"pool_capacity_nbytes": 64 * MIB, "pool_lent_nbytes": 16 * MIB, "drafts_pool_full": 3.0}
LATENCY = {"latency_p50_ms": 12.4, "latency_p99_ms": 987.6, "latency_requests": 100.0}
BEFORE = Look([member("tokenizer", requests_ok=10), member("encoder", encoded_items=5)], 100.0)
NOW = Look(
    [
        member(
            "tokenizer", requests_ok=30, requests_failed=2, requests_busy=1, in_flight=4, queued=7, **POOL, **LATENCY
        ),
        member("encoder", encoded_items=15, cache_hits=3, cache_misses=1, uptime_s=7201.0, queued=5),
    ],
    102.0,
)


def test_rates_are_of_the_last_period_and_pools_of_now() -> None:
    summary, _, _, tokenizer, encoder = shown(BEFORE, NOW).splitlines()
    assert summary == "local: 2 of 2 ready, 10.0 requests/s, 2 failed, 1 busy, 75% cache hits"
    for part in (
        "tokenizer-0",
        "ready",
        "10.0 requests",
        "16.0 MiB of 64.0 MiB",
        "███░░░░░░░░░",
        " 4 ",
        " 7 ",
        " 12 ",
        " 988 ",
        " 3 ",
        " 2 ",
        " 1",
    ):
        assert part in tokenizer, part
    for part in ("encoder-0", " 2 h ", " 5 ", "5.0 items", "75%"):
        assert part in encoder, part


def test_80_columns_have_all_that_an_operator_asks_for_first() -> None:
    summary, _, _, tokenizer, encoder = shown(BEFORE, NOW, width=80).splitlines()
    assert summary == "local: 2 of 2 ready, 10.0 requests/s, 2 failed, 1 busy, 75% cache hits"
    assert tokenizer.split() == ["tokenizer-0", "ready", "4", "7", "10.0", "12", "988", "25%", "3"]
    assert encoder.split() == ["encoder-0", "ready", "2", "h", "5", "5.0"]


def test_the_largest_numbers_fit_80_columns_and_many_processes_24_lines() -> None:
    """No cell is truncated. If processes are left out, those that are not ready are shown."""
    most = {
        "in_flight": 65_536.0,
        "queued": 65_536.0,
        "uptime_s": 99 * 60.0,
        "latency_p50_ms": 600_000.0,
        "latency_p99_ms": 600_000.0,
        "latency_requests": 99.0,
        "pool_capacity_nbytes": MIB,
        "pool_lent_nbytes": MIB,
        "drafts_pool_full": 999_999.0,
    }
    gauges = tuple(Gauge(name, value) for name, value in most.items())
    before = Look([Member("tokenizer", rank, 1, "ready", gauges) for rank in range(200, 240)], 0.0)
    done = (*gauges, Gauge("requests_ok", 12_345.6))
    states = ["ready"] * 39 + ["quarantined"]
    now = Look([Member("tokenizer", 200 + rank, 1, state, done) for rank, state in enumerate(states)], 1.0)
    lines = shown(before, now, width=80, height=24).splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    first, last = lines[3], lines[-3]
    numbers = ["99", "min", "65536", "65536", "12345.6", "600000", "600000*", "100%", "999999"]
    assert first.split() == ["tokenizer-200", "ready", *numbers]
    assert last.split() == ["tokenizer-239", "quarantined", *numbers]
    longest = "* the longest latency, since there were fewer than 100 requests"
    assert lines[-2:] == [longest, "22 more processes are hidden; --once shows all"]


def test_another_life_of_a_process_has_no_rate_yet() -> None:
    before = Look([member("tokenizer", requests_ok=1000)], 1.0)
    now = Look([member("tokenizer", epoch=2, requests_ok=3), member("scheduler", state="gone")], 2.0)
    said = shown(before, now)
    assert "requests" not in said.splitlines()[3]
    assert "gone" in said


def test_latencies_are_of_the_last_minute_by_nearest_rank() -> None:
    latencies = Latencies()
    assert latencies.numbers(0.0) == {"latency_p50_ms": 0.0, "latency_p99_ms": 0.0, "latency_requests": 0}
    for ms in range(1, 201):
        latencies.add(ms / 10, float(ms))  # up to the 20th second
    assert latencies.numbers(20.0) == {"latency_p50_ms": 100.0, "latency_p99_ms": 198.0, "latency_requests": 200}
    assert latencies.numbers(75.0) == {"latency_p50_ms": 175.0, "latency_p99_ms": 200.0, "latency_requests": 51}
    assert latencies.numbers(75.1)["latency_requests"] == 51, "it looks a few times a second, however often it is asked"
    assert latencies.numbers(81.0)["latency_requests"] == 0


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
def serving(may_start_processes: None, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Run a deployment that has answered a few requests. Gives its file and its first port of metrics."""
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


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_what_runs_is_shown_and_the_dashboard_asks_for_metrics_that_there_are(serving: tuple[Path, int]) -> None:
    file, port = serving
    asked = [sys.executable, "-P", "-m", "tensorferry", "top", "--config", str(file), "--once", "--every", "0.3"]
    top = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert top.returncode == 0, top.stderr
    for process in ("tokenizer-0", "encoder-0", "scheduler-0"):
        assert process in top.stdout, process
    assert re.search(
        r"^tokenizer-0 +ready +\d+ s +0 +0 +0\.0 requests +[1-9]\d* +[1-9]\d*\* ", top.stdout, re.MULTILINE
    )
    assert re.search(r"^tokenizer-0 .* of 16\.0 MiB", top.stdout, re.MULTILINE), top.stdout  # not folded
    asked.remove("--once")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        seen = [line.split()[0] for line in islice((line for line in watching.stdout if line.strip()), 14)]
        watching.stdout.close()  # as `head` does
        assert "Traceback" not in watching.stderr.read()
        assert watching.wait(30) == 1
    assert seen[3:7] == seen[10:14], "three processes, and a note"
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


def plain(said: str) -> str:
    """Return the lines written to a terminal, without colours. A line begins where the cursor goes up to redraw."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", said.replace("\r", "").replace("\x1b[1A", "\n"))


@contextlib.contextmanager
def under_load(file: Path) -> Iterator[None]:
    """Keep eight requests in flight during the block. All of them must succeed."""
    over = threading.Event()

    async def one_after_the_other(client: Client) -> None:
        while not over.is_set():
            assert isinstance(await client.submit(["a ", PHOTO.read_bytes()], output_tokens=1), Result)

    async def all_of_them() -> None:
        async with Client.connect(load(file), timeout_s=DEADLINE_S) as client, asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(one_after_the_other(client))

    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(asyncio.run, all_of_them())
        try:
            yield
        finally:
            over.set()
            loading.result(DEADLINE_S)


#: Of a tokenizer that is: state, time up, in flight, queue, rate, latencies, pool.
BUSY = r"^tokenizer-0 +ready +\d+ (s|min) +[1-9]\d* +\d+ +[1-9][\d.]* +[1-9]\d* +[1-9]\d*\*? +\d+%"


@pytest.mark.processes
@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
@pytest.mark.timeout(180)
def test_a_terminal_of_80_columns_and_24_lines_shows_a_deployment_under_load(serving: tuple[Path, int]) -> None:
    file, _ = serving
    program = [sys.executable, "-P", "-m", "tensorferry"]
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 80))
    top = [*program, "top", "--config", str(file), "--every", "0.2"]
    environ = os.environ | {"TERM": "xterm"}
    with (
        os.fdopen(ours, "rb", buffering=0) as screen,
        under_load(file),
        subprocess.Popen(top, stdin=its, stdout=its, stderr=its, env=environ, start_new_session=True) as watching,
    ):
        os.close(its)
        stop = threading.Timer(DEADLINE_S, watching.kill)
        stop.start()
        said, busy = "", None
        try:
            while busy is None:  # until a request is in flight
                said += screen.read(1 << 16).decode(errors="replace")
                busy = re.search(BUSY, plain(said), re.MULTILINE)
            watching.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # EIO: it has ended
                while screen.read(1 << 16):
                    pass
            assert watching.wait(DEADLINE_S) == 0
        finally:
            stop.cancel()
            watching.kill()
    first, *frames = re.split(r"^top-test: ", plain(said), flags=re.MULTILINE)
    assert first.strip() == ""
    assert max(len(line) for frame in frames for line in f"top-test: {frame}".splitlines()) <= 80
    assert max(len(frame.split("\n\n")[0].splitlines()) for frame in frames) in (6, 7), "no line is folded"
