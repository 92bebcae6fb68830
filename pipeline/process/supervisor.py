"""A whole deployment as one block: started, watched, healed, and stopped without a trace.

A stage that dies once all have been ready is started again, the first time at once and then ever later; its peers see
to what it had. One that dies again and again stops the deployment: whatever ails it, starting it is no cure.

Each stage process leads a process group of its own, so a Ctrl-C in the terminal reaches the supervisor alone, and
what a stage has started goes with it. It is tied to the supervisor by a lifeline (see `lifecycle.Tether`): however the
supervisor ends, its stages follow.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType

import structlog

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.backoff import backoff_s
from tensorferry.pipeline.channels.curve_keys import ServerKeys
from tensorferry.pipeline.channels.readable_fd import readable
from tensorferry.pipeline.deployment.load import resolved
from tensorferry.pipeline.deployment.spec import Deployment, ranks_of
from tensorferry.pipeline.process.orphans import reaping
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.stage import inboxes
from tensorferry.pipeline.process.tether import LAST_WORDS_NBYTES, TETHER_VARIABLE, Tether
from tensorferry.pipeline.recording import traffic

log = structlog.get_logger()

#: Upstream first: whoever is asked to drain next then gets nothing new any more.
DRAIN_ORDER = ("tokenizer", "encoder", "scheduler")
FAILED_DRAIN_S = 5.0  #: grace period where something has failed and the rest can hardly finish its work
CANCEL_S = 3.0  #: for stages to end by themselves once they are told to cancel
STARTING_CANCEL_S = 0.3  #: for those that are not ready: one that imports, or blocks its loop, does not hear of it
BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0  #: before a second short life in a row; doubled for each one more
KILL_S = 10.0  #: for the kernel to end a killed process; GPU work in flight takes it up to a second

#: What libraries take their number of threads from.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
#: glibc then copies 16 MiB and more past the caches, which halves the time of such a copy and of reading it (see
#: docs/performance.md); smaller ones are better read from a cache. Its own threshold is three quarters of the last
#: cache, which on a shared machine is mostly somebody else's. Read when a process starts; other C libraries ignore it.
COPY_VARIABLES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x1000000"}

_READY = b"ready\n"  #: see `Tether.announce`

Command = Callable[[str, int], Sequence[str]]  #: (stage, rank) -> argument list


class Supervisor:
    """A running deployment. Made by `running`."""

    def __init__(self, deployment: Deployment, command: Command) -> None:
        self._deployment, self._command = deployment, command
        self._children: list[_Child] = []
        self._lifeline = os.pipe()
        self._whole = False  # everybody has been ready

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        deployment: Deployment,
        config_file: Path,
        overrides: Sequence[str] = (),
        *,
        command: Command | None = None,
    ) -> AsyncIterator[Supervisor]:
        """Every stage of the deployment, ready, for the length of the block; its end drains them, in order.

        config_file, overrides: what `deployment` was loaded from; the stages load it again and check that it is
        the same. command: how a stage is started, for tests. When a stage dies before all are ready, or too often
        afterwards (`restarts`), the block is cancelled, the rest is stopped, and DeploymentError raised; so too when
        the deployment runs already, or is not ready in time, or does not drain within its grace period. When the block
        is cancelled the stages are, too.
        """
        command = command or start_command(config_file, overrides)
        if deployment.security.keys is not None:
            ServerKeys.read(deployment.security.keys)  # else every stage would say so
        async with AsyncExitStack() as undo:
            runtime = Runtime.of(deployment)
            undo.enter_context(runtime.own("deployment", 0, str(config_file)))
            await undo.enter_async_context(_findable(runtime, str(config_file), deployment.timeouts.heartbeat_s))
            runtime.sweep()
            undo.callback(runtime.sweep)
            for stage, rank in inboxes(deployment, runtime, *DRAIN_ORDER):
                if runtime.lock(stage, rank).exists():  # not swept: its owner lives
                    who = runtime.owner(stage, rank)
                    raise DeploymentError(
                        f"{stage}-{rank} runs already: {who}; stop it first (a replay can use it: replay --attach)"
                    )
            traffic.refuse_existing(deployment)
            self = cls(deployment, command)
            undo.callback(traffic.gather, deployment)
            await undo.enter_async_context(reaping(lambda: self.processes.values()))
            undo.push_async_exit(self._stop)
            for stage, ranks in ranks_of(deployment).items():
                for rank in range(ranks):
                    self._children.append(self._spawn(stage, rank))
            async with self._watched():
                await self._until_ready()
                self._whole = True
                log.info("deployment_ready", deployment=deployment.name, processes=len(self._children))
                yield self

    @property
    def processes(self) -> dict[tuple[str, int], int]:
        """The pid of every stage and rank, of its present life or the last."""
        return {(child.stage, child.rank): child.process.pid for child in self._children}

    def is_ready(self, stage: str, rank: int) -> bool:
        """Whether the present life of a stage has said that it is."""
        return any(child.ready for child in self._children if (child.stage, child.rank) == (stage, rank))

    def _spawn(self, stage: str, rank: int) -> _Child:
        deployment = self._deployment
        threads = deployment.encoder.threads if stage == "encoder" else 1
        defaults = dict.fromkeys(THREAD_VARIABLES, str(threads)) | COPY_VARIABLES  # unless the user has set them
        try:
            with ExitStack() as undo, ExitStack() as given:
                status, theirs = os.pipe()
                undo.callback(os.close, status)
                given.callback(os.close, theirs)
                tether = Tether(self._lifeline[0], theirs, digest(deployment))
                process = subprocess.Popen(
                    self._command(stage, rank),
                    stdin=subprocess.DEVNULL,
                    stdout=sys.__stderr__,  # what they print is no result of ours
                    env=defaults | os.environ | {TETHER_VARIABLE: str(tether)},
                    pass_fds=(tether.lifeline, tether.status),
                    process_group=0,
                )
                undo.callback(process.wait)
                undo.callback(process.kill)
                child = _Child(stage, rank, process, status)
                undo.pop_all()
        except OSError as problem:
            raise DeploymentError(f"{stage}-{rank} cannot be started: {problem}") from None
        log.info("stage_started", stage=stage, rank=rank, pid=process.pid)
        return child

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """When a stage cannot be kept alive within the block, the block is cancelled and DeploymentError raised in its
        place."""
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                watches = [group.create_task(self._watch(place)) for place in range(len(self._children))]
                try:
                    yield
                except Exception as problem:  # raised below, not in a group
                    failure = problem
                finally:
                    for watch in watches:
                        watch.cancel()
        except ExceptionGroup as deaths:
            raise deaths.exceptions[0] from failure
        if failure is not None:
            raise failure

    async def _watch(self, place: int) -> None:
        """Start a stage again whenever it has died, for ever. Raises DeploymentError when that is of no use."""
        spec, short_lives = self._deployment.restarts, 0
        while True:
            child = self._children[place]
            await child.ended()
            short_lives = 1 if child.was_ready_s >= spec.healthy_s else short_lives + 1
            log.error("stage_died", stage=child.stage, rank=child.rank, how=child.how)
            if not self._whole or short_lives > spec.most:
                when = "" if child.ready else " before it was ready"
                times = f"; it has died {short_lives} times within {spec.healthy_s:g} s" if short_lives > 1 else ""
                why = f": {child.last_words}" if child.last_words else "; its last lines say more"
                raise DeploymentError(f"{child} {child.how}{when}, so the deployment was stopped{times}{why}")
            await _back_off(short_lives)
            while True:
                try:
                    self._children[place] = child = self._spawn(child.stage, child.rank)
                    break
                except DeploymentError as problem:  # no descriptor, no memory, no process to be had just now
                    short_lives += 1
                    log.error("stage_not_started", stage=child.stage, rank=child.rank, problem=str(problem))
                    if short_lives > spec.most:
                        raise
                await _back_off(short_lives)
            await self._until_ready_or_dead(child)

    async def _until_ready_or_dead(self, child: _Child) -> None:
        """One that is not ready in time is killed."""
        announced = asyncio.create_task(child.announced())
        try:
            async with asyncio.timeout(self._deployment.timeouts.start_s):
                await child.announced_or_died(announced)
        except TimeoutError:
            log.error("stage_late", stage=child.stage, rank=child.rank)
            child.kill()
        finally:
            announced.cancel()
            await asyncio.wait([announced])  # it lets go of a descriptor that will be closed

    async def _until_ready(self) -> None:
        start_s = self._deployment.timeouts.start_s
        try:
            async with asyncio.timeout(start_s), asyncio.TaskGroup() as waiting:
                for child in self._children:
                    waiting.create_task(child.announced())
        except TimeoutError:
            late = ", ".join(str(child) for child in self._children if not child.ready)
            raise DeploymentError(
                f"not ready within {start_s} s: {late}; their lines above say how far they came, and "
                "timeouts.start_s gives them longer"
            ) from None

    async def _stop(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain, then cancel, then kill; a cancellation of our own skips to the next step."""
        grace_s = self._deployment.timeouts.drain_s
        if kind is not None:
            grace_s = min(grace_s, FAILED_DRAIN_S) if issubclass(kind, Exception) else 0.0
        unclean: list[str] = []
        try:
            if grace_s:
                unclean = await self._drain(grace_s)
        finally:
            os.write(self._lifeline[1], bytes(len(self._children)))
            try:
                await self._end_starting()
                with suppress(TimeoutError):
                    async with asyncio.timeout(CANCEL_S):
                        await _all_ended(self._left())
            finally:
                self._kill(self._left())
                os.close(self._lifeline[0])
                os.close(self._lifeline[1])
        if kind is None and unclean:
            raise DeploymentError(", ".join(unclean))

    async def _drain(self, grace_s: float) -> list[str]:
        """Ask one stage after the other to finish; returns what went wrong, by stage and rank."""
        asked: list[_Child] = []
        asked_at: dict[str, float] = {}
        clock = asyncio.get_running_loop().time
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                for stage in DRAIN_ORDER:
                    members = [child for child in self._left() if child.stage == stage]
                    asked_at[stage] = clock()
                    for child in members:
                        child.terminate()
                    asked += members
                    await _all_ended(members)
        # One that has just been started again dies of the signal until it handles it, and has nothing to drain.
        failed = [child for child in asked if child.process.returncode and (child.ready or not child.terminated)]
        wrong = [f"{child} {child.how} while it drained" for child in failed]
        if left := self._left():
            until = [*list(asked_at.values())[1:], clock()]
            spent = ", ".join(
                f"{stage} {end - at:.1f} s" for (stage, at), end in zip(asked_at.items(), until, strict=True)
            )
            late = ", ".join(map(str, left))
            log.warning("drain_overran", left=late, grace_s=grace_s, spent=spent, remedy="raise timeouts.drain_s")
            wrong.append(f"not drained within {grace_s} s (timeouts.drain_s, for all stages together): {late}; {spent}")
        return wrong

    async def _end_starting(self) -> None:
        """End the stages that are not ready, which have nothing to finish: what one leaves is swept."""
        starting = [child for child in self._left() if not child.ready]
        for child in starting:
            child.terminate()  # it dies of that until it handles it, and is cancelled by it then
        with suppress(TimeoutError):
            async with asyncio.timeout(STARTING_CANCEL_S):
                await _all_ended(starting)
        self._kill([child for child in starting if child.process.returncode is None])

    def _kill(self, left: Sequence[_Child]) -> None:
        for child in left:
            log.warning("stage_killed", stage=child.stage, rank=child.rank)
            child.kill()
        for child in left:
            if not child.wait(KILL_S):
                log.error("stage_not_killed", stage=child.stage, rank=child.rank, pid=child.process.pid)

    def _left(self) -> list[_Child]:
        return [child for child in self._children if child.process.returncode is None]


