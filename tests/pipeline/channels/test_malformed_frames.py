"""What is sent to a channel and is no message."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle  # noqa: TID251  (the attack, not the code)
import random
import resource
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.pipeline.channels.processes import (
    DEADLINE_S,
    LIMITS,
    ME,
    beat,
    numbers,
    receive_all,
)

from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.frames import encode
from tensorferry.codecs.messages import Drain
from tensorferry.pipeline.channels.channels import (
    Context,
    Dealer,
    FrontDoor,
    Inbox,
    Outbox,
    check_address,
)
from tensorferry.pipeline.channels.zmq_link import open_socket


class Exploit:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def malformed(sentinel: Path) -> list[list[bytes]]:
    """Multipart messages that are none of ours, one for each way to be wrong."""
    dice = random.Random(11)
    good = bytes(encode(beat(1))[0])
    crafted = pickle.dumps(Exploit(sentinel))  # would leave its mark if anybody unpickled it
    one = [
        b"",
        b"\x00",
        b"\xc1",
        b"\xff" * 100,
        b"[" * 5000,
        b"\x91" * 60_000,
        crafted,
        pickle.dumps(beat(1)),
        good[:-1],
        good + b"\x00",
        msgspec.msgpack.encode([9999, 1]),
        msgspec.msgpack.encode({"type": "hello"}),
        msgspec.msgpack.encode([14, ["encoder", 0, 7], -1]),
        msgspec.msgpack.encode([14, ["encoder", 0, 7], 1 << 63]),
        msgspec.msgpack.encode([14, msgspec.msgpack.Ext(42, crafted), 1]),
        msgspec.msgpack.encode([14, ["\ud7ff" * 100, 0, 7], 1]),
        b"\x93\x0e\x93\xa3\xff\xfe\xfd\x00\x07\x01",  # not UTF-8
        b"x" * (LIMITS.header_nbytes + 1),
        *(dice.randbytes(dice.randrange(1, 400)) for _ in range(100)),
    ]
    return [*([it] for it in one), [good, *[b""] * (LIMITS.frames + 50)], [b"", good]]


@pytest.mark.parametrize("kind", [Inbox, FrontDoor, Dealer])
async def test_b27_b28_what_is_not_a_message_is_refused_and_counted(context, address, dropped, home, kind):
    """On every socket that takes messages; the next good one is served."""
    if kind is Dealer:
        raw = open_socket(context, zmq.ROUTER, high_water=1000)
        raw.bind(address)
        channel: Any = Dealer(context, address, "evil", LIMITS, dropped.append)
        channel.send_nowait(beat(0))
        assert await asyncio.to_thread(raw.poll, 10_000)
        prefix = [raw.recv_multipart()[0]]
    else:
        channel = kind(context, address, LIMITS, dropped.append)
        raw = open_socket(context, zmq.PUSH if kind is Inbox else zmq.DEALER, high_water=1000)
        raw.connect(address)
        prefix = []
    bad = malformed(home / "exploited")
    for frames in bad:
        raw.send_multipart([*prefix, *frames])
    raw.send_multipart([*prefix, *encode(Drain(ME), [b"good"])])
    [received] = await receive_all(channel, 1)
    assert (received.message, [bytes(it) for it in received.frames]) == (Drain(ME), [b"good"])
    assert len(dropped) == len(bad)
    assert all(isinstance(problem, BadMessage) and str(problem) for problem in dropped)
    assert not (home / "exploited").exists()
    raw.close()
    channel.close()


@pytest.mark.parametrize("kind", [Inbox, FrontDoor])
async def test_b28_bytes_that_are_not_even_zeromq_harm_nobody(context, address, dropped, home, kind):
    channel = kind(context, address, LIMITS, dropped.append)
    dice = random.Random(3)
    path = check_address(address)
    crafted = pickle.dumps(Exploit(home / "exploited"))  # the same
    for junk in (b"GET / HTTP/1.1\r\n\r\n", crafted, b"\xff" * 1000, *(dice.randbytes(300) for _ in range(30))):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(DEADLINE_S)
            stranger.connect(path)
            with contextlib.suppress(OSError):  # it hangs up on us
                stranger.sendall(junk)
                stranger.shutdown(socket.SHUT_WR)
                while await asyncio.to_thread(stranger.recv, 4096):
                    pass
    peer = (Outbox if kind is Inbox else _dealer)(context, address, "good")
    peer.send_nowait(beat(4))
    assert numbers(await receive_all(channel, 1)) == [4]
    assert not (home / "exploited").exists()
    peer.close()
    channel.close()


def _dealer(context: Context, address: str, peer: str) -> Dealer:
    return Dealer(context, address, peer, LIMITS, lambda problem: None)


async def test_a_peer_that_lies_about_its_size_costs_no_memory(context, address, dropped):
    """The length of a frame comes before its bytes; over the limit, nothing is allocated and the peer is cut off."""
    inbox = Inbox(context, address, LIMITS, dropped.append)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 16 + b"\0" + b"\0" * 31
    ready = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
    with socket.socket(socket.AF_UNIX) as liar:
        liar.settimeout(DEADLINE_S)
        liar.connect(check_address(address))
        liar.sendall(greeting + ready)
        before = _virtual()
        liar.sendall(b"\x02" + (1 << 31).to_bytes(8, "big") + b"x" * 100)  # 2 GiB, says the header
        while await asyncio.to_thread(liar.recv, 4096):
            pass
        assert _virtual() - before < 1 << 30
    outbox = Outbox(context, address, "good")
    outbox.send_nowait(beat(1))
    assert numbers(await receive_all(inbox, 1)) == [1]
    inbox.close()
    outbox.close()


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
