"""What `fuzz.py` sends to each socket of a deployment, and what must become of it."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

import msgspec

from benchmarks.flood import Packet, Target
from benchmarks.malformed import Frames, Layer, Malformed, batch, samples
from tensorferry.codecs import messages as wire
from tensorferry.codecs.frames import Limits, decode
from tensorferry.pipeline.deployment.spec import STAGES, Deployment, port_offset
from tensorferry.pipeline.pools.fd_conversation import Attach, Refused
from tensorferry.pipeline.process.runtime_dir import Runtime

ANSWER_S = 20.0  #: of a broker

#: What every stage takes from its peers, beside what only some take.
_HANDSHAKE = (wire.Hello, wire.Welcome, wire.Pool, wire.Ready, wire.Heartbeat, wire.Drain, wire.Drained)
_MAIL = (wire.Chunks, wire.Retired, wire.Confirmed, wire.Released, wire.Withdrawn)
TAKES: dict[str, tuple[type, ...]] = {
    "tokenizer-0 inbox": (wire.Delta, wire.Done, wire.Failed, wire.Collected, *_HANDSHAKE, *_MAIL),
    "encoder-0 inbox": (wire.Encode, wire.Cancel, *_HANDSHAKE, *_MAIL),
    "scheduler-0 inbox": (wire.Admit, wire.Embeddings, wire.Cancel, *_HANDSHAKE, *_MAIL),
    "tokenizer-0 front door": (wire.Submit, wire.Cancel, wire.Hello, wire.Drained),
}
TO_TAKER = 0.7  #: of the messages that decode, as many go to somebody who takes such
#: How many of a thousand packets go to sockets that are no ZeroMQ sockets, or are not spoken to as such.
ODD_PER_1000 = {"line": 2, "stream": 2, "tcp": 2}


def targets_of(deployment: Deployment) -> dict[str, Target]:
    """Every socket of a deployment. Those that carry messages are spoken to with and without ZeroMQ's own protocol."""
    runtime, port = Runtime.of(deployment), deployment.telemetry.prometheus_port
    assert port is not None
    found: dict[str, Target] = {}
    for stage in STAGES:
        found[f"{stage}-0 inbox"] = Target("push", runtime.inbox(stage, 0))
        found[f"{stage}-0 inbox, no ZMTP"] = Target("stream", runtime.inbox(stage, 0).removeprefix("ipc://"))
        found[f"{stage}-0 metrics"] = Target("tcp", f"127.0.0.1:{port + port_offset(deployment, stage, 0)}")
    found["tokenizer-0 front door"] = Target("dealer", runtime.front_door(0))
    found["tokenizer-0 front door, no ZMTP"] = Target("stream", runtime.front_door(0).removeprefix("ipc://"))
    for stage in ("tokenizer", "encoder"):
        found[f"{stage}-0 broker"] = Target("line", runtime.broker(stage, 0))
    return found


