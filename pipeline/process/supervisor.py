"""A whole deployment as one block: the supervisor starts it, restarts stages that die, and stops it.

When a stage dies after all have been ready, it is restarted, the first time at once and then after longer and longer
pauses. Its peers recover its work. A stage that dies too often in a row stops the deployment.

Each stage process leads its own process group, so a Ctrl-C in the terminal reaches the supervisor alone, and the
processes that a stage has started end with it. A lifeline ties stages to the supervisor (see `run_process.Tether`):
they end when the supervisor ends, however it ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType

import structlog

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.channels.curve_keys import ServerKeys
from tensorferry.pipeline.deployment.load import resolved
from tensorferry.pipeline.deployment.spec import Deployment, ranks_of
from tensorferry.pipeline.process.child import Child, Restarts, all_ended, kill_all
from tensorferry.pipeline.process.orphans import reaping
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.stage import inboxes
from tensorferry.pipeline.recording import traffic

log = structlog.get_logger()

#: Upstream first, so that a stage gets no new work by the time it is asked to drain.
DRAIN_ORDER = ("tokenizer", "encoder", "scheduler")
FAILED_DRAIN_S = 5.0  #: grace period after a failure, when the other stages can hardly finish their work
CANCEL_S = 3.0  #: for stages to end after they are told to cancel
STARTING_CANCEL_S = 0.3  #: for stages that are not ready: a stage that imports, or blocks its loop, is not told

Command = Callable[[str, int], Sequence[str]]  #: (stage, rank) -> argument list


class Supervisor:
    """A running deployment. `running` makes it."""

    def __init__(self, deployment: Deployment, command: Command) -> None:
        self._deployment, self._command = deployment, command
        self._children: list[Child] = []
        self._lifeline = os.pipe()
        self._whole = False  # all stages have been ready

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
        """Start every stage, and run the block once all are ready. Its end drains them in order.

        config_file, overrides: what `deployment` was loaded from. The stages load it again and check that it is the
        same. command: how a stage is started, for tests. When a stage dies before all are ready, or too often
        afterwards (`restarts`), the block is cancelled and the other stages are stopped. DeploymentError is raised
        then, and also if the deployment runs already, is not ready in time, or does not drain within its grace
        period. When the block is cancelled, the stages are cancelled too.
        """
        command = command or start_command(config_file, overrides)
        if deployment.security.keys is not None:
            ServerKeys.read(deployment.security.keys)  # otherwise every stage would report the same mistake
        async with AsyncExitStack() as undo:
            runtime = Runtime.of(deployment)
            undo.enter_context(runtime.own("deployment", 0, str(config_file)))
            await undo.enter_async_context(_findable(runtime, str(config_file), deployment.timeouts.heartbeat_s))
            runtime.sweep()
            undo.callback(runtime.sweep)
            for stage, rank in inboxes(deployment, runtime, *DRAIN_ORDER):
                if runtime.lock(stage, rank).exists():  # the sweep left it, so its owner lives
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
                    self._children.append(self._start(stage, rank))
            async with self._watched():
                await self._until_ready()
                self._whole = True
                log.info("deployment_ready", deployment=deployment.name, processes=len(self._children))
                yield self

    @property
    def processes(self) -> dict[tuple[str, int], int]:
        """The pid of every stage and rank: of the running process, or else of the last one."""
        return {(child.stage, child.rank): child.process.pid for child in self._children}

    def is_ready(self, stage: str, rank: int) -> bool:
        """Whether a stage's current process has reported that it is ready."""
        return any(child.ready for child in self._children if (child.stage, child.rank) == (stage, rank))

    def _start(self, stage: str, rank: int) -> Child:
        deployment = self._deployment
        threads = deployment.encoder.threads if stage == "encoder" else 1
        command = self._command(stage, rank)
        return Child.started(stage, rank, command, self._lifeline[0], digest(deployment), threads)

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Restart stages within the block. If one cannot be kept alive, the block is cancelled and DeploymentError is
        raised."""
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
        """Restart a stage each time it dies, without end. Raises DeploymentError when a restart cannot help."""
        restarts = Restarts(self._deployment.restarts)
        while True:
            child = self._children[place]
            await child.ended()
            log.error("stage_died", stage=child.stage, rank=child.rank, how=child.how)
            short_lives = restarts.died(child.was_ready_s)
            if not self._whole or restarts.exhausted:
                when = "" if child.ready else " before it was ready"
                healthy_s = self._deployment.restarts.healthy_s
                times = f"; it has died {short_lives} times within {healthy_s:g} s" if short_lives > 1 else ""
                why = f": {child.last_words}" if child.last_words else "; its last log lines may say why"
                raise DeploymentError(f"{child} {child.how}{when}, so the deployment was stopped{times}{why}")
            await restarts.pause()
            while True:
                try:
                    self._children[place] = child = self._start(child.stage, child.rank)
                    break
                except DeploymentError as problem:  # no descriptor, memory or process is available at the moment
                    log.error("stage_not_started", stage=child.stage, rank=child.rank, problem=str(problem))
                    restarts.failed()
                    if restarts.exhausted:
                        raise
                await restarts.pause()
            await child.ready_or_ended(self._deployment.timeouts.start_s)

    async def _until_ready(self) -> None:
        start_s = self._deployment.timeouts.start_s
        try:
            async with asyncio.timeout(start_s), asyncio.TaskGroup() as waiting:
                for child in self._children:
                    waiting.create_task(child.announced())
        except TimeoutError:
            late = ", ".join(str(child) for child in self._children if not child.ready)
            raise DeploymentError(
                f"not ready within {start_s} s: {late}; see their log lines above, or raise timeouts.start_s"
            ) from None

    async def _stop(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain the stages, then cancel, then kill them. If this task is cancelled, it goes on with the next step."""
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
                        await all_ended(self._left())
            finally:
                kill_all(self._left())
                os.close(self._lifeline[0])
                os.close(self._lifeline[1])
        if kind is None and unclean:
            raise DeploymentError(", ".join(unclean))

    async def _drain(self, grace_s: float) -> list[str]:
        """Ask one stage after the other to finish. Returns the problems, by stage and rank."""
        asked: list[Child] = []
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
                    await all_ended(members)
        # A process that was just restarted dies of SIGTERM until it handles it, and has nothing to drain.
        failed = [child for child in asked if child.process.returncode and (child.ready or not child.terminated)]
        wrong = [f"{child} {child.how} while it drained" for child in failed]
        if left := self._left():
            until = [*list(asked_at.values())[1:], clock()]
            spent = ", ".join(
                f"{stage} {end - at:.1f} s" for (stage, at), end in zip(asked_at.items(), until, strict=True)
            )
            late = ", ".join(map(str, left))
            log.warning("drain_timeout", left=late, grace_s=grace_s, spent=spent, remedy="raise timeouts.drain_s")
            wrong.append(f"not drained within {grace_s} s (timeouts.drain_s, for all stages together): {late}; {spent}")
        return wrong

    async def _end_starting(self) -> None:
        """End the stages that are not ready. They have nothing to finish, and the sweep removes their files."""
        starting = [child for child in self._left() if not child.ready]
        for child in starting:
            child.terminate()  # the signal ends a process that does not handle it yet, and cancels one that does
        with suppress(TimeoutError):
            async with asyncio.timeout(STARTING_CANCEL_S):
                await all_ended(starting)
        kill_all([child for child in starting if child.process.returncode is None])

    def _left(self) -> list[Child]:
        return [child for child in self._children if child.process.returncode is None]


