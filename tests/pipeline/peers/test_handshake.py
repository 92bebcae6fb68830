"""Who may be sent work: handshakes, silence, distrust, and that nothing else counts as either."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
from structlog.testing import capture_logs

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import PeerGone
from tensorferry.pipeline.peers import handshake as module
from tensorferry.pipeline.peers.handshake import Peers
from tensorferry.stages.tokenizer.request import Life

ME = wire.Origin("tokenizer", 0, 1)
QUARANTINE_S = 5.0


class Box:
    """An outbox that keeps what is sent."""

    def __init__(self, address: str, peer: str) -> None:
        self.sent: list[wire.Message] = []
        self.flushed = self.closed = False

    async def flush(self, deadline_s: float) -> bool:
        self.flushed = True
        return True

    def close(self) -> None:
        self.closed = True

    def send_nowait(self, message: wire.Message, inline: Sequence[Any] = ()) -> None:
        self.sent.append(message)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def peers(clock: Clock) -> Peers:
    """A tokenizer that has met two encoders and a scheduler; they are ready."""
    connect: Any = Box
    peers = Peers(ME, "ipc:///t", upstream={}, connect=connect, attach=lambda _: None, quarantine_s=QUARANTINE_S)
    peers.greet({("encoder", 0): "ipc:///e0", ("encoder", 1): "ipc:///e1", ("scheduler", 0): "ipc:///s0"})
    for stage, rank in (("encoder", 0), ("encoder", 1), ("scheduler", 0)):
        meet(peers, stage, rank, 10 + rank)
    return peers


def meet(peers: Peers, stage: str, rank: int, epoch: int) -> None:
    origin = wire.Origin(stage, rank, epoch)
    peers.hear(wire.Welcome(wire.PROTOCOL_VERSION, origin, ME.epoch))
    peers.hear(wire.Ready(origin, ME.epoch))


def beats(peers: Peers, clock: Clock, seconds: float, *heard: int) -> None:
    """Time goes by, with a beat a second; of the encoders only these ranks are heard."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        for rank in heard:
            peers.hear(wire.Heartbeat(wire.Origin("encoder", rank, 10 + rank), 0))
        peers.beat(0, ())


def usable(peers: Peers) -> list[int]:
    return [peer.rank for peer in peers.usable("encoder")]


def test_c5_a_silent_peer_gets_nothing_new_until_it_is_heard(peers: Peers, clock: Clock) -> None:
    beats(peers, clock, 4, 0)
    assert usable(peers) == [0, 1]
    with capture_logs() as logs:
        beats(peers, clock, 1, 0)
        assert usable(peers) == [0]
        beats(peers, clock, 100, 0)
        assert usable(peers) == [0]
        beats(peers, clock, 1, 0, 1)
        assert usable(peers) == [0, 1]
    ours = [(log["event"], log["peer"]) for log in logs if log["peer"] == "encoder-1"]
    assert ours == [("peer_quarantined", "encoder-1"), ("peer_recovered", "encoder-1")]
    assert next(log["reason"] for log in logs if log["peer"] == "encoder-1") == "is quarantined: not heard for 5.0 s"


def test_a_quarantined_peer_takes_no_lease_and_is_named_with_the_reason(peers: Peers, clock: Clock) -> None:
    assert peers.taker("encoder", 1, 11).rank == 1
    beats(peers, clock, 6, 0)
    with pytest.raises(PeerGone, match=r"encoder-1: is quarantined: not heard for 6\.0 s"):
        peers.taker("encoder", 1, 11)
    assert peers.get("encoder", 1, 11).rank == 1, "a report still goes to it"
    assert {(member.stage, member.rank): member.state for member in peers.members()} == {
        ("encoder", 0): "ready",
        ("encoder", 1): "quarantined",
        ("scheduler", 0): "quarantined",
    }
    assert peers.all_ready, "nobody has to wait for it to be ready again: the others serve"


def test_a_process_that_was_stopped_itself_does_not_take_the_others_for_silent(peers: Peers, clock: Clock) -> None:
    """Their heartbeats came while it was stopped, and it has not read them yet."""
    beats(peers, clock, 2, 0, 1)
    clock.now += 1000.0
    assert usable(peers) == [0, 1]
    peers.beat(0, ())
    assert usable(peers) == [0, 1]
    beats(peers, clock, 10, 0, 1)
    assert usable(peers) == [0, 1]
    clock.now += 1000.0
    beats(peers, clock, 3, 0)
    assert usable(peers) == [0], "but who stays silent is silent"