class Workload:
    """What is sent, and what must become of it."""

    def __init__(self, rng: Random, deployment: Deployment, epochs: Mapping[str, int], count: int) -> None:
        """Malformed messages of this very deployment: with its epochs and places, so that they get far."""
        runtime = Runtime.of(deployment)
        self.targets = targets_of(deployment)
        pool = pool_of(runtime.broker("tokenizer", 0))
        swaps: dict[object, object] = {
            0x1122334455667788: epochs["tokenizer"],
            0x0102030405060708: epochs["encoder"],
            (1 << 63) - 1: epochs["scheduler"],
            0x7ABBCCDDEEFF0011: pool,
            "ipc:///run/user/1000/tensorferry/local/tokenizer-0": runtime.inbox("tokenizer", 0),
            "/run/broker": runtime.broker("tokenizer", 0),
        }

        def is_true(message: wire.Message) -> bool:
            """A peer that says that it leaves is believed, whoever says so in its name."""
            return isinstance(message, wire.Drain | wire.Drained) and message.origin.epoch in epochs.values()

        starts, limits = samples(swaps, dict.fromkeys(STAGES, 0)), Limits()
        by_kind = {kind: [name for name, one in self.targets.items() if one.kind == kind] for kind in ODD_PER_1000}
        self.packets: list[Packet] = []
        self.made: list[Malformed | None] = []  #: of each packet; None: it is no message
        for one in batch(rng, starts, count, limits, is_true):
            self.packets.append(Packet(receiver(rng, one), one.frames))
            self.made.append(one)
            for kind, per_1000 in ODD_PER_1000.items():
                if rng.random() * 1000 < per_1000:
                    self.packets.append(Packet(rng.choice(by_kind[kind]), odd(rng, kind, one.frames, pool)))
                    self.made.append(None)

    def tally(self, sent: int) -> dict[str, Tally]:
        """Of the first so many packets, round and round: how many went where, and how far they are to get."""
        rounds, rest = divmod(sent, len(self.packets))
        found = {name: Tally() for name in self.targets}
        for number, (packet, made) in enumerate(zip(self.packets, self.made, strict=True)):
            times = rounds + (number < rest)
            tally = found[packet.target]
            tally.sent += times
            if made is not None:
                tally.layers[made.layer] += times
                if made.layer is Layer.STAGE and not isinstance(decode(made.frames, Limits())[0], TAKES[packet.target]):
                    tally.misplaced += times
        return found


@dataclass
class Tally:
    """Of one socket."""

    sent: int = 0
    layers: Counter[Layer] = field(default_factory=Counter)
    misplaced: int = 0  #: messages that this stage does not take

    @property
    def past_header(self) -> int:
        return self.layers[Layer.SCHEMA] + self.layers[Layer.STAGE]

    @property
    def refusals(self) -> int:
        """How many `messages_refused` must be counted for these."""
        return self.layers.total() - self.layers[Layer.STAGE] + self.misplaced


def receiver(rng: Random, made: Malformed) -> str:
    """The socket to try a message on: mostly one whose owner takes such, if there is one."""
    takers = list(TAKES)
    if made.layer is Layer.STAGE and rng.random() < TO_TAKER:
        message = decode(made.frames, Limits())[0]
        takers = [name for name, kinds in TAKES.items() if isinstance(message, kinds)] or takers
    return rng.choice(takers)


def odd(rng: Random, kind: str, frames: Frames, pool: int) -> Frames:
    """What to say at a socket that takes no such messages."""
    if kind == "tcp":
        start = rng.choice(
            (b"GET /metrics HTTP/1.1\r\n", b"GET ", b"\r\n\r\n", b"POST / HTTP/1.0\r\nContent-Length: -1\r\n")
        )
        return (start + rng.choice((b"", b"\r\n", frames[0][:500], b"Host: " + bytes(300) + b"\r\n\r\n")),)
    if kind == "stream":  # a greeting of ZMTP 3.1, whole or not, and frames with lengths that lie
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
        return (
            greeting[: rng.choice((0, 1, 10, 11, 64))],
            rng.choice((b"\x06" + b"\xff" * 8, frames[0][:500] or b"x")),
        )
    attach = msgspec.msgpack.encode(Attach(wire.PROTOCOL_VERSION, wire.Origin("client", 0, 1), pool))
    match rng.randrange(4):
        case 0:
            return (attach,)  # and hangs up when descriptors come
        case 1:
            return (attach, frames[0][:8000] or b"x")
        case 2:
            return (attach[: rng.randrange(1, len(attach))],)
        case _:
            return (frames[0][:8000] or b"x",)


def pool_of(broker: str) -> int:
    """The pool that a broker hands out: it says so to whoever asks for another."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(ANSWER_S)
        line.connect(broker)
        line.send(msgspec.msgpack.encode(Attach(wire.PROTOCOL_VERSION, wire.Origin("client", 0, 1), 1)))
        refused = msgspec.msgpack.decode(line.recv(8192), type=Refused)
    return int(refused.reason.rpartition("; ")[2].split()[0])
