"""The `tensorferry` command finds the subcommand, and turns an error into a sentence and an exit status.

Exit status: 0 done; 2 wrong usage, deployment file or output path; 1 any other expected error. A command may have
further ones. A bug keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import click

from tensorferry import __version__
from tensorferry.codecs.errors import ConfigError, FerryError, OutputError, leaves

#: The subcommands in the order of their use. Each is a module of this package with a `command`. The sentences are
#: here so that `--help` need not import the modules.
COMMANDS = {
    "replay": "Replay a recorded TRACE through a deployment, and report.",
    "report": "Make the pages of a replay's --out folder again.",
    "compare": "Compare replays; repeats share a row with a confidence interval.",
    "sweep": "Replay a TRACE with each combination of settings, and compare.",
    "plan": "Say which pool.budget_mb a TRACE needs, without running it.",
    "trace": "Describe, convert and cut recorded traces.",
    "up": "Run a whole deployment under supervision.",
    "status": "Say which processes of a running deployment are ready.",
    "down": "Drain and stop a running deployment.",
    "top": "Watch a running deployment: rates, latencies, queues, pools.",
    "start": "Run one stage process of a deployment.",
    "submit": "Send one request to a running deployment.",
    "doctor": "Say which transports work here, and why the others do not.",
    "keys": "Make the keys of a networked deployment and of its clients.",
    "config": "Check a deployment file, or show it with every default.",
}


class Refusal(click.ClickException):
    """Expected errors, which end a command with one sentence each and exit status 1."""

    def __init__(self, *problems: BaseException) -> None:
        super().__init__("\n".join(dict.fromkeys(map(str, problems))))


class UsageRefusal(Refusal):
    """Such errors, at least one of which is a mistake in the deployment file or in an output path."""

    exit_code = 2


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn a FerryError, alone or in the groups of task groups, into one sentence. Other exceptions pass."""
    try:
        yield
    except FerryError as problem:
        raise _refusal(problem) from problem
    except ExceptionGroup as group:
        if group.split(FerryError)[1] is not None:  # one of them is a bug
            raise
        raise _refusal(*leaves(group)) from group


def _refusal(*problems: Exception) -> Refusal:
    blamed = any(isinstance(problem, ConfigError | OutputError) for problem in problems)
    return (UsageRefusal if blamed else Refusal)(*problems)


class _Commands(click.Group):
    """A group that imports a subcommand when it is used, so that no command waits for another one's imports."""

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
