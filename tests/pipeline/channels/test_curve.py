"""Sockets with keys: who has none, or another's, is refused before a word is read, counted, and told why."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle  # noqa: TID251  (the attack, not the code)
import socket
import struct
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage, DeploymentError
from tensorferry.codecs.frames import Limits, encode
from tensorferry.pipeline.channels import zmq_link
from tensorferry.pipeline.channels.addresses import host_and_port
from tensorferry.pipeline.channels.channels import (
    HIGH_WATER,
    UNREAD,
    Context,
    Dealer,
    FrontDoor,
    Inbox,
    Outbox,
    open_context,
)
from tensorferry.pipeline.channels.curve_keys import (
    DOOR,
    INBOX,
    CurveClient,
    KeyPair,
    ServerKeys,
    add_client,
    make_keys,
)
from tensorferry.pipeline.channels.interface import Denial
from tensorferry.pipeline.channels.zap_gate import Gate
from tensorferry.pipeline.client.client import Client
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import (
    Deployment,
    NetworkSpec,
    SecuritySpec,
    TimeoutsSpec,
    port_offset,
    ranks_of,
)
from tensorferry.pipeline.process.runtime_dir import Runtime
from tensorferry.pipeline.process.stage import inboxes
from tensorferry.pipeline.process.supervisor import Supervisor

PATIENCE_S = 10.0
DENIED_S = 6.0  #: for three handshakes to be refused, which take two seconds
FLOOD_NBYTES = 32 << 10
LISTENING = Path("/proc/net/tcp")
TCP_BUFFERS = Path("/proc/sys/net/ipv4")
LIMITS = Limits(frames=8, header_nbytes=1 << 16, inline_nbytes=1 << 20)
ROCKET = Path(__file__).parents[3] / "examples" / "images" / "rocket.jpg"


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has now."""
    for first in range(20_000 + os.getpid() % 1000 * 20, 60_000, 20):
        with contextlib.ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no ports")


async def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


# --- the gate, within one process -------------------------------------------------------------------------------


ANN, EVE = KeyPair.new(), KeyPair.new()
KEYS = ServerKeys(KeyPair.new(), {ANN.public: "ann"})
SERVER = KEYS.pair.public


@pytest.fixture
def context() -> Iterator[Context]:
    with open_context() as context:
        yield context


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)}"


def _never(problem: BadMessage) -> None:
    raise problem


def dealer(context: Context, address: str, curve: CurveClient | None, told: list[Denial]) -> Dealer:
    return Dealer(context, address, "door", LIMITS, _never, curve=curve, on_denied=told.append)


async def test_whom_the_gate_knows_is_heard_and_answered(context: Context, address: str) -> None:
    denied: list[object] = []
    gate = Gate(context, KEYS, lambda: denied.append("gate"))
    door = FrontDoor(context, address, LIMITS, _never, curve=KEYS.bound(DOOR), on_denied=denied.append)
    ann = dealer(context, address, CurveClient(ANN, SERVER), [])
    ann.send_nowait(wire.Drain(wire.Origin("client", 0, 1)), [b"bytes"])
    async with asyncio.timeout(PATIENCE_S):
        received = await door.receive()
        assert bytes(received.frames[0]) == b"bytes"
        assert received.client == "ann"
        door.send_nowait(received.peer, wire.Drained(wire.Origin("tokenizer", 0, 2)))
        assert isinstance((await ann.receive()).message, wire.Drained)
    assert denied == []
    for channel in (ann, door, gate):
        channel.close()


