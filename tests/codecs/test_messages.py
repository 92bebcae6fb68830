"""The wire: every message survives it, golden vectors pin it, and whatever else arrives is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.frames import Limits, decode, encode
from tensorferry.codecs.tensors import CODES, DTYPES
from tensorferry.pipeline.pools.fd_conversation import Said

VECTORS = Path(__file__).parents[1] / "vectors"
MESSAGE_TYPES: tuple[type[msgspec.Struct], ...] = get_args(wire.Message)
LIMITS = Limits()


# --- every message, from the definitions -------------------------------------------------------------------


def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """All values that a field's type allows."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, *(values_of(field.type) for field in fields))
        case inspect.UnionType(types=types):
            return st.one_of(*map(values_of, types))
        case inspect.IntType(ge=low, le=high, lt=above):
            assert low is not None, "a number without a lower bound"
            assert high is not None or above is not None, "a number without an upper bound"
            return st.integers(low, high if above is None else above - 1)
        case inspect.BytesType(min_length=low, max_length=high):
            assert high is not None, "bytes without a bound"
            return st.binary(min_size=low or 0, max_size=min(high, 40))
        case inspect.StrType(min_length=low, max_length=high):
            assert high is not None, "text without a bound"
            return st.text(min_size=low or 0, max_size=min(high, 12))
        case inspect.VarTupleType(item_type=item, max_length=high):
            return st.lists(values_of(item), min_size=kind.min_length or 0, max_size=min(high or 3, 3)).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values_of, items))
        case inspect.FloatType(ge=low, gt=above, le=high):
            lowest = above if low is None else low
            finite = {"allow_nan": False, "allow_infinity": lowest is None}
            return st.floats(lowest, high, exclude_min=above is not None, **finite)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    raise AssertionError(f"{kind}: nothing on the wire has this type")


@pytest.mark.parametrize("cls", MESSAGE_TYPES, ids=lambda cls: cls.__name__)
def test_every_message_survives_the_wire(cls: type[msgspec.Struct]) -> None:
    @settings(max_examples=40)
    @given(values_of(inspect.type_info(cls)))
    def survives(message: wire.Message) -> None:
        decoded, inline = decode(encode(message), LIMITS)
        assert type(decoded) is cls
        assert decoded == message
        assert list(inline) == []

    survives()


def structs_in(kind: inspect.Type, found: dict[type, inspect.StructType]) -> dict[type, inspect.StructType]:
    match kind:
        case inspect.StructType(cls=cls, fields=fields) if cls not in found:
            found[cls] = kind
            for field in fields:
                structs_in(field.type, found)
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for each in types:
                structs_in(each, found)
        case inspect.VarTupleType(item_type=item):
            structs_in(item, found)
    return found


def test_every_struct_is_frozen_strict_and_an_array() -> None:
    structs = structs_in(inspect.multi_type_info([wire.Message])[0], {})
    assert set(MESSAGE_TYPES) <= set(structs)
    for cls, kind in structs.items():
        assert issubclass(cls, wire.Wire)
        assert cls.__struct_config__.frozen, cls
        assert kind.array_like, cls
        assert kind.forbid_unknown_fields, cls
    tags = [structs[cls].tag for cls in MESSAGE_TYPES]
    assert len(set(tags)) == len(tags)


def test_times_have_room_for_a_machine_that_never_restarts() -> None:
    times = [
        field.type.item_type if isinstance(field.type, inspect.VarTupleType) else field.type
        for kind in structs_in(inspect.multi_type_info([wire.Message])[0], {}).values()
        for field in kind.fields
        if field.name.endswith("_ns")
    ]
    assert len(times) == 2
    assert all(isinstance(kind, inspect.IntType) and kind.le == (1 << 63) - 1 for kind in times)


# --- golden vectors -------------------------------------------------------------------------------------------


def vectors() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((VECTORS / "messages.json").read_text(encoding="utf-8"))
    return loaded


def named(kind: str) -> list[Any]:
    return [pytest.param(vector, id=vector["name"]) for vector in vectors()[kind]]


def from_fields(value: Any) -> Any:
    """A vector's `message` as structs: field by field, by name."""
    match value:
        case {"type": name, **fields}:
            return getattr(wire, name)(**{str(field): from_fields(each) for field, each in fields.items()})
        case {"hex": digits}:
            return bytes.fromhex(digits)
        case {"int64": digits}:
            return int(digits)
        case [*elements]:
            return tuple(map(from_fields, elements))
    return value


