"""The consumer's side: proxies in, bytes out, exactly one acknowledgement per lease.

One Reader per process. However many proxies name a lease and however often each is opened, the reader counts
the releases and acknowledges once: when the count its producer declared is reached and no block has it open
any more. Thread-safe, so that a copy thread can open and release.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tensorferry.codecs.errors import (
    AttachRefused,
    BadTensor,
    LeaseNotReady,
    LeasePoisoned,
    PeerGone,
    StaleLease,
)
from tensorferry.codecs.frames import Buffer, open_inline
from tensorferry.codecs.memory.host import HostSegment
from tensorferry.codecs.messages import Inline, Payload, Proxy
from tensorferry.codecs.pool.control import AckPage, ControlPage
from tensorferry.codecs.pool.pool import Attachment, Export, check_pidfd, is_dead, new_nonce
from tensorferry.codecs.tensors import ALIGNMENT, View, nbytes_of


class Reader:
    """See the module."""

    def __init__(self, consumer: int | None = None) -> None:
        """consumer: the epoch of this process, random by default."""
        self.consumer = consumer or new_nonce()
        self.stale = 0  #: proxies refused because their lease was over, or acknowledged here already
        self._pools: dict[int, _Import] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- pools

    @property
    def pools(self) -> frozenset[int]:
        return frozenset(self._pools)

    def orphans(self) -> frozenset[int]:
        """The pools whose producer has ended. What was ready in them can still be read; `detach` them when no more
        proxies of theirs can come."""
        with self._lock:
            return frozenset(pool for pool, imported in self._pools.items() if is_dead(imported.producer))

    def attach(self, export: Export, fds: Sequence[int]) -> tuple[Attachment, list[int]]:
        """Map a peer's pool; takes over the descriptors that came with the export.

        Returns what `Pool.admit` needs, with descriptors (ack page, this process) that the caller closes once
        they are sent. Raises AttachRefused, having closed everything.
        """
        description = export.description
        with ExitStack() as undo, ExitStack() as received:
            for fd in fds:
                received.callback(os.close, fd)
            if description.memory != "host" or len(fds) != 3:
                raise AttachRefused(
                    f"cannot map pool {description.pool} of {description.memory} memory from {len(fds)} descriptors"
                )
            check_pidfd(fds[2])
            segment = HostSegment.attach(fds[0], description.nbytes)
            undo.callback(segment.close)
            control = ControlPage.attach(fds[1], description.slots, description.pool, export.producer)
            undo.callback(control.close)
            acks = AckPage.create(description.slots, description.pool, self.consumer)
            undo.callback(acks.close)
            sent = [os.dup(acks.segment.fd)]
            undo.callback(os.close, sent[0])
            sent.append(os.pidfd_open(os.getpid()))
            undo.callback(os.close, sent[1])
            producer = os.dup(fds[2])
            undo.callback(os.close, producer)
            with self._lock:
                if description.pool in self._pools:
                    raise AttachRefused(f"pool {description.pool} is attached already")
                self._pools[description.pool] = _Import(segment, control, acks, description.slots, producer)
            undo.pop_all()
        return Attachment(description.pool, self.consumer), sent

    def detach(self, pool: int) -> None:
        """Forget a pool; its memory is unmapped here once no view is out. No-op for one that is not attached."""
        with self._lock:
            imported = self._pools.pop(pool, None)
            if imported is not None:
                imported.close()

    def close(self) -> None:
        for pool in list(self._pools):
            self.detach(pool)

    # --- payloads

    def is_ready(self, proxy: Proxy) -> bool:
        """Whether `open` would give the bytes now; False only while the producer is still writing.

        Raises as `open` does when it never will.
        """
        with self._lock:
            imported = self._living(proxy)
            imported.view(proxy)
            return imported.is_ready(proxy)

    @contextmanager
    def open(self, payload: Payload, frames: Sequence[Buffer] = ()) -> Iterator[View]:
        """Borrow a payload's bytes for the length of the block; the block's end counts as one release.

        frames: the inline frames of the message the payload came in. Nothing may read the view after the
        block: for a proxy the bytes are then somebody else's. However often a lease is open here at once, its
        bytes stay until the last block ends. Raises StaleLease (over, or acknowledged already), LeasePoisoned,
        LeaseNotReady (see `is_ready`), PeerGone, BadTensor, UnsupportedDtype; for Inline also BadMessage. A
        failed open of a living lease counts as its release too, so that one bad reader wedges nobody.
        """
        if isinstance(payload, Inline):
            yield open_inline(payload, frames)
            return
        imported = self._hold(payload)
        try:
            yield self._look(imported, payload)
        finally:
            self._release(imported, payload)

    def acknowledge(self, payload: Payload) -> None:
        """Release a payload without reading it: an embedding-cache hit, or a request that was given up.

        Safe at any time, also before the bytes are ready. Raises StaleLease when nothing is owed, PeerGone.
        """
        if isinstance(payload, Proxy):
            self._release(self._hold(payload), payload)

    def _hold(self, proxy: Proxy) -> _Import:
        """Count one user of a living lease in; each must be counted out by `_release`."""
        with self._lock:
            imported = self._living(proxy)
            imported.held.setdefault((proxy.slot, proxy.generation), _Held(proxy.uses)).users += 1
            return imported

    def _release(self, imported: _Import, proxy: Proxy) -> None:
        """Count one user out; the last of the last declared use acknowledges."""
        with self._lock:
            held = imported.held[proxy.slot, proxy.generation]
            held.users -= 1
            held.due -= 1
            if held.users == 0 and held.due <= 0:
                del imported.held[proxy.slot, proxy.generation]
                if self._pools.get(proxy.pool) is imported:
                    imported.acks.acknowledge(proxy.slot, proxy.generation)

    def _look(self, imported: _Import, proxy: Proxy) -> View:
        with self._lock:
            if self._pools.get(proxy.pool) is not imported:
                raise PeerGone(f"pool {proxy.pool}", "was detached")
            view = imported.view(proxy)
            if not imported.is_ready(proxy):
                raise LeaseNotReady(proxy.slot, proxy.generation, "is not written yet")
            return view

    def _living(self, proxy: Proxy) -> _Import:
        """The pool of a lease that this process has not acknowledged. Raises PeerGone, BadTensor, StaleLease."""
        imported = self._pools.get(proxy.pool)
        if imported is None:
            raise PeerGone(f"pool {proxy.pool}", "is not attached here")
        if proxy.slot >= imported.slots:
            raise BadTensor(f"slot {proxy.slot} of a pool with {imported.slots}")
        lease = imported.control.look(proxy.slot)[0]
        if lease != proxy.generation:
            self.stale += 1
            raise StaleLease(proxy.slot, proxy.generation, f"is over: the slot is at generation {lease}")
        if imported.acks.acknowledged(proxy.slot) == proxy.generation:
            self.stale += 1
            raise StaleLease(proxy.slot, proxy.generation, "was acknowledged here already")
        return imported


@dataclass(slots=True)
class _Held:
    """What this process still has to do with a lease."""

    due: int  #: releases to come, by its producer's word
    users: int = 0  #: who has it open now, or is about to


class _Import:
    """A peer's pool as it is mapped here."""

    def __init__(self, segment: HostSegment, control: ControlPage, acks: AckPage, slots: int, producer: int) -> None:
        """producer: its pidfd."""
        self.segment, self.control, self.acks = segment, control, acks
        self.slots, self.producer = slots, producer
        self.held: dict[tuple[int, int], _Held] = {}  #: by (slot, generation)

    def view(self, proxy: Proxy) -> View:
        """The bytes a proxy names. Raises UnsupportedDtype or BadTensor; allocates nothing."""
        end = proxy.offset + nbytes_of(proxy.dtype, proxy.shape)
        if end > self.segment.nbytes or proxy.offset % ALIGNMENT:
            raise BadTensor(f"bytes {proxy.offset} to {end} of a pool of {self.segment.nbytes}")
        return View(self.segment.data[proxy.offset : end], proxy.dtype, proxy.shape)

    def is_ready(self, proxy: Proxy) -> bool:
        if self._looks_ready(proxy):
            return True
        if not is_dead(self.producer):
            return False
        if self._looks_ready(proxy):  # ready may have come after the look; now that it is dead its words are final
            return True
        raise PeerGone(f"pool {proxy.pool}", f"its producer died before slot {proxy.slot} was written")

    def _looks_ready(self, proxy: Proxy) -> bool:
        _, ready, poison = self.control.look(proxy.slot)
        if poison == proxy.generation:
            raise LeasePoisoned(proxy.slot, proxy.generation, "will never be valid: its producer said so")
        return ready == proxy.generation

    def close(self) -> None:
        self.segment.close()
        self.control.close()
        self.acks.close()
        os.close(self.producer)
