"""What the tests of channels between processes share: messages, limits, and code for child processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable
from typing import Any

from tensorferry.codecs.frames import Limits
from tensorferry.codecs.messages import Heartbeat, Origin
from tensorferry.pipeline.channels.channels import (
    Received,
)

ME = Origin("encoder", 0, 7)
LIMITS = Limits(frames=8, header_nbytes=1 << 16, inline_nbytes=64 << 20)
DEADLINE_S = 6.0

PRELUDE = """
import asyncio, hashlib, os, sys, time, zmq
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.messages import Heartbeat, Origin
from tensorferry.codecs.errors import PeerBusy
from tensorferry.pipeline.channels.channels import *
ME = Origin("tokenizer", 0, 8)
LIMITS = Limits(frames=8, header_nbytes=1 << 16, inline_nbytes=64 << 20)
address = sys.argv[1]
"""

#: Receives until a Drain, then prints the numbers of all beats.
READER = """
async def main():
    def refuse(problem): raise problem
    with open_context() as context:
        inbox = Inbox(context, address, LIMITS, refuse)
        print("up", flush=True)
        beats = []
        async for received in inbox:
            if not isinstance(received.message, Heartbeat):
                break
            beats.append(received.message.in_flight)
        print(*beats)
        inbox.close()
asyncio.run(main())
"""


def beat(number: int) -> Heartbeat:
    return Heartbeat(ME, number)


async def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110  (what is waited for happens in ZeroMQ's threads)
            await asyncio.sleep(0)


async def receive_all(channel: Any, count: int) -> list[Received]:
    async with asyncio.timeout(DEADLINE_S):
        return [await channel.receive() for _ in range(count)]


def numbers(received: list[Received]) -> list[int]:
    return [it.message.in_flight for it in received if isinstance(it.message, Heartbeat)]


def descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(found)


async def heard(reader: subprocess.Popen[bytes]) -> list[int]:
    """What a READER heard, once it has ended."""
    output, _ = await asyncio.to_thread(reader.communicate, timeout=DEADLINE_S)
    return [int(number) for number in output.split()]
