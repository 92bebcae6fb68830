"""What bursts leave in memory: `python -m benchmarks.probes.bursts`, three minutes.

The deployment of `benchmarks.soak` under bursts of as many requests as may be in flight, with a few others in between.
Of every process, after each tenth of them, the memory that it has to itself, MiB. With the variable
`MALLOC_TRIM_THRESHOLD_=131072` glibc gives back what is free.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import click
import psutil

from benchmarks.soak import DEPLOYMENT, Soak
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.process.supervisor import Supervisor, start_command

CALM_S = 0.3  #: between two bursts


def _own_mib(process: psutil.Process) -> float:
    memory = process.memory_info()
    return float(memory.rss - memory.shared) / (1 << 20)


async def _bursts(count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        file = Path(folder) / "bursts.yaml"
        file.write_text(DEPLOYMENT.format(folder=folder, transport="shm"))
        deployment = load(file)
        async with (
            Supervisor.running(deployment, file, command=start_command(file, ())) as supervisor,
            Client.connect(deployment) as client,
        ):
            asked = Soak(client, seed=0)
            processes = {f"{stage}-{rank}": psutil.Process(pid) for (stage, rank), pid in supervisor.processes.items()}
            for number in range(count + 1):
                if number % max(1, count // 10) == 0:
                    row = (f"{name} {_own_mib(process):5.1f}" for name, process in processes.items())
                    click.echo(f"{number:5d} bursts: {', '.join(row)}; busy {asked.busy}")
                async with asyncio.TaskGroup() as burst:
                    for _ in range(deployment.limits.in_flight_requests):
                        burst.create_task(asked.request())
                await asked.capacity(CALM_S)


@click.command(help=__doc__)
@click.option("--count", type=click.IntRange(min=1), default=240, show_default=True)
def main(count: int) -> None:
    asyncio.run(_bursts(count))


if __name__ == "__main__":
    main()
