"""Where the sockets of a deployment are that other machines may reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensorferry.codecs.errors import DeploymentError
from tensorferry.pipeline.channels.addresses import Host, listening_host, reachable_host
from tensorferry.pipeline.deployment.spec import STAGES, Deployment, port_offset


@dataclass(frozen=True, slots=True)
class SocketAddresses:
    """Where the sockets are that other machines may reach."""

    listening: Host
    reachable: str
    door: int  #: the port of tokenizer 0's
    inboxes: Mapping[str, int]  #: the port of each stage's rank 0; empty: they are in the folder

    @classmethod
    def of(cls, deployment: Deployment) -> SocketAddresses | None:
        """Raises DeploymentError for what `deployment.load` would have refused."""
        network = deployment.network
        if network.bind is None:
            return None
        try:
            listening, reachable = listening_host(network.bind), reachable_host(network.advertise or network.bind)
        except ValueError as problem:
            raise DeploymentError(f"network: {problem}") from None
        first = network.port + deployment.tokenizer.workers
        inboxes = {stage: first + port_offset(deployment, stage, 0) for stage in STAGES}
        return cls(listening, reachable, network.port, inboxes if network.inboxes == "tcp" else {})