@pytest.mark.parametrize("vector", named("messages"))
def test_vectors(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    message, _ = decode([data], LIMITS)
    assert message == from_fields(vector["message"])
    assert encode(message) == [data]


@pytest.mark.parametrize("vector", named("refused"))
def test_vectors_that_are_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        decode([bytes.fromhex(vector["hex"])], LIMITS)


def test_vectors_cover_every_message_and_are_up_to_date() -> None:
    covered = {vector["message"]["type"] for vector in vectors()["messages"]}
    assert covered == {cls.__name__ for cls in MESSAGE_TYPES}
    rendered = load(VECTORS / "make.py").render()
    assert (VECTORS / "messages.json").read_text(encoding="utf-8") == rendered, "run tests/vectors/make.py"


def test_the_document_has_the_structs_as_they_are() -> None:
    """If not: `python tests/vectors/schema.py`, and say in the document what the change means."""
    document = (VECTORS.parent.parent / "docs" / "protocol.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```schema\n(.*?)\n```$", document, re.MULTILINE | re.DOTALL)
    schema = load(VECTORS / "schema.py")
    assert blocks == [schema.render(wire.Message), schema.render(Said)]
    for cls in MESSAGE_TYPES:
        assert re.search(rf"^\|[^|]*`{cls.__name__}`", document, re.MULTILINE), f"who sends {cls.__name__}, and when?"
    assert f"Version {wire.PROTOCOL_VERSION}." in document
    assert ", ".join(DTYPES) in " ".join(document.split()), "the dtypes in the order of their codes"


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- refused ------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_a_message(data: bytes) -> None:
    try:
        message, _ = decode([data], LIMITS)
    except BadMessage as refused:
        assert str(refused)  # noqa: PT017
    else:
        assert isinstance(message, MESSAGE_TYPES)


@settings(max_examples=300)
@given(st.sampled_from(vectors()["messages"]), st.data())
def test_a_message_with_a_changed_byte_is_refused_or_a_message(vector: dict[str, Any], data: st.DataObject) -> None:
    wrong = bytearray.fromhex(vector["hex"])
    wrong[data.draw(st.integers(0, len(wrong) - 1))] = data.draw(st.integers(0, 255))
    try:
        message, _ = decode([wrong], LIMITS)
    except BadMessage:
        return
    assert isinstance(message, MESSAGE_TYPES)


@pytest.mark.parametrize("vector", named("messages"))
def test_a_message_cut_off_anywhere_is_refused(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    for end in range(len(data)):
        with pytest.raises(BadMessage):
            decode([data[:end]], LIMITS)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\x01", b"\xdc\x00\x01", b"\x92\x1e", b"\x92\x13", b"\xc7\x01\x00"])
@pytest.mark.parametrize("place", [b"", bytes.fromhex("9213"), bytes.fromhex("92139101")])
def test_deep_nesting_is_refused(
    opening: bytes, place: bytes, allocates_under: Callable[[int], AbstractContextManager[None]]
) -> None:
    data = place + opening * 500_000
    with allocates_under(1 << 20), pytest.raises(BadMessage):
        decode([data], LIMITS)


def test_nesting_that_exhausts_the_stack_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message of ours nests without end, so the decoder never recurses that far; if one did, this holds."""

    def recurses(header: bytes) -> wire.Message:
        return recurses(header)

    monkeypatch.setattr("tensorferry.codecs.frames._decode", recurses)
    with pytest.raises(BadMessage, match="RecursionError"):
        decode([b"\x90"], LIMITS)


@pytest.mark.parametrize("lie", ["dd", "dc", "db", "da", "c6", "c5", "df", "c9"])
def test_b31_a_length_that_lies_allocates_nothing(
    lie: str, allocates_under: Callable[[int], AbstractContextManager[None]]
) -> None:
    size = {"dd": 4, "db": 4, "c6": 4, "df": 4, "c9": 4}.get(lie, 2)
    for before in ("", "931101", "9213", "951e", "991f"):
        data = bytes.fromhex(before + lie) + b"\xff" * size + bytes(1500)
        with allocates_under(1 << 20), pytest.raises(BadMessage):
            decode([data], LIMITS)


@pytest.mark.parametrize("cls", MESSAGE_TYPES, ids=lambda cls: cls.__name__)
def test_numbers_out_of_range_are_refused(cls: type[msgspec.Struct]) -> None:
    """Each number of each message, in turn, one below and one above what it may be."""
    message = next(from_fields(v["message"]) for v in vectors()["messages"] if v["message"]["type"] == cls.__name__)
    plain = msgspec.msgpack.decode(encode(message)[0])
    tried = 0
    for path, kind in numbers_in(plain, inspect.type_info(cls)):
        assert kind.ge is not None
        highest = kind.le if kind.le is not None else (kind.lt or 0) - 1
        for value in (kind.ge - 1, highest + 1, 1.5, "1", None, True, [kind.ge]):
            with pytest.raises(BadMessage):
                decode([msgspec.msgpack.encode(replaced(plain, path, value))], LIMITS)
            tried += 1
    assert tried


def numbers_in(
    plain: Any, kind: inspect.Type, path: tuple[int, ...] = ()
) -> list[tuple[tuple[int, ...], inspect.IntType]]:
    match kind:
        case inspect.IntType():
            return [(path, kind)]
        case inspect.StructType(fields=fields, tag=tag):
            kinds = [field.type for field in fields]
            start = 0 if tag is None else 1
            inner = [(start + place, each) for place, each in enumerate(kinds)]
        case inspect.VarTupleType(item_type=item):
            inner = [(place, item) for place in range(len(plain))]
        case inspect.TupleType(item_types=items):
            inner = list(enumerate(items))
        case inspect.UnionType(types=types) if plain is not None:
            if untagged := [
                each for each in types if getattr(each, "tag", None) is None and each != inspect.NoneType()
            ]:
                return numbers_in(plain, untagged[0], path)
            tagged = {each.tag: each for each in types if isinstance(each, inspect.StructType)}
            return numbers_in(plain, tagged[plain[0]], path)
        case _:
            return []
    return [found for place, each in inner for found in numbers_in(plain[place], each, (*path, place))]


def replaced(plain: list[Any], path: tuple[int, ...], value: Any) -> list[Any]:
    place, *rest = path
    return [
        each if index != place else replaced(each, tuple(rest), value) if rest else value
        for index, each in enumerate(plain)
    ]


@pytest.mark.processes
def test_b28_a_pickle_does_nothing(tmp_path: Path) -> None:
    """As the header, as a frame, and in every byte string of every message."""
    sentinel = tmp_path / "sentinel"
    # A protocol 0 pickle, by hand: os.system("touch sentinel").
    pickle = f"cos\nsystem\n(S'touch {sentinel}'\ntR.".encode()
    assert os.system(f"touch {sentinel}") == 0
    sentinel.unlink()
    for data in (pickle, b"\x92" + pickle, b"\xc7" + bytes([len(pickle), 0]) + pickle, b"\xc4" + pickle):
        with pytest.raises(BadMessage):
            decode([data], LIMITS)
    submit = wire.Submit(bytes(16), 0, (wire.TokensPart(pickle), wire.ImagePart(0)), 1, 1)
    decoded, inline = decode([*encode(submit), pickle], LIMITS)
    assert decoded == submit
    assert list(inline) == [pickle]
    assert not sentinel.exists()


# --- size ------------------------------------------------------------------------------------------------------------


def proxy(index: int) -> wire.Proxy:
    return wire.Proxy(
        POOL, 4095 - index, (1 << 31) - 1 - index, (1 << 30) + 64 * index, CODES["float32"], (1024, 1176), 1, 1
    )


POOL = secrets.randbits(62) | 1 << 61


def test_a_proxy_is_at_most_64_bytes() -> None:
    plain = proxy(0)
    longest = wire.Proxy(
        POOL, 4095, (1 << 31) - 1, (1 << 40) - 64, CODES["float8_e4m3fnuz"], (1 << 17, 3, 1024, 1176), 4, 3
    )
    for each in (plain, longest):
        assert len(msgspec.msgpack.encode(each)) <= 64


def test_a_request_of_12_proxies_and_2000_tokens_has_small_headers() -> None:
    epoch = (1 << 62) + 1
    owner, ranks = wire.Origin("tokenizer", 15, epoch), tuple(wire.Rank(rank, epoch) for rank in range(4))
    placed = tuple(
        wire.PlacedItem("image", (1, 32, 32), secrets.token_bytes(32), (wire.Span(160 * item, 150),))
        for item in range(12)
    )
    admit = wire.Admit(secrets.token_bytes(16), 0, epoch, owner, ranks[:1], bytes(8000), placed, 128, 60_000)
    items = tuple(
        wire.Item("image", (1, 32, 32), 256, secrets.token_bytes(32), (wire.Tensor("features", proxy(index)),))
        for index in range(12)
    )
    job = wire.Encode(secrets.token_bytes(16), 0, epoch, owner, ranks, ranks[:1], items, 60_000)
    sizes = [len(encode(message)[0]) for message in (admit, job)]
    assert max(sizes) <= 9000
    assert sizes[0] - 8000 <= 12 * 60, "the tokens travel as they are"
    assert sizes[1] <= 12 * 120, "what an item costs"


def test_b27_everything_that_is_many_in_a_message_has_a_bound() -> None:
    """A header full of the smallest of something takes ten times its size, and seconds of its receiver's loop."""

    def unbounded(kind: inspect.Type, where: str, found: list[str]) -> list[str]:
        match kind:
            case inspect.VarTupleType(item_type=item, max_length=most):
                if most is None:
                    found.append(where)
                unbounded(item, where, found)
            case inspect.TupleType(item_types=items):
                for item in items:
                    unbounded(item, where, found)
            case inspect.UnionType(types=types):
                for each in types:
                    unbounded(each, where, found)
            case inspect.StructType(cls=cls, fields=fields):
                for field in fields:
                    unbounded(field.type, f"{cls.__name__}.{field.name}", found)
            case inspect.StrType(max_length=None) | inspect.BytesType(max_length=None):
                found.append(where)
        return found

    assert unbounded(inspect.type_info(wire.Message), "", []) == []
