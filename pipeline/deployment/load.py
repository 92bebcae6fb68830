"""A deployment file, decoded once into the structs of `spec.py`. `load` is the only reader."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from tensorferry.codecs.errors import UNPLACED, ConfigError
from tensorferry.codecs.machine.transport import not_yet
from tensorferry.pipeline.deployment.checks import contradictions
from tensorferry.pipeline.deployment.document import OVERRIDE, Document
from tensorferry.pipeline.deployment.sglang_settings import Tell, migrated
from tensorferry.pipeline.deployment.spec import MIB, Deployment, encoder_pool_nbytes, ranks_of, tokenizer_pool_nbytes
from tensorferry.pipeline.deployment.yaml_file import apply_overrides, emit, read

#: Keys of a deployment file, such as `pool.budget_mb`, or `pool` for its whole section, and what raises ConfigError,
#: with key and problem, where they are wrong. It is not asked where one of them has another mistake: what it would say
#: might be a consequence of that. So it names no key that it does not read.
Check = tuple[tuple[str, ...], Callable[[Deployment], None]]


def load(
    path: Path | str,
    settings: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
    tell: Tell = lambda deprecation: None,
    checks: Sequence[Check] = (),
    largest_item_nbytes: Callable[[Deployment], int] = lambda deployment: 0,
) -> Deployment:
    """The deployment in a YAML file, with `KEY=VALUE` settings over it, checked as a whole, its paths absolute.

    environ: where deprecated variables are looked for (see `migration`); none by default.
    tell: hears of every deprecated setting that was found.
    checks: for what only the layers above know (is there such an adapter?).
    largest_item_nbytes: bytes of the largest pixel tensor that the deployment's processor makes of one item.
    Relative paths start at the file's folder; those given by a setting, at the current one.
    Raises ConfigError, which names all mistakes: each with file (or `--set`), line, key, value and remedy. Where the
    text is not YAML, it names the first place that is none.
    """
    document = migrated(apply_overrides(read(Path(path), lenient=True), settings), environ, tell)
    deployment = _with_paths(document, document.decode(Deployment, lenient=True))
    for problem, keys in contradictions(deployment, _processes(deployment)):
        if not any(map(document.is_faulty, keys)):
            document.blame(document.error(problem, *keys))

    def check_size(deployment: Deployment) -> None:
        nbytes, most_mb = largest_item_nbytes(deployment), deployment.limits.request_mb
        if nbytes > most_mb * MIB:
            raise document.error(
                f"the largest item has a pixel tensor of {nbytes} bytes, which the inline limit, limits.request_mb: "
                f"{most_mb}, cannot carry; raise limits.request_mb to {-(-nbytes // MIB)} or more, "
                "or allow fewer pixels in tokenizer.options",
                ("limits", "request_mb"),
                ("tokenizer", "options"),
            )

    for needed, check in (*checks, (("tokenizer.processor", "tokenizer.options", "limits"), check_size)):
        if not any(document.is_faulty(tuple(key.split("."))) for key in needed):
            with document.blaming():
                check(deployment)
    document.check()
    return deployment


def placed(problem: ConfigError, file: Path | str, settings: Sequence[str] = ()) -> ConfigError:
    """The error of one who knows the key and not the file, with file and line."""
    return apply_overrides(read(Path(file)), settings).placed(problem)


def require_available(deployment: Deployment) -> None:
    """Raise ConfigError for what is well-formed but comes with a later version of tensorferry."""
    if deployment.transport != "auto" and (later := not_yet(deployment.transport)) is not None:
        raise ConfigError(UNPLACED, None, "transport", str(later))
    if deployment.nodes > 1:
        problem = f"{deployment.nodes} nodes come with a later version; use 1 until then"
        raise ConfigError(UNPLACED, None, "nodes", problem)


def _processes(d: Deployment) -> int:
    return sum(ranks_of(d).values())


def _with_paths(document: Document, d: Deployment) -> Deployment:
    """The deployment with absolute paths, those that must exist checked; mistakes are noted in the document."""
    folder = Path(document.file).parent

    def blame(problem: str, *keys: str) -> None:
        document.blame(document.error(problem, keys), keys)

    def absolute(given: str | None, *keys: str) -> str | None:
        if given is None:
            return None
        if not given or given.startswith("~") or "\0" in given:
            blame(f"{given!a} is not a path; write it in full (~ is not expanded)", *keys)
            return None
        place = document.places[keys]
        return os.path.abspath(given if place.file == OVERRIDE else folder / given)

    path = absolute(d.model.path, "model", "path")
    vocabulary = absolute(d.tokenizer.vocabulary, "tokenizer", "vocabulary")
    if path is not None and not os.path.exists(path):
        blame(f"{path} does not exist; name a checkpoint directory or file", "model", "path")
    keys = absolute(d.security.keys, "security", "keys")
    if keys is not None and not os.path.isdir(keys):
        blame(f"{keys} is not a folder; `tensorferry keys new {keys}` makes it", "security", "keys")
    if vocabulary is not None and not os.path.isfile(vocabulary):
        blame(f"{vocabulary} is not a file; name a tokenizer.json", "tokenizer", "vocabulary")
    return msgspec.structs.replace(
        d,
        model=msgspec.structs.replace(d.model, path=path),
        tokenizer=msgspec.structs.replace(d.tokenizer, vocabulary=vocabulary),
        runtime_dir=absolute(d.runtime_dir, "runtime_dir"),
        security=msgspec.structs.replace(d.security, keys=keys),
        telemetry=msgspec.structs.replace(d.telemetry, record=absolute(d.telemetry.record, "telemetry", "record")),
    )


def resolved(deployment: Deployment) -> str:
    """Everything a deployment says, defaults included, as YAML that `load` takes back; shares are comments."""
    text = emit(msgspec.to_builtins(deployment))
    for pool, nbytes, sharer in (
        ("pool", tokenizer_pool_nbytes(deployment), "tokenizer worker"),
        ("embeddings_pool", encoder_pool_nbytes(deployment), "encoder rank"),
    ):
        share = f"per {sharer}: {nbytes // MIB} MiB" if nbytes else "not used: cpu sends everything inline"
        text = text.replace(f"\n{pool}:\n", f"\n{pool}:  # {share}\n", 1)
    return f"# {_processes(deployment)} processes; every key with the value it has\n{text}"
