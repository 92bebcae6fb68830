"""What a stage reports of a request that failed: the kind of failure, its text, and whether it is retryable."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import (
    FerryError,
    LeaseError,
    PeerBusy,
    PeerGone,
    RequestError,
    StaleLease,
    item_of,
    text_of,
)

MOST_BUG_TEXT = 4000  #: characters of an unexpected error's text, which leave room for the name of its class


class Rule(NamedTuple):
    """How a problem is reported."""

    problem: type[BaseException] | tuple[type[BaseException], ...]
    kind: str = ""  #: "": the name of its class
    retryable: bool = False
    names_class: bool = False  #: its text begins with the name of its class, which `kind` does not have


#: By stage; the first rule that fits applies. A tokenizer reports to the client, which may submit the request again.
#: Encoders and schedulers report to the tokenizer, which may send the request to other ranks.
RULES: Mapping[str, Sequence[Rule]] = {
    "tokenizer": (
        Rule(RequestError),
        Rule(FerryError, retryable=True),
        Rule(TimeoutError, "DeadlineExceeded", retryable=True),
        Rule(asyncio.CancelledError, "Cancelled"),
        Rule(BaseException, "InternalError", names_class=True),
    ),
    "encoder": (
        # The producer withdraws leases when its connection breaks, so a stale lease is not the request's fault.
        Rule((PeerBusy, PeerGone, StaleLease), retryable=True),
        Rule(FerryError),
        Rule(BaseException, "EncodeError", names_class=True),
    ),
    "scheduler": (
        # Unreadable embeddings are not the request's fault: if their encoder died, other ranks can make them.
        Rule((LeaseError, PeerGone), retryable=True),
        Rule(FerryError),
        Rule(BaseException, "EngineError"),  # an engine's errors are for the client to read
    ),
}


def failure_of(problem: BaseException, origin: wire.Origin, items: int = wire.MOST_ITEMS) -> wire.Failure:
    """The report of a problem by the stage at `origin`, by `RULES`. items: how many the request has."""
    rule = next(rule for rule in RULES[origin.stage] if isinstance(problem, rule.problem))
    name = type(problem).__name__[: wire.MOST_NAME]
    text = f"{name}: {text_of(problem, MOST_BUG_TEXT)}" if rule.names_class else text_of(problem)
    return wire.Failure(rule.kind or name, text, origin, item_of(problem, items), rule.retryable)
