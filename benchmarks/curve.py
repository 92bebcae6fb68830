"""What keys cost: requests from a client to a front door and answers back, over TCP on loopback with CURVE and without.

A request is a `submit` whose one image is a frame of so many bytes, as it travels inline; the answer is a `busy`. The
door is a process of its own and reads nothing of the image; both ends are the channels that a deployment has. Beside
them a UNIX socket, which is what clients on the same machine use. CPU is that of both processes.

`python -m benchmarks.curve ADDRESS [FOLDER]`: a door there, with the keys of a folder if there is one.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvloop

from benchmarks.results import Measurement, Outcome, Scale, measurement, quantile
from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.frames import Limits
from tensorferry.pipeline.channels.channels import Dealer, FrontDoor, open_context
from tensorferry.pipeline.channels.curve_keys import DOOR, ServerKeys, client_keys, make_keys
from tensorferry.pipeline.channels.zap_gate import Gate

KIB, MIB = 1 << 10, 1 << 20
LIMITS = Limits()
TURN_S, STOP_S = 60.0, 10.0
PLAIN, CURVE, UNIX = "tcp", "tcp, CURVE", "ipc"

Load = tuple[int, int, int]  #: bytes of the image, requests in flight, requests of a turn


def latency(scale: Scale) -> Outcome:
    """One request at a time."""
    found = _measured(scale, {"1 KiB": (KIB, 1, 200), "1 MiB": (MIB, 1, 16)})
    return Outcome("curve-latency", "a request with an inline image and its answer, one at a time", tuple(found))


def rate(scale: Scale) -> Outcome:
    """As many as the two processes get through."""
    found = _measured(scale, {"1 KiB, 64 in flight": (KIB, 64, 1024), "1 MiB, 8 in flight": (MIB, 8, 32)})
    return Outcome("curve-rate", "requests with an inline image and their answers, several in flight", tuple(found))


def _measured(scale: Scale, loads: Mapping[str, Load]) -> list[Measurement]:
    """Contenders take turns: A B C, C B A, A B C and so on; the first turn of each is not counted."""
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="tensorferry-")))
        make_keys(folder / "keys")
        addresses = {PLAIN: _free_address(), CURVE: _free_address(), UNIX: f"ipc://{folder}/door"}
        processes = {
            name: undo.enter_context(_serving(address, folder / "keys" if name == CURVE else None))
            for name, address in addresses.items()
        }
        keys = client_keys(folder / "keys")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, open_context() as context:
            dealers: dict[str, Dealer] = {}

            async def connect() -> None:
                for name, address in addresses.items():
                    made = Dealer(context, address, name, LIMITS, _refused, curve=keys if name == CURVE else None)
                    dealers[name] = made
                    undo.callback(made.close)

            runner.run(connect())
            found: list[Measurement] = []
            for load, (nbytes, window, messages) in loads.items():
                turns: dict[str, list[_Turn]] = {name: [] for name in addresses}
                image, count = secrets.token_bytes(max(1, scale.of(nbytes))), max(window, scale.of(messages))
                for number in range(scale.rounds + 1):
                    for name in addresses if number % 2 == 0 else reversed(addresses):
                        took = runner.run(_turn(dealers[name], processes[name], image, window, count))
                        if number:
                            turns[name].append(took)
                found += [_measurement(f"{load}: {name}", took, window) for name, took in turns.items()]
            for dealer in dealers.values():
                dealer.close()
    return found


class _Turn:
    """What one turn of one contender took."""

    def __init__(self) -> None:
        self.latencies_ns: list[int] = []
        self.elapsed_ns = self.cpu_ns = 0


async def _turn(dealer: Dealer, process: int, image: bytes, window: int, messages: int) -> _Turn:
    """So many requests, `window` of them in flight."""
    turn = _Turn()
    sent: dict[bytes, int] = {}
    cpu_ns, begun = _cpu_ns(process), time.perf_counter_ns()
    left = messages
    async with asyncio.timeout(TURN_S):
        while left or sent:
            while left and len(sent) < window:
                request = secrets.token_bytes(16)
                sent[request] = time.perf_counter_ns()
                dealer.send_nowait(wire.Submit(request, 0, (wire.ImagePart(0),), 1, 1000), [image])
                left -= 1
            answer = (await dealer.receive()).message
            assert isinstance(answer, wire.Busy)
            turn.latencies_ns.append(time.perf_counter_ns() - sent.pop(answer.request))
    turn.elapsed_ns, turn.cpu_ns = time.perf_counter_ns() - begun, _cpu_ns(process) - cpu_ns
    return turn


def _measurement(name: str, turns: list[_Turn], window: int) -> Measurement:
    messages = sum(len(turn.latencies_ns) for turn in turns)
    details = {"cpu_us": sum(turn.cpu_ns for turn in turns) / messages / 1e3}
    if window == 1:
        latencies_us = [took / 1e3 for turn in turns for took in turn.latencies_ns]
        return measurement(name, "us", latencies_us, details=details)
    details["latency_us"] = quantile([took / 1e3 for turn in turns for took in turn.latencies_ns], 0.5)
    rates = [len(turn.latencies_ns) / (turn.elapsed_ns / 1e9) for turn in turns]
    return measurement(name, "messages/s", rates, details=details)


def _cpu_ns(process: int) -> int:
    """CPU time of this process and that one. Source: glibc's clock_getcpuclockid, for the clock's number."""
    return time.process_time_ns() + time.clock_gettime_ns((~process << 3) | 2)


def _free_address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


# --- the door ---------------------------------------------------------------------------------------------------


@contextmanager
def _serving(address: str, keys: Path | None) -> Iterator[int]:
    """The pid of a process with a door there."""
    command = [sys.executable, "-m", "benchmarks.curve", address, *([str(keys)] if keys else [])]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as door:
        assert door.stdout is not None
        assert door.stdin is not None
        if b"ready" not in door.stdout.readline():
            raise RuntimeError(f"no door at {address}")
        try:
            yield door.pid
        finally:
            door.stdin.close()  # the end of its input is the end of the door
            door.wait(STOP_S)


async def _serve(address: str, keys: ServerKeys | None) -> None:
    with open_context() as context, ExitStack() as undo:
        if keys is not None:
            undo.callback(Gate(context, keys, lambda: None).close)
        door = FrontDoor(context, address, LIMITS, _refused, curve=None if keys is None else keys.bound(DOOR))
        undo.callback(door.close)
        loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
        loop.add_reader(stdin, door.close)
        print("ready", flush=True)
        async for received in door:
            submit = received.message
            assert isinstance(submit, wire.Submit)
            door.send_nowait(received.peer, wire.Busy(submit.request, submit.attempt, 0, ""))
        loop.remove_reader(stdin)


def _refused(problem: BadMessage) -> None:
    raise problem


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], ServerKeys.read(sys.argv[2]) if len(sys.argv) > 2 else None))
