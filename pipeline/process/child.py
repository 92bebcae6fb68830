"""A stage process, from its start to its end: its environment, how it reports, how it is killed and restarted."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Self

import structlog

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.backoff import backoff_s
from tensorferry.pipeline.channels.readable_fd import readable
from tensorferry.pipeline.deployment.spec import RestartsSpec
from tensorferry.pipeline.process.tether import LAST_WORDS_NBYTES, TETHER_VARIABLE, Tether

log = structlog.get_logger()

BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0  #: the pause before a restart after two short lives, doubled for each more
KILL_S = 10.0  #: for the kernel to end a killed process; GPU work in flight takes it up to a second

#: Variables from which libraries take their number of threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
#: With this setting, glibc copies 16 MiB and more past the caches, which halves the time of such a copy and of reading
#: it (see docs/performance.md). Smaller copies are better read from a cache. The default threshold is three quarters of
#: the last cache, which other processes use too. It is read when a process starts; other C libraries ignore it.
COPY_VARIABLES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x1000000"}

_READY = b"ready\n"  #: see `Tether.announce`


class Child:
    """A stage process. It holds its pidfd and the reading end of its status pipe until it is reaped."""

    def __init__(self, stage: str, rank: int, process: subprocess.Popen[bytes], status: int) -> None:
        self.stage, self.rank, self.process = stage, rank, process
        self.ready = False
        self.last_words = ""  #: why it ended before it was ready, if it has said so
        self._ready_at = self._ended_at = 0.0
        self._status = status
        self._pidfd = os.pidfd_open(process.pid)

    @classmethod
    def started(
        cls, stage: str, rank: int, command: Sequence[str], lifeline: int, deployment_digest: str, threads: int
    ) -> Self:
        """Start a stage process. lifeline: the reading end of the pipe that tells its stages of a supervisor's end.
        threads: the default for numeric libraries, unless the user has set it. Raises DeploymentError."""
        defaults = dict.fromkeys(THREAD_VARIABLES, str(threads)) | COPY_VARIABLES
        try:
            with ExitStack() as undo, ExitStack() as given:
                status, theirs = os.pipe()
                undo.callback(os.close, status)
                given.callback(os.close, theirs)
                tether = Tether(lifeline, theirs, deployment_digest)
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.__stderr__,  # standard output is for the supervisor's results
                    env=defaults | os.environ | {TETHER_VARIABLE: str(tether)},
                    pass_fds=(tether.lifeline, tether.status),
                    process_group=0,
                )
                undo.callback(process.wait)
                undo.callback(process.kill)
                child = cls(stage, rank, process, status)
                undo.pop_all()
        except OSError as problem:
            raise DeploymentError(f"{stage}-{rank} cannot be started: {problem}") from None
        log.info("stage_started", stage=stage, rank=rank, pid=process.pid)
        return child

    def __str__(self) -> str:
        return f"{self.stage}-{self.rank}"

    @property
    def how(self) -> str:
        """How it ended."""
        status = self.process.returncode
        if status >= 0:
            return f"exited with status {status}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-status, f'signal {-status}')}"

    async def announced(self) -> None:
        """Wait until the process is ready, without end if it never is."""
        await readable(self._status)
        said = os.read(self._status, LAST_WORDS_NBYTES)
        if said != _READY:  # the process has ended
            self.last_words = said.decode(errors="replace")
            await asyncio.get_running_loop().create_future()
        self.ready, self._ready_at = True, time.monotonic()

    async def ready_or_ended(self, start_s: float) -> None:
        """Return when the process is ready or has ended. After start_s seconds it is killed."""
        announced, died = asyncio.create_task(self.announced()), asyncio.create_task(readable(self._pidfd))
        waits = (announced, died)
        try:
            ended, _ = await asyncio.wait(waits, timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                log.error("stage_start_timeout", stage=self.stage, rank=self.rank)
                self.kill()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)  # they release the descriptors, which will be closed

    @property
    def terminated(self) -> bool:
        return self.process.returncode == -signal.SIGTERM

    @property
    def was_ready_s(self) -> float:
        """For how long a process that has ended was ready."""
        return self._ended_at - self._ready_at if self.ready else 0.0

    async def ended(self) -> None:
        """Wait until the process has ended, and reap it."""
        if self.process.returncode is None:
            await readable(self._pidfd)
            self._reap()

    def wait(self, patience_s: float) -> bool:
        """Wait without the event loop. False: the process has not ended."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        ended = bool(poll.poll(patience_s * 1000))
        if ended:
            self._reap()
        return ended

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _reap(self) -> None:
        """Reap a process that has ended. Until then no other process can have its pid or process group."""
        with suppress(ProcessLookupError, PermissionError):  # the processes that it has started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._ended_at = time.monotonic()
        os.set_blocking(self._status, False)  # a process that left the group may have the writing end
        with suppress(BlockingIOError):
            if said := os.read(self._status, LAST_WORDS_NBYTES).removeprefix(_READY):
                self.last_words = said.decode(errors="replace")
        os.close(self._pidfd)
        os.close(self._status)


class Restarts:
    """Counts one rank's short lives in a row, and says how long its next start has to wait."""

    def __init__(self, spec: RestartsSpec) -> None:
        self._spec = spec
        self._short_lives = 0

    @property
    def exhausted(self) -> bool:
        return self._short_lives > self._spec.most

    def died(self, was_ready_s: float) -> int:
        """The number of short lives in a row. was_ready_s: for how long the last life was ready; a long one restarts
        the count at 1."""
        self._short_lives = 1 if was_ready_s >= self._spec.healthy_s else self._short_lives + 1
        return self._short_lives

    def failed(self) -> None:
        """A process could not be started, which counts as a short life."""
        self._short_lives += 1

    async def pause(self) -> None:
        """The first restart is immediate, and each after another short life waits longer."""
        if self._short_lives > 1:
            await asyncio.sleep(backoff_s(BACKOFF_S, LONGEST_BACKOFF_S, self._short_lives - 2))


async def all_ended(children: Iterable[Child]) -> None:
    async with asyncio.TaskGroup() as waiting:
        for child in children:
            waiting.create_task(child.ended())


def kill_all(children: Sequence[Child]) -> None:
    """Kill processes and wait for them, without an event loop."""
    for child in children:
        log.warning("stage_killed", stage=child.stage, rank=child.rank)
        child.kill()
    for child in children:
        if not child.wait(KILL_S):
            log.error("stage_not_killed", stage=child.stage, rank=child.rank, pid=child.process.pid)