def test_a_distrusted_peer_gets_nothing_more_in_that_life(peers: Peers, clock: Clock) -> None:
    peers.quarantined(wire.Origin("encoder", 1, 11))
    assert usable(peers) == [0]
    beats(peers, clock, 3, 0, 1)
    meet(peers, "encoder", 1, 11)
    assert usable(peers) == [0], "heartbeats and handshakes of the same life do not help"
    with pytest.raises(PeerGone, match="acknowledged what it was never lent"):
        peers.taker("encoder", 1, 11)
    peers.died(wire.Origin("encoder", 1, 11))
    meet(peers, "encoder", 1, 99)
    assert usable(peers) == [0, 1]


def test_what_is_said_of_a_former_life_changes_nothing(peers: Peers, clock: Clock) -> None:
    former = wire.Origin("encoder", 1, 11)
    peers.died(former)
    meet(peers, "encoder", 1, 99)
    peers.quarantined(former)
    peers.died(former)
    peers.admitted(former, 3)
    assert usable(peers) == [0, 1]
    assert peers.get("encoder", 1, 99).column is None
    beats(peers, clock, 6, 0, 1)  # 1 says so of its former life
    assert usable(peers) == [0]
    for call in (peers.get, peers.taker):
        with pytest.raises(PeerGone, match="is not there in that life"):
            call("encoder", 1, 11)


def test_b27_the_life_that_is_known_goes_on_whoever_answers_in_its_name(peers: Peers) -> None:
    meet(peers, "encoder", 1, 99)
    assert peers.get("encoder", 1, 11).state == "ready"
    with pytest.raises(PeerGone, match="is not there in that life"):
        peers.get("encoder", 1, 99)


def test_c2_a_former_life_s_column_is_not_the_next_one_s(peers: Peers) -> None:
    """Of one whose connection broke, and whose death nobody has proven yet: its column is there still, and owed in."""
    peers.admitted(wire.Origin("encoder", 1, 11), 3)
    assert peers.get("encoder", 1, 11).column == 3
    peers.lost("encoder-1")
    meet(peers, "encoder", 1, 99)
    assert peers.get("encoder", 1, 99).column is None


def test_what_may_be_lost_with_a_connection_is_said_again_once_the_peer_is_heard(clock: Clock) -> None:
    """Of the last life alone: a former one's reports mean nothing to the next."""
    connect: Any = Box
    mended: list[str] = []
    scheduler = Peers(
        wire.Origin("scheduler", 0, 5),
        "ipc:///s",
        upstream={("tokenizer", 0): "ipc:///t"},
        connect=connect,
        attach=lambda _: None,
        quarantine_s=QUARANTINE_S,
        on_mended=lambda peer: mended.append(str(peer)),
    )
    scheduler.open()
    scheduler.hear(wire.Hello(wire.PROTOCOL_VERSION, ME, "ipc:///t"))
    [owner] = scheduler
    box: Any = owner.outbox
    report = wire.Collected(bytes(16), 0, ME.epoch, scheduler.origin)
    scheduler.report(owner, report)
    scheduler.hear(wire.Heartbeat(ME, 0))
    assert box.sent.count(report) == 1, "nothing broke"

    scheduler.lost("tokenizer-0")
    assert box.sent.count(report) == 1, "it may be dead, and then nobody is to hear of this"
    box.sent.clear()
    scheduler.hear(wire.Heartbeat(ME, 0))
    assert box.sent == [wire.Ready(scheduler.origin, ME.epoch), report]
    scheduler.hear(wire.Heartbeat(ME, 0))
    assert box.sent.count(report) == 1
    assert mended == ["tokenizer-0"]

    scheduler.lost("tokenizer-0")
    scheduler.hear(wire.Hello(wire.PROTOCOL_VERSION, wire.Origin("tokenizer", 0, 2), "ipc:///t"))
    assert box.sent.count(report) == 1
    assert mended == ["tokenizer-0"]


