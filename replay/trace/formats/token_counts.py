"""Traces that count tokens: a JSON object a line with a time, two lengths, and often identities of the prompt's blocks.
They differ in the names of their keys and in their units."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from tensorferry.pipeline.recording.request import MAX_OUTPUT_TOKENS, MAX_TOKENS, BrokenRow, Image, Request
from tensorferry.replay.trace.exact_numbers import NS, whole
from tensorferry.replay.trace.formats.json_lines import identity, json_object, list_of_integers
from tensorferry.replay.trace.formats.times import UNITS_NS, JsonRows, Times


class Keys(msgspec.Struct, frozen=True):
    """The keys of such a trace and their meaning."""

    name: str
    unit_ns: int  #: of the time; 0: the format's unit, or the unit that the numbers show
    block_tokens: int
    time: str = "timestamp"
    prompt: str = "input_length"
    output: str = "output_length"
    blocks: str = "hash_ids"
    id: str = ""
    parent: str = ""
    session: str = ""
    time_alone: bool = False  #: whether only `time` and `unit_ns` count, and the trace's format gives the rest
    image_flag: str = ""  #: a key whose value "image" says only that the request had an image


def keys_of(text: str) -> Keys:
    """Read the keys `time=ts,prompt=in,output=out,blocks=h,unit=s,block_tokens=16`, for which vLLM's timed_trace has
    flags. `time` and `unit` alone give the place and the unit of the times in a trace of any format.

    unit: s, ms, us, ns, or the length of one unit in seconds. Raises ValueError with a sentence.
    """
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    given = dict(pairs)
    time_alone = given.keys() <= {"time", "unit"}
    if len(given) < len(pairs):
        twice = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise ValueError(f"{text!r} has {twice}= twice; give each name once")
    names = {name: given.pop(name) for name in ("time", "prompt", "output", "blocks", "session", "id") if name in given}
    unit, block_tokens = given.pop("unit", ""), given.pop("block_tokens", "16")
    if given or not all(names.values()):
        known = "time, prompt, output, blocks, session, id, unit, block_tokens"
        raise ValueError(f"{text!r} is not a list of name=key; the names are {known}")
    if time_alone and not unit and names:
        return Keys("", 0, 0, time=names["time"], time_alone=True)
    try:
        exact = Decimal(UNITS_NS.get(unit) or Decimal(unit) * NS)
        inside = 1 <= exact <= 10**18  # compared before conversion: 1e999999 is short as a decimal alone
    except ArithmeticError:  # not a number, NaN, or too large for a Decimal
        raise ValueError(f"unit={unit} is unknown; give s, ms, us, ns, or one unit in seconds, such as 0.001") from None
    if not inside:
        raise ValueError(f"unit={unit} is not between a nanosecond and 10^9 seconds; give a unit in that range")
    unit_ns = int(exact)
    if time_alone:
        return Keys("", unit_ns, 0, time=names.get("time", ""), time_alone=True)
    if not block_tokens.isascii() or not block_tokens.isdigit() or not 1 <= int(block_tokens) <= MAX_TOKENS:
        raise ValueError(f"block_tokens={block_tokens} is not a number of tokens; give 1 to {MAX_TOKENS}")
    return msgspec.structs.replace(Keys("timed-trace", unit_ns, int(block_tokens)), **names)


class LengthRows(JsonRows):
    """The rows of such a trace."""

    def __init__(self, keys: Keys, times: Times | None) -> None:
        super().__init__(times)
        self.name, self._keys = keys.name, keys

    def parse(self, line: str, number_of_line: int) -> Request:
        row, keys = json_object(line), self._keys
        tokens = whole(row.get(keys.prompt), keys.prompt, MAX_TOKENS)
        if not tokens:
            raise BrokenRow("empty", f"{keys.prompt} is 0")
        parent = identity(row.get(keys.parent), keys.parent)
        image = bool(keys.image_flag) and row.get(keys.image_flag) == "image"
        return Request(
            line=number_of_line,
            at_ns=self._at_ns(row),
            output_tokens=whole(row.get(keys.output), keys.output, MAX_OUTPUT_TOKENS),
            id=identity(row.get(keys.id), keys.id),
            text_tokens=None if image else tokens,
            context_tokens=tokens if image else None,
            images=(Image(),) if image else (),
            blocks=_blocks(row.get(keys.blocks), keys.blocks),
            block_tokens=keys.block_tokens,
            session=identity(row.get(keys.session), keys.session),
            parent="" if parent == "-1" else parent,
            notes=("number_of_images_assumed",) if image else (),
        )


def _blocks(value: object, name: str) -> tuple[int, ...]:
    """Read a list of identities, or RAGPulse's consecutive lists for the parts of a prompt."""
    if value is None:
        return ()
    if isinstance(value, dict):
        return tuple(block for part, ids in value.items() for block in list_of_integers(ids, f"{name}.{part}"))
    return list_of_integers(value, name)