@asynccontextmanager
async def _findable(runtime: Runtime, config: str, every_s: float) -> AsyncIterator[None]:
    """Within the block, which owns the deployment, restore its lock file if it is removed. Without the file,
    `tensorferry down` does not find the deployment, and a second one could be started."""
    with ExitStack() as held:
        restoring = asyncio.create_task(_restore(runtime, config, every_s, held))
        try:
            yield
        finally:
            restoring.cancel()
            await asyncio.wait([restoring])


async def _restore(runtime: Runtime, config: str, every_s: float, held: ExitStack) -> None:
    well = True
    while True:
        await asyncio.sleep(every_s)
        try:
            if runtime.keep("deployment", 0, held, config):
                log.warning("lock_file_recreated", directory=str(runtime.directory))
            well = True
        except (DeploymentError, OSError) as problem:
            if well:
                log.error(
                    "runtime_directory_lost",
                    problem=str(problem),
                    remedy="make it writable; until then `tensorferry down` may not find this deployment",
                )
            well = False


def start_command(config_file: Path, overrides: Sequence[str]) -> Command:
    """Return the command `tensorferry start` with this interpreter."""
    settings = [argument for setting in overrides for argument in ("--set", setting)]
    return lambda stage, rank: [
        *(sys.executable, "-P", "-m", "tensorferry", "start", stage),
        *("--rank", str(rank), "--config", str(config_file), *settings),
    ]


def digest(deployment: Deployment) -> str:
    """Return the digest that two processes compare to know that they loaded the same settings."""
    return hashlib.blake2b(resolved(deployment).encode(), digest_size=16).hexdigest()