def test_what_was_sent_through_a_connection_that_broke_is_lost_also_where_the_peer_is_back(peers: Peers) -> None:
    [encoder, _] = peers.usable("encoder")
    before = Life.of(encoder)
    peers.lost("encoder-0")
    assert before.over
    meet(peers, "encoder", 0, 10)
    assert encoder.state == "ready"
    assert before.over, "a message may have been on its way"
    assert not Life.of(encoder).over
    peers.lost("encoder-0")
    peers.lost("encoder-0")
    during = Life.of(encoder)
    peers.lost("encoder-0")
    assert during.over, "it broke again before the peer was heard"


def test_a_peer_that_leaves_gets_nothing_new_but_may_be_told_what_is_under_way(peers: Peers) -> None:
    peers.hear(wire.Drain(wire.Origin("scheduler", 0, 10)))
    assert peers.usable("scheduler") == []
    assert peers.taker("scheduler", 0, 10).state == "leaving"


async def test_the_last_word_is_for_those_who_are_still_there(peers: Peers) -> None:
    """The deployment drains upstream first: to wait for who has left would take the whole deadline, each time."""
    peers.greet({("scheduler", 1): "ipc:///s1"})  # has never been there
    peers.hear(wire.Drained(wire.Origin("encoder", 0, 10)))
    peers.lost("encoder-1")  # its connection may come back
    peers.hear(wire.Drain(wire.Origin("scheduler", 0, 10)))  # it finishes what it has
    peers.lost("scheduler-0")  # and its connection may come back, too
    await peers.leave(1.0)
    boxes = {str(peer): peer.outbox for peer in peers}
    assert {name for name, box in boxes.items() if box.flushed} == {"encoder-1", "scheduler-0"}  # type: ignore[attr-defined]
    assert {name for name, box in boxes.items() if box.closed} == {"encoder-0", "scheduler-1"}  # type: ignore[attr-defined]
    told = {name for name, box in boxes.items() if wire.Drained(ME) in box.sent}  # type: ignore[attr-defined]
    assert told == {"encoder-1", "scheduler-0"}


async def test_the_last_word_is_not_for_the_dead(peers: Peers) -> None:
    peers.died(wire.Origin("encoder", 0, 10))
    await peers.leave(1.0)
    assert [str(peer) for peer in peers if peer.outbox.closed] == ["encoder-0"]  # type: ignore[attr-defined]


# --- what is not believed -----------------------------------------------------------------------------------------


