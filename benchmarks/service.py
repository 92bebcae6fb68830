"""A service in a process of its own that answers every request after a time that is known beforehand: what a replay
says of latency and lateness can be held against it.

`python -m benchmarks.service FILE SERVICE_MS [STALL_FROM STALL_MS]`: the front door of the deployment of FILE. From its
request number STALL_FROM on (counted from 0) it reads nothing for STALL_MS, once.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.frames import Limits
from tensorferry.pipeline.channels.channels import FrontDoor, open_context
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.runtime_dir import Runtime

DEPLOYMENT = """
name: service
transport: cpu
runtime_dir: {folder}/run
tokenizer: {{workers: 1}}
"""
_STOP_S = 10.0


@contextmanager
def serving(folder: Path, service_ms: float, *stall: float) -> Iterator[Deployment]:
    """The deployment, with its only process running. stall: STALL_FROM and STALL_MS."""
    file = folder / "service.yaml"
    file.write_text(DEPLOYMENT.format(folder=folder), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.service", str(file), *map(str, (service_ms, *stall))]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        assert service.stdin is not None
        if b"ready" not in service.stdout.readline():
            raise RuntimeError("the service did not start")
        try:
            yield load(file)
        finally:
            service.stdin.close()  # the end of its input is the end of the service
            service.wait(_STOP_S)


async def _serve(deployment: Deployment, service_s: float, stall_from: int, stall_s: float) -> None:
    runtime = Runtime.of(deployment)
    runtime.prepare()
    origin = wire.Origin("tokenizer", 0, 1)
    members = wire.Members(origin, True, (wire.Member("tokenizer", 0, 1, "ready"),))
    loop = asyncio.get_running_loop()
    limits = Limits(inline_nbytes=deployment.limits.request_mb << 20)
    requests = 0
    with open_context() as context:
        door = FrontDoor(context, runtime.front_door(0), limits, _refused)
        task = asyncio.current_task()
        assert task is not None
        loop.add_reader(sys.stdin.fileno(), _until_end, task)
        print("ready", flush=True)
        try:
            async for received in door:
                match received.message:
                    case wire.Hello():
                        door.send_nowait(received.peer, members)
                    case wire.Submit(request=request, output_tokens=output):
                        result = wire.Result(request, 0, 0, output, (), ())
                        loop.call_later(service_s, door.send_nowait, received.peer, result)
                        if requests == stall_from:
                            time.sleep(stall_s)  # noqa: ASYNC251  # nothing is read: that is what a stall is
                        requests += 1
                    case _:
                        pass
        except asyncio.CancelledError:
            pass
        finally:
            door.close()


def _until_end(task: asyncio.Task[None]) -> None:
    if not os.read(sys.stdin.fileno(), 1):
        task.cancel()


def _refused(problem: BadMessage) -> None:
    raise AssertionError(problem)


def main(file: str, service_ms: str, stall_from: str = "-1", stall_ms: str = "0") -> None:
    deployment = load(Path(file))
    asyncio.run(_serve(deployment, float(service_ms) / 1e3, int(float(stall_from)), float(stall_ms) / 1e3))


if __name__ == "__main__":
    main(*sys.argv[1:])
