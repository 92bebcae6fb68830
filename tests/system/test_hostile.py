"""Messages that lie, sent to every socket of a live deployment: each fails alone, and the next good request works."""

from __future__ import annotations

import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from tensorferry.codecs import messages as wire
from tensorferry.codecs.tensors import CODES
from tensorferry.pipeline.channels.channels import Outbox, open_context
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.stage import inboxes
from tensorferry.pipeline.process.supervisor import Supervisor

pytestmark = pytest.mark.timeout(120)

ROCKET = Path(__file__).parents[2] / "examples" / "images" / "rocket.jpg"

DEPLOYMENT = """
name: hostile
transport: shm
runtime_dir: {directory}
model: {{adapter: fingerprint}}
pool: {{budget_mb: 16}}
embeddings_pool: {{budget_mb: 16}}
timeouts: {{heartbeat_s: 0.2, quarantine_s: 10.0}}
telemetry: {{log_level: error, log_format: json}}
"""

Epochs = dict[str, int]
REQUEST = b"a lying request."
EVIL = 666


def rank(epoch: int) -> wire.Rank:
    return wire.Rank(0, epoch)


def me(epochs: Epochs, stage: str) -> wire.Origin:
    return wire.Origin(stage, 0, epochs[stage])


def placed(offset: int, length: int) -> wire.PlacedItem:
    return wire.PlacedItem("image", (1, 2, 2), bytes(32), (wire.Span(offset, length),))


def admit(epochs: Epochs, **changes: object) -> wire.Admit:
    good = wire.Admit(
        REQUEST, 0, epochs["scheduler"], me(epochs, "tokenizer"), (rank(epochs["scheduler"]),), bytes(8), (), 0, 60_000
    )
    return msgspec.structs.replace(good, **changes)


def encode(epochs: Epochs, payload: wire.Payload, **changes: object) -> wire.Encode:
    item = wire.Item("image", (1, 4, 4), 4, bytes(32), (wire.Tensor("features", payload),))
    good = wire.Encode(
        REQUEST,
        0,
        epochs["encoder"],
        me(epochs, "tokenizer"),
        (rank(epochs["encoder"]),),
        (rank(epochs["scheduler"]),),
        (item,),
        60_000,
    )
    return msgspec.structs.replace(good, **changes)


def embeddings(epochs: Epochs, payload: wire.Payload) -> wire.Embeddings:
    item = wire.Embedding(0, 4, (wire.Tensor("embeddings", payload),))
    return wire.Embeddings(REQUEST, 0, epochs["scheduler"], me(epochs, "encoder"), (item,), ())


