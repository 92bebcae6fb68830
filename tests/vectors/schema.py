"""The wire structs as text, for `docs/protocol.md`: one line each, read off the definitions.

`python tests/vectors/schema.py` prints them; a test fails while the document has others.
"""

from __future__ import annotations

from textwrap import fill

from msgspec import inspect

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.pools import fd_conversation

WIDTH = 118
INTEGERS = {
    (0, (1 << 31) - 1): "index",
    (1, (1 << 31) - 1): "generation",
    (1, (1 << 32) - 1): "serial",
    (0, (1 << 40) - 1): "count",
    (1, (1 << 63) - 1): "nonce",
    (0, (1 << 63) - 1): "natural",
    (0, (1 << 23) - 1): "submission",
}
TEXTS = {(1, 64): "name", (1, 512): "address", (0, 4096): "text"}


def render(message: object) -> str:
    """Every struct of a union, those it uses first; `Name = tag: field type, ...`, `?` where it may be left out."""
    lines: dict[str, str] = {}
    _name(inspect.type_info(message), lines)
    return "\n".join(fill(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False) for line in lines.values())


def _name(kind: inspect.Type, lines: dict[str, str]) -> str:
    match kind:
        case inspect.StructType(cls=cls, fields=fields, tag=tag):
            said = [f"{f.name} {_name(f.type, lines)}{'' if f.required else '?'}" for f in fields]
            lines.setdefault(cls.__name__, f"{cls.__name__} = {'' if tag is None else f'{tag}: '}{', '.join(said)}")
            return cls.__name__
        case inspect.UnionType(types=types):
            return " | ".join(_name(each, lines) for each in types)
        case inspect.VarTupleType(item_type=item, min_length=low, max_length=high):
            bound = "" if high is None else f" x {low or 0}..{high}"
            return f"[{_name(item, lines)}{bound}]"
        case inspect.TupleType(item_types=items):
            return f"({', '.join(_name(each, lines) for each in items)})"
        case inspect.IntType(ge=low, le=high, lt=above):
            high = above - 1 if high is None and above is not None else high
            return INTEGERS.get((low or 0, high or 0), f"{low}..{high}")
        case inspect.StrType(min_length=low, max_length=high):
            return TEXTS.get((low or 0, high or 0), f"text {low or 0}..{high}")
        case inspect.LiteralType(values=values):
            return " | ".join(f'"{value}"' for value in values)
        case inspect.BytesType(min_length=low, max_length=high):
            return f"bytes {high}" if low == high else f"bytes {low or 0}..{high}"
        case inspect.FloatType(le=None):
            return "float64"
        case inspect.FloatType(ge=low, gt=above, le=high):
            return f"float64 over {above:g}..{high:g}" if low is None else f"float64 {low:g}..{high:g}"
        case inspect.BoolType():
            return "bool"
        case inspect.NoneType():
            return "nil"
    raise AssertionError(f"{kind}: nothing on the wire has this type")


if __name__ == "__main__":
    print(render(wire.Message))
    print()
    print(render(fd_conversation.Said))
