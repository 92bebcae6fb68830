"""What a deployment's start decides and logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.codecs.machine.machine_facts import (
    ALL,
)

from tensorferry.cli import transport as cli_transport
from tensorferry.codecs.machine import transport as policy
from tensorferry.codecs.machine.facts import Facts
from tensorferry.pipeline.deployment.spec import Deployment


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Deployment, list[Any]]]:
    """`cli.transport.settle` on a machine with these facts: the deployment, and what was logged."""

    def settle(facts: Facts, available: frozenset[Any] = ALL, **keys: Any) -> tuple[Deployment, list[Any]]:
        monkeypatch.setattr(cli_transport, "gather", lambda environ, cuda: facts if cuda else Facts(facts.host))
        monkeypatch.setattr(cli_transport, "decide", lambda wanted, facts: policy.decide(wanted, facts, available))
        with capture_logs() as logs:
            deployment = cli_transport.settle(Deployment(name="a", **keys), {})
        return deployment, logs

    return settle
