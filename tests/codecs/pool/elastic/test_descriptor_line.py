"""How chunks reach the consumers of an elastic pool; see `test_growth.py`."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
)
from typing import Any

import msgspec
import pytest
from tests.codecs.pool.elastic.elastic_pools import (
    CHUNK,
    Create,
    Peer,
    Until,
    connect_here,
    digest,
    encode,
    fill,
    growth_of,
    here,
    publish,
    retiring,
    shrink_to,
    some,
)

from tensorferry.codecs.errors import AttachRefused, LeaseError
from tensorferry.codecs.messages import Origin, Proxy
from tensorferry.codecs.pool.elastic.descriptor_line import Sender
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES
from tensorferry.pipeline.pools.broker import Broker, attach

# --- R7: giving up what somebody may still use ------------------------------------------------------------------------


def test_the_thread_sends_again_what_could_not_be_sent(
    create: Create, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = create(4)
    with Reader() as reader:
        connect_here(pool, reader)

        def come() -> set[int]:
            reader.upkeep()
            return set(here(reader, pool).mapped)

        with monkeypatch.context() as patch:
            patch.setattr(Sender, "send", lambda *_: False)
            with pool.lease(2 * CHUNK):
                until(lambda: pool.statistics().grown == 3)
            assert come() == {0}
        growth_of(pool).look()
        until(lambda: come() == {0, 1, 2})  # and nobody dispatches


# --- the line -------------------------------------------------------------------------------------------------------


def narrow(sender: Sender, descriptor: int, made: Callable[[Sender, int], None] = Sender.__init__) -> None:
    """Make a line that takes a few packets, the kernel's least."""
    with socket.socket(fileno=os.dup(descriptor)) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    made(sender, descriptor)


def test_a_consumer_that_does_not_empty_its_line_is_dispatched_nothing_that_it_cannot_map(
    create: Create, start: Callable[[], Peer], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, stopped = create(40, slots=64), start()
    monkeypatch.setattr(Sender, "__init__", narrow)
    column = stopped.join(pool)
    until(lambda: pool.statistics().grown == 1)
    stopped.stop()
    with ExitStack() as leases:
        last = [leases.enter_context(pool.lease(CHUNK)) for _ in range(40)][-1]
        with pytest.raises(LeaseError, match="does not take its chunk at 39"):
            last.dispatch([column])
        stopped.signal(signal.SIGCONT)

        def is_sent() -> bool:
            stopped.ask("upkeep")
            try:
                last.dispatch([column])  # which sends it first
            except LeaseError:  # the pool's thread has filled the line again
                return False
            return True

        until(is_sent)
        last.data[:] = 3
        slot, generation, offset, _ = last.grant
    proxy = Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (CHUNK,))
    assert stopped.ask("read", encode(proxy))[2] == digest(b"\3" * CHUNK)
    stopped.ask("reset")


@pytest.mark.parametrize(
    ("replace", "problem"),
    [
        (lambda fds: fds[:2], "2 descriptors"),
        (lambda fds: [*fds[:2], fds[0]], "is not a line"),
        (lambda fds: [*fds[:2], fds[1]], "is not a line"),
    ],
)
def test_an_admission_without_a_line_is_refused(
    create: Create, replace: Callable[[list[int]], list[int]], problem: str
) -> None:
    pool = create(4)
    with Reader() as reader:
        attachment, fds = reader.attach(*pool.export())
        given = [os.dup(fd) for fd in replace(fds)]
        for fd in fds:
            os.close(fd)
        with pytest.raises(AttachRefused, match=problem):
            pool.admit(attachment, given)


def test_a_line_of_another_kind_is_refused(create: Create) -> None:
    pool = create(4)
    ours, theirs = socket.socketpair()
    with Reader() as reader, ours:
        attachment, fds = reader.attach(*pool.export())
        os.close(fds.pop())
        with pytest.raises(AttachRefused, match="no UNIX SEQPACKET socket"):
            pool.admit(attachment, [*fds, theirs.detach()])


@pytest.mark.parametrize(
    "lie",
    [
        {"chunk_nbytes": CHUNK // 2, "nbytes": 2 * CHUNK},  # which is as many positions
        {"chunk_nbytes": 3 * CHUNK},
        {"chunk_nbytes": 0},
        {"nbytes": 0},
    ],
)
def test_a_lie_about_chunks_is_refused(create: Create, lie: dict[str, int]) -> None:
    export, fds = create(4).export()
    lying = msgspec.structs.replace(export, description=msgspec.structs.replace(export.description, **lie))
    with Reader() as reader, pytest.raises(AttachRefused, match="a chunk is a multiple of"):
        reader.attach(lying, fds)


def test_packets_that_are_not_of_the_protocol_are_passed_over(create: Create) -> None:
    """By a consumer: too short, too long, without a descriptor, for positions that are taken or are none."""
    pool = create(4)
    with Reader() as reader:
        attachment, fds = reader.attach(*pool.export())
        with socket.socket(fileno=os.dup(fds[-1])) as line, closing(Sender(os.dup(fds[-1]))) as sender:
            column = pool.admit(attachment, fds)
            proxy = publish(pool, column, some(100))
            for packet in (b"", b"1234567", b"123456789"):
                socket.send_fds(line, [packet], [0])
            line.send(b"\1\0\0\0\3\0\0\0")
            for position in (0, 4, 0xFFFFFFFF):
                assert sender.send(9, position, 0)
        with reader.open(proxy) as view:
            assert digest(view.data) == digest(some(100))
        other = publish(pool, column, some(3 * CHUNK))
        reader.acknowledge(other)


def test_what_a_process_without_descriptors_cannot_take_it_does_not_hold(
    start: Callable[[], Peer],
    create: Create,
    until: Until,
    refused: Callable[..., AbstractContextManager[Any]],
) -> None:
    pool, peer = create(4), start()
    column = peer.join(pool)
    peer.ask("run_short_of_descriptors", True)
    payloads = fill(pool, column, 4)
    with refused("StaleLease", "which has not come"):
        peer.ask("read", payloads[-1])
    for payload in payloads[:-1]:
        peer.ask("acknowledge", payload)
    peer.ask("run_short_of_descriptors", False)
    shrink_to(pool, until)
    peer.ask("upkeep")
    until(lambda: retiring(pool) == 0)
    peer.ask("reset")


async def test_the_broker_admits_to_an_elastic_pool(create: Create, until: Until) -> None:
    pool = create(4)
    with tempfile.TemporaryDirectory(prefix="ferry-") as folder, Reader() as reader:
        path = f"{folder}/pool.sock"
        async with Broker(path, pool, lambda origin, column: None):
            column = await attach(path, Origin("encoder", 0, 7), pool.description.pool, reader, 20.0)
            proxy = publish(pool, column, some(2 * CHUNK))
            with reader.open(proxy) as view:
                assert digest(view.data) == digest(some(2 * CHUNK))