class _Child:
    """A stage process; holds its pidfd and the reading end of its status pipe until it is waited for."""

    def __init__(self, stage: str, rank: int, process: subprocess.Popen[bytes], status: int) -> None:
        self.stage, self.rank, self.process = stage, rank, process
        self.ready = False
        self.last_words = ""  #: of one that ended before it was ready, where it knew why
        self._ready_at = self._ended_at = 0.0
        self._status = status
        self._pidfd = os.pidfd_open(process.pid)

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
        """Until it is ready; for ever if it never will be."""
        await readable(self._status)
        said = os.read(self._status, LAST_WORDS_NBYTES)
        if said != _READY:  # it has ended
            self.last_words = said.decode(errors="replace")
            await asyncio.get_running_loop().create_future()
        self.ready, self._ready_at = True, time.monotonic()

    async def announced_or_died(self, announced: asyncio.Task[None]) -> None:
        died = asyncio.create_task(readable(self._pidfd))
        try:
            await asyncio.wait([announced, died], return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
            await asyncio.wait([died])

    @property
    def terminated(self) -> bool:
        return self.process.returncode == -signal.SIGTERM

    @property
    def was_ready_s(self) -> float:
        """For how long it was, of one that has ended."""
        return self._ended_at - self._ready_at if self.ready else 0.0

    async def ended(self) -> None:
        """Until its process has ended and been waited for."""
        if self.process.returncode is None:
            await readable(self._pidfd)
            self._reap()

    def wait(self, patience_s: float) -> bool:
        """The same without the event loop, for the last moment; False: it has not."""
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
        """Its process has ended, and is not waited for yet: so its number, and its group's, are still its own."""
        with suppress(ProcessLookupError, PermissionError):  # whatever it has left behind
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._ended_at = time.monotonic()
        os.set_blocking(self._status, False)  # a process that left the group may hold the other end
        with suppress(BlockingIOError):
            if said := os.read(self._status, LAST_WORDS_NBYTES).removeprefix(_READY):
                self.last_words = said.decode(errors="replace")
        os.close(self._pidfd)
        os.close(self._status)


@asynccontextmanager
async def _findable(runtime: Runtime, config: str, every_s: float) -> AsyncIterator[None]:
    """Within the block, which owns the deployment, make the lock file again that somebody removes: without it
    `tensorferry down` finds nobody, and another deployment could be started beside this one."""
    with ExitStack() as held:
        keeping = asyncio.create_task(_keep(runtime, config, every_s, held))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])


