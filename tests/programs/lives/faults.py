"""Faults planted into a life, by name, to see that the schedules find them. Some are looked up where they are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from lives.stream import Stream
from tensorferry.codecs.errors import PeerGone
from tensorferry.codecs.frames import Buffer
from tensorferry.codecs.messages import Payload, Proxy
from tensorferry.codecs.pool.attached_pool import Imported
from tensorferry.codecs.pool.ledger import Grant, Ledger, Words
from tensorferry.codecs.pool.lending import Lending
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.system.pidfd import is_dead
from tensorferry.codecs.tensors import View

_kept: list[object] = []
_open, _reclaim, _attach, _is_ready = Reader.open, Ledger.reclaim, Reader.attach, Imported.is_ready


@contextmanager
def _open_and_acknowledge_first(self: Reader, payload: Payload, frames: Sequence[Buffer] = ()) -> Iterator[View]:
    with _open(self, payload, frames) as view:
        pass
    if isinstance(payload, Proxy):
        Stream.latest.finish()
    yield view


@contextmanager
def _open_and_forget_when_it_fails(self: Reader, payload: Payload, frames: Sequence[Buffer] = ()) -> Iterator[View]:
    block = _open(self, payload, frames)
    _kept.append(block)  # or the garbage collector would end it
    view = block.__enter__()
    yield view
    block.__exit__(None, None, None)


def _strike_the_slow(self: Lending) -> list[int]:
    slow = [column for column in self.consumers if self.ledger.outstanding(column)]
    for column in slow:
        self.strike(column)
    return slow


def _reclaim_unready(self: Ledger, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
    return _reclaim(self, self._due, acks, limit)


def _reclaim_at_the_first(self: Ledger, ready: Words, acks: Mapping[int, Words], limit: int = 64) -> list[Grant]:
    for grant, columns in self._settled.values():
        if any(acks[column][grant.slot] == grant.generation for column in columns):
            for column in columns:
                self._need[column][grant.slot] = 0
            columns.clear()
    return _reclaim(self, ready, acks, limit)


def _believe_the_living_only(self: Imported, proxy: Proxy) -> bool:
    if is_dead(self.producer):
        raise PeerGone(f"pool {proxy.pool}", "its producer is dead")
    return _is_ready(self, proxy)


def _attach_and_keep_a_descriptor(self: Reader, *arguments: Any) -> Any:
    attached = _attach(self, *arguments)
    os.dup(attached[1][0])
    return attached


#: name -> (class, attribute, what it is replaced with)
FAULTS: dict[str, tuple[type[Any], str, Callable[..., Any]]] = {
    "acknowledges before it has read": (Reader, "open", _open_and_acknowledge_first),
    "forgets the lease of a block that failed": (Reader, "open", _open_and_forget_when_it_fails),
    "reads what is not ready": (Imported, "_looks_ready", lambda self, proxy: True),
    "waits for the dead": (Imported, "is_ready", lambda self, proxy: self._looks_ready(proxy)),
    "gives up what a dead producer had finished": (Imported, "is_ready", _believe_the_living_only),
    "keeps a descriptor": (Reader, "attach", _attach_and_keep_a_descriptor),
    "keeps what it has detached": (Reader, "detach", lambda self, pool: _kept.append(self._pools.pop(pool, None))),
    "strikes whoever is slow": (Lending, "strike_dead", _strike_the_slow),
    "never strikes": (Lending, "strike", lambda self, column: None),
    "ends a lease at its first acknowledgement": (Ledger, "reclaim", _reclaim_at_the_first),
    "lends before the writer is done": (Ledger, "reclaim", _reclaim_unready),
}


def plant(fault: str) -> None:
    with suppress(KeyError):
        owner, name, replacement = FAULTS[fault]
        setattr(owner, name, replacement)
