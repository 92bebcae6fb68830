"""One JSON object a line, numbers kept exact; and the values that many formats have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tensorferry.pipeline.recording.request import (
    ASSUMED_OUTPUT_TOKENS,
    MAX_ID_CHARACTERS,
    MAX_OUTPUT_TOKENS,
    BrokenRow,
)
from tensorferry.replay.trace.exact_numbers import decimal, whole

_decode = msgspec.json.Decoder(float_hook=decimal).decode


def json_object(line: str | bytes) -> dict[str, Any]:
    """The object on one line. Raises BrokenRow: not_json, out_of_range."""
    try:
        value = _decode(line)
    except msgspec.ValidationError:  # of an object that may hold anything: an integer that no int can be made of
        raise BrokenRow("out_of_range", "a number of thousands of digits; times and counts have 19 at most") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as problem:
        raise BrokenRow("not_json", f"not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise BrokenRow("not_json", f"a JSON {type(value).__name__}, not an object")
    return value


def object_at(row: dict[str, Any], key: str) -> dict[str, Any]:
    """Raises BrokenRow: missing, bad_value."""
    value = row.get(key)
    if not isinstance(value, dict):
        raise BrokenRow("missing" if value is None else "bad_value", f"{key} is not an object")
    return value


def list_of_integers(value: object, name: str) -> tuple[int, ...]:
    """Raises BrokenRow (bad_value). Identities of 64 bits stay what they are: nothing goes through a float."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise BrokenRow("bad_value", f"{name} is not a list of integers")
    return tuple(value)


def identity(value: object, name: str) -> str:
    """An id, which may be text or a number; nothing for None. Raises BrokenRow (bad_value)."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or len(value) > MAX_ID_CHARACTERS:
        raise BrokenRow("bad_value", f"{name} is not a string of at most {MAX_ID_CHARACTERS} characters")
    return value


def output_tokens(row: dict[str, Any], *keys: str) -> tuple[int, tuple[str, ...]]:
    """How much the engine is to make, by the first of these keys that is there, and the note where none is."""
    for key in keys:
        if row.get(key) is not None:
            return whole(row[key], key, MAX_OUTPUT_TOKENS), ()
    return ASSUMED_OUTPUT_TOKENS, ("output_tokens_assumed",)


def refuse_unknown(row: dict[str, Any], known: Iterable[str], where: str = "") -> None:
    """Raises BrokenRow (unknown_key)."""
    for key in row:
        if key not in known:
            raise BrokenRow("unknown_key", f"unknown key {where}{key[:40]}; known are {', '.join(sorted(known))}")
