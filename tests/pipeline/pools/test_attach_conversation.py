"""Consumers of a broker: an error when its producer misbehaves, and both sides agree when it gives up."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import msgspec
import pytest
from tests.pipeline.pools.conversations import (
    DEADLINE_S,
    ORIGIN,
    Heard,
    Raw,
    eventually,
)

from tensorferry.codecs.errors import AttachRefused, PeerGone
from tensorferry.codecs.pool.export import Export
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.channels.readable_fd import readable
from tensorferry.pipeline.pools.broker import attach
from tensorferry.pipeline.pools.fd_conversation import (
    Admitted,
    Attach,
    Exported,
    Refused,
)


@asynccontextmanager
async def impostor(path: str, behave: Callable[[Raw], Awaitable[None]]) -> AsyncIterator[None]:
    """A broker that does what it likes with the first who comes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        async def serve() -> None:
            await readable(listener.fileno())
            with closing(Raw(listener.accept()[0])) as line:
                message, _ = await line.hear()
                assert isinstance(message, Attach)
                await behave(line)

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve())
            yield
            serving.cancel()


def export(pool: Pool, line: Raw, /, **changes: Any) -> None:
    """Say Exported, with the description as changed."""
    exported, fds = pool.export()
    try:
        description = msgspec.structs.replace(exported.description, **changes)
        line.say(Exported(msgspec.structs.replace(exported, description=description)), fds)
    finally:
        for fd in fds:
            os.close(fd)


async def hangs_up_at_once(pool: Pool, line: Raw) -> None:
    pass


async def answers_garbage(pool: Pool, line: Raw) -> None:
    line.say(b"\xc1\xc1\xc1", [0, 0])


async def declines(pool: Pool, line: Raw) -> None:
    line.say(Refused("because"))


async def exports_without_descriptors(pool: Pool, line: Raw) -> None:
    line.say(Exported(Export(pool.description, pool.producer)))


async def exports_another_pool(pool: Pool, line: Raw) -> None:
    with Pool.create(1 << 16, 16) as another:
        export(another, line)


async def hangs_up_after_exported(pool: Pool, line: Raw) -> None:
    export(pool, line)


async def lies_about_the_size(pool: Pool, line: Raw) -> None:
    export(pool, line, nbytes=1 << 39)


async def has_memory_of_another_kind(pool: Pool, line: Raw) -> None:
    export(pool, line, memory="cuda_ipc")


async def hangs_up_after_attached(pool: Pool, line: Raw) -> None:
    export(pool, line)
    _, fds = await line.hear()
    for fd in fds:
        os.close(fd)


async def says_nothing_after_attached(pool: Pool, line: Raw) -> None:
    await hangs_up_after_attached(pool, line)
    await asyncio.Event().wait()


async def admits_without_hearing(pool: Pool, line: Raw) -> None:
    line.say(Admitted(0))
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("behave", "error", "reason"),
    [
        (hangs_up_at_once, PeerGone, "hung up"),
        (answers_garbage, AttachRefused, "not a message of ours"),
        (declines, AttachRefused, "^because$"),
        (exports_without_descriptors, AttachRefused, "Exported with 1 or 2 or 3 was due"),
        (exports_another_pool, AttachRefused, "has pool"),
        (hangs_up_after_exported, PeerGone, "hung up"),
        (lies_about_the_size, AttachRefused, "were announced"),
        (has_memory_of_another_kind, AttachRefused, "cannot map pool"),
        (hangs_up_after_attached, PeerGone, "hung up"),
        (says_nothing_after_attached, PeerGone, r"no answer within 0\.3 s"),
        (admits_without_hearing, AttachRefused, "Exported with 1 or 2 or 3 was due"),
    ],
)
async def test_a_misbehaving_producer_is_an_error_and_leaves_nothing(
    behave: Callable[[Pool, Raw], Awaitable[None]],
    error: type[Exception],
    reason: str,
    path: str,
    pool: Pool,
    belongings: Callable[[], Any],
) -> None:
    timeout_s = 0.3 if behave is says_nothing_after_attached else DEADLINE_S
    before = belongings()
    with Reader() as reader:
        async with impostor(path, lambda line: behave(pool, line)):
            with pytest.raises(error, match=reason):
                await attach(path, ORIGIN, pool.description.pool, reader, timeout_s)
        assert reader.pools == frozenset()
        await eventually(lambda: not belongings().gained_since(before))


async def test_a_producer_of_another_user_is_refused(path: str, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with Reader() as reader, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(AttachRefused, match="only those of user"):
            await attach(path, ORIGIN, pool.description.pool, reader, 0.5)


async def test_nobody_there_is_an_error(path: str) -> None:
    with Reader() as reader, pytest.raises(PeerGone, match="cannot be reached: No such file"):
        await attach(path, ORIGIN, 1, reader, DEADLINE_S)


@pytest.mark.parametrize("admitted", [True, False])
async def test_a_consumer_that_gives_up_is_attached_exactly_if_it_was_admitted(
    admitted: bool, path: str, pool: Pool
) -> None:
    waiting: list[asyncio.Task[int]] = []
    outcome: list[str] = []

    async def behave(line: Raw) -> None:
        await hangs_up_after_attached(pool, line)
        if admitted:
            line.say(Admitted(0))
        waiting[0].cancel()  # before it can look
        await asyncio.wait(waiting)
        try:
            line.say(Admitted(0))
            outcome.append("said")
        except BrokenPipeError:
            outcome.append("could not be said")

    with Reader() as reader:
        async with impostor(path, behave):
            waiting.append(asyncio.create_task(attach(path, ORIGIN, pool.description.pool, reader, DEADLINE_S)))
            with pytest.raises(asyncio.CancelledError):
                await waiting[0]
            await eventually(lambda: outcome)
        assert outcome == ["could not be said"]
        assert reader.pools == ({pool.description.pool} if admitted else frozenset())


async def test_cancelled_at_any_moment_both_sides_agree(path: str, pool: Pool, belongings: Callable[[], Any]) -> None:
    heard = Heard()

    async def cancelled_after(ticks: int) -> bool:
        """Whether an attach that is cancelled after so many turns of the loop was admitted."""
        told, refused = len(heard.admitted), broker.refused
        with Reader() as reader:
            task = asyncio.create_task(attach(path, ORIGIN, pool.description.pool, reader, DEADLINE_S))
            for _ in range(ticks):
                await asyncio.sleep(0 if ticks % 3 else 0.0005)
            task.cancel()
            await asyncio.wait([task])
            await eventually(lambda: len(heard.admitted) + broker.refused > told + refused)
            await eventually(lambda: bool(reader.pools) == (len(heard.admitted) > told))
            return bool(reader.pools)

    async with heard.broker(path, pool) as broker:
        before = belongings()
        assert {await cancelled_after(ticks) for ticks in range(1, 60)} == {True, False}
        assert pool.statistics().consumers == len(heard.admitted)
        for _, column in heard.admitted:
            pool.strike(column)
        # What the broker keeps of a consumer is its pidfd, to learn of its death. A cancelled attach that has reached
        # its thread is undone there, when that has mapped the pool.
        await eventually(lambda: all("pidfd" in one for one in belongings().gained_since(before)))
