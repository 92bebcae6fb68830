"""Malformed messages: real ones, changed where their structure says that it may hurt.

The samples are the golden vectors of the protocol (`tests/vectors/messages.json`), so every kind of message takes part.
Whatever is drawn is drawn from the caller's `Random`: a seed repeats a batch, and Hypothesis, which has a `Random` of
its own, makes a finding small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.frames import Limits, decode
from tensorferry.codecs.messages import Message

VECTORS = Path(__file__).parents[1] / "tests" / "vectors" / "messages.json"
MOST_TRIES = 200  #: for one that gets to the layer that is asked for

Frames = tuple[bytes, ...]
Tree = Any  #: what msgpack decodes to without a schema: lists, integers, text, bytes

encode_tree = msgspec.msgpack.Encoder().encode


class Layer(IntEnum):
    """Where a receiver finds out, at the latest, that a message is none."""

    SIZE = 0  #: by the number of its frames, or of their bytes
    HEADER = 1  #: its header is not one value of msgpack
    SCHEMA = 2  #: it is, but no message of the protocol
    STAGE = 3  #: it is a message: that it lies is for its receiver to find


def layer_of(frames: Sequence[bytes], limits: Limits) -> Layer:
    """How far these frames get. The strict reading: a header whose type is wrong in its first byte and whose last is
    missing does not get past decoding, though a receiver may see the type first."""
    try:
        decode(frames, limits)
    except BadMessage:
        within = 0 < len(frames) <= limits.frames and len(frames[0]) <= limits.header_nbytes
        if not within or sum(map(len, frames[1:])) > limits.inline_nbytes:
            return Layer.SIZE
        try:
            msgspec.msgpack.decode(frames[0])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError):
            return Layer.HEADER
        return Layer.SCHEMA
    return Layer.STAGE


@dataclass(frozen=True, slots=True)
class Sample:
    """A real message to start from."""

    name: str
    tree: Tree
    inline: Frames

    @property
    def frames(self) -> Frames:
        return encode_tree(self.tree), *self.inline


def swapped(tree: Tree, swaps: Mapping[object, Tree], ranks: Mapping[str, int]) -> Tree:
    """A message of the vectors as one of a deployment. swaps: what to put in the place of the vectors' own epochs,
    addresses and the like; ranks: of each stage's origin."""
    if isinstance(tree, list):
        if len(tree) == 3 and isinstance(tree[0], str) and tree[0] in ranks:  # an origin
            return [tree[0], ranks[tree[0]], swapped(tree[2], swaps, ranks)]
        return [swapped(inner, swaps, ranks) for inner in tree]
    return swaps.get(tree, tree) if isinstance(tree, int | str | bytes) and not isinstance(tree, bool) else tree


def samples(swaps: Mapping[object, Tree] | None = None, ranks: Mapping[str, int] | None = None) -> list[Sample]:
    """All golden vectors, with as many inline frames as they point at; swapped as above."""
    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))["messages"]
    trees = {vector["name"]: msgspec.msgpack.decode(bytes.fromhex(vector["hex"])) for vector in vectors}
    return [
        Sample(name, swapped(tree, swaps or {}, ranks or {}), (b"\xff\xd8\xff inline",) * 2)
        for name, tree in trees.items()
    ]


# --- what is done to a message ----------------------------------------------------------------------------------

Mutation = Callable[[Random, Sample, Sequence[Sample]], Frames]
Path_ = tuple[int, ...]

#: msgpack that no decoder of ours should like, wherever it stands: each a value of its own, or the beginning of one.
RAW: dict[str, bytes] = {
    "ext": b"\xc7\x05\x2aabcde",
    "ext of no bytes": b"\xc7\x00\x00",
    "fixext 16": b"\xd8\x7f" + bytes(16),
    "timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "timestamp of the far future": b"\xc7\x0c\xff\x00\x00\x00\x00\x7f" + b"\xff" * 7,
    "timestamp with too many nanoseconds": b"\xd7\xff" + b"\xff" * 8,
    "never used byte": b"\xc1",
    "text that is not UTF-8": b"\xa4\xff\xfe\xfa\x80",
    "text of a surrogate": b"\xa3\xed\xa0\x80",
    "text of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "array of 2^32-1": b"\xdd\xff\xff\xff\xff",
    "map of 2^32-1": b"\xdf\xff\xff\xff\xff",
    "ext of 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
    "not a number": b"\xcb\x7f\xf8" + bytes(6),
    "infinity": b"\xcb\x7f\xf0" + bytes(6),
    "float32 not a number": b"\xca\x7f\xc0\x00\x00",
    "map with an array for a key": b"\x81\x91\x01\x01",
    "map of the same key twice": b"\x82\x01\x01\x01\x01",
    "a pickle": b"\xc4\x12cos\nsystem\n(S'x'\ntR.",
}
INTEGERS = (0, 1, -1, 127, 128, 255, 256, 65_535, 65_536, -(1 << 31), (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
            1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))  # fmt: skip
