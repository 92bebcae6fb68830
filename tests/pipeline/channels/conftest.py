"""Fixtures of the tests of channels."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
import zmq
from tests.pipeline.channels.processes import PRELUDE

from tensorferry.codecs.errors import BadMessage
from tensorferry.pipeline.channels.channels import (
    Context,
    open_context,
)


@pytest.fixture(scope="module", autouse=True)
def what_libraries_keep() -> None:
    """Before anything is counted: pyzmq keeps a thread for uncopied frames, with its sockets, and uvloop a pipe."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://one")
        other.connect("inproc://one")
        one.send(bytes(1 << 20), copy=False)
        other.recv()
    uvloop.new_event_loop().close()


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder whose path is short enough for any socket."""
    with tempfile.TemporaryDirectory(prefix="tf-") as made:
        yield Path(made)


@pytest.fixture
def address(home: Path) -> str:
    return f"ipc://{home}/it"


@pytest.fixture
def context() -> Iterator[Context]:
    with open_context() as context:
        yield context


@pytest.fixture
def dropped() -> list[BadMessage]:
    return []


@pytest.fixture
def child(may_start_processes: None) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """child(code, *arguments): a new Python process that knows the channels; killed at the end."""
    running: list[subprocess.Popen[bytes]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *arguments]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()
