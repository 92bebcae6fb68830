"""`tensorferry config` checks a deployment; every command loads its deployment here: a file, and `--set` over it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from tensorferry.codecs.errors import UNPLACED, ConfigError, DeploymentError
from tensorferry.pipeline.channels.curve_keys import ServerKeys
from tensorferry.pipeline.deployment.load import Check, load, placed, require_available, resolved
from tensorferry.pipeline.deployment.sglang_settings import Deprecation, Tell
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.telemetry.span_exporter import require_installed
from tensorferry.stages.adapters.registry import (
    check_model,
    check_model_name,
    import_adapter,
    supports_cuda_vmm_feature_transport,
)
from tensorferry.stages.compatibility import check_pairs
from tensorferry.stages.engines.registry import check_engine, check_engine_name, import_engine
from tensorferry.stages.processors.registry import (
    check_processor,
    check_processor_name,
    import_processor,
    largest_item_nbytes,
)

F = TypeVar("F", bound=Callable[..., Any])

#: The keys that choose a processor, a model and an engine.
_PROCESSOR = ("tokenizer.processor", "tokenizer.options")
_MODEL = ("model.adapter", "model.path", "model.options")
_ENGINE = ("scheduler.engine", "scheduler.options")

file_argument = click.argument("file", type=click.Path(path_type=Path))
config_option = click.option(
    "--config", "file", required=True, type=click.Path(path_type=Path), help="The deployment file."
)


def set_option(command: F) -> F:
    """Add `--set KEY=VALUE`, which is repeatable, as the command's parameter `settings`."""
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
    plugins: bool = False,
    with_vocabulary: bool = False,
    more: Sequence[Check] = (),
) -> Deployment:
    """Load the deployment of FILE with its settings, and check that its processor, adapter and engine exist.

    environ: deprecated variables are read from it. tell: is called with every deprecated setting. plugins: import the
    plug-ins and ask them how large an item is, and whether the model has opted in to cuda_vmm. A command that starts
    nothing leaves it out, so that no code of a plug-in runs. with_vocabulary: read `tokenizer.vocabulary` too, which
    takes half a second for a large one; tokenizers read it anyway. more: further checks. Raises ConfigError, which
    names all mistakes. Imports no torch, unless a plug-in does.
    """
    checks: list[Check] = [
        # Names are checked apart from options, so that a wrong option hides no wrong name.
        (("tokenizer.processor",), lambda made: check_processor_name(made.tokenizer.processor)),
        (("model.adapter",), lambda made: check_model_name(made.model.adapter)),
        (("scheduler.engine",), lambda made: check_engine_name(made.scheduler.engine)),
        (_PROCESSOR, lambda made: check_processor(made.tokenizer.processor, made.tokenizer.options)),
        (("model.adapter", "model.options"), lambda made: check_model(made.model)),
        (_ENGINE, lambda made: check_engine(made.scheduler)),
        ((*_PROCESSOR, *_MODEL, *_ENGINE), check_pairs),
        (("telemetry.otlp_endpoint",), _check_spans),
        (("transport", "model.adapter"), partial(_check_opted_in, plugins=plugins)),
        *more,
    ]
    if with_vocabulary:
        checks.append((("tokenizer.vocabulary",), _check_vocabulary))
    sizes = partial(_largest_item_nbytes, plugins=plugins)
    return load(file, settings, environ=environ, tell=tell, checks=checks, largest_item_nbytes=sizes)


@contextmanager
def placing(file: Path, settings: Sequence[str]) -> Iterator[None]:
    """Add file and line to a ConfigError that the block raises with a key alone."""
    try:
        yield
    except ConfigError as problem:
        raise placed(problem, file, settings) from problem


def _check_spans(deployment: Deployment) -> None:
    if deployment.telemetry.otlp_endpoint is not None:
        require_installed()


def _check_opted_in(deployment: Deployment, plugins: bool) -> None:
    adapter = deployment.model.adapter
    if deployment.transport != "cuda_vmm" or (":" in adapter and not plugins):
        return
    if not supports_cuda_vmm_feature_transport(adapter):
        problem = f"cuda_vmm needs a model that has opted in, but {adapter} has not; use cuda_ipc, shm, cpu or auto"
        raise ConfigError(UNPLACED, None, "transport", problem)


def _check_vocabulary(deployment: Deployment) -> None:
    from tensorferry.stages.tokenizer.text import TextEncoder  # its library is slow to import, and seldom needed here

    TextEncoder.from_file(deployment.tokenizer.vocabulary)


def _largest_item_nbytes(deployment: Deployment, plugins: bool) -> int:
    tokenizer = deployment.tokenizer
    if ":" in tokenizer.processor and not plugins:
        return 0
    return largest_item_nbytes(tokenizer.processor, tokenizer.options, deployment.limits)


def _plugins_of(deployment: Deployment) -> dict[str, str]:
    """Return the plug-ins that a deployment names, by key."""
    named = {
        "tokenizer.processor": deployment.tokenizer.processor,
        "model.adapter": deployment.model.adapter,
        "scheduler.engine": deployment.scheduler.engine,
    }
    return {key: reference for key, reference in named.items() if ":" in reference}


#: The checks that import a plug-in. Each one runs even if another one fails.
_IMPORTS: tuple[Check, ...] = (
    (("tokenizer.processor",), lambda made: _import(made, "tokenizer.processor", import_processor)),
    (("model.adapter",), lambda made: _import(made, "model.adapter", import_adapter)),
    (("scheduler.engine",), lambda made: _import(made, "scheduler.engine", import_engine)),
)


def _import(deployment: Deployment, key: str, importer: Callable[[str], object]) -> None:
    if reference := _plugins_of(deployment).get(key):
        importer(reference)


@click.group()
def command() -> None:
    """Check a deployment file, or show it with every default."""


@command.command()
@file_argument
@set_option
@click.option("--no-import", is_flag=True, help="Do not import plug-ins, so that none of their code runs.")
def check(file: Path, settings: tuple[str, ...], no_import: bool) -> None:
    """Check the deployment in FILE. The plug-ins that it names (processor, adapter and engine) are imported.

    If it has mistakes, the exit status is 2, and each mistake is printed with its file, line and key.
    """
    notes: list[Deprecation] = []
    more = () if no_import else _IMPORTS
    deployment = load_deployment(
        file, settings, tell=notes.append, plugins=not no_import, with_vocabulary=True, more=more
    )
    click.echo(f"{click.format_filename(file)}: ok")
    if no_import and (named := _plugins_of(deployment)):
        them = ", ".join(f"{key}: {reference}" for key, reference in named.items())
        click.echo(f"note: --no-import: these plug-ins were not imported, so they were not checked: {them}")
    for note in notes:
        click.echo(f"note: {note}")
    try:
        require_available(deployment)
    except ConfigError as later:
        click.echo(f"note: {later.key}: {later.problem}")
    if deployment.security.keys is not None:
        try:
            ServerKeys.read(deployment.security.keys)
        except DeploymentError as problem:  # a client's machine need not have the deployment's own keys
            click.echo(f"note: security.keys: {problem}")


@command.command()
@file_argument
@set_option
def show(file: Path, settings: tuple[str, ...]) -> None:
    """Print FILE with every default filled in.

    The output is itself a deployment file, with absolute paths. Notes on deprecated settings go to standard error.
    """
    notes: list[Deprecation] = []
    click.echo(resolved(load_deployment(file, settings, tell=notes.append)), nl=False)
    for note in notes:
        click.echo(f"note: {note}", err=True)
