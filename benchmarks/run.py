"""The command: run benchmarks, print their tables, and say which floors are met."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click
import msgspec

from benchmarks import batches, codec, cpu, curve, handover, leases, overhead, pacing, plan, traces
from benchmarks.results import FULL, QUICK, SMOKE, Outcome, Scale
from benchmarks.tables import table

BENCHMARKS: dict[str, Callable[[Scale], Outcome]] = {
    "64kib": handover.small,
    "8mib": handover.large,
    "36mib": handover.huge,
    "pipelined": handover.pipelined,
    "inline": handover.inline,
    "every-byte": handover.every_byte,
    "codec": codec.codec,
    "leases": leases.leases,
    "scan": leases.scan,
    "cpu": cpu.cpu,
    "curve-latency": curve.latency,
    "curve-rate": curve.rate,
    "overhead": overhead.overhead,
    "batches": batches.batches,
    "reading": traces.reading,
    "trace-memory": traces.memory,
    "pacing": pacing.pacing,
    "plan": plan.plan,
}


class Machine(msgspec.Struct, frozen=True):
    """Where and when: times of two machines cannot be compared, nor those of a busy and an idle one."""

    cpu: str
    cores: int
    kernel: str
    python: str
    versions: dict[str, str]
    utc: str
    load: float  #: processes that wanted a core in the last minute, before the run; ours not among them

    @classmethod
    def here(cls) -> Machine:
        models = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        return cls(
            cpu=models[0] if models else platform.machine(),
            cores=len(os.sched_getaffinity(0)),
            kernel=platform.release(),
            python=platform.python_version(),
            versions={name: version(name) for name in ("torch", "numpy", "pyzmq", "msgspec", "uvloop")},
            utc=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            load=os.getloadavg()[0],
        )


class Report(msgspec.Struct, frozen=True):
    machine: Machine
    outcomes: list[Outcome]


@click.command(help=__doc__)
@click.option("--only", type=click.Choice(list(BENCHMARKS)), multiple=True, help="Run this one; may be repeated.")
@click.option("--quick", is_flag=True, help="Fewer rounds: a fifth of the time, and less to be relied on.")
@click.option("--smoke", is_flag=True, help="Tiny sizes and one round: shows that it runs, measures nothing.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the numbers here too."
)
def main(only: tuple[str, ...], quick: bool, smoke: bool, json_file: Path | None) -> None:
    scale = SMOKE if smoke else QUICK if quick else FULL
    report = Report(Machine.here(), [])
    click.echo(f"{report.machine.cpu}, {report.machine.cores} cores, load {report.machine.load:.2f}\n")
    for name in only or BENCHMARKS:
        outcome = BENCHMARKS[name](scale)
        report.outcomes.append(outcome)
        click.echo(table(outcome))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


if __name__ == "__main__":
    main()
