"""Writes this folder: malformed messages, deployment files, traces and images that every change must go on refusing.

`PYTHONPATH=. python tests/corpus/make.py` in the root. What a fuzzer has found once is under
FOUND, by hand and with what it did; the rest is a few of each kind of damage, so that each kind is met every time. A
test replays all of it, and fails while the folder is out of date.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.damage import damaged
from benchmarks.malformed import MUTATIONS, Layer, Sample, layer_of, samples
from msgspec.structs import replace

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Limits, encode
from tensorferry.codecs.tensors import CODES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SEED = 8
EACH = 2  #: of each mutation that gets to a layer
LONGEST_NBYTES = 4096  #: of a message that is kept

TOKENIZER, ENCODER, SCHEDULER = 0x1122334455667788, 0x0102030405060708, (1 << 63) - 1  # the vectors' epochs
OWNER, REQUEST = wire.Origin("tokenizer", 0, TOKENIZER), bytes(range(16))
RANKS = (wire.Rank(0, ENCODER),), (wire.Rank(0, SCHEDULER),)


def _encode(rows: int, grid: tuple[int, int, int], shape: tuple[int, ...]) -> wire.Encode:
    item = wire.Item("image", grid, rows, bytes(32), (wire.Tensor("features", wire.Inline(0, CODES["uint8"], shape)),))
    return wire.Encode(REQUEST, 0, ENCODER, OWNER, *RANKS, (item,), 60_000)


def _placed(offset: int, length: int) -> wire.PlacedItem:
    return wire.PlacedItem("image", (1, 2, 2), bytes(32), (wire.Span(offset, length),))


def _admit(**changes: Any) -> wire.Admit:
    fields: dict[str, Any] = {"token_ids": bytes(40), "items": (), "output_tokens": 1, "deadline_ms": 60_000} | changes
    return wire.Admit(REQUEST, 0, SCHEDULER, OWNER, RANKS[1], **fields)


#: Messages that were not refused once, or not at once, each with what they did.
FOUND: dict[str, tuple[wire.Message, str]] = {
    "a refusal to a process that was accepted": (
        wire.Welcome(3, wire.Origin("encoder", 0, ENCODER), TOKENIZER, (), "protocol version 2; encoder speaks 3"),
        "ended the tokenizer, and with it the deployment",
    ),
    "a hello of another version in the name of a living tokenizer": (
        wire.Hello(3, OWNER, "ipc:///run/user/1000/tensorferry/local/tokenizer-0", ("pool",)),
        "had the encoder send the tokenizer that refusal",
    ),
    "a pool that is handed out elsewhere": (
        wire.Pool(OWNER, wire.PoolDescription(77, "host", 1 << 20, 8), "/tmp/elsewhere"),
        "had every tensor of that tokenizer sent inline from then on",
    ),
    "no room for the pool of somebody who has it mapped": (
        wire.Ready(wire.Origin("encoder", 0, ENCODER), TOKENIZER, "a memfd with seals 0x0"),
        "had every tensor for that encoder sent inline from then on",
    ),
    "an item of four million rows": (
        _encode(4_000_000, (1, 1, 18), (18,)),
        "had the adapter make them; of 2^31-1 rows it would have been 64 GiB",
    ),
    "a request of 4,097 items": (
        _admit(items=(_placed(0, 0),) * 4097),
        "with ten million it held the scheduler's loop for two seconds, and took 340 MB",
    ),
    "a request with tokens cut off": (_admit(token_ids=bytes(5)), "waited for its deadline among the good ones"),
    "a request with placeholders beyond its tokens": (
        _admit(items=(_placed(4, (1 << 31) - 1),)),
        "waited for its deadline among the good ones",
    ),
    "an item of an owner that nobody has met": (
        wire.Encode(REQUEST, 0, ENCODER, wire.Origin("tokenizer", 7, 666), *RANKS, (), 60_000),
        "took a place in the encoder's queue, which had no end",
    ),
}

#: Deployment files, each of which must be refused by a ConfigError that names it.
CONFIGS: dict[str, bytes] = {
    "nothing": b"",
    "no_mapping": b"[1, 2]\n",
    "not_utf8": b"name: \xff\xfe\n",
    "nul": b"name: a\0b\n",
    "deep": b"name: " + b"[" * 3000 + b"\n",
    "deep_mappings": b"".join(b" " * depth + b"a:\n" for depth in range(120)),
    "laughs": b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (c + 1, c + 1, c, c) for c in range(97, 121)),
    "its_own_anchor": b"name: &a [*a]\n",
    "python": b"name: !!python/object/apply:os.system ['true']\n",
    "binary": b"name: !!binary aGVsbG8=\n",
    "twice": b"name: a\nname: b\n",
    "merge": b"base: &b {name: a}\n<<: *b\n",
    "two_documents": b"name: a\n---\nname: b\n",
    "number_too_long": b"name: a\ntokenizer: {workers: " + b"9" * 5000 + b"}\n",
    "infinite": b"name: a\ntimeouts: {start_s: .inf}\n",
    "not_a_number": b"name: a\ntimeouts: {start_s: .nan}\n",
    "sexagesimal": b"name: a\ntokenizer: {workers: 1:30}\n",
    "unknown_key": b"name: a\nteh: 1\n",
    "wrong_type": b"name: a\nencoder: []\n",
    "key_that_is_a_list": b"? [a]\n: b\n",
}

#: Traces that are none.
TRACES: dict[str, bytes] = {
    "nothing.jsonl": b"",
    "deep.jsonl": b"[" * 20_000,
    "numbers.jsonl": b'{"timestamp": 1e999, "input_length": '
    + b"9" * 500
    + b', "output_length": -1, "hash_ids": [1]}\n',
    "surrogate.jsonl": b'{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["\\ud800"]}\n',
    "nul.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03\0,1,2\n",
    "quotes.csv": b'TIMESTAMP,ContextTokens,GeneratedTokens\n"' + b"x" * 3000,
    "bomb.jsonl.gz": gzip.compress(b"0" * 8_000_000, mtime=0),
    "cut.jsonl.gz": gzip.compress(b'{"timestamp": 1}\n' * 50, mtime=0)[:40],
}
IMAGES = ("tiny_20x20.jpg", "pixel_1x1.png")


def _kept(name: str, layer: Layer, frames: Sequence[bytes], did: str = "") -> dict[str, object]:
    return {"name": name, "layer": layer.name.lower(), "frames": [frame.hex() for frame in frames], "did": did}


def messages() -> list[dict[str, object]]:
    """All of them, as JSON: how far each gets, its frames in hexadecimal, and why it is here."""
    rng, limits, starts = Random(SEED), Limits(), samples()
    found = []
    for number, (name, (message, did)) in enumerate(FOUND.items()):
        if hasattr(message, "request"):  # one of its own, as what is over once is over
            message = replace(message, request=bytes([number]) * 16)
        frames = tuple(map(bytes, encode(message, [bytes(18)])))
        found.append(_kept(name, layer_of(frames, limits), frames, did))
    for layer, mutations in MUTATIONS.items():
        for mutation in dict.fromkeys(mutations if layer is not Layer.SIZE else ()):
            kept = 0
            for _ in range(2000):
                sample: Sample = rng.choice(starts)
                frames = mutation(rng, sample, starts)
                short = sum(map(len, frames)) < LONGEST_NBYTES and len(frames) < 20
                if kept < EACH and short and frames != sample.frames and layer_of(frames, limits) is layer:
                    kept += 1
                    found.append(_kept(f"{mutation.__name__} {sample.name}, {kept}", layer, frames))
    return found


def files() -> dict[str, bytes]:
    """Everything in the folder, by name."""
    rng = Random(SEED)
    text = json.dumps(messages(), indent=1, ensure_ascii=True)
    made = {"messages.json": text.encode("ascii") + b"\n"}
    made |= {f"configs/{name}.yaml": data for name, data in CONFIGS.items()}
    made |= {f"traces/{name}": data for name, data in TRACES.items()}
    for name in IMAGES:
        whole = (ROOT / "tests" / "data" / "images" / name).read_bytes()
        stem, _, suffix = name.partition(".")
        made |= {f"images/{stem}-{number}.{suffix}": damaged(rng, whole) for number in range(6)}
    return made


def main() -> None:
    for name, data in files().items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
