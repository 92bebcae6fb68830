"""`tensorferry submit` sends one request to a running deployment, for a first try by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tensorferry.cli.config import config_option, load_deployment, set_option
from tensorferry.cli.running import as_running
from tensorferry.cli.values import InFile, Real, Words
from tensorferry.codecs.errors import BadRequest
from tensorferry.codecs.messages import MAX_OUTPUT_TOKENS, Busy, Failed, Result
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.client.prompt_parts import Image, Part, Video
from tensorferry.pipeline.deployment.spec import Deployment

NOT_SERVED = 3
#: Each option that adds a part to the prompt -> the type of that part.
PARTS: dict[str, Callable[[Any], Part]] = {"text": str, "image": Image, "video": Video}


class InOrder(click.Command):
    """A command that keeps the order of --text, --image and --video: `ctx.meta["parts"]` names each in turn.

    click collects a repeatable option's values in one tuple per option, and a prompt is one sequence.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        ctx.meta["parts"] = [parameter.name for parameter in order if parameter.name in PARTS]
        return super().parse_args(ctx, args)


@click.command(cls=InOrder)
@config_option
@set_option
@click.option("--image", multiple=True, type=InFile(), help="An image file. Repeatable.")
@click.option("--video", multiple=True, type=InFile(), help="An animated file. Repeatable.")
@click.option("--text", multiple=True, type=Words(), help="Text of the prompt. Repeatable.")
@click.option(
    "--output-tokens",
    type=click.IntRange(0, MAX_OUTPUT_TOKENS),
    default=16,
    show_default=True,
    help="Tokens to generate.",
)
@click.option("--timeout", "timeout_s", type=Real(0.001, 1e6), default=30.0, show_default=True, help="Seconds to wait.")
@click.pass_context
def command(
    ctx: click.Context,
    file: Path,
    settings: tuple[str, ...],
    image: tuple[Path, ...],
    video: tuple[Path, ...],
    text: tuple[str, ...],
    output_tokens: int,
    timeout_s: float,
) -> None:
    """Send one request to the running deployment of a file. It has the --image, --video and --text in the given order.

    Exit status: 0 served; 3 failed or busy; 2 wrong usage, or settings other than those of the running deployment; 1 no
    deployment is ready.
    """
    given = {"text": iter(text), "image": iter(image), "video": iter(video)}
    parts = [PARTS[name](next(given[name])) for name in ctx.meta["parts"]]
    if not parts:
        raise click.UsageError("nothing to send: give at least one --image, --video or --text")
    deployment = load_deployment(file, settings)
    deployment = as_running(deployment, file, settings) or deployment
    try:
        outcome = asyncio.run(_submit(deployment, parts, output_tokens, timeout_s))
    except BadRequest as problem:  # for example, a file that is too large
        raise click.UsageError(str(problem), ctx) from None
    console = Console()
    match outcome:
        case Result():
            console.print(_table(outcome))
        case Failed(failure=failure):
            console.print(f"failed: {failure.kind}: {failure.problem}", markup=False, highlight=False)
        case Busy():
            console.print(f"busy: {outcome.reason}; try again in {outcome.retry_ms} ms", markup=False, highlight=False)
    ctx.exit(0 if isinstance(outcome, Result) else NOT_SERVED)


async def _submit(
    deployment: Deployment, parts: Sequence[Part], output_tokens: int, timeout_s: float
) -> Result | Failed | Busy:
    deadline_s = min(timeout_s, deployment.limits.request_timeout_s)
    async with Client.connect(deployment, timeout_s=timeout_s) as client:
        return await client.submit(parts, output_tokens=output_tokens, deadline_s=deadline_s)


def _table(result: Result) -> Table:
    """Make the table of a request's items, titled with its tokens and its duration."""
    marks = sorted(mark.at_ns for mark in result.marks)
    took = f", {(marks[-1] - marks[0]) / 1e6:.1f} ms" if marks else ""
    title = f"{result.prompt_tokens} tokens in, {result.output_tokens} out{took}"
    heads = ("item", "grid", "embeddings", "encoder", "travelled by", "bytes", "digest")
    table = Table(*heads, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for index, item in enumerate(result.items):
        grid = " x ".join(map(str, item.grid))
        numbers = (str(index), grid, str(item.rows), str(item.rank), item.transport, str(item.nbytes))
        table.add_row(*numbers, item.digest.hex()[:12] or "-")
    return table
