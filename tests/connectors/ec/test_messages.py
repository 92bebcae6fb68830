"""The bytes of every message: as they were written down, and strictly decoded."""

from __future__ import annotations

import msgspec
import pytest

from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.messages import Inline, Origin, PoolDescription, Proxy
from tensorferry.connectors.ec import messages as wire

ORIGIN = Origin("ec_consumer", 1, 77)
MODEL = wire.Model("m", "d", "bfloat16", 4096)
#: Message, and its bytes in hexadecimal.
VECTORS = [
    (wire.Hello(1, ORIGIN, MODEL), "940101"),
    (wire.Welcome(1, ORIGIN, 5, MODEL, PoolDescription(9, "host", 64, 4), "/run/x.pool"), "980201"),
    (wire.Want(("a", "b"), 1500), "930392a161a162cd05dc"),
    (wire.Enough(("a",)), "920491a161"),
    (wire.Item("a", Proxy(9, 1, 2, 64, 11, (2, 8))), "9305a161990109010240" "0b920208" "0101"),
    (wire.Item("a", Inline(0, 11, (2, 8))), "9305a1619402000b920208"),
    (wire.Withdrawn(9, ((1, 2),)), "9306099192" "0102"),
    (wire.Here(0, 2), "93140002"),
    (wire.Take("a", 3, 1500), "9415a16103cd05dc"),
    (wire.Held("a", 3, 1, 7), "9516a161030107"),
    (wire.Refused("a", 3, 1, "why"), "9517a1610301a3776879"),
    (wire.LetGo("a", 3), "9318a16103"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "start"), VECTORS, ids=lambda value: type(value).__name__)
def test_each_message_has_the_bytes_that_are_written_down(message: wire.Message, start: str) -> None:
    [data] = wire.encode(message)
    assert data.hex().startswith(start)
    assert wire.decode([data]) == (message, [])


def test_every_kind_of_message_is_among_them() -> None:
    assert {type(message) for message, _ in VECTORS} == set(wire.Message.__args__)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", msgspec.msgpack.encode([99]), msgspec.msgpack.encode([3, [], 0]),
        msgspec.msgpack.encode([3, ["a"], 1, 1]), msgspec.msgpack.encode([3, [""], 1]),
        msgspec.msgpack.encode([21, "a", 0, 1]), msgspec.msgpack.encode([20, 1024, 1]),
        msgspec.msgpack.encode([3, ["a"] * 4097, 1]), msgspec.msgpack.encode({"tag": 3}),
    ],
)  # fmt: skip
def test_whatever_else_comes_is_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        wire.decode([data])


def test_more_frames_or_bytes_than_a_message_has_are_not_decoded() -> None:
    [data] = wire.encode(wire.Enough(("a",)))
    with pytest.raises(BadMessage, match="a message of 3 frames; 1 to 2 are taken"):
        wire.decode([data, b"", b""])
    with pytest.raises(BadMessage, match="a message of 0 frames"):
        wire.decode([])
    with pytest.raises(BadMessage, match="a header of 8388609 bytes"):
        wire.decode([bytes((8 << 20) + 1)])
