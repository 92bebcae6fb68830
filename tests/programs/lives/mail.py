"""What producers and consumers say to each other."""

from __future__ import annotations

import msgspec

from tensorferry.codecs.messages import Origin, Payload


class Note(msgspec.Struct, frozen=True, array_like=True):
    pass


class Hello(Note, frozen=True, tag=1):
    """A consumer lives."""

    origin: Origin


class Announce(Note, frozen=True, tag=2):
    """A producer's pool can be attached."""

    to: int  #: epoch of the consumer that is meant, 0: whoever hears it
    origin: Origin
    pool: int
    path: str


class Tensors(Note, frozen=True, tag=3):
    """Every 8-byte word of a tensor is its identity."""

    to: int  #: epoch of the consumer that is meant
    origin: Origin
    identities: tuple[int, ...]
    payloads: tuple[Payload, ...]
    frames: tuple[bytes, ...]
    uses: int
    poisoned: bool  #: or will be


Any = Hello | Announce | Tensors
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Any).decode
