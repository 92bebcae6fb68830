"""The reader of one JSON object a line with exact numbers, and of values that many formats have."""

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
    """Read the object on one line. Raises BrokenRow: not_json, out_of_range."""
    try:
        value = _decode(line)
    except msgspec.ValidationError:  # any object is valid, so an integer was too long for an int
        problem = "it has a number of thousands of digits; times and counts have 19 at most"
        raise BrokenRow("out_of_range", problem) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as problem:
        raise BrokenRow("not_json", f"not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise BrokenRow("not_json", f"it is a JSON {type(value).__name__}, not an object")
    return value


def object_at(row: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the object at a key. Raises BrokenRow: missing, bad_value."""
    value = row.get(key)
    if not isinstance(value, dict):
        raise BrokenRow("missing" if value is None else "bad_value", f"{key} is not an object")
    return value


def list_of_integers(value: object, name: str) -> tuple[int, ...]:
    """Read a list of integers, exactly, so that 64-bit identities are kept. Raises BrokenRow (bad_value)."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise BrokenRow("bad_value", f"{name} is not a list of integers")
    return tuple(value)


def identity(value: object, name: str) -> str:
    """Read an id, which may be text or a number; empty for None. Raises BrokenRow (bad_value)."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or len(value) > MAX_ID_CHARACTERS:
        raise BrokenRow("bad_value", f"{name} is not a string of at most {MAX_ID_CHARACTERS} characters")
    return value


def output_tokens(row: dict[str, Any], *keys: str) -> tuple[int, tuple[str, ...]]:
    """Return the number of output tokens by the first of these keys in the row, and a note if there is none."""
    for key in keys:
        if row.get(key) is not None:
            return whole(row[key], key, MAX_OUTPUT_TOKENS), ()
    return ASSUMED_OUTPUT_TOKENS, ("output_tokens_assumed",)


def refuse_unknown(row: dict[str, Any], known: Iterable[str], where: str = "") -> None:
    """Raise BrokenRow (unknown_key) if the row has a key that is not known."""
    for key in row:
        if key not in known:
            raise BrokenRow("unknown_key", f"unknown key {where}{key[:40]}; known keys are {', '.join(sorted(known))}")
