"""Plain data that remembers where each key was given, and its strict decoding into structs.

What is wrong with a value is said in terms of the file it came from: file, line, key, the value as it was
spelled there, and what to write instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from tensorferry.codecs.errors import ConfigError

Keys = tuple[str | int, ...]  #: ("pool", "budget_mb"); positions in a list are numbers
T = TypeVar("T", bound=msgspec.Struct)

OVERRIDE = "--set"  #: stands where a file's name would, for what was given on the command line
SHOWN = 80  #: characters of a user's text that an error repeats

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a section of keys",
    "array": "a list",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was given, and how: a file and line (or `--set`), and its spelling ("" for a section or list)."""

    file: str
    line: int | None
    spelling: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A mapping, and the place of every key in it."""

    file: str
    data: dict[str, Any]
    places: Mapping[Keys, Place]

    def error(self, problem: str, *keys: Keys) -> ConfigError:
        """A complaint about the first of `keys` that was really given; what `--set` gave comes before the file's."""
        given = [one for one in keys if one in self.places]
        overrides = [one for one in given if self.places[one].file == OVERRIDE]
        blamed = [*overrides, *given, *keys][0]
        return ConfigError(*self._nearest(blamed), dotted(blamed), problem)

    def _nearest(self, keys: Keys) -> tuple[str, int | None]:
        """Where `keys` was given; for a default, the section around it, or the file as a whole."""
        while keys and keys not in self.places:
            keys = keys[:-1]
        return (self.places[keys].file, self.places[keys].line) if keys else (self.file, None)

    def shown(self, keys: Keys, value: Any) -> str:
        """The value at `keys` as an error repeats it: as it was spelled, and what that means where it may surprise."""
        if isinstance(value, list | dict):
            return _WORDS["array" if isinstance(value, list) else "object"]
        spelling = self.places[keys].spelling if keys in self.places else str(value)
        meaning = {str: " (text)", type(None): " (null)"}.get(type(value), "")
        return short(spelling) + meaning if spelling else "nothing"

    def decode(self, kind: type[T]) -> T:
        """The document as `kind`, strictly: no unknown keys, no conversions but int to float. Raises ConfigError."""
        return _Decoder(self, kind).struct(kind, self.data, ())


def dotted(keys: Keys) -> str:
    """`pool.budget_mb`: printable and of bounded length, whatever the file says."""
    return ".".join(short(str(key)) for key in keys)


def short(text: str) -> str:
    """A user's text, fit to be repeated in one line of an error."""
    text = text if len(text) <= SHOWN else text[:SHOWN] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Walks struct and data together, so that the path of a complaint is known and not parsed out of a message."""

    document: Document
    root: type[msgspec.Struct]

    def struct(self, kind: type[T], data: dict[str, Any], keys: Keys) -> T:
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        values = {}
        for key, value in data.items():
            here = (*keys, key)
            if key not in fields:
                problem = f"unknown key, given {self.document.shown(here, value)}; {self.suggestion(key, list(fields))}"
                raise self.document.error(problem, here)
            values[fields[key].name] = self.value(fields[key].type, value, here)
        for name, field in fields.items():
            if field.required and name not in data:
                raise self.document.error(f"missing; add `{name}: ...`", (*keys, name))
        return kind(**values)

    def value(self, kind: Any, value: Any, keys: Keys) -> Any:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            return self.struct(kind, value, keys)
        if get_origin(kind) is dict and isinstance(value, dict):
            inner = get_args(kind)[1]
            return {key: self.value(inner, one, (*keys, key)) for key, one in value.items()}
        try:
            return msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError as problem:
            wanted, remedy = _wanted(kind, value, str(problem))
            shown = self.document.shown(keys, value)
            raise self.document.error(f"expected {wanted}, got {shown}{remedy}", keys) from None

    def suggestion(self, key: str, known: list[str]) -> str:
        if near := difflib.get_close_matches(key, known, n=1):
            return f"did you mean `{near[0]}`?"
        if elsewhere := [dotted(keys) for keys in _known(self.root, ()) if keys[-1] == key]:
            return f"did you mean `{'` or `'.join(elsewhere)}`?"
        return f"known here: {', '.join(known)}"


def _known(kind: type[msgspec.Struct], keys: Keys) -> Iterator[Keys]:
    for field in msgspec.structs.fields(kind):
        yield (*keys, field.encode_name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _known(field.type, (*keys, field.encode_name))


def _wanted(kind: Any, value: Any, problem: str) -> tuple[str, str]:
    """What msgspec's complaint says it wanted, in our words, and the remedy ("" where that is plain)."""
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        near = difflib.get_close_matches(str(value), choices, n=1)
        return f"one of {', '.join(choices)}", f"; did you mean {near[0]}?" if near else ""
    expected = re.match(r"Expected `([^`]*)`([^,]*)", problem)
    if expected is None:  # a complaint of a kind that our structs cannot raise today
        return problem, ""
    names = expected[1].split(" | ")
    wanted = " or ".join(_WORDS.get(name, name) for name in names) + expected[2]
    return wanted, "" if ", got" not in problem else _remedy(names, value)


def _remedy(names: list[str], value: Any) -> str:
    if value is None:
        return "; give it a value or remove the key"
    if "str" in names and not isinstance(value, list | dict):
        return "; put it in quotes"
    if "bool" in names:
        return "; write true or false"
    if "int" in names and isinstance(value, float):
        return f"; write {int(value)}" if value.is_integer() else "; leave out the fraction"
    if "int" in names or "float" in names:
        return "; write plain decimal digits, without quotes, leading zeros, separators or units"
    return ""
