"""What the registries of adapters and engines share: a class named in a deployment file, and its options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import msgspec

from tensorferry.codecs.errors import ConfigError

#: `package.module:Class`.
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)

Options = TypeVar("Options", bound=msgspec.Struct)


def bad_config(key: str, problem: str) -> ConfigError:
    """A ConfigError by one who knows the key but not the file; whoever holds the file may fill it in."""
    return ConfigError("deployment", None, key, problem)


def check_reference(key: str, reference: str, built_in: Mapping[str, object]) -> None:
    """Raise ConfigError naming `key` unless this is a built-in name or looks like `package.module:Class`."""
    if reference not in built_in and not _REFERENCE.fullmatch(reference):
        known = ", ".join(sorted(built_in))
        raise bad_config(key, f"unknown: {reference!r}; give one of {known}, or package.module:Class")


def require(key: str, name: str, package: str | None) -> None:
    """Raise ConfigError naming `key`, and what installs it, where a built-in needs a package that is not there."""
    if package and not find_spec(package):
        raise bad_config(key, f"{name} needs {package}; install it with: pip install 'tensorferry[hf]'")


def import_class(key: str, reference: str) -> type[Any]:
    """The class that `package.module:Class` names; the module must be importable (installed, or PYTHONPATH).

    This runs code of the user's choice: the reference comes from a deployment file, never from a message.
    Raises ConfigError naming `key`, with the module's own error as its cause.
    """
    module_name, _, class_name = reference.partition(":")
    try:
        module = import_module(module_name)
    except Exception as problem:  # the module's top level may raise anything
        reason = f"{type(problem).__name__}: {problem}"
        raise bad_config(key, f"cannot import {module_name} of {reference!r}: {reason}") from problem
    found = vars(module).get(class_name)
    if not isinstance(found, type):
        raise bad_config(key, f"{reference!r}: module {module_name} has no class {class_name}")
    return found


def read_options(key: str, owner: str, form: type[Options], given: Mapping[str, object]) -> Options:
    """The options of `owner`, checked against the struct `form`.

    key: where they stand in the deployment file, as in `model.options`. Raises ConfigError naming the option:
    unknown (with those that are known), of the wrong type or out of range, or, by a ValueError of the
    struct's `__post_init__`, at odds with another one.
    """
    fields = {field.name: field.type for field in msgspec.structs.fields(form)}
    for name, value in given.items():
        if name not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise bad_config(f"{key}.{name}", f"unknown option; {owner} has: {known}")
        try:
            msgspec.convert(value, fields[name])
        except msgspec.ValidationError as problem:
            raise bad_config(f"{key}.{name}", f"{problem}, not {value!r}") from None
    try:
        return msgspec.convert(given, form)
    except msgspec.ValidationError as problem:
        raise bad_config(key, str(problem)) from None
