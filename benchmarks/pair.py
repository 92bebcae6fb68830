"""A contender in two processes of its own, run a round at a time so that contenders can take turns."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import Any, Self

import msgspec
import uvloop

from benchmarks.contenders import CONTENDERS
from benchmarks.sides import Answered, Send, Setup, answered, answering, faults
from tensorferry.pipeline.channels.readable_fd import readable

PATIENCE_S = 60.0  #: for a round; a pair that is silent for longer has failed
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Round(msgspec.Struct, frozen=True):
    """What a round of messages took."""

    latencies_ns: list[int]  #: of each message, from the writing of its first byte until its last page was read
    held_ns: list[int]  #: of each message: how long the producer's event loop could do nothing else
    elapsed_ns: int  #: from the start of the first message to the end of the last
    producer_faults: int
    consumer_faults: int
    producer_cpu_ns: int
    consumer_cpu_ns: int
    wrong: int  #: messages whose bytes were not what was sent


class Pair:
    """The two processes of one contender, for the length of a `with` block."""

    def __init__(
        self, contender: str, nbytes: int, *, window: int = 1, full: bool = False, pool_nbytes: int = 4 << 20
    ) -> None:
        """nbytes: of every message. window: messages in flight at most. full: every byte is written and read, not one
        in every page. pool_nbytes: of contenders that have a pool; it is never smaller than they need.
        """
        self.contender = contender
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        with theirs, _environment(CONTENDERS[contender].environment):
            arguments = (contender, nbytes, window, full, max(pool_nbytes, (window + 1) * nbytes), theirs)
            self._producer = context.Process(target=_produce, args=arguments, name=f"producer: {contender}")
            self._producer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        _end(self._producer, PATIENCE_S)

    def round(self, messages: int) -> Round:
        """Hand over so many messages. Raises RuntimeError when a safe contender changed or mixed up a message."""
        self._line.send_bytes(msgspec.msgpack.encode(messages))
        if not self._line.poll(PATIENCE_S):
            raise RuntimeError(f"{self.contender}: silent for {PATIENCE_S} s")
        found = msgspec.msgpack.decode(self._line.recv_bytes(), type=Round)
        if found.wrong and CONTENDERS[self.contender].safe:
            raise RuntimeError(f"{self.contender}: {found.wrong} messages arrived wrong")
        return found


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What a process that is started within the block finds in its environment, unless it is there already."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _end(process: BaseProcess, patience_s: float) -> None:
    process.join(patience_s)
    process.kill()
    process.join()
    process.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# --- the producer's process -------------------------------------------------------------------------------------


def _produce(contender: str, nbytes: int, window: int, full: bool, pool_nbytes: int, line: Connection) -> None:
    _die_with_parent()
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="ferry-") as folder, ExitStack() as undo:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.enter_context(ours)
        address, queue = f"ipc://{folder}/messages", _queue(context, contender)
        setup = Setup(contender, nbytes, window, full, pool_nbytes, address, ours, queue)
        with theirs:
            arguments = (replace(setup, line=theirs),)
            consumer = context.Process(target=_consume, args=arguments, name=f"consumer: {contender}", daemon=True)
            consumer.start()
        undo.callback(_end, consumer, 0.0)
        uvloop.run(_serve(setup, line))


def _queue(context: SpawnContext, contender: str) -> Any:
    if not contender.startswith("torch queue"):
        return None
    import torch.multiprocessing

    return torch.multiprocessing.get_context("spawn").Queue()


async def _serve(setup: Setup, line: Connection) -> None:
    """Run the rounds that are asked for, until nobody is there to ask."""
    with CONTENDERS[setup.contender].sender(setup) as send:
        setup.line.setblocking(False)
        producer = _Producer(setup, send)
        while True:
            try:
                messages = msgspec.msgpack.decode(line.recv_bytes(), type=int)
            except EOFError:
                return
            line.send_bytes(msgspec.msgpack.encode(await producer.round(messages)))


class _Producer:
    """Sends, and hears the answers."""

    def __init__(self, setup: Setup, send: Send) -> None:
        self._setup, self._send = setup, send
        self._last: Answered | None = None
        self._sent = 0

    async def round(self, messages: int) -> Round:
        before, faults_before, cpu_before = self._last, faults(), time.process_time_ns()
        started: dict[int, int] = {}
        ended: dict[int, int] = {}
        held: list[int] = []
        wrong = 0
        while len(ended) < messages:
            if len(started) < messages and len(started) - len(ended) < self._setup.window:
                self._sent += 1
                started[self._sent] = time.monotonic_ns()
                self._send(self._sent)
                held.append(time.monotonic_ns() - started[self._sent])
                continue
            self._last = last = await self._answer()
            ended[last.number] = last.read_at_ns
            wrong += not self._setup.is_right(last)
        assert self._last is not None
        return Round(
            latencies_ns=[ended[number] - started[number] for number in started],
            held_ns=held,
            elapsed_ns=max(ended.values()) - min(started.values()),
            producer_faults=faults() - faults_before,
            consumer_faults=self._last.faults - before.faults if before else 0,
            producer_cpu_ns=time.process_time_ns() - cpu_before,
            consumer_cpu_ns=self._last.cpu_ns - before.cpu_ns if before else 0,
            wrong=wrong,
        )

    async def _answer(self) -> Answered:
        while True:
            try:
                packet = self._setup.line.recv(64)
            except BlockingIOError:
                await readable(self._setup.line.fileno())
                continue
            if not packet:
                raise RuntimeError("the consumer has ended")
            return answered(packet)


# --- the consumer's process -------------------------------------------------------------------------------------


def _consume(setup: Setup) -> None:
    _die_with_parent()
    uvloop.run(CONTENDERS[setup.contender].receive(setup, answering(setup)))