async def _keep(runtime: Runtime, config: str, every_s: float, held: ExitStack) -> None:
    well = True
    while True:
        await asyncio.sleep(every_s)
        try:
            if runtime.keep("deployment", 0, held, config):
                log.warning("lock_file_recreated", directory=str(runtime.directory))
            well = True
        except (DeploymentError, OSError) as problem:
            if well:
                log.error("runtime_directory_lost", problem=str(problem), remedy="`tensorferry down` may not find us")
            well = False


async def _back_off(short_lives: int) -> None:
    """Before another life: the first comes at once, and each after a short one later than the last."""
    if short_lives > 1:
        await asyncio.sleep(backoff_s(BACKOFF_S, LONGEST_BACKOFF_S, short_lives - 2))


async def _all_ended(children: Iterable[_Child]) -> None:
    async with asyncio.TaskGroup() as waiting:
        for child in children:
            waiting.create_task(child.ended())


def start_command(config_file: Path, overrides: Sequence[str]) -> Command:
    """`tensorferry start`, with this interpreter."""
    settings = [argument for setting in overrides for argument in ("--set", setting)]
    return lambda stage, rank: [
        *(sys.executable, "-P", "-m", "tensorferry", "start", stage),
        *("--rank", str(rank), "--config", str(config_file), *settings),
    ]


def digest(deployment: Deployment) -> str:
    """What two processes compare to know that they read the same from a deployment file."""
    return hashlib.blake2b(resolved(deployment).encode(), digest_size=16).hexdigest()
