"""The small messages: what it costs to make and read those of a request, and what the checks cost of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from benchmarks.results import Outcome, Scale, Verdict, measurement
from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Limits, decode, encode
from tensorferry.codecs.tensors import CODES, dtype_of, nbytes_of

ITEMS, TOKENS = 12, 2000
_BATCH = 50  #: requests a sample; the clock is too coarse for one


def codec(scale: Scale) -> Outcome:
    """A request of 12 images and 2,000 tokens: `Admit` to its scheduler and `Encode` to its encoder."""
    checked = request()
    twins = Twins()
    unchecked = [twins.like(message) for message in checked]
    limits = Limits()
    twin_encode, twin_decode = (
        msgspec.msgpack.Encoder().encode,
        msgspec.msgpack.Decoder(twins.of(wire.Message)).decode,
    )

    def ours() -> None:
        for message in checked:
            read, _ = decode(encode(message), limits)
            if isinstance(read, wire.Encode):
                for item in read.items:  # what the reader checks of a payload before it opens it
                    for feature in item.features:
                        nbytes_of(dtype_of(feature.payload.dtype), feature.payload.shape)

    def bare() -> None:
        for message in unchecked:
            twin_decode(twin_encode(message))

    assert [decode(encode(message), limits)[0] for message in checked] == checked
    assert [twin_encode(message) for message in unchecked] == [encode(message)[0] for message in checked]
    times = _in_turn({"checked": ours, "the same structs, unchecked": bare}, scale)
    nbytes = sum(len(encode(message)[0]) for message in checked)
    found = Outcome(
        "codec",
        "Encode and decode a request, 12 proxies and 2,000 token ids",
        tuple(measurement(name, "us", values, details={"nbytes": nbytes}) for name, values in times.items()),
    )
    slower = found.of("checked").p50 / found.of("the same structs, unchecked").p50
    verdicts = (
        Verdict.of("at most 9,000 B", nbytes, "<=", 9000),
        Verdict.of("with validation: at most twice the same structs without checks", slower, "<=", 2),
    )
    return Outcome(found.name, found.title, found.measurements, verdicts)


def request() -> list[wire.Message]:
    """The messages of a request as a tokenizer sends them; numbers as large as they get in a busy deployment."""
    rows, patches = 121, 484
    owner, ranks = wire.Origin("tokenizer", 1, (1 << 61) + 7), (wire.Rank(0, (1 << 61) + 9),)
    request_id, deadline_ms = bytes(range(16)), 90_000
    placed = tuple(
        wire.PlacedItem("image", (1, 22, 22), bytes([item]) * 32, (wire.Span(20 + item * (rows + 20), rows),))
        for item in range(ITEMS)
    )
    items = tuple(
        wire.Item(
            modality="image",
            grid=(1, 22, 22),
            rows=rows,
            content_hash=bytes([item]) * 32,
            features=(
                wire.Tensor(
                    "features",
                    wire.Proxy(
                        pool=(1 << 61) + 11,
                        slot=300 + item,
                        generation=20_000 + item,
                        offset=(item + 40) * 2_276_864,
                        dtype=CODES["float32"],
                        shape=(patches, 1176),
                    ),
                ),
            ),
        )
        for item in range(ITEMS)
    )
    token_ids = b"".join((100_000 + token).to_bytes(4, "little") for token in range(TOKENS))
    return [
        wire.Admit(request_id, 0, ranks[0].epoch, owner, ranks, token_ids, placed, 256, deadline_ms),
        wire.Encode(request_id, 0, ranks[0].epoch, owner, ranks, ranks, items, deadline_ms),
    ]


class Twins:
    """The structs of the wire with the same fields and tags, and none of the checks."""

    def __init__(self) -> None:
        self._made: dict[type, type[msgspec.Struct]] = {}

    def of(self, annotation: Any) -> Any:
        """An annotation with the constraints taken off it and every struct replaced by its twin."""
        if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
            return self._struct(annotation)
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is None:
            return annotation
        twins = tuple(... if one is ... else self.of(one) for one in arguments)
        return Union[twins] if origin in (Union, UnionType) else origin[twins]  # noqa: UP007

    def like(self, value: Any) -> Any:
        """A message, or part of one, as its twin."""
        if isinstance(value, tuple):
            return tuple(map(self.like, value))
        if not isinstance(value, msgspec.Struct):
            return value
        twin = self._struct(type(value))
        return twin(*(self.like(getattr(value, field)) for field in value.__struct_fields__))

    def _struct(self, struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
        if struct not in self._made:
            hints = get_type_hints(struct)  # which takes `Annotated` off, however deep
            fields = [(name, self.of(hints[name])) for name in struct.__struct_fields__]
            config = struct.__struct_config__
            self._made[struct] = msgspec.defstruct(
                struct.__name__, fields, tag=config.tag, array_like=config.array_like, frozen=True
            )
        return self._made[struct]


def _in_turn(works: dict[str, Callable[[], None]], scale: Scale) -> dict[str, list[float]]:
    """Microseconds of one run of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(scale.rounds * 5):
        for name, work in works.items():
            started = time.perf_counter_ns()
            for _ in range(scale.of(_BATCH)):
                work()
            times[name].append((time.perf_counter_ns() - started) / 1e3 / scale.of(_BATCH))
    return times
