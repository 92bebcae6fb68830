"""tensorferry as a contender: pool, publisher, reader and channels, as its stages use them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from benchmarks.sides import Answer, Send, Setup, bytes_of
from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadMessage
from tensorferry.codecs.frames import Buffer, Limits
from tensorferry.codecs.pool.export import Attachment, Export
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.channels.channels import Inbox, Outbox, open_context
from tensorferry.pipeline.deployment.spec import PoolSpec
from tensorferry.pipeline.pools.broker import recycle
from tensorferry.pipeline.process.child import COPY_VARIABLES

_REQUEST, _HASH = bytes(16), bytes(32)
_ME, _PEER = wire.Origin("tokenizer", 0, 1), wire.Rank(0, 2)


class _Ours:
    """What the three have in common: the consumer, and how the two meet."""

    safe = True
    environment: Mapping[str, str] = COPY_VARIABLES

    async def receive(self, setup: Setup, answer: Answer) -> None:
        with Reader() as reader, open_context() as context:
            data, fds, _, _ = socket.recv_fds(setup.line, 1 << 16, 8, socket.MSG_CMSG_CLOEXEC)
            if fds:
                attachment, ours = reader.attach(msgspec.msgpack.decode(data, type=Export), fds)
                _send(setup.line, msgspec.msgpack.encode(attachment), ours)
            inbox = Inbox(context, setup.address, Limits(), _refused)
            async for received in inbox:
                job = received.message
                assert isinstance(job, wire.Encode)
                payload = job.items[0].features[0].payload
                with reader.open(payload, received.frames) as view:
                    answer(job.attempt, view.data)
                del received, view

    @contextmanager
    def _opened(self, setup: Setup, pool: Pool | None) -> Iterator[tuple[Publisher, Outbox, int | None]]:
        """(publisher, outbox, the consumer's column in the pool) of a producer."""
        column = None
        if pool is None:
            setup.line.send(b"no pool")
        else:
            export, fds = pool.export()
            _send(setup.line, msgspec.msgpack.encode(export), fds)
            data, theirs, _, _ = socket.recv_fds(setup.line, 1 << 16, 8, socket.MSG_CMSG_CLOEXEC)
            column = pool.admit(msgspec.msgpack.decode(data, type=Attachment), theirs)
        with open_context() as context, ExitStack() as undo:
            outbox = Outbox(context, setup.address, "consumer")
            undo.callback(outbox.close)
            if pool is not None:
                recycler = asyncio.get_running_loop().create_task(recycle(pool, PoolSpec().recycle_s))
                undo.callback(recycler.cancel)
            yield Publisher(pool), outbox, column


class InPlace(_Ours):
    """The producer writes the tensor into the pool; the consumer borrows it there."""

    @contextmanager
    def sender(self, setup: Setup) -> Iterator[Send]:
        layout = [("float32", setup.shape)]
        with Pool.create(setup.pool_nbytes) as pool, self._opened(setup, pool) as (publisher, outbox, column):

            def send(number: int) -> None:
                with publisher.draft(layout) as draft:
                    setup.write(draft.views[0].data, number)
                    frames: list[Buffer] = []
                    payload = draft.dispatch(column, frames)[0]
                    outbox.send_nowait(_encode(number, payload), frames)

            yield send


class CopiedIn(_Ours):
    """The producer writes a tensor of its own, which is copied into the pool; the consumer borrows it there."""

    pooled = True

    @contextmanager
    def sender(self, setup: Setup) -> Iterator[Send]:
        source = setup.source()
        with ExitStack() as undo:
            pool = undo.enter_context(Pool.create(setup.pool_nbytes)) if self.pooled else None
            publisher, outbox, column = undo.enter_context(self._opened(setup, pool))

            def send(number: int) -> None:
                setup.write(bytes_of(source), number)
                with publisher.publish(source) as draft:
                    frames: list[Buffer] = []
                    payload = draft.dispatch(column, frames)[0]
                    outbox.send_nowait(_encode(number, payload), frames)

            yield send


class CopiedInByLibrary(CopiedIn):
    """The same in a process that our supervisor has not started, so without its `COPY_VARIABLES`."""

    environment: Mapping[str, str] = {}


class InlineFallback(CopiedIn):
    """What the pool has no room for: a copy of the producer's tensor travels inside the message."""

    pooled = False


def _encode(number: int, payload: wire.Payload) -> wire.Encode:
    """A message as a tokenizer sends it: one item of one request, for one encoder rank and one scheduler rank."""
    item = wire.Item("image", (1, 64, 64), 1024, _HASH, (wire.Tensor("features", payload),))
    return wire.Encode(_REQUEST, number, 2, _ME, (_PEER,), (_PEER,), (item,), 60_000)


def _send(line: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send descriptors, which are then the receiver's alone."""
    socket.send_fds(line, [data], fds)
    for fd in fds:
        os.close(fd)


def _refused(problem: BadMessage) -> None:
    raise problem
