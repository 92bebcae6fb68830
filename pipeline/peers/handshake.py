"""The handshake between processes, their heartbeats, and which peers may be sent work now.

A process sends Hello to each downstream peer, however early: ZeroMQ keeps the message until the peer has bound its
inbox, so processes start in any order. The answer, Welcome, has the peer's epoch. A process with a pool then announces
it. The peer maps the pool and sends Ready. If it cannot map the pool, its Ready has the reason, and it is sent payloads
inline.

When the connection to a peer breaks, its work is given to others, and it is sent Hello again. A peer is *quarantined*
while it is silent for too long, and for the rest of its epoch once it has sent an acknowledgement never owed. It then
gets no new work. Its leases stay valid either way: only its death proves that it reads no more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import structlog

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import FerryError, PeerBusy, PeerGone
from tensorferry.codecs.frames import Buffer
from tensorferry.pipeline.channels.interface import Sender
from tensorferry.pipeline.peers.peer import Peer

log = structlog.get_logger()

LOST_BEATS = 2  #: one may have been on its way when the connection broke

Key = tuple[str, int]  #: (stage, rank)
#: Who sends work to whom.
DOWNSTREAM = {"tokenizer": ("encoder", "scheduler"), "encoder": ("scheduler",), "scheduler": ()}


class Peers:
    """See the module. The stage passes it each message that the stage does not handle itself."""

    def __init__(
        self,
        origin: wire.Origin,
        inbox: str,
        *,
        upstream: Mapping[Key, str],
        connect: Callable[[str, str], Sender],
        attach: Callable[[wire.Pool], None],
        quarantine_s: float,
        capabilities: tuple[str, ...] = (),
        needs: str = "",
        on_mended: Callable[[Peer], None] = lambda peer: None,
        broker: Callable[[str, int], str] | None = None,
        on_unknown: Callable[[], None] = lambda: None,
    ) -> None:
        """upstream: the inboxes of the peers that may send us work. connect: makes an outbox to (address, name).
        attach: starts to map an announced pool, and calls `attached` in the end. needs: a capability without which no
        tokenizer is accepted, because the front end may be another program. on_mended: called when a peer is heard
        after its connection broke, in the same epoch. broker: the path where the pool of (stage, rank) is handed out;
        None: the path that its announcement has. on_unknown: called for each message that is dropped because its peer,
        epoch or pool is unknown."""
        self.origin = origin
        self._inbox = inbox
        self._upstream = upstream
        self._connect, self._attach = connect, attach
        self._quarantine_s = quarantine_s
        self._capabilities, self._needs, self._on_mended = capabilities, needs, on_mended
        self._broker, self._on_unknown = broker, on_unknown
        self._peers: dict[Key, Peer] = {}
        self._announcement: wire.Pool | None = None
        self._open = False  # this process takes work
        self._changed = asyncio.Event()
        self._beat_at = self._greeted_at = time.monotonic()
        self._last_states: dict[Key, str] = {}

    # --- peers

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def usable(self, stage: str) -> list[Peer]:
        """The peers of a stage that may be sent work now, by rank."""
        found = [peer for peer in self if peer.stage == stage and peer.state == "ready"]
        return sorted(found, key=lambda peer: peer.rank)

    def get(self, stage: str, rank: int, epoch: int) -> Peer:
        """The peer, if it has this epoch. Raises PeerGone if it has another, or none."""
        peer = self._peers.get((stage, rank))
        if peer is None or peer.epoch != epoch:
            raise PeerGone(f"{stage}-{rank}", "is not there in that life")
        return peer

    def taker(self, stage: str, rank: int, epoch: int) -> Peer:
        """The peer that `get` returns, for a lease. Raises PeerGone also if it is lost or quarantined: the lease would
        not come back."""
        peer = self.get(stage, rank, epoch)
        if peer.gone:
            raise PeerGone(str(peer), "has died, or its connection broke")
        if peer.state == "quarantined":
            raise PeerGone(str(peer), peer.quarantine)
        return peer

    def knows(self, origin: wire.Origin) -> bool:
        """Whether the peer of this origin has shaken hands, and has had no later epoch since."""
        return self._known(origin) is not None

    def living(self, epoch: int) -> Peer | None:
        """The peer with this epoch, unless it is gone; None: there is none."""
        return next((peer for peer in self if peer.epoch == epoch and not peer.gone), None)

    def members(self) -> tuple[wire.Member, ...]:
        """The downstream peers, by stage and rank."""
        return tuple(
            wire.Member(peer.stage, peer.rank, peer.epoch, peer.state, peer.life.gauges)
            for peer in sorted(self, key=lambda peer: (peer.stage, peer.rank))
            if peer.downstream
        )

    @property
    def all_ready(self) -> bool:
        return all(peer.life.ready for peer in self if peer.downstream)

    async def wait_ready(self) -> None:
        """Wait until each downstream peer has sent Ready."""
        while not self.all_ready:
            await self.changed()

    async def changed(self) -> None:
        """Wait until a peer's state changes."""
        self._changed.clear()
        await self._changed.wait()

    # --- messages to peers

    def greet(self, inboxes: Mapping[Key, str]) -> None:
        """Send Hello to these downstream peers."""
        for (stage, rank), address in inboxes.items():
            peer = Peer(stage, rank, self._connect(address, f"{stage}-{rank}"), True, self._quarantine_s)
            self._peers[stage, rank] = peer
            self._greet(peer)

    def _greet(self, peer: Peer) -> None:
        self._greeted_at = time.monotonic()
        self.send(peer, wire.Hello(wire.PROTOCOL_VERSION, self.origin, self._inbox, self._capabilities))

    def announce(self, announcement: wire.Pool) -> None:
        """Announce our pool to the downstream peers, to those that come later as well."""
        self._announcement = announcement
        for peer in self:
            if peer.downstream and peer.epoch:
                self.send(peer, announcement)

    def open(self) -> None:
        """Take work from now on: send Ready to the peers that wait for it."""
        self._open = True
        for peer in self:
            if peer.life.wants:
                self._say_ready(peer)

    def attached(self, origin: wire.Origin, refusal: str) -> None:
        """A peer's pool is mapped here, or `refusal` says why it cannot be read."""
        peer = self._known(origin)
        if peer is None:
            return
        if refusal:
            log.warning("pool_refused", peer=str(peer), reason=refusal)
        peer.life.refusal = refusal
        self._say_ready(peer)

    def admitted(self, origin: wire.Origin, column: int) -> None:
        """Note that a peer has mapped our pool; its acknowledgements are in `column`."""
        if (peer := self._known(origin)) is not None:
            peer.life.column = column

    def died(self, origin: wire.Origin) -> None:
        """Note that a peer's process is proven dead; its column is free."""
        if (peer := self._known(origin)) is not None:
            peer.life.ready, peer.life.column, peer.life.dead = False, None, True
            if peer.life.leaving:
                log.info("peer_left", peer=str(peer))
            else:
                log.warning("peer_died", peer=str(peer))
            self._touch()

    def lost(self, name: str) -> None:
        """Note that the connection to a peer broke. Most likely the peer has died, but this is no proof, so its leases
        stay valid. It gets no new work until it is heard again, and a new epoch may take its place."""
        peer = next((peer for peer in self if str(peer) == name), None)
        if peer is None or not peer.epoch:
            return
        peer.connection += 1
        peer.life.broken = True
        if peer.life.lost:
            self._touch()
            return
        peer.life.lost = LOST_BEATS
        (log.info if peer.life.leaving else log.warning)("peer_lost", peer=name)
        if peer.downstream:
            self._greet(peer)  # this epoch answers, or the next one
        self._touch()

    def quarantined(self, origin: wire.Origin) -> None:
        """Note that a peer has sent an acknowledgement never owed: it gets no more work in this epoch."""
        if (peer := self._known(origin)) is not None:
            peer.life.distrusted = True
            self._touch()

    def beat(self, in_flight: int, gauges: tuple[wire.Gauge, ...]) -> None:
        """Send a heartbeat to each known peer, and notice changes of state. Call it periodically."""
        heartbeat = wire.Heartbeat(self.origin, in_flight, gauges)
        for peer in self:
            if peer.epoch and not peer.gone:  # it would wait there for the next epoch
                self.send(peer, heartbeat)
        now = time.monotonic()
        again = now - self._greeted_at > self._quarantine_s / 2  # a restarted peer does not know us yet
        for peer in self:
            peer.was_silent(now - self._beat_at)
            if again and peer.downstream and peer.over:
                self._greet(peer)
        self._beat_at = now
        states = {(peer.stage, peer.rank): peer.state for peer in self}
        if states != self._last_states:
            for peer in self:
                _log_change(peer, self._last_states.get((peer.stage, peer.rank), ""))
            self._last_states = states
            self._touch()

    def tell(self, message: wire.Drain | wire.Drained) -> None:
        for peer in self:
            if peer.epoch and not peer.life.left:
                self.send(peer, message)

    async def leave(self, deadline_s: float) -> None:
        """Send Drained, and wait until the peers' kernel has all messages. Peers that have left are skipped."""
        self.tell(wire.Drained(self.origin))
        there = [peer for peer in self if peer.epoch and not peer.life.left]
        for peer in self:
            if peer not in there:
                peer.outbox.close()
        await asyncio.gather(*(peer.outbox.flush(deadline_s) for peer in there))

    def send(self, peer: Peer, message: wire.Message, inline: Iterable[Buffer] = ()) -> bool:
        """Send a message that can be lost without harm; False: the peer's queue is full."""
        try:
            peer.outbox.send_nowait(message, list(inline))
        except PeerBusy as busy:
            log.warning("not_sent", peer=str(peer), message=type(message).__name__, reason=str(busy))
            return False
        return True

    def report(self, peer: Peer, message: wire.Message) -> None:
        """Send a message that a peer waits for, and send it again if the connection breaks: it may have been lost."""
        peer.life.reports.append(message)
        self.send(peer, message)

    def _mended(self, peer: Peer) -> None:
        """Note that a peer is heard. If its connection broke, send its reports again: repeating does no harm."""
        if not peer.life.broken:
            return
        peer.life.broken = False
        log.info("connection_restored", peer=str(peer))
        if not peer.downstream and self._open:
            self._say_ready(peer)
        for report in list(peer.life.reports):
            self.send(peer, report)
        self._on_mended(peer)

    # --- messages from peers

    def hear(self, message: wire.Message) -> bool:
        """Take a message of the handshake; False: it is not one.

        A message of an unknown epoch is dropped, and so is one that contradicts an earlier message of its epoch.
        """
        match message:
            case wire.Hello():
                known = self._greeted(message)
            case wire.Welcome():
                known = self._welcomed(message)
            case wire.Pool(origin=origin):
                known = self._announced(message)
            case wire.Ready(origin=origin, to=to):
                peer = self._known(origin) if to == self.origin.epoch else None
                if peer is not None and message.refusal and peer.life.ready and peer.column is not None:
                    peer = None  # it reads our pool, as it has confirmed
                if peer is not None:
                    peer.life.ready = True
                    if message.refusal:
                        peer.life.column = None
                        log.warning("pool_refused_by_peer", peer=str(peer), reason=message.refusal)
                    self._heard(peer)
                known = peer is not None
            case wire.Heartbeat(origin=origin):
                peer = self._known(origin)
                if peer is not None:
                    peer.life.gauges = message.gauges
                    peer.life.silent_s, peer.life.lost = 0.0, max(0, peer.life.lost - 1)
                    self._mended(peer)
                known = peer is not None
            case wire.Drain(origin=origin) | wire.Drained(origin=origin):
                peer = self._known(origin)
                if peer is not None:
                    peer.life.leaving = True
                    peer.life.drained |= isinstance(message, wire.Drained)
                    self._heard(peer)
                known = peer is not None
            case _:
                return False
        if not known:
            self._on_unknown()
        return True

    def _known(self, origin: wire.Origin) -> Peer | None:
        """The peer with this origin; None: there is none."""
        peer = self._peers.get((origin.stage, origin.rank))
        return peer if peer is not None and peer.epoch == origin.epoch else None

    def _greeted(self, hello: wire.Hello) -> bool:
        """Take a Hello; False: it is not from an expected peer."""
        origin = hello.origin
        if self._upstream.get((origin.stage, origin.rank)) != hello.inbox:
            log.warning("hello_refused", stage=origin.stage, rank=origin.rank, inbox=hello.inbox)
            return False
        peer = self._peers.get((origin.stage, origin.rank))
        if peer is None:
            outbox = self._connect(hello.inbox, f"{origin.stage}-{origin.rank}")
            peer = Peer(origin.stage, origin.rank, outbox, False, self._quarantine_s)
            self._peers[origin.stage, origin.rank] = peer
        refusal = ""
        if hello.version != wire.PROTOCOL_VERSION:
            refusal = f"protocol version {hello.version}; {self.origin.stage} speaks {wire.PROTOCOL_VERSION}"
        elif origin.stage == "tokenizer" and self._needs and self._needs not in hello.capabilities:
            said = ", ".join(hello.capabilities) or "none"
            refusal = (
                f"{peer} cannot hand tensors over by {self._needs} (its capabilities: {said}); use a front end that "
                "can, or another transport"
            )
        if not peer.over and (refusal or peer.epoch != origin.epoch):
            log.warning("hello_refused", peer=str(peer), epoch=origin.epoch, reason="the life that is known goes on")
            return False  # a real peer asks again
        if refusal:
            log.warning("hello_refused", peer=str(peer), reason=refusal)
        else:
            peer.meet(origin.epoch)
        self.send(peer, wire.Welcome(wire.PROTOCOL_VERSION, self.origin, origin.epoch, self._capabilities, refusal))
        if refusal:
            return True
        if not peer.life.ready:
            peer.life.ready = True
            self._heard(peer)
        if "pool" not in hello.capabilities:
            self._say_ready(peer)
        self._mended(peer)
        return True

    def _welcomed(self, welcome: wire.Welcome) -> bool:
        """Take a Welcome; False: it is not from an expected peer. Raises HandshakeRefused if the first Welcome of a
        peer is a refusal."""
        origin = welcome.origin
        peer = self._peers.get((origin.stage, origin.rank))
        if peer is None or not peer.downstream or welcome.to != self.origin.epoch:
            return False
        if welcome.refusal and not peer.epoch:
            raise HandshakeRefused(str(peer), welcome.refusal)
        if welcome.refusal or not peer.meet(origin.epoch):  # a process that was accepted is not ended by a message
            reason = welcome.refusal or "the life that is known goes on"
            log.warning("welcome_refused", peer=str(peer), epoch=origin.epoch, reason=reason)
            return False
        self._heard(peer)
        if self._announcement is not None:
            self.send(peer, self._announcement)
        self._mended(peer)
        return True

    def _announced(self, message: wire.Pool) -> bool:
        """Take the announcement of a pool, of which each epoch has one; False: it is not from an expected peer."""
        origin, pool = message.origin, message.description.pool
        peer = self._known(origin)
        if peer is None or peer.downstream or peer.life.pool not in (None, pool):
            return False
        if self._broker is not None and message.broker != self._broker(origin.stage, origin.rank):
            log.warning("pool_refused", peer=str(peer), reason=f"{message.broker} is not where it hands pools out")
            return False
        peer.life.pool = pool
        self._attach(message)
        return True

    def _say_ready(self, peer: Peer) -> None:
        peer.life.wants = not self._open
        if self._open:
            self.send(peer, wire.Ready(self.origin, peer.epoch, peer.life.refusal))

    def _heard(self, peer: Peer) -> None:
        peer.life.silent_s = 0.0
        self._touch()

    def _touch(self) -> None:
        self._changed.set()


def _log_change(peer: Peer, before: str) -> None:
    if peer.state == "quarantined" != before:
        log.warning("peer_quarantined", peer=str(peer), reason=peer.quarantine)
    elif before == "quarantined" != peer.state:
        log.info("peer_recovered", peer=str(peer), state=peer.state)


class HandshakeRefused(FerryError):
    """A peer does not accept this process, and why."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer, self.reason = peer, reason

    def __str__(self) -> str:
        return f"{self.peer} refuses the handshake: {self.reason}"
