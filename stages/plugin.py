"""Loads a class that a deployment file names, and checks its options: for all registries."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from traceback import extract_tb
from types import FrameType
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from tensorferry.codecs.errors import UNPLACED, ConfigError, all_of, text_of

#: `package.module:Class`.
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)

Options = TypeVar("Options", bound=msgspec.Struct)


def bad_config(key: str, problem: str) -> ConfigError:
    """A ConfigError for a key whose file is not known here; a caller that knows the file adds it."""
    return ConfigError(UNPLACED, None, key, problem)


def check_reference(key: str, reference: str, built_in: Mapping[str, object]) -> None:
    """Raise ConfigError naming `key` unless this is a built-in name or looks like `package.module:Class`."""
    if reference not in built_in and not _REFERENCE.fullmatch(reference):
        known = ", ".join(sorted(built_in))
        raise bad_config(key, f"unknown: {reference!r}; give one of {known}, or package.module:Class")


def require(key: str, name: str, package: str | None) -> None:
    """Raise ConfigError that names `key` and the command to install a package which a built-in needs and lacks."""
    if package and not find_spec(package):
        raise bad_config(key, f"{name} needs {package}; install it with: pip install 'tensorferry[hf]'")


def import_class(key: str, reference: str) -> type[Any]:
    """The class that `package.module:Class` names; the module must be importable (installed, or PYTHONPATH).

    This runs code of the user's choice: the reference comes from a deployment file, never from a message.
    Raises ConfigError naming `key`, with the module's own error as its cause.
    """
    module_name, _, class_name = reference.partition(":")
    with blamed(key, f"cannot import {module_name} of {reference!r}"):
        module = import_module(module_name)
    found = vars(module).get(class_name)
    if not isinstance(found, type):
        raise bad_config(key, f"{reference!r}: module {module_name} has no class {class_name}")
    return found


@contextmanager
def blamed(key: str, what: str, *, unless: bool = False) -> Iterator[None]:
    """Turn every exception of a plug-in inside the block into a ConfigError that names `key`: `what: KeyError: 'x'`.

    Also what is no Exception, such as SystemExit. A ConfigError of this file's keys passes: it says more. The user's
    Ctrl-C passes too, but not a KeyboardInterrupt that the plug-in raises.
    unless: of what is built in, a bug keeps its traceback.
    """
    interrupts: list[int] = []
    try:
        with _counting_interrupts(interrupts):
            yield
    except BaseException as problem:  # a plug-in may raise anything
        if isinstance(problem, KeyboardInterrupt) and interrupts:
            raise
        if unless or (isinstance(problem, ConfigError) and all(one.file == UNPLACED for one in problem.each)):
            raise
        text, name = " ".join(text_of(problem, 500).split()), " ".join(type(problem).__name__.split())
        reason = f"{name}: {text}" if text else name
        raise bad_config(key, f"{what}: {reason}{_place(problem)}") from problem


@contextmanager
def _counting_interrupts(interrupts: list[int]) -> Iterator[None]:
    """Append each SIGINT that this process gets within the block, and handle it as before.

    A handler runs, and raises KeyboardInterrupt, in the main thread alone: in another thread there is none to count.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def count(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        handler(number, frame)

    signal.signal(signal.SIGINT, count)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is count:  # else the plug-in has set its own
            signal.signal(signal.SIGINT, handler)


def _place(problem: BaseException) -> str:
    """Where it was raised, for the plug-in's author; "" if the text says so, or if it was raised here."""
    frames = [frame for frame in extract_tb(problem.__traceback__) if not frame.filename.startswith("<frozen")]
    if isinstance(problem, SyntaxError) or not frames or frames[-1].filename == __file__:
        return ""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})"


def read_options(key: str, owner: str, form: type[Options], given: Mapping[str, object]) -> Options:
    """The options of `owner`, checked against the struct `form`.

    key: of the options in the deployment file, as in `model.options`. Raises ConfigError that names each wrong option:
    it is unknown (the known ones are listed), of the wrong type, out of range, or contradicts another option (a
    ValueError of the struct's `__post_init__`).
    """
    fields = {field.name: field.type for field in msgspec.structs.fields(form)}
    mistakes = []
    for name, value in given.items():
        if name not in fields:
            known = ", ".join(sorted(fields)) or "none"
            mistakes.append(bad_config(f"{key}.{name}", f"unknown option, given {value!r}; {owner} has: {known}"))
            continue
        try:
            msgspec.convert(value, fields[name])
        except msgspec.ValidationError as problem:
            wanted = f"expected one of {', '.join(map(str, get_args(fields[name])))}"
            said = wanted if get_origin(fields[name]) is Literal else str(problem)
            mistakes.append(bad_config(f"{key}.{name}", f"{said}, not {value!r}"))
    if mistakes:
        raise all_of(mistakes)
    try:
        return msgspec.convert(given, form)
    except msgspec.ValidationError as problem:
        raise bad_config(key, str(problem)) from None
