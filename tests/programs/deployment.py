"""A supervisor of stage processes that are none: `deployment.py RUNTIME_DIR JOURNAL BEHAVIOUR`."""

from __future__ import annotations

import sys
from pathlib import Path

from tensorferry.pipeline.deployment.spec import Deployment, EncoderSpec
from tensorferry.pipeline.process.run_process import Stop, run_process
from tensorferry.pipeline.process.supervisor import Supervisor

runtime_dir, journal, behaviour = sys.argv[1:]
deployment = Deployment(name="supervised", runtime_dir=runtime_dir, encoder=EncoderSpec(ranks=2))


def command(stage: str, rank: int) -> list[str]:
    program = Path(__file__).parent / "stage.py"
    return [sys.executable, str(program), behaviour, stage, str(rank), journal]


async def main(stop: Stop) -> None:
    async with Supervisor.running(deployment, Path("deployment.yaml"), command=command) as supervisor:
        stop.announce_ready()
        print(*supervisor.processes.values(), file=sys.stderr, flush=True)
        await stop.wait_draining()


sys.exit(run_process(main, name="up", drain_s=60.0))
