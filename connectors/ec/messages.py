"""Every message about encoder outputs, on one page.

| message     | from              | to                | when                                                  |
|-------------|-------------------|-------------------|-------------------------------------------------------|
| `Hello`     | a consumer's rank | a producer        | first, and again after each break of the connection   |
| `Welcome`   | a producer        | a consumer's rank | the answer to `Hello`                                 |
| `Want`      | a consumer's rank | a producer        | items that it would read, also those that nobody made |
| `Enough`    | a consumer's rank | a producer        | items that it would read no more                      |
| `Item`      | a producer        | a consumer's rank | one item that was asked for; an inline frame follows  |
| `Withdrawn` | a producer        | a consumer's rank | after a break: leases whose proxies may be lost       |
| `Here`      | a rank            | its scheduler     | first: this rank serves the scheduler                 |
| `Take`      | its scheduler     | each rank         | see that this item is here, and hold it               |
| `Held`      | a rank            | its scheduler     | the item is here, and stays until it is let go        |
| `Refused`   | a rank            | its scheduler     | what came of an item cannot be used                   |
| `LetGo`     | its scheduler     | each rank         | the item is not wanted any more                       |

The first six travel between a ROUTER socket of the producer and a DEALER of each consumer rank, over ipc or TCP; the
others within one engine, over ipc. A message is one msgpack array, an integer tag first; a frame follows an `Item`
whose payload is `Inline`. Structs are strict, as those of `codecs/messages.py`; this protocol has a version of its own.

An item's name is whatever the engines agree on, such as vLLM's multimodal hash. A producer answers `Want` once with the
item, or later, when it has made it, until `left_ms` are over by its own clock. A producer need not be an engine: an
encoder rank that a router feeds answers in the same way. What comes unasked is acknowledged unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorferry.codecs.errors import BadMessage, FerryError
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.messages import (
    MOST_RANKS,
    Address,
    Count,
    Index,
    Named,
    Nonce,
    Origin,
    Payload,
    PoolDescription,
    Text,
    Wire,
)

EC_VERSION = 1
MOST_WANTED = 4096  #: items of one message
MOST_FRAMES = 2  #: of one message: an item is one tensor
HEADER_NBYTES = 8 << 20  #: more than `MOST_WANTED` of the longest names take
LONGEST_LEFT_MS = 3_600_000

ItemName = Annotated[str, Meta(min_length=1, max_length=1024)]
ItemNames = Annotated[tuple[ItemName, ...], Meta(max_length=MOST_WANTED)]
Left = Annotated[int, Meta(ge=1, le=LONGEST_LEFT_MS)]  #: milliseconds from when the message comes
Hold = Annotated[int, Meta(ge=1, lt=1 << 53)]  #: which holding of an item it is; it rises with each
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]


class Model(Wire, frozen=True):
    """What outputs are of. Both sides must agree in all of it; see `ModelIdentity`."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    digest: Annotated[str, Meta(min_length=1, max_length=128)]  #: of the configuration
    dtype: Annotated[str, Meta(min_length=1, max_length=64)]
    width: Count  #: each output's last dimension is a multiple of it: the language model's hidden size


# --- between engines


class Hello(Wire, frozen=True, tag=1):
    """I am a rank of a consumer, and read outputs of this model."""

    version: Index
    origin: Origin  #: its epoch is the one that the rank attaches pools with
    model: Model


class Welcome(Wire, frozen=True, tag=2):
    """Ask me; or do not, for this reason."""

    version: Index
    origin: Origin
    to: Nonce  #: epoch of the Hello answered
    model: Model
    pool: PoolDescription | None = None  #: None: everything travels inline
    broker: Address | None = None  #: the path of a UNIX socket, where the pool can be had by who came over ipc
    refusal: Text = ""


class Want(Wire, frozen=True, tag=3):
    """Send me these, now or when they are made. Said again, it replaces the time that is left."""

    items: ItemNames
    left_ms: Left


class Enough(Wire, frozen=True, tag=4):
    """Do not send these any more. What is under way is acknowledged all the same."""

    items: ItemNames


class Item(Wire, frozen=True, tag=5):
    """One encoder output of shape (rows, width). Every proxy must be opened or acknowledged."""

    name: ItemName
    payload: Payload


class Withdrawn(Wire, frozen=True, tag=6):
    """The connection broke, so proxies of these leases may be lost: acknowledge those that you do not read just now."""

    pool: Nonce
    leases: Named


# --- within one engine


class Here(Wire, frozen=True, tag=20):
    """I am this rank, of so many."""

    rank: Rank
    ranks: Ranks


class Take(Wire, frozen=True, tag=21):
    """See that this item is here within `left_ms`, and hold it until it is let go under this number."""

    name: ItemName
    hold: Hold
    left_ms: Left


class Held(Wire, frozen=True, tag=22):
    """The item is here, with so many rows."""

    name: ItemName
    hold: Hold
    rank: Rank
    rows: Count


class Refused(Wire, frozen=True, tag=23):
    """An item came that cannot be used, and this is why."""

    name: ItemName
    hold: Hold
    rank: Rank
    reason: Text


class LetGo(Wire, frozen=True, tag=24):
    """The item is not wanted any more. No-op under another number than that of the last `Take`."""

    name: ItemName
    hold: Hold


Message = Hello | Welcome | Want | Enough | Item | Withdrawn | Here | Take | Held | Refused | LetGo

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def encode(message: Message, inline: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frames of one message."""
    return [_encode(message), *inline]


def decode(frames: Sequence[Buffer]) -> tuple[Message, Sequence[Buffer]]:
    """The message and its inline frames. Raises BadMessage, and nothing else."""
    if not 1 <= len(frames) <= MOST_FRAMES:
        raise BadMessage(f"a message of {len(frames)} frames; 1 to {MOST_FRAMES} are taken")
    if len(frames[0]) > HEADER_NBYTES:
        raise BadMessage(f"a header of {len(frames[0])} bytes; the limit is {HEADER_NBYTES}")
    try:
        return _decode(frames[0]), frames[1:]
    except (msgspec.MsgspecError, FerryError, RecursionError, UnicodeDecodeError) as problem:
        raise BadMessage(f"{type(problem).__name__}: {problem}") from None
