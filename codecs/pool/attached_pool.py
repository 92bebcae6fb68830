"""A peer's pool as it is mapped here: its memory, its control words, and the acknowledgements of this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from tensorferry.codecs.errors import AttachRefused, BadTensor, LeasePoisoned, PeerGone, StaleLease
from tensorferry.codecs.memory.cuda_ipc import CudaImport
from tensorferry.codecs.memory.cuda_vmm import VmmImport
from tensorferry.codecs.memory.host import HOST_ORDER, HostSegment
from tensorferry.codecs.memory.memory import Memory, Order
from tensorferry.codecs.memory.registered import RegisteredSegment
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.control import AckPage, ControlPage, await_stores
from tensorferry.codecs.pool.elastic.chunk_imports import ChunkImports
from tensorferry.codecs.pool.elastic.descriptor_line import Receiver
from tensorferry.codecs.pool.elastic.mail import ReleaseMail
from tensorferry.codecs.pool.export import Export, positions_of
from tensorferry.codecs.system.pidfd import check_pidfd, is_dead
from tensorferry.codecs.tensors import ALIGNMENT, dtype_of, nbytes_of


@dataclass(slots=True)
class Held:
    """The uses of one lease that this process still has to end."""

    due: int  #: releases to come, by its producer's word
    users: int = 0  #: who has it open now, or is about to
    last: Order | None = None  #: of the reader that ended last
    marks: list[int] = field(default_factory=list)  #: where the readers that have ended were then

    def ended(self, order: Order) -> None:
        self.last = order
        self.marks.append(order.mark())


class Imported:
    """A peer's pool as it is mapped here."""

    def __init__(
        self,
        memory: Memory,
        control: ControlPage | None,
        acks: AckPage,
        slots: int,
        producer: int | None,
        producer_epoch: int,
    ) -> None:
        """control: None of a pool that is acknowledged by message. producer: its pidfd; None: it is on another node."""
        self.memory, self.control, self.acks = memory, control, acks
        self.slots, self.producer, self.producer_epoch = slots, producer, producer_epoch
        self.held: dict[tuple[int, int], Held] = {}  #: by (slot, generation)
        self.open = 0  #: uses that have not ended
        self.detached = False
        self.bereaved = False  #: the supervisor of its node has said that the producer is dead
        self.mapping: ChunkImports | None = None  #: of an elastic pool
        self.mail: ReleaseMail | None = None  #: instead of a control page
        self.acknowledged = [0] * slots  #: last generation given back of each; the word may still be on its way

    @classmethod
    def local(
        cls, export: Export, fds: Sequence[int], consumer: int, device: int | None, cache_handles: bool
    ) -> tuple[Self, list[int]]:
        """Map a pool that shares pages; takes over the descriptors that came with the export.

        Returns descriptors for the pool too, the caller's to close (ack page, this process, for an elastic pool the
        line). consumer: our epoch; the rest as `Reader` has it. Raises as `Reader.attach`, having closed everything.
        """
        description, gpu = export.description, export.gpu
        with ExitStack() as undo, ExitStack() as received:
            for fd in fds:
                received.callback(os.close, fd)
            kinds = [("host", 3)] if gpu is None else [("cuda_ipc", 2), ("cuda_vmm", 2)]
            if (description.memory, len(fds)) not in kinds:
                raise AttachRefused(
                    f"cannot map pool {description.pool} of {description.memory} memory from {len(fds)} descriptors"
                )
            check_pidfd(fds[-1])
            memory: Memory
            arriving: VmmImport | None = None
            nbytes, chunk_nbytes = description.nbytes, description.chunk_nbytes
            if gpu is None:
                host = HostSegment.attach if device is None else partial(RegisteredSegment.attach, ordinal=device)
                memory = host(fds[0], nbytes)
            elif description.memory == "cuda_vmm":
                memory = arriving = VmmImport.attach(gpu, nbytes, chunk_nbytes, ordinal=device)
            else:
                memory = CudaImport.attach(gpu, nbytes, ordinal=device, cached=cache_handles)
            undo.callback(memory.close)
            positions = positions_of(description)
            control = ControlPage.attach(fds[-2], description.slots, description.pool, export.producer, positions)
            undo.callback(control.close)
            acks = AckPage.create(description.slots, description.pool, consumer, positions)
            undo.callback(acks.close)
            memory.adopt(acks)
            undo.callback(memory.disown, acks)
            sent = [os.dup(acks.segment.fd)]
            undo.callback(os.close, sent[0])
            sent.append(os.pidfd_open(os.getpid()))
            undo.callback(os.close, sent[1])
            producer = os.dup(fds[-1])
            undo.callback(os.close, producer)
            imported = cls(memory, control, acks, description.slots, producer, export.producer)
            if arriving is not None:
                line = Receiver()
                sent.append(line.descriptor)
                undo.callback(os.close, line.descriptor)
                imported.mapping = ChunkImports(arriving, control, acks, line, chunk_nbytes, imported.acknowledged)
            undo.pop_all()
        return imported, sent

    @classmethod
    def by_mail(
        cls, export: Export, fds: Sequence[int], consumer: int, device: int | None, cache_handles: bool
    ) -> tuple[Self, list[int]]:
        """The same of a pool that shares no pages. From another node no descriptors come, and none are returned."""
        description, gpu, pool = export.description, export.gpu, export.description.pool
        by_line = export.mail == "posix_fd"
        with ExitStack() as undo, ExitStack() as received:
            for fd in fds:
                received.callback(os.close, fd)
            if gpu is None or export.mail is None or description.memory != "cuda_vmm" or len(fds) not in (by_line, 1):
                said = f"{description.memory} memory from {len(fds)} descriptors"
                raise AttachRefused(f"cannot map pool {pool} of {said}, to acknowledge it by message")
            sent: list[int] = []
            producer: int | None = None
            if fds:
                check_pidfd(fds[0])
                producer = os.dup(fds[0])
                undo.callback(os.close, producer)
                sent.append(os.pidfd_open(os.getpid()))
                undo.callback(os.close, sent[0])
            nbytes, chunk_nbytes = description.nbytes, description.chunk_nbytes
            memory = VmmImport.attach(gpu, nbytes, chunk_nbytes, ordinal=device, kind=export.mail)
            undo.callback(memory.close)
            positions = positions_of(description)
            acks = AckPage.create(description.slots, pool, consumer, positions)
            undo.callback(acks.close)
            memory.adopt(acks)
            undo.callback(memory.disown, acks)
            mail = ReleaseMail(pool, export.producer, consumer, acks, description.slots, positions)
            line: Receiver | ReleaseMail = mail
            if by_line:
                line = Receiver()
                sent.append(line.descriptor)
                undo.callback(os.close, line.descriptor)
            imported = cls(memory, None, acks, description.slots, producer, export.producer)
            imported.mail = mail
            imported.mapping = ChunkImports(memory, mail, acks, line, chunk_nbytes, imported.acknowledged)
            undo.pop_all()
        return imported, sent

    @property
    def is_orphan(self) -> bool:
        return self.bereaved or (self.producer is not None and is_dead(self.producer))

    def check_living(self, slot: int, generation: int) -> None:
        """Raises BadTensor for a slot outside the pool, StaleLease for a lease that is over, or was given back here.

        Without a control page it is the proxy that says that the lease lives: we owe an acknowledgement for all that
        we were sent, and the slot cannot go on without it.
        """
        if slot >= self.slots:
            raise BadTensor(f"slot {slot} of a pool with {self.slots}")
        given_back = self.acknowledged[slot]
        if self.control is not None:
            lease = self.control.look(slot)[0]
            if lease != generation:
                raise StaleLease(slot, generation, f"is over: the slot is at generation {lease}")
        elif generation < given_back:
            raise StaleLease(slot, generation, f"is over: generation {given_back} was acknowledged here")
        if given_back == generation:
            raise StaleLease(slot, generation, "was acknowledged here already")

    def check(self, proxy: Proxy) -> int:
        """The bytes of a proxy. Raises UnsupportedDtype or BadTensor for one that points outside; allocates nothing."""
        nbytes = nbytes_of(dtype_of(proxy.dtype), proxy.shape)
        end = proxy.offset + nbytes
        if end > self.memory.nbytes or proxy.offset % ALIGNMENT:
            raise BadTensor(f"bytes {proxy.offset} to {end} of a pool of {self.memory.nbytes}")
        return nbytes

    def acknowledge(self, slot: int, generation: int, held: Held, order: Order | None) -> None:
        """Give a lease back, in the order of its last reader and after all others; at once if it was never read."""
        order = order or held.last or HOST_ORDER
        while held.marks:
            order.after(held.marks.pop())
        order.store(self.acks, self.acks.ACK, slot, generation)
        self.acknowledged[slot] = generation

    def withdraw(self, slot: int, generation: int) -> None:
        """Give a living lease back, read or not. One that is open is given back at the end of its last block."""
        try:
            self.check_living(slot, generation)
        except (StaleLease, BadTensor):
            return
        held = self.held.get((slot, generation), Held(0))
        if held.users:
            held.due = 1
            return
        self.acknowledge(slot, generation, held, None)
        self.held.pop((slot, generation), None)

    def is_ready(self, proxy: Proxy) -> bool:
        if self._looks_ready(proxy):
            return True
        if not self.is_orphan:
            return False
        if self._looks_ready(proxy):  # ready may have come after the look; now that it is dead its words are final
            return True
        raise PeerGone(f"pool {proxy.pool}", f"its producer died before slot {proxy.slot} was written")

    def _looks_ready(self, proxy: Proxy) -> bool:
        if self.control is None:  # its proxy was sent when it was complete, but its chunks may come later
            assert self.mapping is not None
            return self.mapping.has_come(proxy, nbytes_of(dtype_of(proxy.dtype), proxy.shape))
        _, ready, poison = self.control.look(proxy.slot)
        if poison == proxy.generation:
            raise LeasePoisoned(proxy.slot, proxy.generation, "will never be valid: its producer said so")
        return ready == proxy.generation

    def close(self) -> None:
        await_stores(lambda: self.acks.column(self.acks.ACK) == self.acknowledged)
        with ExitStack() as undo:  # all of it, also where one of them fails
            if self.producer is not None:
                undo.callback(os.close, self.producer)
            undo.callback(self.memory.close)
            if self.control is not None:
                undo.callback(self.control.close)
            undo.callback(self.acks.close)
            undo.callback(self.memory.disown, self.acks)
            if self.mail is not None:
                undo.callback(self.mail.end)
            if self.mapping is not None:
                undo.callback(self.mapping.close)
