"""Machines can read the log, and no peer can forge its lines."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

DEADLINE_S = 20.0

PRELUDE = """
import asyncio, logging, sys, threading
import structlog
from structlog.contextvars import bound_contextvars
from tensorferry.codecs.errors import BadItem
from tensorferry.pipeline.deployment.spec import TelemetrySpec
from tensorferry.pipeline.telemetry.logs import configure
log = structlog.get_logger()  # before it is configured, as modules do
"""


@pytest.fixture
def logged(may_start_processes: None) -> Callable[..., str]:
    """logged(code): what a new process that runs it writes to stderr."""

    def run(code: str) -> str:
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True, cwd="/")
        assert done.stdout == b""  # standard output is for results
        return done.stderr.decode()

    return run


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_json_line_is_complete_wherever_it_comes_from(logged):
    text = logged(
        """
        configure(TelemetrySpec(log_format="json"), stage="encoder", rank=3, epoch=77)
        async def request(number):
            with bound_contextvars(request=bytes([number] * 16)):
                await asyncio.sleep(0)
                log.info("encoded", nbytes=number)
        async def main():
            async with asyncio.TaskGroup() as tasks:
                for number in (1, 2):
                    tasks.create_task(request(number))
        asyncio.run(main())
        thread = threading.Thread(target=lambda: log.warning("warned", view=memoryview(b"\\x0a")))
        thread.start()
        thread.join()
        """
    )
    one, two, three = lines(text)
    for line in (one, two, three):
        assert (line["stage"], line["rank"], line["epoch"]) == ("encoder", 3, 77)
        at = datetime.fromisoformat(line["timestamp"])
        assert at.tzinfo is not None
        assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert [(line["event"], line["nbytes"], line["request"], line["level"]) for line in (one, two)] == [
        ("encoded", 1, "01" * 16, "info"),
        ("encoded", 2, "02" * 16, "info"),
    ]
    assert (three["event"], three["level"], three["view"]) == ("warned", "warning", "0a")
    assert "request" not in three


@pytest.mark.parametrize(("level", "heard"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_is_a_floor(logged, level, heard):
    text = logged(
        f"""
        configure(TelemetrySpec(log_format="json", log_level="{level}"))
        for method in (log.debug, log.info, log.warning, log.error):
            method("happened")
        """
    )
    assert len(lines(text)) == heard


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_peer_cannot_forge_a_line_or_steer_the_terminal(logged, form):
    text = logged(
        f"""
        configure(TelemetrySpec(log_format="{form}"), stage="tokenizer", rank=0)
        said = dict(problem="bad\\n2026-01-01 [info] paid", one="\\x1b[2J", two="\\u202e", three="\\ud800")
        log.warning("refused", **said, name="größe")
        """
    )
    assert len(text.splitlines()) == 1
    assert "\x1b[2J" not in text
    assert "\u202e" not in text
    assert "paid" in text
    assert ("größe" in text) or json.loads(text)["name"] == "größe"


def test_a_console_line_can_be_read(logged):
    text = logged(
        """
        configure(TelemetrySpec(), stage="encoder", rank=3)
        log.info("encoded", nbytes=8, transport="shm", request=bytes(2))
        """
    )
    assert re.fullmatch(r"20\S+Z \[info +\] encoded +nbytes=8 rank=3 request=0000 stage=encoder transport=shm\n", text)


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_tells_where_and_not_what_users_sent(logged, form):
    text = logged(
        f"""
        configure(TelemetrySpec(log_format="{form}"))
        def encode(prompt):
            raise BadItem(3, "broken")
        try:
            encode("a secret " + str(1234))
        except BadItem:
            log.exception("failed")
        """
    )
    assert "BadItem" in text
    assert "item 3: broken" in text
    assert "in encode" in text or '"name": "encode"' in text
    assert "a secret 1234" not in text
    assert len(text.splitlines()) == 1 or form == "console"


def test_warnings_are_rate_limited_and_the_next_has_the_number_that_was_suppressed(logged):
    text = logged(
        """
        import time
        configure(TelemetrySpec(log_format="json"))
        for number in range(1000):
            log.warning("refused", number=number)
        log.warning("another")
        for number in range(20):
            log.info("answered", number=number)
        time.monotonic = lambda now=time.monotonic() + 2: now
        log.warning("refused", number=1000)
        """
    )
    found = lines(text)
    refused = [line for line in found if line["event"] == "refused"]
    assert [line["number"] for line in refused] == [0, 1, 2, 3, 4, 1000]
    assert refused[-1]["suppressed"] == 995
    assert sum(line["event"] == "another" for line in found) == 1
    assert sum(line["event"] == "answered" for line in found) == 20


def test_what_libraries_log_is_an_event_too(logged):
    text = logged(
        """
        configure(TelemetrySpec(log_format="json"), stage="encoder", rank=3)
        logging.getLogger("lib").info("not this")
        logging.getLogger("lib").warning("careful: %s", "x")
        logging.getLogger("lib").log(35, "odd level")
        logging.getLogger("lib").warning("broken %d", "format")
        async def fail():
            raise BadItem(1, "lost")
        async def main():
            task = asyncio.create_task(fail())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            del task
        asyncio.run(main())
        """
    )
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [(line["level"], line["library"]) for line in found] == [
        ("warning", "lib"), ("warning", "lib"), ("error", "asyncio"),
    ]  # fmt: skip
    assert found[0]["text"] == "careful: x"
    assert "never retrieved" in found[2]["text"]
    assert found[2]["exception"][0]["exc_type"] == "BadItem"
    assert all(line["stage"] == "encoder" for line in found)
    assert "--- Logging error ---" in text  # the broken one, and the process lived on


def test_the_last_configuration_counts_and_the_present_stderr(logged):
    text = logged(
        """
        import io
        configure(TelemetrySpec(log_format="json"), stage="encoder")
        log.info("one")
        configure(TelemetrySpec(log_format="json", log_level="error"), rank=1)
        log.info("two")
        log.error("three")
        true, sys.stderr = sys.stderr, io.StringIO()
        log.error("four")
        sys.stderr.close()
        sys.stderr = true
        log.error("five")
        """
    )
    assert [(line["event"], line.get("stage"), line.get("rank")) for line in lines(text)] == [
        ("one", "encoder", None), ("three", None, 1), ("five", None, 1),
    ]  # fmt: skip


#: Logs until the parent says that it may end, and then once more; says on stdout how far it is.
LOGS_FOR_EVER = (
    PRELUDE
    + """
