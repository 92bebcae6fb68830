"""`tensorferry config`, and the way every command comes to its deployment: a file, and `--set` over it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tensorferry.codecs.errors import ConfigError, DeploymentError
from tensorferry.pipeline.config import Deployment, load, require_available, resolved
from tensorferry.pipeline.keys import ServerKeys
from tensorferry.pipeline.migration import Deprecation, Tell
from tensorferry.pipeline.spans import require_installed
from tensorferry.stages.adapters.registry import check_model, supports_cuda_vmm_feature_transport
from tensorferry.stages.engines.registry import check_engine
from tensorferry.stages.pairing import check_pairs
from tensorferry.stages.processors.registry import make_processor

F = TypeVar("F", bound=Callable[..., Any])

file_argument = click.argument("file", type=click.Path(path_type=Path))


def set_option(command: F) -> F:
    """Adds `--set KEY=VALUE`, repeatable; the command's parameter is `settings`."""
    return click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override one key of FILE, such as pool.budget_mb=512. Repeatable.",
    )(command)


def load_deployment(
    file: Path,
    settings: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = os.environ,
    tell: Tell = lambda deprecation: None,
    with_vocabulary: bool = False,
) -> Deployment:
    """The deployment of FILE with its settings, checked against the processors, adapters and engines there are.

    environ: where deprecated variables are read. tell: hears of every deprecated setting. with_vocabulary: read
    `tokenizer.vocabulary` too, which takes half a second for a large one; tokenizers find out anyway. Raises
    ConfigError; imports no torch.
    """
    check = _check_with_vocabulary if with_vocabulary else _check
    return load(file, settings, environ=environ, tell=tell, check=check, largest_item_nbytes=_largest_item_nbytes)


def _check(deployment: Deployment) -> None:
    check_model(deployment.model)
    check_engine(deployment.scheduler)
    check_pairs(deployment)
    if deployment.telemetry.otlp_endpoint is not None:
        require_installed()
    adapter = deployment.model.adapter
    if deployment.transport == "cuda_vmm" and not supports_cuda_vmm_feature_transport(adapter):
        problem = f"cuda_vmm needs a model that has opted in, and {adapter} has not; use cuda_ipc, shm, cpu or auto"
        raise ConfigError("deployment", None, "transport", problem)


def _check_with_vocabulary(deployment: Deployment) -> None:
    _check(deployment)
    from tensorferry.stages.processors.text import TextEncoder  # its library is slow to import, and seldom needed here

    TextEncoder.from_file(deployment.tokenizer.vocabulary)


def _largest_item_nbytes(deployment: Deployment) -> int:
    tokenizer = deployment.tokenizer
    return make_processor(tokenizer.processor, tokenizer.options, deployment.limits).largest_item_nbytes()


@click.group()
def command() -> None:
    """Check a deployment file, or show it with every default."""


@command.command()
@file_argument
@set_option
def check(file: Path, settings: tuple[str, ...]) -> None:
    """Say whether FILE is a sound deployment.

    Exit status 2 where it is not, with the file, line and key to blame.
    """
    notes: list[Deprecation] = []
    deployment = load_deployment(file, settings, tell=notes.append, with_vocabulary=True)
    click.echo(f"{click.format_filename(file)}: ok")
    for note in notes:
        click.echo(f"note: {note}")
    try:
        require_available(deployment)
    except ConfigError as later:
        click.echo(f"note: {later.key}: {later.problem}")
    if deployment.security.keys is not None:
        try:
            ServerKeys.read(deployment.security.keys)
        except DeploymentError as problem:  # a client's file, where that is all there is to be
            click.echo(f"note: security.keys: {problem}")


@command.command()
@file_argument
@set_option
def show(file: Path, settings: tuple[str, ...]) -> None:
    """Print FILE with every default filled in.

    What is printed is a deployment file itself, with absolute paths. Notes on deprecated settings go to standard error.
    """
    notes: list[Deprecation] = []
    click.echo(resolved(load_deployment(file, settings, tell=notes.append)), nl=False)
    for note in notes:
        click.echo(f"note: {note}", err=True)
