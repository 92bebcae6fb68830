"""A stage in this process whose peers are played by the test: a real `Stage`, no sockets, no other process."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from typing import Any

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.pipeline.channels.inproc import InprocNetwork
from tensorferry.pipeline.channels.interface import Received
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.peers.handshake import DOWNSTREAM
from tensorferry.pipeline.process.stage import Stage

#: Messages of a request; `PlayedPeers.sent` leaves out the others.
OF_REQUESTS = wire.Encode | wire.Admit | wire.Embeddings | wire.Cancel | wire.Collected | wire.Done | wire.Failed


class PlayedPeers:
    """Rank 0 of a stage, and the inboxes of its peers."""

    def __init__(self, name: str, undo: AsyncExitStack, *peers: wire.Origin, **specs: Any) -> None:
        """peers: they have shaken hands with the stage. specs: of the deployment. undo: closes the stage."""
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="tf-"))
        deployment = Deployment(name="test", transport="cpu", runtime_dir=f"{folder}/run", **specs)
        network = InprocNetwork()
        self.stage = Stage(deployment, name, 0, False, undo, network)
        self.stage.lend(None, Publisher(None))
        self._inboxes = {}
        for peer in peers:
            address = self.stage.runtime.inbox(peer.stage, peer.rank)
            self._inboxes[peer] = network.inbox(address, Limits(), _raise)
            if peer.stage in DOWNSTREAM[name]:
                self.stage.peers.greet({(peer.stage, peer.rank): address})
                self.stage.peers.hear(wire.Welcome(wire.PROTOCOL_VERSION, peer, self.stage.epoch, ()))
                self.stage.peers.hear(wire.Ready(peer, self.stage.epoch))
            else:
                self.stage.peers.hear(wire.Hello(wire.PROTOCOL_VERSION, peer, address, ()))

    def sent(self, peer: wire.Origin) -> list[Received]:
        """What the stage has sent this peer of requests, since the last call."""
        received = iter(self._inboxes[peer].receive_nowait, None)
        return [one for one in received if isinstance(one.message, OF_REQUESTS)]


def _raise(problem: BadMessage) -> None:
    raise problem
