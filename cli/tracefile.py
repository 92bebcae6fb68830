"""The options that say how a trace is read. All commands that take a TRACE share them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tensorferry.cli.values import Real
from tensorferry.codecs.errors import TraceError
from tensorferry.replay.trace.formats.token_counts import Keys, keys_of
from tensorferry.replay.trace.trace_file import Recording
from tensorferry.replay.trace.window import Moment, Window

_Command = TypeVar("_Command", bound=Callable[..., Any])


def parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Make the callback of an option whose text `parse` reads. Its ValueError becomes a BadParameter."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as problem:
            raise click.BadParameter(str(problem), ctx, param) from None

    return callback


class TracePath(click.Path):
    """A trace: a file, or a folder of its parts."""

    def __init__(self) -> None:
        super().__init__(exists=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail(
                "a trace is read twice, so it cannot be the standard input; name a file (./- names one)", param, ctx
            )
        return super().convert(value, param, ctx)


def trace_argument(command: _Command) -> _Command:
    """Add the argument TRACE, a `TracePath`."""
    return click.argument("trace", type=TracePath())(command)


def reading_options(command: _Command) -> _Command:
    """Add --rate, --keys and --seed, which `opened` takes."""
    options = (
        click.option(
            "--rate",
            type=Real(1e-6, 1e9),
            help="Requests a second, evenly spaced, for a trace that has no times.",
        ),
        click.option(
            "--keys",
            metavar="NAME=KEY,...",
            callback=parsed(keys_of),
            help="Read JSON lines by these keys: time=t,prompt=in,output=out,blocks=h,unit=ms,block_tokens=16. "
            "time= and unit= alone name the time field of a trace of any format.",
        ),
        click.option(
            "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The seed of all that is invented."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def window_options(command: _Command) -> _Command:
    """Add --start and --end, each a `Moment` or None."""
    for name, meaning in (("--end", "Stop before this time."), ("--start", "Start at this time of the trace.")):
        text = f"{meaning} A date, or a time after the first request: 90, 90s, 1h30m, 250ms."
        command = click.option(name, metavar="TIME", callback=parsed(Moment.parse), help=text)(command)
    return command


def window_of(start: Moment | None, end: Moment | None) -> Window:
    """Return the window between two times. Raises click.BadParameter if it ends before it starts."""
    if start is not None and end is not None and start.absolute == end.absolute and end.ns <= start.ns:
        raise click.BadParameter("it must be after --start", param_hint="--end")
    return Window(start, end)


def opened(trace: Path, rate: float | None, keys: Keys | None, seed: int, *, scheduled: bool = True) -> Recording:
    """Open the recording behind a TRACE. scheduled: it must have times.

    Raises TraceError.
    """
    recording = Recording(trace, rate=rate, keys=keys, seed=seed)
    if scheduled and not recording.scheduled:
        problem = f"the trace (format {recording.name}) has an order but no times; give it times with "
        problem += "--rate, or name the field that has them: --keys time=FIELD,unit=s"
        raise TraceError(str(trace), None, problem)
    return recording