VALUES: tuple[Tree, ...] = (
    None, True, False, 0.0, -0.0, 1e308, float("nan"), float("inf"), "", "\0", "a" * 65, "\u202e", "encoder",
    b"", bytes(15), bytes(16), bytes(17), bytes(65), [], [[]], {}, {"type": 1}, [0] * 4097, *INTEGERS,
)  # fmt: skip


def places(tree: Tree, path: Path_ = ()) -> Iterator[Path_]:
    """Every place in a message, the whole of it first."""
    yield path
    if isinstance(tree, list):
        for index, inner in enumerate(tree):
            yield from places(inner, (*path, index))


def at(tree: Tree, path: Path_) -> Tree:
    for index in path:
        tree = tree[index]
    return tree


def put(tree: Tree, path: Path_, value: Tree) -> Tree:
    """The same message with another value at a place."""
    if not path:
        return value
    changed = list(tree)
    changed[path[0]] = put(tree[path[0]], path[1:], value)
    return changed


def _somewhere(rng: Random, tree: Tree) -> Path_:
    return rng.choice(list(places(tree)))


def _list_in(rng: Random, tree: Tree) -> Path_:
    return rng.choice([path for path in places(tree) if isinstance(at(tree, path), list)])


def bits(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """A few bits of the header flipped."""
    header = bytearray(encode_tree(sample.tree))
    for _ in range(rng.randint(1, 4)):
        header[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
    return bytes(header), *sample.inline


def cut(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """The header ends early, goes on too long, or has a hole."""
    header = encode_tree(sample.tree)
    first, last = sorted(rng.randrange(len(header) + 1) for _ in range(2))
    return rng.choice((header[:first], header + header[first:last], header[:first] + header[last:])), *sample.inline


def spliced(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """The beginning of one header and the end of another."""
    header, other = encode_tree(sample.tree), encode_tree(rng.choice(others).tree)
    return header[: rng.randrange(len(header) + 1)] + other[rng.randrange(len(other) + 1) :], *sample.inline


def noise(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """Frames of random bytes."""
    return tuple(rng.randbytes(rng.choice((0, 1, 2, 40, 200))) for _ in range(rng.randint(1, 3)))


def raw(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """Odd msgpack somewhere: other types, lengths that lie, text that is none."""
    odd = msgspec.Raw(RAW[rng.choice(list(RAW))])
    return encode_tree(put(sample.tree, _somewhere(rng, sample.tree), odd)), *sample.inline


def nested(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """Deeper than any decoder's stack."""
    depth, opening = rng.choice((100, 2_000, 20_000)), rng.choice((b"\x91", b"\x81\x00", b"\x92\x01"))
    odd = msgspec.Raw(opening * depth + b"\x01")
    return encode_tree(put(sample.tree, _somewhere(rng, sample.tree), odd)), *sample.inline


def valued(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """A value of another type, or at the edge of its range, somewhere."""
    return encode_tree(put(sample.tree, _somewhere(rng, sample.tree), rng.choice(VALUES))), *sample.inline


def reshaped(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """A field or element left out, repeated, or at another's place."""
    path = _list_in(rng, sample.tree)
    inner = list(at(sample.tree, path))
    if inner:
        one = rng.randrange(len(inner))
        match rng.randrange(4):
            case 0:
                del inner[one]
            case 1:
                inner[one:one] = [inner[one]] * rng.choice((1, 2, 300))
            case 2:
                inner.append(None)
            case _:
                rng.shuffle(inner)
    return encode_tree(put(sample.tree, path, inner)), *sample.inline


def crossed(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """A part of another message in the place of one of this one's."""
    other = rng.choice(others).tree
    graft = at(other, _somewhere(rng, other))
    return encode_tree(put(sample.tree, _somewhere(rng, sample.tree), graft)), *sample.inline


def retagged(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """The fields of one kind under the tag of another."""
    return encode_tree([rng.choice(others).tree[0], *sample.tree[1:]]), *sample.inline


def lying(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """Up to three leaves with another value of their own type: what no schema sees."""
    tree = sample.tree
    leaves = [path for path in places(tree) if path != (0,) and not isinstance(at(tree, path), list)]
    for path in rng.sample(leaves, min(len(leaves), rng.randint(1, 3))):
        match at(tree, path):
            case bool() as flag:
                tree = put(tree, path, not flag)
            case int() as number:
                tree = put(tree, path, rng.choice((number ^ 1, number + 1, rng.randrange(1 << 8), *INTEGERS)))
            case float():
                tree = put(tree, path, rng.choice((float("nan"), float("inf"), -1e308)))
            case str() as text:
                tree = put(tree, path, rng.choice(("", "x", text + "\0", text[::-1], "../../etc", "ipc:///tmp/x")))
            case bytes() as data:
                tree = put(tree, path, rng.choice((rng.randbytes(len(data)), data[:-1], b"")))
    return encode_tree(tree), *sample.inline


def emptied(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """A list of nothing, or of twice as much."""
    path = _list_in(rng, sample.tree)
    return encode_tree(put(sample.tree, path, at(sample.tree, path) * rng.choice((0, 0, 2)))), *sample.inline


def renamed(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """A request that nobody has heard of."""
    ids = [path for path in places(sample.tree) if isinstance(at(sample.tree, path), bytes) and path == (1,)]
    tree = put(sample.tree, ids[0], rng.randbytes(16)) if ids else sample.tree
    return lying(rng, Sample(sample.name, tree, sample.inline), others)


def misframed(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """The right header with frames too few, too many, empty, or in another order."""
    header, inline = encode_tree(sample.tree), list(sample.inline)
    match rng.randrange(5):
        case 0:
            return (header,)
        case 1:
            return header, *[b""] * rng.randint(1, 300)
        case 2:
            return *inline, header
        case 3:
            return (header, header, *inline)
        case _:
            return b"", header, *inline


def crowded(rng: Random, sample: Sample, others: Sequence[Sample]) -> Frames:
    """More frames than any receiver takes."""
    return encode_tree(sample.tree), *[b""] * (Limits().frames + rng.randint(0, 2))


MUTATIONS: dict[Layer, Sequence[Mutation]] = {
    Layer.SIZE: (crowded,),
    Layer.HEADER: (bits, cut, spliced, noise, raw, nested, misframed),
    Layer.SCHEMA: (bits, raw, valued, reshaped, crossed, retagged, lying),
    Layer.STAGE: (lying, renamed, renamed, emptied, crossed, misframed, reshaped),
}
#: What a batch is made of, unless somebody says otherwise.
SHARES = {Layer.SIZE: 0.0005, Layer.HEADER: 0.4995, Layer.SCHEMA: 0.35, Layer.STAGE: 0.15}


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that is none, and how far it gets."""

    layer: Layer
    frames: Frames
    what: str  #: which mutation of which sample


def malformed(
    rng: Random,
    starts: Sequence[Sample],
    layer: Layer,
    limits: Limits,
    is_true: Callable[[Message], bool] = lambda message: False,
) -> Malformed:
    """One that gets as far as that and no further. is_true: whether a peer could have said so, so that it is no lie."""
    for _ in range(MOST_TRIES):
        mutation, sample = rng.choice(MUTATIONS[layer]), rng.choice(starts)
        frames = mutation(rng, sample, starts)
        if frames == sample.frames or layer_of(frames, limits) is not layer:
            continue
        if layer is not Layer.STAGE or not is_true(decode(frames, limits)[0]):
            return Malformed(layer, frames, f"{mutation.__name__} {sample.name}")
    raise AssertionError(f"no message that gets to {layer.name} in {MOST_TRIES} tries")


def batch(
    rng: Random,
    starts: Sequence[Sample],
    count: int,
    limits: Limits,
    is_true: Callable[[Message], bool] = lambda message: False,
    shares: Mapping[Layer, float] = SHARES,
) -> list[Malformed]:
    """So many, of all layers, in any order."""
    layers = rng.choices(list(shares), list(shares.values()), k=count)
    return [malformed(rng, starts, layer, limits, is_true) for layer in layers]