@pytest.mark.parametrize(
    ("curve", "reason", "final"),
    [
        (CurveClient(EVE, SERVER), "its deployment does not know this key", True),
        (CurveClient(ANN, EVE.public), "it hung up in the handshake", False),
        (None, "one side has keys and the other has none", True),
    ],
)
async def test_b28_who_has_no_key_or_anothers_is_refused_counted_and_told(
    context: Context, address: str, curve: CurveClient | None, reason: str, final: bool
) -> None:
    denied: list[object] = []
    gate = Gate(context, KEYS, lambda: denied.append("gate"))
    door = FrontDoor(context, address, LIMITS, _never, curve=KEYS.bound(DOOR), on_denied=denied.append)
    told: list[Denial] = []
    with capture_logs() as lines:
        eve = dealer(context, address, curve, told)
        eve.send_nowait(wire.Drain(wire.Origin("client", 0, 1)))
        await until(lambda: denied and any(one.final == final and one.reason.startswith(reason) for one in told))
    if curve is not None and curve.pair is EVE:
        assert denied == ["gate"], "once, and not tried again"
        assert lines[0]["event"] == "connection_denied"
        assert lines[0]["key"] == EVE.public[:8].decode()
        assert lines[0]["address"] == "127.0.0.1"
    ann = dealer(context, address, CurveClient(ANN, SERVER), [])
    ann.send_nowait(wire.Drained(wire.Origin("client", 0, 1)))
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance((await door.receive()).message, wire.Drained), "the first that comes in"
    assert door.receive_nowait() is None
    for channel in (eve, ann, door, gate):
        channel.close()


async def test_a_client_is_told_of_a_door_without_keys(context: Context, address: str) -> None:
    door = FrontDoor(context, address, LIMITS, _never)
    told: list[Denial] = []
    ann = dealer(context, address, CurveClient(ANN, SERVER), told)
    await until(lambda: Denial("one side has keys and the other has none", True) in told)
    ann.close()
    door.close()


async def test_a_client_is_no_stage(context: Context, address: str) -> None:
    """Its key opens front doors; inboxes take messages from the deployment itself alone."""
    denied: list[str] = []
    gate = Gate(context, KEYS, lambda: denied.append("gate"))
    inbox = Inbox(context, address, LIMITS, _never, curve=KEYS.bound(INBOX))
    ann = Outbox(context, address, "inbox", curve=CurveClient(ANN, SERVER))
    ann.send_nowait(wire.Drain(wire.Origin("encoder", 0, 1)))
    await until(lambda: denied)
    stage = Outbox(context, address, "inbox", curve=KEYS.stage)
    stage.send_nowait(wire.Drained(wire.Origin("encoder", 0, 1)))
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance((await inbox.receive()).message, wire.Drained)
    assert inbox.receive_nowait() is None
    for channel in (ann, stage, inbox, gate):
        channel.close()


async def test_where_nobody_answers_for_the_gate_nobody_comes_in(context: Context, address: str) -> None:
    door = FrontDoor(context, address, LIMITS, _never, curve=KEYS.bound(DOOR))
    told: list[Denial] = []
    ann = dealer(context, address, CurveClient(ANN, SERVER), told)
    ann.send_nowait(wire.Drain(wire.Origin("client", 0, 1)))
    await until(lambda: told)
    assert door.receive_nowait() is None
    ann.close()
    door.close()


async def test_a_context_has_one_gate(context: Context) -> None:
    gate = Gate(context, KEYS, lambda: None)
    with pytest.raises(DeploymentError, match="has a gate already"):
        Gate(context, KEYS, lambda: None)
    gate.close()


async def test_a_client_that_floods_a_door_on_a_network_fills_its_own_queue(context: Context, address: str) -> None:
    """What nobody has taken yet is bounded at the door, by the kernel, and then at the sender."""
    door = FrontDoor(context, address, LIMITS, _never)
    eve = dealer(context, address, None, [])
    kernel_nbytes = sum(int(TCP_BUFFERS.joinpath(name).read_text().split()[2]) for name in ("tcp_wmem", "tcp_rmem"))
    most = HIGH_WATER + 2 * UNREAD + 2 * kernel_nbytes // FLOOD_NBYTES
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent <= most:
            async with asyncio.timeout(0.5):
                await eve.writable()
            eve.send_nowait(wire.Drain(wire.Origin("client", 0, 1)), [bytes(FLOOD_NBYTES)])
            sent += 1
    assert HIGH_WATER <= sent <= most
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(sent):  # and nothing is lost of one that stays
            await door.receive()
    eve.close()
    door.close()


async def test_who_connects_and_says_nothing_is_hung_up_on(
    context: Context, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_link, "HANDSHAKE_MS", 50)
    gate = Gate(context, KEYS, lambda: None)
    door = FrontDoor(context, address, LIMITS, _never, curve=KEYS.bound(DOOR))
    host, port = host_and_port(address)
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, port)
        greeted = await reader.read()  # until its end
    assert greeted.startswith(b"\xff")
    writer.close()
    await writer.wait_closed()
    door.close()
    gate.close()