class Strangers:
    """Counts what was dropped because of whom, or of what, it spoke."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def strangers() -> Strangers:
    return Strangers()


@pytest.fixture
def encoder(clock: Clock, strangers: Strangers) -> tuple[Peers, list[wire.Pool]]:
    """An encoder that has met a tokenizer of epoch 1, and what it was to attach to."""
    connect: Any = Box
    attached: list[wire.Pool] = []
    peers = Peers(
        wire.Origin("encoder", 0, 2),
        "ipc:///e",
        upstream={("tokenizer", 0): "ipc:///t"},
        connect=connect,
        attach=attached.append,
        quarantine_s=QUARANTINE_S,
        broker=lambda stage, rank: f"/run/{stage}-{rank}.pool",
        on_unknown=strangers,
    )
    peers.hear(wire.Hello(wire.PROTOCOL_VERSION, ME, "ipc:///t", ("pool",)))
    return peers, attached


def test_b27_a_process_that_was_accepted_is_not_ended_by_a_message(peers: Peers) -> None:
    """Whoever knows its epoch could say so; and every client is told it."""
    for origin in (wire.Origin("encoder", 0, 10), wire.Origin("encoder", 0, 99)):
        assert peers.hear(wire.Welcome(wire.PROTOCOL_VERSION + 1, origin, ME.epoch, (), "protocol version 1"))
    assert usable(peers) == [0, 1]
    stranger = Peers(ME, "ipc:///t", upstream={}, connect=Box, attach=lambda _: None, quarantine_s=1.0)  # type: ignore[arg-type]
    stranger.greet({("encoder", 0): "ipc:///e0"})
    with pytest.raises(module.HandshakeRefused, match="protocol version 1"):  # but at the first meeting
        stranger.hear(wire.Welcome(2, wire.Origin("encoder", 0, 10), ME.epoch, (), "protocol version 1"))


@pytest.mark.parametrize("epoch", [ME.epoch, 666])
def test_b27_a_hello_of_another_version_in_the_name_of_a_living_process_is_not_answered(
    encoder: tuple[Peers, list[wire.Pool]], strangers: Strangers, epoch: int
) -> None:
    """The answer would go to the real one."""
    peers, _ = encoder
    [peer] = peers
    peer.outbox.sent.clear()  # type: ignore[attr-defined]
    peers.hear(wire.Hello(wire.PROTOCOL_VERSION + 1, wire.Origin("tokenizer", 0, epoch), "ipc:///t"))
    assert (peer.outbox.sent, peer.state, strangers.count) == ([], "ready", 1)  # type: ignore[attr-defined]


def test_a_life_has_one_pool_and_hands_it_out_in_one_place(
    encoder: tuple[Peers, list[wire.Pool]], strangers: Strangers
) -> None:
    peers, attached = encoder

    def announce(pool: int, broker: str) -> wire.Pool:
        message = wire.Pool(ME, wire.PoolDescription(pool, "host", 1 << 20, 8), broker)
        peers.hear(message)
        return message

    announce(5, "/tmp/elsewhere")
    assert (attached, strangers.count) == ([], 1)
    true = announce(5, "/run/tokenizer-0.pool")
    announce(6, "/run/tokenizer-0.pool")
    again = announce(5, "/run/tokenizer-0.pool")
    assert (attached, strangers.count) == ([true, again], 2)


def test_who_reads_our_pool_cannot_be_said_not_to(peers: Peers) -> None:
    origin = wire.Origin("encoder", 0, 10)
    peers.admitted(origin, 3)
    peers.hear(wire.Ready(origin, ME.epoch, "cannot be mapped"))
    assert peers.get("encoder", 0, 10).column == 3


def test_whatever_is_of_a_life_that_is_not_known_is_counted(
    encoder: tuple[Peers, list[wire.Pool]], strangers: Strangers
) -> None:
    peers, attached = encoder
    [peer] = peers
    before = deepcopy(peer.life)
    for origin in (wire.Origin("tokenizer", 0, 666), wire.Origin("tokenizer", 7, ME.epoch), wire.Origin("x", 0, 1)):
        for message in (
            wire.Hello(wire.PROTOCOL_VERSION, origin, "ipc:///t"),
            wire.Welcome(wire.PROTOCOL_VERSION, origin, 2),
            wire.Pool(origin, wire.PoolDescription(5, "host", 1 << 20, 8), "/run/tokenizer-0.pool"),
            wire.Ready(origin, 2),
            wire.Heartbeat(origin, 3, (wire.Gauge("a", 1.0),)),
            wire.Drain(origin),
            wire.Drained(origin),
        ):
            strangers.count = 0
            assert peers.hear(message)
            assert strangers.count == 1, message
    assert peer.life == before
    assert list(peers) == [peer]
    assert attached == []


# --- pools and capabilities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "refused"),
    [((), True), (("pool",), True), (("pool", "cuda_vmm"), True), (("pool", "cuda_ipc"), False)],
    ids=str,
)
def test_p8_a_front_end_that_cannot_do_what_the_deployment_needs_is_refused_when_it_connects(
    clock: Clock, capabilities: tuple[str, ...], refused: bool
) -> None:
    connect: Any = Box
    encoder = Peers(
        wire.Origin("encoder", 0, 2),
        "ipc:///e",
        upstream={("tokenizer", 0): "ipc:///t"},
        connect=connect,
        attach=lambda _: None,
        quarantine_s=QUARANTINE_S,
        needs="cuda_ipc",
    )
    encoder.hear(wire.Hello(wire.PROTOCOL_VERSION, ME, "ipc:///t", capabilities))
    [peer] = encoder
    welcome: Any = next(message for message in peer.outbox.sent if isinstance(message, wire.Welcome))  # type: ignore[attr-defined]
    assert bool(welcome.refusal) is refused
    assert peer.state == ("waiting" if refused else "ready")
    if refused:
        said = ", ".join(capabilities) or "none"
        assert f"tokenizer-0 cannot hand tensors over by cuda_ipc (its capabilities: {said})" in welcome.refusal


def test_the_next_life_does_not_have_the_former_ones_gauges(peers: Peers) -> None:
    peers.hear(wire.Heartbeat(wire.Origin("encoder", 1, 11), 0, (wire.Gauge("pool_bytes", 5.0),)))
    peers.lost("encoder-1")
    meet(peers, "encoder", 1, 99)
    (member,) = [member for member in peers.members() if (member.stage, member.rank) == ("encoder", 1)]
    assert (member.epoch, member.gauges) == (99, ())
