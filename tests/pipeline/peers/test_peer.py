"""Nothing of one life of a peer is there in the next."""

from __future__ import annotations

from collections import deque
from typing import Any

from tensorferry.codecs import messages as wire
from tensorferry.pipeline.peers.peer import Peer, PeerLife

NO_OUTBOX: Any = None
REPORT = wire.Collected(bytes(16), 0, 1, wire.Origin("scheduler", 0, 10))
#: Every field of it differs from that of a new life.
FULL = {
    "epoch": 10,
    "column": 3,
    "pool": 5,
    "refusal": "no memory",
    "ready": True,
    "wants": True,
    "leaving": True,
    "drained": True,
    "dead": True,
    "broken": True,
    "lost": 2,
    "distrusted": True,
    "silent_s": 7.0,
    "gauges": (wire.Gauge("busy_s", 4.0),),
    "reports": deque([REPORT]),
}


def peer_of(**life: Any) -> Peer:
    return Peer("scheduler", 0, NO_OUTBOX, downstream=True, quarantine_s=5.0, life=PeerLife(**life))


def test_a_new_life_has_nothing_of_the_one_before() -> None:
    """A field that is added to `PeerLife` is added to `FULL`."""
    peer = peer_of(**FULL)
    new = PeerLife()
    assert {name for name in PeerLife.__slots__ if getattr(peer.life, name) != getattr(new, name)} == set(
        PeerLife.__slots__
    )
    assert peer.meet(11)
    assert peer.life == PeerLife(11)
    assert peer.state == "waiting"


def test_the_count_of_broken_connections_goes_on_over_lives() -> None:
    """It tells whether a message may have been lost: a connection is of a rank, and of no life."""
    peer = peer_of(epoch=10, lost=2)
    peer.connection = 3
    assert peer.meet(11)
    assert peer.connection == 3


def test_a_life_that_goes_on_keeps_all_it_has() -> None:
    peer = peer_of(epoch=10, column=3, ready=True)
    before = peer.life
    assert not peer.meet(11)
    assert peer.meet(10)
    assert peer.life is before
    assert peer.life == PeerLife(10, column=3, ready=True)