async def test_b24_a_port_in_use_is_refused_not_stolen(context: Context, address: str) -> None:
    door = FrontDoor(context, address, LIMITS, _never)
    with pytest.raises(DeploymentError, match=f"cannot listen at {address}: Address already in use"):
        FrontDoor(context, address, LIMITS, _never)
    door.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
async def test_b25_ipv6_is_spoken(context: Context) -> None:
    address = f"tcp://[::1]:{free_ports(1)}"
    gate = Gate(context, KEYS, lambda: None)
    door = FrontDoor(context, address, LIMITS, _never, curve=KEYS.bound(DOOR))
    ann = dealer(context, address, CurveClient(ANN, SERVER), [])
    ann.send_nowait(wire.Drain(wire.Origin("client", 0, 1)))
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance((await door.receive()).message, wire.Drain)
    for channel in (ann, door, gate):
        channel.close()


# --- a client, and a door that changes its keys ------------------------------------------------------------------


@contextlib.asynccontextmanager
async def tokenizer(address: str, keys: ServerKeys) -> AsyncIterator[None]:
    """A door that says it is ready, and answers no request."""
    origin = wire.Origin("tokenizer", 0, 1)
    members = wire.Members(origin, True, (wire.Member("tokenizer", 0, 1, "ready"),))

    async def greet(door: FrontDoor) -> None:
        async for received in door:
            if isinstance(received.message, wire.Hello):
                door.send_nowait(received.peer, members)

    with open_context() as context, contextlib.closing(Gate(context, keys, lambda: None)):
        door = FrontDoor(context, address, LIMITS, _never, curve=keys.bound(DOOR))
        greeting = asyncio.create_task(greet(door))
        try:
            yield
        finally:
            door.close()
            await greeting


async def test_what_is_in_flight_fails_at_once_when_the_keys_are_others_from_now_on(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "other")
    deployment = Deployment(
        name="curve",
        network=NetworkSpec(bind="127.0.0.1", port=free_ports(1)),
        security=SecuritySpec(keys=str(tmp_path / "keys")),
        timeouts=TimeoutsSpec(heartbeat_s=0.05, quarantine_s=30.0),
    )
    address = Runtime.of(deployment).front_door(0)
    async with contextlib.AsyncExitStack() as undo:
        async with tokenizer(address, ServerKeys.read(tmp_path / "keys")):
            client = await undo.enter_async_context(Client.connect(deployment, timeout_s=PATIENCE_S))
            asked = client.submit_nowait(["x"], deadline_s=60.0)
        async with tokenizer(address, ServerKeys.read(tmp_path / "other")), asyncio.timeout(PATIENCE_S):
            outcome = await asked
            assert isinstance(outcome, wire.Failed)
            assert outcome.failure.kind == "Denied"
            assert outcome.failure.retryable
            assert "the deployment does not let this client in: tokenizer-0 at tcp" in outcome.failure.problem
            with pytest.raises(DeploymentError, match="does not let this client in"):
                await client.refresh()


# --- a deployment on a network ------------------------------------------------------------------------------------


