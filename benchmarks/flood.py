"""A process that sends what `fuzz.py` has made ready, as cheaply as it can: `python -m benchmarks.flood FILE`.

The file has all frames, so that nothing is made while it is measured. For each line on stdin, `PER_S SECONDS`, packets
are sent in the file's order, round and round, and a line of JSON says what became of them.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import zmq

TICK_S = 0.01
ZMQ_KINDS = {"push": zmq.PUSH, "dealer": zmq.DEALER}
TAKEN_S = 10.0  #: for a peer to take what was sent


class Target(msgspec.Struct, frozen=True, array_like=True):
    """A socket of the deployment, and how it is spoken to: a ZeroMQ socket, or a connection for each message, of a UNIX
    socket of whole packets (`line`) or of bytes (`stream`), or of TCP on loopback (`tcp`)."""

    kind: Literal["push", "dealer", "line", "stream", "tcp"]
    address: str


class Packet(msgspec.Struct, frozen=True, array_like=True):
    """A message, and where it goes."""

    target: str
    frames: tuple[bytes, ...]


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    targets: dict[str, Target]
    packets: tuple[Packet, ...]


class Burst(msgspec.Struct, frozen=True):
    """What became of a line."""

    sent: int  #: packets of the file, from where the last burst ended
    took_s: float
    late_s: float  #: behind its schedule at the end
    refused: dict[str, int]  #: connections that were not taken, by target


class Flood:
    """All sockets of one sender."""

    def __init__(self, traffic: Traffic, undo: ExitStack) -> None:
        self._packets = traffic.packets
        self._next = 0
        self._refused: Counter[str] = Counter()
        self._dealers: list[zmq.Socket[bytes]] = []
        context = undo.enter_context(zmq.Context())
        self._send: dict[str, Callable[[Sequence[bytes]], None]] = {}
        for name, target in traffic.targets.items():
            if target.kind in ZMQ_KINDS:
                made = undo.enter_context(context.socket(ZMQ_KINDS[target.kind]))
                made.linger = int(TAKEN_S * 1000)
                made.sndtimeo = int(TAKEN_S * 1000)  # a receiver that takes nothing for so long is stuck
                made.connect(target.address)
                self._send[name] = partial(_send, made)
                if target.kind == "dealer":
                    self._dealers.append(made)
            else:
                self._send[name] = self._connecting(name, target)

    def _connecting(self, name: str, target: Target) -> Callable[[Sequence[bytes]], None]:
        family = socket.AF_INET if target.kind == "tcp" else socket.AF_UNIX
        kind = socket.SOCK_SEQPACKET if target.kind == "line" else socket.SOCK_STREAM
        address: object = target.address
        if target.kind == "tcp":
            host, _, port = target.address.rpartition(":")
            address = host, int(port)

        def send(frames: Sequence[bytes]) -> None:
            with socket.socket(family, kind) as made:
                made.settimeout(1.0)
                try:
                    made.connect(address)  # type: ignore[arg-type]  # typeshed does not tie it to the family
                    for frame in frames:
                        made.send(frame)
                except OSError:  # it hung up at the first word, or has no room for one more
                    self._refused[name] += 1

        return send

    def burst(self, per_s: float, seconds: float) -> Burst:
        """Send so many a second for so long, in small bursts."""
        self._refused.clear()
        started, packets, first, count = time.monotonic(), self._packets, self._next, int(per_s * seconds)
        sent = 0
        while sent < count:
            due = min(count, max(sent + 1, int((time.monotonic() - started + TICK_S) * per_s)))
            for number in range(first + sent, first + due):
                packet = packets[number % len(packets)]
                self._send[packet.target](packet.frames)
            sent = due
            self._drain()
            left_s = started + sent / per_s - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)  # until the next small burst is due: the rate is what was asked for
        self._next = first + sent
        took_s = time.monotonic() - started
        return Burst(sent, took_s, took_s - seconds, dict(self._refused))

    def _drain(self) -> None:
        """Take answers, which are not looked at."""
        for dealer in self._dealers:
            try:
                while True:
                    dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                continue


def _send(made: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    made.send_multipart(frames)


def main(file: str) -> None:
    traffic = msgspec.msgpack.decode(Path(file).read_bytes(), type=Traffic)
    with ExitStack() as undo:
        flood = Flood(traffic, undo)
        print("ready", flush=True)
        for line in sys.stdin:
            per_s, seconds = map(float, line.split())
            print(json.dumps(msgspec.to_builtins(flood.burst(per_s, seconds))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
