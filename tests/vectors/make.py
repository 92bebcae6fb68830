"""Writes messages.json: what every message looks like on the wire, for implementations in other languages.

`python tests/vectors/make.py` after a change of the protocol; a test fails while the file is out of date. The
bytes come from the codec, and the tests decode them and compare with the fields beside them, which are what a
reader of `docs/protocol.md` would expect. An integer beyond 2^53-1, which a reader of JSON may round, is text in
decimal: `{"int64": "9223372036854775807"}`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import encode
from tensorferry.codecs.tensors import CODES

FILE = Path(__file__).with_name("messages.json")

REQUEST = bytes(range(16))
CONTENT = bytes(range(224, 256))
LARGEST = (1 << 63) - 1
EXACT_IN_JSON = (1 << 53) - 1
#: The traceparent of W3C's own example: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01.
CONTEXT = bytes.fromhex("0af7651916cd43dd8448eb211c80319cb7ad6b716920333101")

TOKENIZER = wire.Origin("tokenizer", 0, 0x1122334455667788)
ENCODER = wire.Origin("encoder", 2, 0x0102030405060708)
SCHEDULER = wire.Origin("scheduler", 1, LARGEST)
CLIENT = wire.Origin("client", 0, 1)

PROXY = wire.Proxy(0x7ABBCCDDEEFF0011, 4095, LARGEST >> 32, 1 << 30, CODES["float32"], (1024, 1176), 1, 1)
SHARED = wire.Proxy(0x7ABBCCDDEEFF0011, 0, 1, 0, CODES["bfloat16"], (), 2, 3)
INLINE = wire.Inline(0, CODES["uint8"], (0, 3, 224, 224))
MARK = wire.Mark("received", 31_535_999_000_000_000)
ANSWER = b"\x01\0\0\0\xff\xff\0\0"
SAMPLING = wire.Sampling(0.7, 0.95, 40, LARGEST, ("\n\n",), (2,), 1, 0.5, -0.5, 1.25, 2, "poems")

MESSAGES: dict[str, wire.Message] = {
    "hello": wire.Hello(2, TOKENIZER, "ipc:///run/user/1000/tensorferry/local/tokenizer-0", ("pool",)),
    "hello, nothing offered": wire.Hello(2, CLIENT, "ipc:///run/client"),
    "hello, from a known machine": wire.Hello(
        2, ENCODER, "tcp://10.0.0.2:5557", ("pool", "delta"), bytes(range(16)), bytes(range(32))
    ),
    "welcome": wire.Welcome(2, ENCODER, TOKENIZER.epoch, ("pool",)),
    "welcome, refused": wire.Welcome(3, ENCODER, TOKENIZER.epoch, (), "protocol version 2; encoder speaks 3"),
    "pool": wire.Pool(TOKENIZER, wire.PoolDescription(PROXY.pool, "host", 256 << 20, 4096), "/run/broker"),
    "pool, elastic": wire.Pool(
        TOKENIZER, wire.PoolDescription(PROXY.pool, "cuda_vmm", 1 << 30, 4096, 64 << 20), "/run/broker"
    ),
    "ready": wire.Ready(ENCODER, TOKENIZER.epoch),
    "ready, inline only": wire.Ready(ENCODER, TOKENIZER.epoch, "a memfd with seals 0x0; 0x17 are needed"),
    "heartbeat": wire.Heartbeat(SCHEDULER, 3, (wire.Gauge("queue_s", 0.25), wire.Gauge("waiting", -1.0))),
    "heartbeat, no gauges": wire.Heartbeat(SCHEDULER, 0),
    "members": wire.Members(
        TOKENIZER,
        False,
        (wire.Member("encoder", 2, ENCODER.epoch, "ready"), wire.Member("scheduler", 0, 0, "waiting")),
    ),
    "chunks": wire.Chunks(
        PROXY.pool, ENCODER.epoch, (wire.Chunk(0, 1, bytes(range(64))), wire.Chunk(1, (1 << 32) - 1))
    ),
    "retired": wire.Retired(PROXY.pool, ENCODER.epoch, (wire.Chunk(1, 2),)),
    "released": wire.Released(PROXY.pool, ENCODER.epoch, ((4095, LARGEST >> 32), (0, 1))),
    "released, of chunks": wire.Released(PROXY.pool, ENCODER.epoch, (), (1,), (2, (1 << 32) - 1)),
    "confirmed": wire.Confirmed(PROXY.pool, ENCODER.epoch, ((4095, LARGEST >> 32),)),
    "withdrawn": wire.Withdrawn(PROXY.pool, ENCODER.epoch, ((4095, LARGEST >> 32), (0, 1))),
    "drain": wire.Drain(ENCODER),
    "drained": wire.Drained(ENCODER),
    "submit": wire.Submit(
        REQUEST,
        0,
        (wire.TextPart("Was ist das? 🛳"), wire.ImagePart(0), wire.TokensPart(b"\x01\0\0\0\xff\xff\xff\x7f")),
        128,
        30_000,
    ),
    "submit, a video": wire.Submit(
        REQUEST, 0, (wire.VideoPart(0, 12, (30_000, 1001)), wire.VideoPart(12, 2)), 16, 1000
    ),
    "submit, embeddings": wire.Submit(
        REQUEST,
        0,
        (
            wire.EmbeddingsPart((wire.Tensor("embeddings", wire.Inline(0, CODES["bfloat16"], (64, 4096))),)),
            wire.EmbeddingsPart(
                (wire.Tensor("embeddings", INLINE), wire.Tensor("deepstack", INLINE)), "video", (2, 4, 8)
            ),
        ),
        16,
        1000,
    ),
    "submit, of a trace": wire.Submit(REQUEST, 0, (wire.TextPart("hello"),), 16, 1000, CONTEXT),
    "submit, of a tenant, to be streamed": wire.Submit(
        REQUEST, 0, (wire.TextPart("hello"),), 16, 1000, None, wire.Sampling(), True, -1, "team-7"
    ),
    "submit, sampled": wire.Submit(REQUEST, 0, (wire.TextPart("hello"),), 16, 1000, None, SAMPLING),
    "submit, a sound, a video file and a known image": wire.Submit(
        REQUEST, 0, (wire.AudioPart(0), wire.VideoFilePart(1), wire.ImageRef(CONTENT)), 16, 1000
    ),
    "submit, an animated file": wire.Submit(REQUEST, 0, (wire.AnimationPart(0),), 16, 1000),
    "result": wire.Result(
        REQUEST,
        0,
        264,
        128,
        (wire.ItemReport(2, (1, 32, 32), 256, "shm", 4_816_896, b"\xde\xad"),),
        (MARK, wire.Mark("answered", LARGEST)),
    ),
    "result, with its answer": wire.Result(
        REQUEST,
        0,
        5,
        2,
        (),
        (MARK,),
        ANSWER,
        "Hi 🛳",
        "stop",
        4,
        (wire.TokenLogprob(-0.5, ((1, -0.5), (7, -2.25))),) * 2,
    ),
    "delta, to its owner": wire.Delta(REQUEST, 513, TOKENIZER.epoch, SCHEDULER, 0, ANSWER, (MARK.at_ns, LARGEST), "Hi"),
    "delta": wire.Delta(REQUEST, 2, 0, TOKENIZER, 2, b"\x01\0\0\0", (LARGEST,), "", (wire.TokenLogprob(-0.5),)),
    "failed": wire.Failed(REQUEST, 1, wire.Failure("BadItem", "item 3: no image", TOKENIZER, 3)),
    "failed, worth a retry": wire.Failed(REQUEST, 1, wire.Failure("PeerGone", "encoder-2: died", ENCODER, -1, True)),
    "busy": wire.Busy(REQUEST, 0, 200, "256 requests in flight (limits.in_flight_requests)"),
    "failed, to its owner": wire.Failed(
        REQUEST, 256, wire.Failure("BadItem", "item 3: no image", ENCODER, 3), TOKENIZER.epoch
    ),
    "cancel, of a client": wire.Cancel(REQUEST, 2),
    "cancel": wire.Cancel(REQUEST, 513, ENCODER.epoch),
    "admit": wire.Admit(
        REQUEST,
        0,
        SCHEDULER.epoch,
        TOKENIZER,
        (wire.Rank(1, SCHEDULER.epoch),),
        b"\x01\0\0\0" * 3,
        (wire.PlacedItem("image", (1, 2, 4), CONTENT, (wire.Span(1, 2),)),),
        128,
        30_000,
    ),
    "admit, a video in two pieces, to be streamed": wire.Admit(
        REQUEST,
        0,
        SCHEDULER.epoch,
        TOKENIZER,
        (wire.Rank(1, SCHEDULER.epoch),),
        b"\x01\0\0\0" * 4,
        (wire.PlacedItem("video", (2, 2, 2), CONTENT, (wire.Span(0, 1), wire.Span(2, 1))),),
        128,
        30_000,
        None,
        SAMPLING,
        True,
        1,
        "team-7",
    ),
    "admit, text only": wire.Admit(
        REQUEST, 0, SCHEDULER.epoch, TOKENIZER, (wire.Rank(1, SCHEDULER.epoch),), b"\x01\0\0\0", (), 0, 86_400_000
    ),
    "admit, with a context": wire.Admit(
        REQUEST,
        0,
        SCHEDULER.epoch,
        TOKENIZER,
        (wire.Rank(1, SCHEDULER.epoch),),
        b"\x01\0\0\0",
        (),
        0,
        86_400_000,
        CONTEXT,
    ),
    "encode": wire.Encode(
        REQUEST,
        0,
        ENCODER.epoch,
        TOKENIZER,
        (wire.Rank(0, 5), wire.Rank(2, ENCODER.epoch)),
        (wire.Rank(1, SCHEDULER.epoch),),
        (
            wire.Item("image", (1, 32, 32), 256, CONTENT, (wire.Tensor("pixels", PROXY),)),
            wire.Item("image", (1, 2, 2), 1, CONTENT, (wire.Tensor("pixels", INLINE), wire.Tensor("sizes", INLINE))),
            wire.Item("video", (4, 32, 32), 1024, CONTENT, ()),
        ),
        30_000,
    ),
    "encode, anew": wire.Encode(
        REQUEST,
        0,
        ENCODER.epoch,
        TOKENIZER,
        (wire.Rank(2, ENCODER.epoch),),
        (wire.Rank(1, SCHEDULER.epoch),),
        (
            wire.Item("image", (1, 32, 32), 256, CONTENT, ()),
            wire.Item("image", (1, 2, 2), 1, CONTENT, (wire.Tensor("pixels", INLINE), wire.Tensor("sizes", INLINE))),
        ),
        30_000,
        (1,),
    ),
    "encode, to owners that were chosen": wire.Encode(
        REQUEST,
        0,
        ENCODER.epoch,
        TOKENIZER,
        (wire.Rank(0, 5), wire.Rank(2, ENCODER.epoch)),
        (wire.Rank(1, SCHEDULER.epoch),),
        (
            wire.Item("image", (1, 32, 32), 256, CONTENT, ()),
            wire.Item("image", (1, 2, 2), 1, CONTENT, (wire.Tensor("pixels", INLINE),)),
        ),
        30_000,
        (),
        None,
        (0, 1),
    ),
    "encode, with a context": wire.Encode(REQUEST, 0, ENCODER.epoch, TOKENIZER, (), (), (), 30_000, (), CONTEXT),
    "embeddings": wire.Embeddings(
        REQUEST,
        0,
        SCHEDULER.epoch,
        ENCODER,
        (wire.Embedding(0, 256, (wire.Tensor("last", SHARED), wire.Tensor("deepstack_0", INLINE))),),
        (MARK,),
    ),
    "done": wire.Done(REQUEST, 0, TOKENIZER.epoch, SCHEDULER, 128, (b"", b"\xbe\xef"), (MARK,)),
    "done, with its answer": wire.Done(
        REQUEST, 0, TOKENIZER.epoch, SCHEDULER, 2, (), (MARK,), ANSWER, "Hi 🛳", "length", 4
    ),
    "collected": wire.Collected(REQUEST, 0, TOKENIZER.epoch, SCHEDULER),
}

#: Bytes that every implementation must refuse, and why.
REFUSED: dict[str, bytes] = {
    "nothing": b"",
    "not an array": b"\x01",
    "an empty array": b"\x90",
    "a map": b"\x81\xa4type\x13",
    "an unknown tag": b"\x91\x63",
    "a tag that is text": b"\x92\xa5drain\x93\xa7encoder\x02\x01",
    "a field too many": b"\x93\x13\x93\xa7encoder\x02\x01\xc0",
    "a field too few": b"\x91\x13",
    "a nested field too many": b"\x92\x13\x94\xa7encoder\x02\x01\x00",
    "a negative rank": b"\x92\x13\x93\xa7encoder\xff\x01",
    "epoch zero": b"\x92\x13\x93\xa7encoder\x02\x00",
    "an epoch over 2^63-1": b"\x92\x13\x93\xa7encoder\x02\xcf\x80\0\0\0\0\0\0\0",
    "a rank that is a float": b"\x92\x13\x93\xa7encoder\xcb\x40\0\0\0\0\0\0\0\x01",
    "a rank that is true": b"\x92\x13\x93\xa7encoder\xc3\x01",
    "a stage that is bytes": b"\x92\x13\x93\xc4\x07encoder\x02\x01",
    "a stage that is not UTF-8": b"\x92\x13\x93\xa1\xff\x02\x01",
    "a stage of no characters": b"\x92\x13\x93\xa0\x02\x01",
    "a request id of 15 bytes": b"\x93\x22\xc4\x0f" + bytes(15) + b"\x00",
    "cut off": b"\x92\x13\x93\xa7enc",
    "something after the end": b"\x92\x13\x93\xa7encoder\x02\x01\xc0",
    "an array said to have 2^32-1 elements": b"\x93\x11\x01\xdd\xff\xff\xff\xff",
    "a temperature that is no number": b"\x98\x1e\xc4\x10"
    + bytes(16)
    + b"\x00\x91\x92\x01\xa1x\x10\x01\xc0"
    + b"\x91\xcb\x7f\xf8\0\0\0\0\0\0",
    "a pickle": b"\x80\x04cos\nsystem\n\x8c\x04true\x85R.",
}


def fields_of(value: Any) -> Any:
    """A message as JSON: structs by field name with their type, bytes as hex."""
    if isinstance(value, msgspec.Struct):
        named = {name: fields_of(getattr(value, name)) for name in value.__struct_fields__}
        return {"type": type(value).__name__, **named}
    if isinstance(value, tuple):
        return [fields_of(element) for element in value]
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, int) and value > EXACT_IN_JSON:
        return {"int64": str(value)}
    return value


def render() -> str:
    vectors = {
        "protocol_version": wire.PROTOCOL_VERSION,
        "messages": [
            {"name": name, "hex": bytes(encode(message)[0]).hex(), "message": fields_of(message)}
            for name, message in MESSAGES.items()
        ],
        "refused": [{"name": name, "hex": data.hex()} for name, data in REFUSED.items()],
    }
    return json.dumps(vectors, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
