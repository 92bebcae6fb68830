"""`tensorferry up` runs a whole deployment until it is stopped."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tensorferry.cli.config import config_option, set_option
from tensorferry.cli.transport import load_to_run
from tensorferry.pipeline.deployment.spec import ranks_of
from tensorferry.pipeline.process.child import KILL_S
from tensorferry.pipeline.process.run_process import Stop, run_process
from tensorferry.pipeline.process.supervisor import CANCEL_S, Supervisor


@click.command()
@config_option
@set_option
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Record the live traffic in this file, as a trace.",
)
@click.option("--record-media", is_flag=True, help="Record text and images too; otherwise only their sizes.")
@click.pass_context
def command(ctx: click.Context, file: Path, settings: tuple[str, ...], record: Path | None, record_media: bool) -> None:
    """Run the deployment of a file under supervision.

    The first Ctrl-C (SIGINT, SIGTERM) drains it, a second one cancels it. Exit status: 0 drained; 1 it could not
    start, a stage died, or it did not drain within timeouts.drain_s; 130 cancelled; 2 wrong usage or deployment file.
    """
    if record is not None:
        # JSON is YAML too, and quotes any path correctly.
        settings = (*settings, f"telemetry.record={json.dumps(str(record.absolute()))}")
        settings = (*settings, f"telemetry.record_media={json.dumps(record_media)}")
    elif record_media:
        raise click.UsageError("--record-media adds media to the file of --record; give --record too", ctx)
    deployment, settings = load_to_run(file, settings, stage="supervisor")

    async def main(stop: Stop) -> None:
        async with Supervisor.running(deployment, file, settings):
            stop.announce_ready()
            stages = ", ".join(f"{ranks} {stage}" for stage, ranks in ranks_of(deployment).items())
            click.echo(f"{deployment.name} is ready ({stages}); Ctrl-C drains and stops it")
            await stop.wait_draining()

    stop_s = CANCEL_S + KILL_S
    drain_s = deployment.timeouts.drain_s + stop_s  # the supervisor enforces timeouts.drain_s itself
    ctx.exit(run_process(main, name="tensorferry up", drain_s=drain_s, cancel_s=stop_s))
