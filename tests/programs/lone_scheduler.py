"""Scheduler rank 0 of a deployment file, whatever this machine can do: `lone_scheduler.py FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.process.run_process import Stop, run_process
from tensorferry.stages.scheduler import scheduler

deployment = load(Path(sys.argv[1]))


async def main(stop: Stop) -> None:
    await scheduler.main(deployment, 0, stop)


sys.exit(run_process(main, name="scheduler", drain_s=10.0))
