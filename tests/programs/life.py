"""A process that lives by `run_process`: `life.py BEHAVIOUR`. Prints what happens to it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

from tensorferry.codecs.errors import BadRequest, DeploymentError
from tensorferry.pipeline.process import run_process as lifecycle
from tensorferry.pipeline.process.run_process import Stop, run_process
from tensorferry.pipeline.process.tether import Tether


def say(what: object) -> None:
    print(what, flush=True)


async def drains(stop: Stop) -> None:
    say(type(asyncio.get_running_loop()).__module__)
    stop.announce_ready()
    assert not stop.draining
    say("ready")
    await stop.wait_draining()
    assert stop.draining
    say("drained")


async def never_drains(stop: Stop) -> None:
    stop.announce_ready()
    say("ready")
    try:
        await stop.wait_draining()
        say("draining")
        await asyncio.Event().wait()
    finally:
        say("cleaned up")


async def is_never_ready(stop: Stop) -> None:
    say("starting")
    try:
        await asyncio.Event().wait()
    finally:
        say("cleaned up")


async def is_stuck(stop: Stop) -> None:
    stop.announce_ready()
    say("ready")
    await stop.wait_draining()
    threading.Event().wait()


async def cleans_up_at_length(stop: Stop) -> None:
    stop.announce_ready()
    say("ready")
    try:
        await stop.wait_draining()
        say("draining")
        await asyncio.Event().wait()
    finally:
        say("cleaning")
        await asyncio.sleep(0.2)
        say("cleaned up")


async def is_deaf(stop: Stop) -> None:
    stop.announce_ready()
    await is_deaf_from_the_start(stop)


async def is_deaf_from_the_start(stop: Stop) -> None:
    say("ready")
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            say("not listening")


async def blocks_its_loop(stop: Stop) -> None:
    stop.announce_ready()
    say("ready")
    threading.Event().wait()


async def leaves_a_thread(stop: Stop) -> None:
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    say("done")


async def returns(stop: Stop) -> None:
    say("done")


async def cannot_go_on(stop: Stop) -> None:
    raise DeploymentError("port 80 is taken")


async def cannot_go_on_twice(stop: Stop) -> None:
    async def fail(problem: str) -> None:
        raise BadRequest(problem)

    async with asyncio.TaskGroup() as tasks, asyncio.TaskGroup() as more:
        tasks.create_task(fail("one"))
        more.create_task(fail("another"))
        more.create_task(fail("one"))


async def has_a_bug(stop: Stop) -> None:
    raise ZeroDivisionError


async def has_a_child(stop: Stop) -> None:
    listing = 'import os; print(sorted(map(int, os.listdir("/proc/self/fd"))), "TENSORFERRY_TETHER" in os.environ)'
    say(subprocess.run([sys.executable, "-c", listing], close_fds=False, stdout=subprocess.PIPE, text=True).stdout)  # noqa: ASYNC221


lifecycle.ORPHAN_S = 0.5
behaviour = sys.argv[1]
tether = Tether.taken_from(os.environ)
sys.exit(run_process(globals()[behaviour], name="life-0", drain_s=0.5, cancel_s=0.5, tether=tether))