configure(TelemetrySpec(log_format="json"), stage="encoder")
for number in range(5000):
    log.error("flood", number=number, text="x" * 100)
print("done", flush=True)
sys.stdin.readline()
log.error("after")
"""
)


@pytest.mark.processes
def test_b07_a_log_that_nobody_reads_holds_nobody_up_and_says_what_is_missing():
    """As when `less` shows the first page, or a collector of logs is stopped."""
    pipe, command = subprocess.PIPE, [sys.executable, "-c", LOGS_FOR_EVER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert select.select([process.stdout], [], [], DEADLINE_S)[0], "it waits for a reader"
        text = os.read(process.stderr.fileno(), 1 << 20)  # all that a pipe holds
        rest, _ = process.communicate(b"\n", timeout=DEADLINE_S)[::-1]
    found = lines((text + rest).decode())
    assert found[-1]["event"] == "after"
    assert found[-1]["lines_lost"] + len(found) == 5001


@pytest.mark.processes
@pytest.mark.parametrize("how", ["full", "closed"])
def test_b10_a_log_that_cannot_be_written_ends_nobody(how, tmp_path):
    """On a full disk, and behind `| head`."""
    command = [sys.executable, "-c", LOGS_FOR_EVER]
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        stderr = full if how == "full" else writer
        done = subprocess.run(command, input=b"\n", stdout=subprocess.PIPE, stderr=stderr, timeout=DEADLINE_S, cwd="/")
    finally:
        os.close(writer)
        os.close(full)
    assert (done.returncode, done.stdout) == (0, b"done\n")
