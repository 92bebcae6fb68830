"""YAML without surprises: a file becomes plain data that remembers where each key was given.

The scalars are those of YAML 1.2's core schema, less what invites mistakes: `true` and `false` alone are
booleans, whole numbers are decimal without leading zeros, and there are no dates, base-60 numbers,
infinities or merge keys. So `NO`, `0123` and `12:30:00` are text, and where text is not wanted the error
says so. Duplicate keys, keys that are not text, aliases, foreign tags and second documents are refused.
Source: https://yaml.org/spec/1.2.2/#103-core-schema
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tensorferry.codecs.errors import ConfigError
from tensorferry.codecs.system.files import read_regular
from tensorferry.pipeline.deployment.document import OVERRIDE, Document, Keys, Place, dotted, short

FILE_NBYTES = 1 << 18
DEPTH = 16  #: levels of nesting

_TAG = "tag:yaml.org,2002:"
_ALIAS = "alias"  #: the tag of a node that stands for `*name`

#: How plain text becomes something else: pattern, and the characters it may start with.
_PLAIN: dict[str, tuple[re.Pattern[str], list[str]]] = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    "int": (re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z"), list("-+0123456789")),
    "float": (
        re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z"),
        list("-+.0123456789"),
    ),
}


def read(path: Path, *, lenient: bool = False) -> Document:
    """The one mapping in a UTF-8 YAML file. Raises ConfigError with file, line and, where there is one, key.

    lenient: mistakes of single keys are noted in the document, which is without these, and not raised.
    """
    file = str(path)
    try:
        raw = read_regular(path, FILE_NBYTES)
    except OSError as problem:
        if problem.errno == errno.EFBIG:
            raise ConfigError(file, None, "", f"is larger than {FILE_NBYTES} bytes, so not a deployment file") from None
        raise ConfigError(file, None, "", f"cannot be read: {problem.strerror}") from None
    except ValueError as problem:  # a null byte
        raise ConfigError(file, None, "", f"cannot be read: {problem}") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        raise ConfigError(file, line, "", f"byte 0x{raw[problem.start]:02x} is not UTF-8; save it as UTF-8") from None
    parser = _Parser(file, text)
    data = parser.parse(())
    if data is None:
        raise ConfigError(file, None, "", "is empty; a deployment needs at least `name: ...`")
    if not isinstance(data, dict):
        raise ConfigError(file, parser.places[()].line, "", "is not a mapping of `key: value` lines")
    document = Document(file, data, parser.places, parser.mistakes, parser.faulty)
    if not lenient:
        document.check()
    return document


def apply_overrides(document: Document, settings: Iterable[str]) -> Document:
    """The document with `KEY=VALUE` settings over it: dotted keys, values by the same YAML rules.

    An empty VALUE is null. A later setting may refine an earlier one (`pool={slots: 8}`, then
    `pool.budget_mb=4`) but not undo it. Mistakes are noted in the document, naming `--set`, and raised where it is
    decoded, where it is also decided whether a key exists.
    """
    data, places = _copied(document.data), dict(document.places)
    document = replace(document, data=data, places=places)
    for setting in settings:
        name, equals, text = setting.partition("=")
        keys: Keys = tuple(name.strip().split("."))
        if not equals or not all(keys):
            problem = "write it as KEY=VALUE, such as pool.budget_mb=512"
            document.blame(ConfigError(OVERRIDE, None, short(setting), problem))
            continue
        try:
            _override(document, places, keys, text)
        except ConfigError as mistake:
            document.blame(mistake, keys)
    return document


def _override(document: Document, places: dict[Keys, Place], keys: Keys, text: str) -> None:
    """Put one setting into the document, whose places these are. Raises ConfigError naming `--set`."""
    if any(place.file == OVERRIDE and given[: len(keys)] == keys for given, place in places.items()):
        raise ConfigError(OVERRIDE, None, dotted(keys), f"given twice, the second time as {short(text)}")
    section: Any = document.data
    for depth, key in enumerate(keys[:-1], 1):
        if key not in section:
            section[key], places[keys[:depth]] = {}, Place(OVERRIDE, None)
        section = section[key]
        if not isinstance(section, dict):
            raise ConfigError(OVERRIDE, None, dotted(keys), f"{dotted(keys[:depth])} is not a section of keys")
    parser = _Parser(OVERRIDE, text)
    section[keys[-1]] = parser.parse(keys)
    for mistake in parser.mistakes:
        document.blame(mistake)
    document.faulty.update(parser.faulty)
    for given in [given for given in places if given[: len(keys)] == keys]:
        del places[given]
    places.update(parser.places)


def emit(data: dict[str, Any]) -> str:
    """Plain data as YAML that `read` gives back unchanged; each top-level key starts a line of its own."""
    one_line = 1 << 30  # never folded
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=one_line)


def _copied(data: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in data.items()}


class _Loader(yaml.SafeLoader):
    """Composes nodes with our idea of plain scalars. It constructs nothing."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's attribute, filled below

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # refused later, when the key it stands at is known
            alias = self.get_event()  # type: ignore[no-untyped-call]
            return yaml.ScalarNode(_ALIAS, alias.anchor, alias.start_mark, alias.end_mark)
        if self.depth == DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(None, None, f"nested deeper than {DEPTH} levels", mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Writes text plainly only where no reader, of YAML 1.1 or 1.2, could take it for something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        plain = re.fullmatch(r"[A-Za-z/][\w./-]*", text, re.ASCII)
        return self.represent_scalar(_TAG + "str", text, style=None if plain else '"')


for _name, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
_Dumper.add_representer(str, _Dumper.represent_text)


@dataclass(slots=True)
class _Parser:
    """One document's text, and the places of what was found in it."""

    file: str
    text: str
    places: dict[Keys, Place] = field(default_factory=dict)
    mistakes: list[ConfigError] = field(default_factory=list)  #: of single keys, which are left out
    faulty: set[Keys] = field(default_factory=set)

    def parse(self, keys: Keys) -> Any:
        """The document as dicts, lists and scalars; `keys` is where it stands in the deployment."""
        node = self.compose(keys)
        if node is None:
            self.places[keys] = Place(self.file, self.line(0))
            return None
        self.places[keys] = self.place(node, node)
        return self.plain(node, keys)

    def compose(self, keys: Keys) -> yaml.Node | None:
        try:
            loader = _Loader(self.text)
        except yaml.reader.ReaderError as problem:
            line = self.text.count("\n", 0, problem.position)
            raise self.not_yaml(line, keys, f"the character U+{problem.character:04X} is not allowed") from None
        try:
            return loader.get_single_node()
        except yaml.MarkedYAMLError as problem:
            line = problem.problem_mark.line if problem.problem_mark else loader.line
            text = " ".join(part for part in (problem.context, problem.problem) if part)
            raise self.not_yaml(line, keys, text + ("; indent with spaces" if "'\\t'" in text else "")) from None
        except (ValueError, OverflowError):  # chr() within PyYAML's scanner
            raise self.not_yaml(loader.line, keys, "an escape beyond Unicode") from None

    def plain(self, node: yaml.Node, keys: Keys) -> Any:
        tag = node.tag.removeprefix(_TAG)
        if node.tag == _ALIAS:
            raise self.error(node, keys, f"the alias *{short(node.value)} is not supported; write the value out")
        if isinstance(node, yaml.MappingNode) and tag == "map":
            return self.mapping(node, keys)
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            for position, one in enumerate(node.value):
                self.places[(*keys, position)] = self.place(one, one)
            return [self.plain(one, (*keys, position)) for position, one in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and tag in {"str", *_PLAIN}:
            return self.scalar(node, tag, keys)
        spelling = node.tag.replace(_TAG, "!!", 1)
        raise self.error(node, keys, f"the tag {short(spelling)} is not supported here; leave it out")

    def mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag != _TAG + "str" or not isinstance(key_node, yaml.ScalarNode):
                spelling = short(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
                what = f'{spelling}; write "{spelling}"' if spelling else "a list, a mapping or nothing"
                self.mistakes.append(self.error(key_node, keys, f"a key must be text, not {what}"))
                continue
            try:
                key = self.scalar(key_node, "str", keys)
            except ConfigError as mistake:
                self.mistakes.append(mistake)
                continue
            here = (*keys, key)
            if here in self.places:
                first = self.places[here].line
                where = f"; first on line {first}" if first else ""
                self.mistakes.append(self.error(key_node, here, f"given twice{where}; remove one of the two"))
                continue
            self.places[here] = self.place(key_node, value_node)
            try:
                found[key] = self.plain(value_node, here)
            except ConfigError as mistake:
                self.mistakes.append(mistake)
                self.faulty.add(here)
        return found

    def scalar(self, node: yaml.ScalarNode, tag: str, keys: Keys) -> Any:
        text = node.value
        if tag != "str" and not _PLAIN[tag][0].match(text):  # only an explicit tag gets here: !!int 0123
            raise self.error(node, keys, f"{short(text)} is not what its tag !!{tag} says")
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() == "true"
        if tag == "str":
            if any("\ud800" <= one <= "\udfff" for one in text):
                raise self.error(node, keys, f"{short(text)} has half a surrogate pair; write the character itself")
            return text
        if tag == "float":
            value = float(text)
            if math.isinf(value):
                raise self.error(node, keys, f"{short(text)} is beyond what a number can hold; write a smaller one")
            return value
        if len(text) > 20 or int(text) >> 63 not in (0, -1):
            raise self.error(node, keys, f"{short(text)} is beyond 64 bits; write a smaller number")
        return int(text)

    def place(self, start: yaml.Node, value: yaml.Node) -> Place:
        """Where `start` is, with the spelling of `value`."""
        spelling = ""
        if isinstance(value, yaml.ScalarNode):
            spelling = value.value if value.style is None else f'"{value.value}"'
        return Place(self.file, self.line(start.start_mark.line), spelling)

    def line(self, counted_from_0: int) -> int | None:
        return None if self.file == OVERRIDE else counted_from_0 + 1

    def error(self, node: yaml.Node, keys: Keys, problem: str) -> ConfigError:
        return ConfigError(self.file, self.line(node.start_mark.line), dotted(keys), problem)

    def not_yaml(self, line: int, keys: Keys, problem: str) -> ConfigError:
        lines = self.text.splitlines()
        quoted = f": {short(lines[line].strip())}" if line < len(lines) and lines[line].strip() else ""
        return ConfigError(self.file, self.line(line), dotted(keys), f"not YAML: {problem}{quoted}")
