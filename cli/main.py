"""The `tensorferry` command: finds the subcommand, and turns what went wrong into a sentence and an exit status.

Exit status: 0 done, 2 wrong usage, deployment file or place for a file, 1 anything else a user can be told about; a
command may have more of its own. A bug keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import click

from tensorferry import __version__
from tensorferry.codecs.errors import ConfigError, FerryError, OutputError

#: The subcommands in the order of their use, each a module of this package that has a `command`. The sentence
#: stands here so that `--help` need not import them all.
COMMANDS = {
    "replay": "Replay a recorded TRACE through a deployment and report.",
    "report": "Make the pages of a replay's --out folder again.",
    "compare": "Compare replays, repeats put together, with confidence intervals.",
    "sweep": "Replay a TRACE with every combination of settings, and compare.",
    "plan": "Say which pool.budget_mb a TRACE needs, without running it.",
    "trace": "Describe, convert and cut recorded traces.",
    "up": "Run a whole deployment under supervision.",
    "status": "Say who of a running deployment is ready, and who is not.",
    "down": "Drain and stop a running deployment.",
    "top": "Watch a running deployment: rates, latencies, queues, pools.",
    "start": "Run one stage process of a deployment.",
    "submit": "Send one request to a running deployment.",
    "doctor": "Say which transports would work here, and why others would not.",
    "keys": "Make the keys of a deployment on a network, and of its clients.",
    "config": "Check a deployment file, or show it with every default.",
}


class Refusal(click.ClickException):
    """Errors that the user can be told about, as the last word of a command. Exit status 1."""

    def __init__(self, *problems: BaseException) -> None:
        super().__init__("\n".join(dict.fromkeys(map(str, problems))))


class UsageRefusal(Refusal):
    """Among them one that the user's deployment file, or the place named for a file, is to blame for."""

    exit_code = 2


@contextmanager
def friendly_errors() -> Iterator[None]:
    """FerryError, alone or in the groups that task groups make, becomes one sentence; all else passes."""
    try:
        yield
    except FerryError as problem:
        raise _refusal(problem) from problem
    except ExceptionGroup as group:
        if group.split(FerryError)[1] is not None:  # a bug is among them
            raise
        raise _refusal(*_leaves(group)) from group


def _refusal(*problems: Exception) -> Refusal:
    blamed = any(isinstance(problem, ConfigError | OutputError) for problem in problems)
    return (UsageRefusal if blamed else Refusal)(*problems)


def _leaves(group: ExceptionGroup[Exception]) -> Iterator[Exception]:
    for problem in group.exceptions:
        if isinstance(problem, ExceptionGroup):
            yield from _leaves(problem)
        else:
            yield problem


class _Commands(click.Group):
    """Imports a subcommand when it is asked for, so that no command waits for another one's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"tensorferry.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        with friendly_errors():
            return super().invoke(ctx)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tensorferry")
def main() -> None:
    """Ferry tensors between the stages of a vision-language server."""
