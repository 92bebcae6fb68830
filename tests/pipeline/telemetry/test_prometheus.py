"""The metrics' HTTP server: what a stranger can do to it, which is to be counted."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tensorferry.pipeline.telemetry import prometheus
from tensorferry.pipeline.telemetry.counters import Counters

DEADLINE_S = 20.0


@pytest.fixture
def counters() -> Iterator[Counters]:
    counters = Counters(stage="encoder", rank=3)
    try:
        yield counters
    finally:
        counters.close()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refused(counters: Counters) -> float:
    return counters.value("scrapes_refused")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"\x00\xff\r\n\r\n", b""),
        (b"GET\r\n\r\n", b""),
        (b"GET /metrics HTTP/9.9\r\n\r\n", b""),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"BREW /pot HTTP/1.1\r\n\r\n", b"405"),
    ],
    ids=["noise", "one word", "a version of the future", "a long line", "many headers", "another method"],
)
def test_what_is_no_scrape_is_counted_and_answered_in_a_line_at_most(
    counters: Counters, capfd: pytest.CaptureFixture[str], said: bytes, answer: bytes
) -> None:
    port = counters.serve(0)
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as line:
        line.sendall(said)
        said_back = line.recv(200)  # to one that speaks no HTTP/1: nothing
        assert answer in said_back
        assert bool(said_back) is bool(answer)
    if answer != b"405":  # HTTP, and its answer says what would do
        until(lambda: refused(counters) == 1)
    assert "tensorferry_requests_ok_total" in scrape(port)
    assert capfd.readouterr() == ("", "")


def test_a_connection_that_is_reset_is_counted_without_a_traceback(
    counters: Counters, capfd: pytest.CaptureFixture[str]
) -> None:
    port = counters.serve(0)
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close resets
        line.sendall(b"GET /met")
    until(lambda: refused(counters) == 1)
    assert "requests_ok" in scrape(port)
    assert capfd.readouterr().err == ""


def test_silent_connections_take_no_more_threads_than_there_are_and_are_hung_up(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prometheus.MetricsHandler.timeout == prometheus.SILENT_S
    monkeypatch.setattr(prometheus.MetricsHandler, "timeout", 1.0)
    port = counters.serve(0)
    before = threading.active_count()
    with ExitStack() as silent:
        lines = [
            silent.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE_S))
            for _ in range(3 * prometheus.CONNECTIONS)
        ]
        until(lambda: refused(counters) == 2 * prometheus.CONNECTIONS)
        assert threading.active_count() <= before + prometheus.CONNECTIONS
        assert all(line.recv(1) == b"" for line in lines), "hung up"
        assert refused(counters) == len(lines)
    assert "requests_ok" in scrape(port)


def test_no_name_server_is_asked(counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("gethostbyaddr", "gethostbyname", "gethostbyname_ex", "getfqdn", "getnameinfo"):
        monkeypatch.setattr(socket, name, lambda *_, name=name: asked.append(name) or "x")
    port = counters.serve(0)
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as line:
        line.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert line.recv(12) == b"HTTP/1.0 200"
    assert asked == []
