"""What a stage says of a request that it gives up: the kind of failure, its text, and whether to send it again."""

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

MOST_BUG_TEXT = 4000  #: characters of it, which leave room for the name of its class


class Rule(NamedTuple):
    """What is said of a problem."""

    problem: type[BaseException] | tuple[type[BaseException], ...]
    kind: str = ""  #: "": the name of its class
    retryable: bool = False
    names_class: bool = False  #: its text begins with the name of its class, which `kind` does not tell


#: By stage; the first rule that fits is the one. What a tokenizer says is for the client, which may submit the request
#: again; what encoders and schedulers say is for the tokenizer, which may send it to other ranks.
RULES: Mapping[str, Sequence[Rule]] = {
    "tokenizer": (
        Rule(RequestError),
        Rule(FerryError, retryable=True),
        Rule(TimeoutError, "DeadlineExceeded", retryable=True),
        Rule(asyncio.CancelledError, "Cancelled"),
        Rule(BaseException, "InternalError", names_class=True),
    ),
    "encoder": (
        # The producer withdraws leases when its connection breaks, so one that is over is no fault of the request's.
        Rule((PeerBusy, PeerGone, StaleLease), retryable=True),
        Rule(FerryError),
        Rule(BaseException, "EncodeError", names_class=True),
    ),
    "scheduler": (
        # Unreadable embeddings are no fault of the request's: their encoder may have died, and others can make them.
        Rule((LeaseError, PeerGone), retryable=True),
        Rule(FerryError),
        Rule(BaseException, "EngineError"),  # an engine raises what the client is to read
    ),
}


def failure_of(problem: BaseException, origin: wire.Origin, items: int = wire.MOST_ITEMS) -> wire.Failure:
    """What the stage at `origin` says of a problem, by `RULES`. items: how many the request has."""
    rule = next(rule for rule in RULES[origin.stage] if isinstance(problem, rule.problem))
    name = type(problem).__name__[: wire.MOST_NAME]
    text = f"{name}: {text_of(problem, MOST_BUG_TEXT)}" if rule.names_class else text_of(problem)
    return wire.Failure(rule.kind or name, text, origin, item_of(problem, items), rule.retryable)
