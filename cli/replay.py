"""`tensorferry replay` replays a recorded trace through a deployment, and reports."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
import structlog
from rich.console import Console

from tensorferry.cli.config import config_option, load_deployment, placing, set_option
from tensorferry.cli.outfile import OutFolder, make_place, overwrite_option, require_free_folder
from tensorferry.cli.output import console
from tensorferry.cli.report import say_pages, write_pages
from tensorferry.cli.running import as_running
from tensorferry.cli.tracefile import opened, parsed, reading_options, trace_argument, window_of, window_options
from tensorferry.cli.transport import load_to_run, settle
from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import require_available
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.supervisor import Supervisor
from tensorferry.pipeline.telemetry.logs import configure
from tensorferry.replay.results.machine import this_machine
from tensorferry.replay.results.out_folder import filled
from tensorferry.replay.results.report import print_plan, print_report, write_report
from tensorferry.replay.results.summary import Setup, drops_of, summarise
from tensorferry.replay.run.conversations import MODES, Mode, natural_mode
from tensorferry.replay.run.progress import preparing, replaying
from tensorferry.replay.run.schedule import Speed
from tensorferry.replay.run.sender import Replay
from tensorferry.replay.run.session import Session
from tensorferry.replay.trace.formats.token_counts import Keys
from tensorferry.replay.trace.loaded_trace import load
from tensorferry.replay.trace.trace_file import nothing_usable
from tensorferry.replay.trace.window import Moment
from tensorferry.replay.workload.image_models import image_model
from tensorferry.replay.workload.photos import load_photos
from tensorferry.replay.workload.prepare import UnusableSize, prepare
from tensorferry.replay.workload.token_ids import TokenSource
from tensorferry.stages.processors.base import BadMedia, Processor
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.tokenizer.text import TextEncoder

log = structlog.get_logger()


@click.command()
@trace_argument
@config_option
@set_option
@click.option(
    "--speed",
    metavar="X|max",
    callback=parsed(Speed.parse),
    default="1",
    show_default=True,
    help="2: twice as fast as recorded; max: as fast as the deployment accepts requests.",
)
@click.option(
    "--concurrency", type=click.IntRange(min=1), help="The most requests in flight. Others wait, and are counted."
)
@reading_options
@window_options
@click.option("--limit", type=click.IntRange(min=1), help="Read only so many rows from the start.")
@click.option(
    "--failures",
    type=click.Choice(["keep", "drop"]),
    default="keep",
    help="Keep or drop requests recorded without output.",
)
@click.option(
    "--image-model",
    "model",
    metavar="MODEL",
    default="modserve",
    show_default=True,
    help="The sizes of images that the trace only counts: modserve, coco, 640x480, a CSV of sizes, or another trace.",
)
@click.option(
    "--sessions",
    type=click.Choice(MODES),
    help="When later turns are due. clock: at their time; wait: at their time, but after the answer before; think: "
    "their think time after it. Default: think if the trace has delays, else clock.",
)
@click.option("--strict", is_flag=True, help="Refuse rows out of order; fail if sending fell behind its schedule.")
@click.option("--dry-run", is_flag=True, help="Prepare everything, print what would be sent, and start nothing.")
@click.option(
    "--media-root",
    "media_roots",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder, beside the trace's own, whose images the trace may name. Repeatable.",
)
@click.option(
    "--images",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder of photos for images that the trace lacks.",
)
@click.option("--out", type=OutFolder(), help="A new folder for report.html and its numbers.")
@overwrite_option
@click.option("--attach", is_flag=True, help="Use the running deployment instead of starting one.")
@click.pass_context
def command(
    ctx: click.Context,
    trace: Path,
    file: Path,
    settings: tuple[str, ...],
    speed: Speed,
    concurrency: int | None,
    rate: float | None,
    keys: Keys | None,
    seed: int,
    start: Moment | None,
    end: Moment | None,
    limit: int | None,
    failures: str,
    model: str,
    sessions: Mode | None,
    strict: bool,
    dry_run: bool,
    media_roots: tuple[Path, ...],
    images: Path | None,
    out: Path | None,
    overwrite: bool,
    attach: bool,
) -> None:
    """Replay the recorded TRACE through the deployment of a file, and report.

    With --attach, settings other than those of the running deployment are refused.

    Exit status: 0 all requests sent are ok; 3 some failed; 4 none is ok; 5 with --strict, the load was not the recorded
    one; 2 wrong usage; 1 the replay could not run.
    """
    window = window_of(start, end)
    if out is not None:
        require_free_folder(out, "summary.json", overwrite=overwrite)
    elif overwrite:
        raise click.UsageError("--overwrite replaces the folder of --out; give --out too", ctx)
    deployment = load_deployment(file, settings)
    if attach:
        require_available(deployment)
        configure(deployment.telemetry)
        if (running := as_running(deployment, file, settings)) is not None:
            deployment = running
        elif deployment.transport == "auto":  # its starter has decided by the same machine
            deployment = settle(deployment)
    else:
        if deployment.telemetry.log_level == "info" and not _says_log_level(settings):
            settings = (*settings, "telemetry.log_level=warning")  # a line per request and stage drowns the progress
        deployment, settings = load_to_run(file, settings)
    try:
        sizes = image_model(model, seed)
    except ValueError as problem:
        raise click.BadParameter(str(problem), ctx, param_hint="--image-model") from None
    recording = opened(trace, rate, keys, seed, scheduled=speed.ratio is not None)
    recorded = load(recording, window=window, limit=limit, failures=failures == "keep", strict=strict)
    with placing(file, settings):
        text = TextEncoder.from_file(deployment.tokenizer.vocabulary)
        tokenizer = deployment.tokenizer
        sizer = Sizer(make_processor(tokenizer.processor, tokenizer.options, deployment.limits))
    tokens = TokenSource(text.size, text.special_ids(), seed)
    if concurrency is None and speed.ratio is None:
        concurrency = deployment.tokenizer.workers * deployment.limits.in_flight_requests
    setup = Setup(
        deployment=deployment.name,
        transport=deployment.transport,
        speed=speed,
        seed=seed,
        concurrency=concurrency,
        limit=limit,
        strict=strict,
        pooled_from_nbytes=None if deployment.transport == "cpu" else deployment.pool.inline_below_kb << 10,
        command=("tensorferry", *sys.argv[1:]),
        config=msgspec.to_builtins(deployment),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=this_machine(),
    )
    stderr = Console(stderr=True)
    with preparing(stderr) as progress:
        photos = load_photos(images)
        prepared = prepare(
            recorded, photos, sizer, tokens, seed=seed, model=sizes, progress=progress, roots=media_roots
        )
    replay = Replay(
        prepared.requests,
        tokens,
        speed,
        concurrency=concurrency,
        deadline_s=deployment.limits.request_timeout_s,
        run_id=secrets.token_bytes(8) if attach else b"%d" % seed,
        sessions=sessions or natural_mode(recorded.requests),
    )
    if dry_run:
        if not prepared.requests:
            drops = drops_of(recorded, prepared, replay)
            reasons = Counter(drop.reason for drop in drops)
            raise TraceError(str(trace), None, nothing_usable(recorded.read, reasons, drops))
        plan = summarise(recorded, prepared, replay, setup)
        print_plan(console(), plan)
        if out is not None:
            make_place(out)
            with filled(out, "summary.json", overwrite=overwrite) as folder:
                write_report(folder, plan, (), drops_of(recorded, prepared, replay), 0)
            click.echo(f"wrote the plan to {click.format_filename(out)}; nothing was started")
        return
    if out is not None:
        make_place(out)  # before the run, so that a wrong path does not cost the report
    session = Session(replay)
    try:
        if prepared.requests:
            if not attach:
                stderr.print(f"starting {deployment.name}", highlight=False, markup=False)
            with replaying(stderr) as watch:
                connected = _connected(deployment, file, settings, attach)
                heartbeat_s = deployment.timeouts.heartbeat_s
                asyncio.run(session.carry_out(connected, heartbeat_s=heartbeat_s, watch=watch))
    finally:
        if replay.start_ns or not prepared.requests:
            summary = summarise(recorded, prepared, replay, setup, pools=session.pools, error=session.error)
            drops = drops_of(recorded, prepared, replay)
            print_report(console(), summary)
            if out is not None:
                with filled(out, "summary.json", overwrite=overwrite) as folder:
                    write_report(folder, summary, replay.outcomes, drops, replay.start_ns, session.sampler.samples)
                    has_page = write_pages(folder)
                say_pages(out, has_page=has_page)
    ctx.exit(summary.exit_status)


def _says_log_level(settings: Sequence[str]) -> bool:
    return any(setting.partition("=")[0].strip() == "telemetry.log_level" for setting in settings)


@asynccontextmanager
async def _connected(
    deployment: Deployment, file: Path, settings: Sequence[str], attach: bool
) -> AsyncIterator[Client]:
    """Connect a client to the deployment, which is started unless `attach` is set. Raises ConfigError if a running
    deployment has other settings."""
    async with AsyncExitStack() as undo:
        if not attach:
            await undo.enter_async_context(Supervisor.running(deployment, file, settings))
        client = await undo.enter_async_context(Client.connect(deployment, timeout_s=deployment.timeouts.start_s))
        if attach and as_running(deployment, file, settings) is None:  # asked again: it may have been started meanwhile
            log.warning("settings_not_compared", reason="the deployment has left no settings on this machine")
        yield client


class Sizer:
    """The part of a deployment's processor that a replay may use."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor

    def rows_for(self, width: int, height: int) -> int:
        try:
            return self._processor.rows_for(width, height)
        except BadMedia as problem:
            raise UnusableSize(str(problem)) from None

    def size_for(self, rows: int, aspect: float) -> tuple[int, int]:
        try:
            return self._processor.size_for(rows, aspect)
        except BadMedia as problem:
            raise UnusableSize(str(problem)) from None