DEPLOYMENT = """
name: curve
transport: shm
runtime_dir: {folder}/run
model: {{adapter: fingerprint}}
network: {{bind: 0.0.0.0, advertise: 127.0.0.1, port: {port}, inboxes: tcp}}
security: {{keys: {folder}/keys}}
limits: {{client_requests_per_s: 20}}
timeouts: {{heartbeat_s: 0.2, quarantine_s: 10.0}}
telemetry: {{log_level: error, log_format: json, prometheus_port: {metrics}}}
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tf-") as made:
        yield Path(made)


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Deployment]:
    make_keys(folder / "keys")
    first = free_ports(7)
    file = folder / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(folder=folder, port=first, metrics=first + 4))
    deployment = load(file)
    async with Supervisor.running(deployment, file):
        yield deployment


def denied(deployment: Deployment) -> int:
    """Connections that were refused, by everybody's metrics."""
    total = 0.0
    for stage in ranks_of(deployment):
        port = (deployment.telemetry.prometheus_port or 0) + port_offset(deployment, stage, 0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        total += sum(
            float(line.split()[-1]) for line in lines if line.startswith("tensorferry_connections_denied_total")
        )
    return int(total)


def listening() -> set[tuple[str, int]]:
    """Where anybody listens on IPv4. Source: proc_net_tcp(5); 0A is the state, addresses in host order."""
    rows = [line.split() for line in LISTENING.read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {(socket.inet_ntoa(struct.pack("=I", int(host, 16))), int(port, 16)) for host, port in local}


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.sentinel}",)


def greeting(mechanism: bytes) -> bytes:
    """Of ZMTP 3.1. Source: https://rfc.zeromq.org/spec/37/"""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_b28_a_deployment_on_a_network_answers_those_it_knows_and_no_one_else(folder: Path) -> None:
    sentinel = folder / "sentinel"
    bomb = pickle.dumps(Bomb(sentinel))
    async with running(folder) as deployment, Client.connect(deployment, timeout_s=60) as client:
        runtime = Runtime.of(deployment)
        addresses = [runtime.front_door(0), *inboxes(deployment, runtime, *ranks_of(deployment)).values()]
        assert len(set(addresses)) == 4

        async def good() -> None:
            outcome = await client.submit(["what is this? ", ROCKET.read_bytes()])
            assert isinstance(outcome, wire.Result), outcome

        await good()
        assert denied(deployment) == 0
        ports = {int(address.rpartition(":")[2]) for address in addresses}
        assert {host for host, port in listening() if port in ports} == {"0.0.0.0"}
        with zmq.Context() as attacker, contextlib.ExitStack() as undo:
            for address in addresses:
                for curve in (None, CurveClient(EVE, client_of(deployment)), CurveClient(EVE, EVE.public)):
                    kind = zmq.DEALER if address == addresses[0] else zmq.PUSH
                    raw = undo.enter_context(attacker.socket(kind))
                    raw.linger = 0
                    if curve is not None:
                        curve.secure(raw)
                    raw.connect(address)
                    for frames in ([bomb], [bomb, bomb], encode(wire.Drain(wire.Origin("client", 0, 1)))):
                        with contextlib.suppress(zmq.Again):
                            raw.send_multipart(frames, zmq.NOBLOCK)
                host, port = address.removeprefix("tcp://").split(":")
                for said in (bomb, greeting(b"NULL") + bomb, greeting(b"CURVE") + bomb, b"GET / HTTP/1.0\r\n\r\n"):
                    with socket.create_connection((host, int(port)), PATIENCE_S) as line:
                        line.sendall(said)
            await good()
            await until(lambda: denied(deployment) >= 6 * len(addresses))
        await good()
        assert {member.state for member in await client.refresh()} == {"ready"}
        await _others_are_told(folder, deployment)
        outcomes = await asyncio.gather(*(client.submit(["x"]) for _ in range(60)))
        busy = [outcome for outcome in outcomes if isinstance(outcome, wire.Busy)]
        assert 0 < len(busy) < 60
        assert all("limits.client_requests_per_s" in one.reason and 0 < one.retry_ms <= 1000 for one in busy)
    assert not sentinel.exists()


def client_of(deployment: Deployment) -> bytes:
    assert deployment.security.keys is not None
    return ServerKeys.read(deployment.security.keys).pair.public


async def _others_are_told(folder: Path, deployment: Deployment) -> None:
    """Clients with the wrong keys hear why within seconds, though they would wait for a minute."""
    make_keys(folder / "other")
    add_client(folder / "keys", "late", folder / "late")  # known to the folder, not to those who run
    for keys, says in (
        ("other", "tokenizer-0 at tcp://127.0.0.1:.*: it hung up in the handshake, as one does whose key is another"),
        ("late", "tokenizer-0 at tcp://127.0.0.1:.*: its deployment does not know this key"),
        (None, "(one side has keys and the other has none|it hung up in the handshake, .* or who has none)"),
    ):
        settings = ["network.bind=127.0.0.1", f"network.port={deployment.network.port}"]
        settings += [f"security.keys={folder / keys}"] if keys else []
        file = folder / "client.yaml"
        file.write_text("name: curve\n")
        async with asyncio.timeout(DENIED_S):
            with pytest.raises(DeploymentError, match=f"deployment 'curve' does not let this client in: .*{says}"):
                async with Client.connect(load(file, settings), timeout_s=60):
                    raise AssertionError("it came in")
