"""`tensorferry start` runs one process of a deployment."""

from __future__ import annotations

import gc
import os
from importlib import import_module
from pathlib import Path

import click

from tensorferry.cli.config import config_option, load_deployment, placing, set_option
from tensorferry.cli.transport import load_to_run, settle
from tensorferry.codecs.errors import ConfigError
from tensorferry.pipeline.deployment.load import require_available
from tensorferry.pipeline.deployment.spec import ranks_of
from tensorferry.pipeline.process.run_process import Stop, run_process
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.supervisor import DRAIN_ORDER, digest
from tensorferry.pipeline.process.tether import Tether
from tensorferry.pipeline.telemetry import logs


@click.command()
@click.argument("stage", type=click.Choice(DRAIN_ORDER))
@click.option("--rank", type=int, default=0, show_default=True, help="The rank of the process in its stage.")
@config_option
@set_option
@click.pass_context
def command(ctx: click.Context, stage: str, rank: int, file: Path, settings: tuple[str, ...]) -> None:
    """Run one process of a deployment. The processes may be started in any order.

    The first SIGINT or SIGTERM drains it, a second one cancels it. Exit status: 0 drained; 1 failed, or not drained
    within timeouts.drain_s; 130 cancelled; 2 wrong usage or deployment file.
    """
    tether = Tether.taken_from(os.environ)
    if tether is not None:
        tether.hold()
    if tether is None:
        deployment, _ = load_to_run(file, settings, stage=stage, rank=rank)
    else:  # the supervisor has decided and logged the transport
        deployment = load_deployment(file, settings)
        with placing(file, settings):
            require_available(deployment)
        logs.configure(deployment.telemetry, stage=stage, rank=rank)
    ranks = ranks_of(deployment)[stage]
    if not 0 <= rank < ranks:
        raise click.BadParameter(
            f"{rank} is not one of the {stage} ranks of {click.format_filename(file)}, which are 0 to {ranks - 1}",
            param_hint="--rank",
        )
    if tether is not None and tether.deployment != digest(deployment):
        problem = "it was changed while the deployment was starting; start the deployment again"
        raise ConfigError(str(file), None, "", problem)
    if deployment.transport == "auto":  # another program supervises this process and has decided nothing
        deployment = settle(deployment)
    main = import_module(f"tensorferry.stages.{stage}.{stage}").main

    async def run(stop: Stop) -> None:
        with placing(file, settings):  # errors that a processor, adapter or engine raises for its options and files
            await main(deployment, rank, stop)

    status = run_process(
        run,
        name=f"{stage}-{rank}",
        drain_s=deployment.timeouts.drain_s,
        tether=tether,
        on_orphaned=Runtime.of(deployment).sweep,
    )
    gc.disable()  # else the interpreter walks over all objects as it ends: half a second where torch is loaded
    gc.freeze()
    ctx.exit(status)
