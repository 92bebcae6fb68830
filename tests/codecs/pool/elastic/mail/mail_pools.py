"""What the tests of pools without shared pages share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from tensorferry.codecs.messages import (
    Message,
    Proxy,
)
from tensorferry.codecs.pool.elastic.mail import Letter
from tensorferry.codecs.pool.export import Attachment, Export
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader

CHUNK = 2 << 20  #: the stub's granularity


FOREVER_S = 1000.0


Kind = Literal["posix_fd", "fabric"]


Peer = Any  #: conftest.Peer


Stub = Any  #: conftest.Stub


Until = Callable[..., None]


Create = Callable[..., Pool]


Struct = TypeVar("Struct", Export, Attachment)


encode = msgspec.msgpack.encode


decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode


def connect(pool: Pool, reader: Reader) -> int:
    """As from another node where handles allow it: no descriptor goes either way."""
    export, fds = pool.export()
    if export.mail == "fabric":
        for fd in fds:
            os.close(fd)
        fds = []
    attachment, given = reader.attach(over_wire(export), fds)
    assert bool(given) is (export.mail == "posix_fd")
    return pool.admit(over_wire(attachment), given)


def over_wire(struct: Struct) -> Struct:
    return msgspec.msgpack.decode(encode(struct), type=type(struct))


def messages(letters: list[Letter]) -> list[Any]:
    return [decode(encode(letter.message)) for letter in letters]


def tell(pool: Pool, *readers: Reader) -> None:
    """Bring everybody what is to be said to them, and the answers."""
    by_epoch = {reader.consumer: reader for reader in readers}
    for letter in pool.letters():
        by_epoch[letter.to].hear(*messages([letter]))
    for reader in readers:
        for message in messages(reader.letters()):
            answer = pool.hear(message)
            if answer is not None:
                reader.hear(*messages([answer]))


def some(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def digest(data: Any) -> str:
    return hashlib.blake2b(bytes(data), digest_size=16).hexdigest()


def publish(pool: Pool, column: int, data: np.ndarray[Any, Any]) -> Proxy:
    with Publisher(pool).publish(data) as draft:
        assert draft.prepared(column)
        [proxy] = draft.dispatch(column, [])
    assert isinstance(proxy, Proxy), "there was no room"
    return proxy


def out(pool: Pool) -> int:
    pool.reclaim()
    return pool.statistics().lent_slots


def shrink(pool: Pool, until: Until) -> None:
    """Wait until the spare is all that is mapped; then shrink no more."""
    assert pool.growth is not None
    pool.growth.idle_s = 0.0
    until(lambda: out(pool) == 0 and pool.statistics().mapped_nbytes == CHUNK)
    pool.growth.idle_s = FOREVER_S


def retiring(pool: Pool) -> int:
    return pool.statistics().retiring_nbytes // CHUNK