#: name -> who gets it, and the messages; a fresh set is made for each deployment.
LIES: dict[str, tuple[str, Callable[[Epochs, Callable[[str], str]], list[wire.Message]]]] = {
    "token ids of 5 bytes": ("scheduler", lambda e, _: [admit(e, token_ids=bytes(5))]),
    "spans beyond the tokens": ("scheduler", lambda e, _: [admit(e, items=(placed(1, 50),))]),
    "spans out of order": (
        "scheduler",
        lambda e, _: [admit(e, items=(placed(1, 1), placed(0, 1)))],
    ),
    "a deadline in a day": ("scheduler", lambda e, _: [admit(e, deadline_ms=86_400_000)]),
    "no schedulers": ("scheduler", lambda e, _: [admit(e, schedulers=())]),
    "embeddings of a pool that is not there": (
        "scheduler",
        lambda e, _: [embeddings(e, wire.Proxy(EVIL, 0, 1, 0, CODES["uint8"], (4, 32))), admit(e)],
    ),
    "a slot out of range, an absurd shape, an unknown dtype": (
        "encoder",
        lambda e, _: [
            encode(e, wire.Proxy(EVIL, 1 << 30, 1, 0, CODES["uint8"], (1 << 39, 1 << 39))),
            encode(e, wire.Inline(0, 255, (3,)), attempt=1),
            encode(e, wire.Inline(7, CODES["uint8"], (1 << 39, 1 << 39)), attempt=2),
        ],
    ),
    "an assignment that disagrees": (
        "encoder",
        lambda e, _: [encode(e, wire.Inline(0, CODES["uint8"], (1,)), encoders=(rank(EVIL),))],
    ),
    "a hello of another life": (
        "scheduler",
        lambda e, inbox: [wire.Hello(1, wire.Origin("tokenizer", 0, EVIL), inbox("tokenizer"), ("pool",))],
    ),
    "a hello of the next version": (
        "encoder",
        lambda e, inbox: [wire.Hello(2, wire.Origin("tokenizer", 0, EVIL), inbox("tokenizer"), ("pool",))],
    ),
    "a hello from elsewhere": (
        "encoder",
        lambda e, inbox: [wire.Hello(1, wire.Origin("tokenizer", 0, EVIL), "tcp://10.0.0.1:1", ())],
    ),
    "the same hello again": (
        "encoder",
        lambda e, inbox: [wire.Hello(1, me(e, "tokenizer"), inbox("tokenizer"), ("pool",))] * 3,
    ),
    "a welcome of another life": (
        "tokenizer",
        lambda e, inbox: [wire.Welcome(1, wire.Origin("encoder", 0, EVIL), e["tokenizer"])],
    ),
    "a failure from nobody": (
        "tokenizer",
        lambda e, _: [wire.Failed(REQUEST, 0, wire.Failure("Lie", "", wire.Origin("encoder", 55, EVIL)))],
    ),
    "a message for somebody else": ("encoder", lambda e, _: [admit(e)]),
    "drained, of another life": ("scheduler", lambda e, _: [wire.Drained(wire.Origin("tokenizer", 0, EVIL))]),
}


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield Path(path)


async def good(client: Client) -> None:
    outcome = await client.submit(
        ["a good request ", (Path(__file__).parents[2] / "examples/images/rocket.jpg").read_bytes()]
    )
    assert isinstance(outcome, wire.Result), outcome


@pytest.mark.processes
@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_b27_b28_lies_and_garbage_fail_alone(directory: Path) -> None:
    file = directory / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(directory=directory / "run"))
    deployment = load(file)
    runtime = Runtime.of(deployment)
    rng = random.Random(3)
    sentinel = directory / "sentinel"
    pickled = b"cposix\nsystem\n(S'touch " + str(sentinel).encode() + b"'\ntR."  # would run `touch` if it were loaded
    async with (
        Supervisor.running(deployment, file) as supervisor,
        Client.connect(
            deployment,
            timeout_s=60,
        ) as client,
    ):
        epochs = {member.stage: member.epoch for member in client.members()}
        for name, (stage, messages) in LIES.items():
            with open_context() as context:
                outbox = Outbox(context, runtime.inbox(stage, 0), stage)
                for message in messages(epochs, lambda other: runtime.inbox(other, 0)):
                    outbox.send_nowait(message, [b"x"])
                assert await outbox.flush(10.0), name
            await good(client)
        addresses = [*inboxes(deployment, runtime, "tokenizer", "encoder", "scheduler").values(), runtime.front_door(0)]
        with zmq.Context() as context:
            for address in addresses:
                kind = zmq.DEALER if address == runtime.front_door(0) else zmq.PUSH
                with context.socket(kind) as raw:
                    raw.linger = 5000  # ms
                    raw.connect(address)
                    for garbage in (
                        b"",
                        pickled,
                        b"\x91" * 5000,
                        b"\x80\x05",
                        *(rng.randbytes(n) for n in (1, 40, 9000)),
                    ):
                        raw.send_multipart([garbage, pickled])
        for broker in (runtime.broker("tokenizer", 0), runtime.broker("encoder", 0)):
            for garbage in (b"\x00", pickled, rng.randbytes(3000)):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                    line.connect(broker)
                    line.send(garbage)
        await good(client)
        assert {member.state for member in await client.refresh()} == {"ready"}
        for pid in supervisor.processes.values():
            os.kill(pid, 0)  # it lives
            assert not psutil.Process(pid).net_connections("inet"), "by default nothing listens on a network"
    assert not sentinel.exists()
