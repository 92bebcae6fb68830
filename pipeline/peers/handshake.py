"""Who is there: the handshake between processes, their heartbeats, and who may be sent work now.

A process says Hello to everybody downstream of it, however early: ZeroMQ keeps the message until the peer has
bound its inbox, so the order of starting does not matter. The answer, Welcome, tells the peer's epoch. Where
the process has a pool it then announces it; the peer maps it and says Ready, or Ready with the reason why it
cannot, and is sent its payloads inline.

A peer whose connection breaks is taken for dead by those who give its work to others, and asked whether it is. A peer
is *quarantined*, and gets no new work, while it is silent for too long, or for the rest of its life once it has
acknowledged what it was never lent. What it has been given stays with it either way: only its death proves that it
reads no more.
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
    """See the module. The stage feeds it every message that it does not handle itself."""

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
        """upstream: the inboxes of those who may send us work. connect: an outbox to (address, name). attach: starts
        to map an announced pool, then calls `attached`. needs: a capability without which no tokenizer is accepted: the
        front end may be somebody else's program. on_mended: a peer is heard after its connection broke, in the same
        life. broker: where the pool of (stage, rank) is handed out; None: wherever it says. on_unknown: called for
        each message that is dropped because of whom, or of what, it speaks."""
        self.origin = origin
        self._inbox = inbox
        self._upstream = upstream
        self._connect, self._attach = connect, attach
        self._quarantine_s = quarantine_s
        self._capabilities, self._needs, self._on_mended = capabilities, needs, on_mended
        self._broker, self._on_unknown = broker, on_unknown
        self._peers: dict[Key, Peer] = {}
        self._announcement: wire.Pool | None = None
        self._open = False  # we take work ourselves
        self._changed = asyncio.Event()
        self._beat_at = self._greeted_at = time.monotonic()
        self._last_states: dict[Key, str] = {}

    # --- who

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def usable(self, stage: str) -> list[Peer]:
        """The peers of a stage that may be sent work now, by rank."""
        found = [peer for peer in self if peer.stage == stage and peer.state == "ready"]
        return sorted(found, key=lambda peer: peer.rank)

    def get(self, stage: str, rank: int, epoch: int) -> Peer:
        """This life of this peer. Raises PeerGone when it is another, or none."""
        peer = self._peers.get((stage, rank))
        if peer is None or peer.epoch != epoch:
            raise PeerGone(f"{stage}-{rank}", "is not there in that life")
        return peer

    def taker(self, stage: str, rank: int, epoch: int) -> Peer:
        """`get`, of one that is to take a lease. Raises PeerGone also when it is lost, or quarantined: it would
        keep it."""
        peer = self.get(stage, rank, epoch)
        if peer.gone:
            raise PeerGone(str(peer), "has died, or its connection broke")
        if peer.state == "quarantined":
            raise PeerGone(str(peer), peer.quarantine)
        return peer

    def knows(self, origin: wire.Origin) -> bool:
        """Whether it is of a life that has been met here, and that no other has followed."""
        return self._known(origin) is not None

    def living(self, epoch: int) -> Peer | None:
        """Whose life this is, if it is not over."""
        return next((peer for peer in self if peer.epoch == epoch and not peer.gone), None)

    def members(self) -> tuple[wire.Member, ...]:
        """Everybody downstream, by stage and rank."""
        return tuple(
            wire.Member(peer.stage, peer.rank, peer.epoch, peer.state, peer.life.gauges)
            for peer in sorted(self, key=lambda peer: (peer.stage, peer.rank))
            if peer.downstream
        )

    @property
    def all_ready(self) -> bool:
        return all(peer.life.ready for peer in self if peer.downstream)

    async def wait_ready(self) -> None:
        """Until everybody downstream has said Ready."""
        while not self.all_ready:
            await self.changed()

    async def changed(self) -> None:
        """Until a peer's state changes."""
        self._changed.clear()
        await self._changed.wait()

    # --- what we say

    def greet(self, inboxes: Mapping[Key, str]) -> None:
        """Say Hello to these peers, downstream of us."""
        for (stage, rank), address in inboxes.items():
            peer = Peer(stage, rank, self._connect(address, f"{stage}-{rank}"), True, self._quarantine_s)
            self._peers[stage, rank] = peer
            self._greet(peer)

    def _greet(self, peer: Peer) -> None:
        self._greeted_at = time.monotonic()
        self.send(peer, wire.Hello(wire.PROTOCOL_VERSION, self.origin, self._inbox, self._capabilities))

    def announce(self, announcement: wire.Pool) -> None:
        """Our pool is there: tell everybody downstream, now and when they come."""
        self._announcement = announcement
        for peer in self:
            if peer.downstream and peer.epoch:
                self.send(peer, announcement)

    def open(self) -> None:
        """We take work from now on: say Ready to whoever waits for it."""
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
        """A peer has mapped our pool; its acknowledgements are in `column`."""
        if (peer := self._known(origin)) is not None:
            peer.life.column = column

    def died(self, origin: wire.Origin) -> None:
        """A peer's process is proven dead; its column is gone with it."""
        if (peer := self._known(origin)) is not None:
            peer.life.ready, peer.life.column, peer.life.dead = False, None, True
            if peer.life.leaving:
                log.info("peer_left", peer=str(peer))
            else:
                log.warning("peer_died", peer=str(peer))
            self._touch()

    def lost(self, name: str) -> None:
        """The connection to a peer broke: most likely it has died. No proof, so what it may read stays its own; but it
        gets nothing new until it is heard again, and another life may take its place."""
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
            self._greet(peer)  # whoever answers
        self._touch()

    def quarantined(self, origin: wire.Origin) -> None:
        """A peer has acknowledged what it was never lent: it gets nothing more in this life."""
        if (peer := self._known(origin)) is not None:
            peer.life.distrusted = True
            self._touch()

    def beat(self, in_flight: int, gauges: tuple[wire.Gauge, ...]) -> None:
        """Tell everybody we know that we live, and notice who changed state. To be called again and again."""
        heartbeat = wire.Heartbeat(self.origin, in_flight, gauges)
        for peer in self:
            if peer.epoch and not peer.gone:  # they would wait there for the next life
                self.send(peer, heartbeat)
        now = time.monotonic()
        again = now - self._greeted_at > self._quarantine_s / 2  # one that has come again does not know us yet
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
        """Say Drained, and wait until all that was said is with the others, but not for whoever has left before us."""
        self.tell(wire.Drained(self.origin))
        there = [peer for peer in self if peer.epoch and not peer.life.left]
        for peer in self:
            if peer not in there:
                peer.outbox.close()
        await asyncio.gather(*(peer.outbox.flush(deadline_s) for peer in there))

    def send(self, peer: Peer, message: wire.Message, inline: Iterable[Buffer] = ()) -> bool:
        """Send what can be lost without harm; a peer that does not keep up is counted by its outbox."""
        try:
            peer.outbox.send_nowait(message, list(inline))
        except PeerBusy as busy:
            log.warning("not_sent", peer=str(peer), message=type(message).__name__, reason=str(busy))
            return False
        return True

    def report(self, peer: Peer, message: wire.Message) -> None:
        """`send` what a peer waits for, and again should the connection break: it may be lost with that."""
        peer.life.reports.append(message)
        self.send(peer, message)

    def _mended(self, peer: Peer) -> None:
        """A peer is heard. If its connection broke it gets anew what may be lost; hearing it twice does no harm."""
        if not peer.life.broken:
            return
        peer.life.broken = False
        log.info("connection_restored", peer=str(peer))
        if not peer.downstream and self._open:
            self._say_ready(peer)
        for report in list(peer.life.reports):
            self.send(peer, report)
        self._on_mended(peer)

    # --- what we hear

    def hear(self, message: wire.Message) -> bool:
        """Take a message of the handshake; False: it is not one.

        Whatever it says, it is not believed of a life that is not known here, nor against what that life has said.
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
                    peer = None  # it reads our pool, and has said so
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
        """The peer whose life this is, None: nobody's."""
        peer = self._peers.get((origin.stage, origin.rank))
        return peer if peer is not None and peer.epoch == origin.epoch else None

    def _greeted(self, hello: wire.Hello) -> bool:
        """Take a Hello; False: it is nobody's."""
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
            return False  # a real one asks again
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
        """Take a Welcome; False: it is nobody's. Raises HandshakeRefused, at a first meeting."""
        origin = welcome.origin
        peer = self._peers.get((origin.stage, origin.rank))
        if peer is None or not peer.downstream or welcome.to != self.origin.epoch:
            return False
        if welcome.refusal and not peer.epoch:
            raise HandshakeRefused(str(peer), welcome.refusal)
        if welcome.refusal or not peer.meet(origin.epoch):  # having been accepted, a process is not ended by a message
            reason = welcome.refusal or "the life that is known goes on"
            log.warning("welcome_refused", peer=str(peer), epoch=origin.epoch, reason=reason)
            return False
        self._heard(peer)
        if self._announcement is not None:
            self.send(peer, self._announcement)
        self._mended(peer)
        return True

    def _announced(self, message: wire.Pool) -> bool:
        """Take the announcement of a pool, of which each life has one; False: it is nobody's."""
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
