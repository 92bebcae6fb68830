"""Counters add up and are served on loopback alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.telemetry.counters import COUNTERS, Counters

DEADLINE_S = 20.0


@pytest.fixture
def counters() -> Iterator[Counters]:
    made = Counters(stage="encoder", rank=3)
    yield made
    made.close()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        text: str = answer.read().decode()
    return text


def test_what_is_counted_adds_up(counters):
    counters.count("requests_ok")
    counters.count("requests_ok", 2)
    counters.count("requests_failed", kind="BadItem", item=1)
    counters.count("requests_failed", item=1, kind="BadItem")
    counters.count("requests_busy", 0)
    counters.gauge("pool_lent_nbytes", 10)
    counters.gauge("pool_lent_nbytes", 7)
    assert counters.value("requests_ok") == 3
    assert counters.value("requests_failed", kind="BadItem", item=1) == 2
    assert counters.value("requests_failed") == counters.value("requests_busy") == 0
    assert counters.value("pool_lent_nbytes") == 7
    assert counters.value("pool_free_nbytes") == 0
    assert Counters().value("requests_ok") == 0  # each is on its own


@pytest.mark.parametrize(
    "misuse", [("count", "no_such"), ("count", "requests_ok", -1), ("gauge", "requests_ok", 1), ("gauge", "a b", 1)]
)
def test_a_bug_in_counting_is_loud(counters, misuse):
    method, *arguments = misuse
    with pytest.raises(AssertionError):
        getattr(counters, method)(*arguments)


def test_threads_count_exactly(counters):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: [counters.count("pool_full_fallbacks") for _ in range(5000)], range(8)))
    finally:
        sys.setswitchinterval(before)
    assert counters.value("pool_full_fallbacks") == 40_000


def test_s4_prometheus_reads_every_counter_with_its_help(counters):
    port = counters.serve(0)
    counters.count("requests_ok", 5)
    counters.count("messages_refused", kind='odd"\n')
    counters.gauge("pool_lent_nbytes", 4096.5)
    text = scrape(port)
    for name, meaning in COUNTERS.items():
        assert f"# HELP tensorferry_{name}_total {meaning}\n# TYPE tensorferry_{name}_total counter\n" in text
    assert 'tensorferry_requests_ok_total{rank="3",stage="encoder"} 5.0\n' in text
    assert 'tensorferry_requests_failed_total{rank="3",stage="encoder"} 0.0\n' in text
    assert r'tensorferry_messages_refused_total{kind="odd\"\n",rank="3",stage="encoder"} 1.0' in text
    assert "# HELP tensorferry_pool_lent_nbytes pool lent nbytes\n# TYPE tensorferry_pool_lent_nbytes gauge\n" in text
    assert 'tensorferry_pool_lent_nbytes{rank="3",stage="encoder"} 4096.5\n' in text
    assert text.count("# TYPE") == len(COUNTERS) + 1
    counters.count("requests_ok")
    assert 'tensorferry_requests_ok_total{rank="3",stage="encoder"} 6.0\n' in scrape(port)


def test_b28_metrics_are_served_on_loopback_alone(counters):
    port = counters.serve(0)
    bound = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if os.path.exists(table)
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"  # listening
    ]
    assert bound == [f"0100007F:{port:04X}"]


def test_a_port_that_is_taken_is_a_clear_error(counters):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(DeploymentError, match=rf"on 127.0.0.1:{port}: .*in use.*telemetry.prometheus_port"):
            counters.serve(port)
    assert counters.serve(port) == port


def test_closing_frees_the_port(counters):
    port = counters.serve(0)
    scrape(port)
    counters.close()
    counters.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_prometheus_is_not_imported_without_a_port(may_start_processes: None) -> None:
    code = """
import sys
from tensorferry.pipeline.telemetry.counters import Counters
counters = Counters()
counters.count("requests_ok")
counters.close()
assert not [name for name in sys.modules if name.startswith("prometheus")]
"""
    subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=True, cwd="/")
