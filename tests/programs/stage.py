"""A stage process that is none: `stage.py BEHAVIOUR STAGE RANK JOURNAL`. Writes what happens to it into the journal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.process.run_process import Stop, run_process
from tensorferry.pipeline.process.tether import Tether

behaviour, stage, rank, journal = sys.argv[1:]
name = f"{stage}-{rank}"


def note(what: object) -> None:
    with open(journal, "a", encoding="utf-8") as file:
        file.write(f"{name} {what}\n")


def sweep() -> None:
    from tensorferry.pipeline.deployment.spec import Deployment  # seldom needed, and slow
    from tensorferry.pipeline.process.runtime_dir import Runtime

    Runtime.of(Deployment(name="supervised", runtime_dir=str(Path(journal).with_name("run")))).sweep()


async def drains(stop: Stop) -> None:
    stop.announce_ready()
    try:
        await stop.wait_draining()
    except asyncio.CancelledError:
        note("cancelled")
        raise
    note("draining")
    await asyncio.sleep(0.02)
    note("drained")


async def never_drains(stop: Stop) -> None:
    stop.announce_ready()
    await stop.wait_draining()
    note("draining")
    await asyncio.Event().wait()


async def fails_to_drain(stop: Stop) -> None:
    stop.announce_ready()
    await stop.wait_draining()
    raise DeploymentError("something is left")


async def is_never_ready(stop: Stop) -> None:
    note("starting")
    await asyncio.Event().wait()


async def blocks_its_loop(stop: Stop) -> None:
    note("starting")
    while True:
        signal.pause()


async def dies_at_start(stop: Stop) -> None:
    raise DeploymentError("there is no such file")


async def vanishes_at_start(stop: Stop) -> None:
    os._exit(9)


async def leaves_when_ready(stop: Stop) -> None:
    stop.announce_ready()


async def hears_nothing(stop: Stop) -> None:
    stop.announce_ready()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    os.kill(os.getpid(), signal.SIGSTOP)


async def has_a_child(stop: Stop) -> None:
    child = subprocess.Popen(["sleep", "1000"])  # noqa: ASYNC220
    note(f"child {child.pid}")
    await drains(stop)


async def leaves_an_orphan(stop: Stop) -> None:
    """While it drains; and it is done when somebody has taken the orphan's exit status."""
    stop.announce_ready()
    await stop.wait_draining()
    shell = subprocess.run(["sh", "-c", "sleep 0.2 >/dev/null & echo $!"], capture_output=True, check=True)  # noqa: ASYNC221
    async with asyncio.timeout(10.0):
        with suppress(ProcessLookupError):
            while True:
                os.kill(int(shell.stdout), 0)  # a zombie is there
                await asyncio.sleep(0.01)
    note("orphan reaped")


async def looks_around(stop: Stop) -> None:
    note(f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} MKL_NUM_THREADS={os.environ['MKL_NUM_THREADS']}")
    await drains(stop)


tether = Tether.taken_from(os.environ)
assert tether is not None
tether.hold()
if behaviour == "looks_around":
    open_now = {int(fd) for fd in os.listdir("/proc/self/fd")} - {tether.lifeline, tether.status}
    note(f"descriptors {sorted(fd for fd in open_now if os.path.exists(f'/proc/self/fd/{fd}'))}")
if behaviour == "imports":
    note("starting")
    while True:
        signal.pause()
sys.exit(run_process(globals()[behaviour], name=name, drain_s=20.0, tether=tether, on_orphaned=sweep))
