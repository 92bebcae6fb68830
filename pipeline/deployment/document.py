"""Plain data that remembers where each key was given, and its strict decoding into structs.

What is wrong with a value is said in terms of the file it came from: file, line, key, the value as it was
spelled there, and what to write instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from tensorferry.codecs.errors import UNPLACED, ConfigError, all_of

Keys = tuple[str | int, ...]  #: ("pool", "budget_mb"); positions in a list are numbers
T = TypeVar("T", bound=msgspec.Struct)

OVERRIDE = "--set"  #: stands where a file's name would, for what was given on the command line
SHOWN = 80  #: characters of a user's text that an error repeats
MOST_MISTAKES = 100  #: that are named of one document

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
    """A mapping, and the place of every key in it; and the mistakes found so far, so that all are told at once."""

    file: str
    data: dict[str, Any]  #: less what is faulty
    places: Mapping[Keys, Place]
    mistakes: list[ConfigError] = field(default_factory=list)
    faulty: set[Keys] = field(default_factory=set)  #: keys whose values are not known, because of a mistake

    def blame(self, mistake: ConfigError, *faulty: Keys) -> None:
        """Note a mistake, or the several that it is made of, and the keys whose values are not known for it."""
        self.faulty.update(faulty)
        self.mistakes.extend(mistake.each[: MOST_MISTAKES - len(self.mistakes)])

    @property
    def is_full(self) -> bool:
        """Whether no more mistakes are looked for: a file may have a hundred thousand."""
        return len(self.mistakes) >= MOST_MISTAKES

    def is_faulty(self, keys: Keys) -> bool:
        """Whether a value at, above or below these keys is not known."""
        return any(one[: len(keys)] == keys or keys[: len(one)] == one for one in self.faulty)

    def placed(self, problem: ConfigError) -> ConfigError:
        """An error by one who knows the key and not the file (`UNPLACED`), with file and line; any other as it is."""
        found = [
            self.error(one.problem, tuple(one.key.split("."))) if one.file == UNPLACED else one for one in problem.each
        ]
        return all_of(found)

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """A ConfigError that is raised inside the block is noted, with its place, and goes no further."""
        try:
            yield
        except ConfigError as problem:
            self.blame(self.placed(problem), *(tuple(one.key.split(".")) for one in problem.each))

    def check(self) -> None:
        """Raise ConfigError for all mistakes that were noted: those of the file by line, then the others."""
        if self.mistakes:
            found = sorted(self.mistakes, key=lambda one: (one.file != self.file, one.line or 0))
            if self.is_full:
                found.append(ConfigError(self.file, None, "", f"only the first {MOST_MISTAKES} mistakes are named"))
            raise all_of(found)

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

    def decode(self, kind: type[T], *, lenient: bool = False) -> T:
        """The document as `kind`, strictly: no unknown keys, no conversions but int to float. Raises ConfigError.

        lenient: note mistakes and raise nothing; in place of what is faulty there are defaults, and of a required key
        an empty text, until `check` raises.
        """
        decoded = _Decoder(self, kind).struct(kind, self.data, ())
        if not lenient:
            self.check()
        return decoded


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
        values: dict[str, Any] = {}
        for key, value in data.items():
            here = (*keys, key)
            if self.document.is_full:
                break
            if key not in fields:
                problem = f"unknown key, given {self.document.shown(here, value)}; {self.suggestion(key, list(fields))}"
                self.document.blame(self.document.error(problem, here))
                continue
            try:
                values[fields[key].name] = self.value(fields[key].type, value, here)
            except ConfigError as mistake:
                self.document.blame(mistake, here)
        for name, one in fields.items():
            if one.required and one.name not in values:
                values[one.name] = ""
                if not self.document.is_faulty(here := (*keys, name)):
                    self.document.blame(self.document.error(f"missing; add `{name}: ...`", here), here)
        return kind(**values)

    def value(self, kind: Any, value: Any, keys: Keys) -> Any:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            return self.struct(kind, value, keys)
        if get_origin(kind) is dict and isinstance(value, dict):
            return self.table(get_args(kind)[1], value, keys)
        try:
            return msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError as problem:
            wanted, remedy = _wanted(kind, value, str(problem))
            shown = self.document.shown(keys, value)
            raise self.document.error(f"expected {wanted}, got {shown}{remedy}", keys) from None

    def table(self, kind: Any, data: dict[str, Any], keys: Keys) -> dict[str, Any]:
        found = {}
        for key, value in data.items():
            try:
                found[key] = self.value(kind, value, (*keys, key))
            except ConfigError as mistake:
                self.document.blame(mistake, (*keys, key))
        return found

    def suggestion(self, key: str, known: list[str]) -> str:
        if near := difflib.get_close_matches(key, known, n=1):
            return f"did you mean `{near[0]}`?"
        if elsewhere := [dotted(keys) for keys in _known(self.root, ()) if keys[-1] == key]:
            return f"did you mean `{'` or `'.join(elsewhere)}`?"
        return f"known here: {', '.join(known)}"


def _known(kind: type[msgspec.Struct], keys: Keys) -> Iterator[Keys]:
    for one in msgspec.structs.fields(kind):
        yield (*keys, one.encode_name)
        if isinstance(one.type, type) and issubclass(one.type, msgspec.Struct):
            yield from _known(one.type, (*keys, one.encode_name))


def _wanted(kind: Any, value: Any, problem: str) -> tuple[str, str]:
    """What msgspec's complaint says it wanted, in our words, and the remedy ("" where that is plain)."""
    spellings: Mapping[str, str] = {}
    if get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) is Literal:
        kind, meta = get_args(kind)
        spellings = (meta.extra or {}).get("spellings", {})
    if get_origin(kind) is Literal:
        if remedy := spellings.get(re.sub(r"[-_ ]", "", str(value).lower())):
            return f"one of {', '.join(map(str, get_args(kind)))}", f"; {remedy}"
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
