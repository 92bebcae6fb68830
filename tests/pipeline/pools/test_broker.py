"""The broker: who is given a pool's descriptors, what becomes of those who misbehave, and that nothing leaks by it."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import uvloop
from structlog.testing import capture_logs
from tests.pipeline.pools.conversations import (
    DEADLINE_S,
    ORIGIN,
    PROGRAMS,
    SLOTS,
    Heard,
    Raw,
    encode,
    eventually,
)

from tensorferry.codecs.errors import AttachRefused
from tensorferry.codecs.messages import PROTOCOL_VERSION, Origin, Proxy
from tensorferry.codecs.pool.control import AckPage
from tensorferry.codecs.pool.export import Export
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES
from tensorferry.pipeline.pools.broker import Broker, attach
from tensorferry.pipeline.pools.fd_conversation import (
    Admitted,
    Attach,
    Attached,
    Exported,
    Line,
    Refused,
    check_process,
)


async def start(*command: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-W", "error", *command, stdin=pipe, stdout=pipe)


async def told(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        return (await process.stdout.readline()).decode().strip()


@asynccontextmanager
async def consumer(path: str, pool: Pool) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A consumer process and the first line it prints, its column."""
    process = await start(str(PROGRAMS / "consumer.py"), path, str(pool.description.pool))
    try:
        yield process, await told(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def send(pool: Pool, data: bytes, column: int) -> bytes:
    """A proxy of these bytes, dispatched to a column, as a line for the consumer."""
    with pool.lease(len(data)) as lease:
        lease.data[:] = bytearray(data)
        lease.dispatch([column])
        grant = lease.grant
    proxy = Proxy(pool.description.pool, grant.slot, grant.generation, grant.offset, CODES["uint8"], (len(data),))
    return encode(proxy).hex().encode() + b"\n"


@pytest.mark.processes
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_l12_a_consumer_reads_and_gives_back_and_its_death_gives_back_the_rest(
    path: str, pool: Pool, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def scenario() -> None:
        heard = Heard()
        async with heard.broker(path, pool), consumer(path, pool) as (process, line):
            assert process.stdin is not None
            [(origin, column)] = heard.admitted
            assert (line, origin.stage, origin.rank) == (str(column), "encoder", 0)
            process.stdin.write(send(pool, b"seen by another process", column))
            assert bytes.fromhex(await told(process)) == b"seen by another process"
            await eventually(lambda: pool.reclaim() == 1)
            process.stdin.write(b"hold\n")
            assert await told(process) == "holding"
            send(pool, b"never read", column)
            assert pool.reclaim() == 0
            process.kill()
            await eventually(lambda: heard.died)
            assert heard.died == [(origin, column)]
            assert pool.reclaim() == 1
            assert pool.statistics().consumers == 0

    run(scenario())


def kill_and_wait(pid: int) -> None:
    """Until it is dead, without a turn of the event loop."""
    pidfd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], DEADLINE_S)[0]
    finally:
        os.close(pidfd)


@pytest.mark.processes
async def test_a_death_that_the_pool_finds_first_is_told_all_the_same(path: str, pool: Pool) -> None:
    heard = Heard()
    async with heard.broker(path, pool), consumer(path, pool) as (process, _):
        kill_and_wait(process.pid)
        assert pool.strike_dead() == [heard.admitted[0][1]]
        assert not heard.died
        await eventually(lambda: heard.died == heard.admitted)


async def test_the_socket_file_is_for_this_user_alone_and_goes_with_the_broker(path: str, pool: Pool) -> None:
    os.mkfifo(path)  # left by a former life
    previous = os.umask(0)
    try:
        async with Broker(path, pool, lambda origin, column: None):
            mode = os.stat(path).st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
    finally:
        os.umask(previous)
    assert os.listdir(os.path.dirname(path)) == []


@pytest.mark.processes
async def test_a_socket_file_that_was_removed_is_made_again_and_a_conversation_goes_on(path: str, pool: Pool) -> None:
    admitted: list[int] = []
    async with Broker(path, pool, lambda _, column: admitted.append(column)) as broker:
        async with consumer(path, pool) as (_, first):
            os.unlink(path)
            assert broker.mend()
            assert not broker.mend()
            async with consumer(path, pool) as (_, second):
                assert admitted == [int(first), int(second)]
                assert pool.statistics().consumers == 2
    assert os.listdir(os.path.dirname(path)) == []


async def test_admission_is_told_before_the_consumer_can_know(path: str, pool: Pool) -> None:
    heard = Heard()
    async with heard.broker(path, pool):
        with Reader() as reader:
            column = await attach(path, ORIGIN, pool.description.pool, reader, DEADLINE_S)
            assert heard.admitted == [(ORIGIN, column)]
            assert reader.pools == {pool.description.pool}


async def test_many_consumers_at_once(path: str, pool: Pool) -> None:
    heard = Heard()
    readers = [Reader() for _ in range(40)]
    async with heard.broker(path, pool, conversations=8):
        attaching = (attach(path, ORIGIN, pool.description.pool, reader, DEADLINE_S) for reader in readers)
        assert sorted(await asyncio.gather(*attaching)) == sorted(column for _, column in heard.admitted)
        assert len(set(heard.admitted)) == 40
    for reader in readers:
        reader.close()


async def test_a_bug_in_a_callback_is_not_lost(path: str, pool: Pool) -> None:
    def wrong(origin: Origin, column: int) -> None:
        raise ZeroDivisionError

    def of_a_kind(group: BaseException) -> bool:
        return isinstance(group, ExceptionGroup) and group.split(ZeroDivisionError)[1] is None

    with pytest.RaisesGroup(ExceptionGroup, check=of_a_kind), Reader() as reader:
        async with asyncio.timeout(DEADLINE_S), Broker(path, pool, wrong):
            await attach(path, ORIGIN, pool.description.pool, reader, DEADLINE_S)
            await asyncio.Event().wait()


# --- consumers that misbehave ----------------------------------------------------------------------------------


@dataclass
class Misbehaving:
    """A consumer with what it needs to attach, to spoil as it likes."""

    line: Raw
    pool: Pool
    undo: ExitStack

    def greet(self) -> None:
        self.line.say(Attach(PROTOCOL_VERSION, ORIGIN, self.pool.description.pool))

    async def exported(self) -> tuple[Export, list[int]]:
        self.greet()
        message, fds = await self.line.hear()
        assert isinstance(message, Exported)
        return message.export, fds

    async def attached(self) -> tuple[Attached, list[int]]:
        """What a good consumer would say now, to be spoilt."""
        reader = self.undo.enter_context(Reader())
        attachment, fds = reader.attach(*await self.exported())
        for fd in fds:
            self.undo.callback(os.close, fd)
        return Attached(attachment), fds

    def own(self, fd: int) -> int:
        self.undo.callback(os.close, fd)
        return fd


def pidfd_of_the_dead() -> int:
    with subprocess.Popen(["true"]) as dead:
        return os.pidfd_open(dead.pid)


Behaviour = Callable[[Misbehaving], Awaitable[None]]
BEHAVIOURS: dict[str, tuple[Behaviour, str]] = {}


def behaviour(reason: str) -> Callable[[Behaviour], Behaviour]:
    """One way to misbehave, and what of the reason the broker gives."""

    def register(function: Behaviour) -> Behaviour:
        BEHAVIOURS[function.__name__] = function, reason
        return function

    return register


@behaviour("hung up")
async def says_nothing(it: Misbehaving) -> None:
    it.line.close()


@behaviour("hung up")
async def vanishes_after_attach(it: Misbehaving) -> None:
    it.greet()
    it.line.close()


@behaviour("hung up")
async def vanishes_after_exported(it: Misbehaving) -> None:
    _, fds = await it.exported()
    for fd in fds:
        os.close(fd)
    it.line.close()


@behaviour("hung up")
async def vanishes_after_attached(it: Misbehaving) -> None:
    it.line.say(*await it.attached())
    it.line.close()


@behaviour("not a message of ours")
async def says_garbage(it: Misbehaving) -> None:
    it.line.say(os.urandom(200))


@behaviour("not a message of ours")
async def says_a_pickle_with_descriptors(it: Misbehaving) -> None:
    it.line.say(b"cos\nsystem\n(S'true'\ntR.", [it.own(os.dup(0))])


@behaviour("too large")
async def says_too_much(it: Misbehaving) -> None:
    it.line.say(b"\x00" * 20_000)


@behaviour("Attach with 0 was due")
async def skips_attach(it: Misbehaving) -> None:
    it.line.say(Admitted(0))


@behaviour("Attach with 3 descriptors came")
async def brings_descriptors_with_attach(it: Misbehaving) -> None:
    it.line.say(Attach(PROTOCOL_VERSION, ORIGIN, it.pool.description.pool), [0, 0, 0])


@behaviour("descriptors that cannot be taken")
async def brings_too_many_descriptors(it: Misbehaving) -> None:
    it.line.say(Attach(PROTOCOL_VERSION, ORIGIN, it.pool.description.pool), [0] * 200)


@behaviour("is not here")
async def wants_another_pool(it: Misbehaving) -> None:
    it.line.say(Attach(PROTOCOL_VERSION, ORIGIN, 4711))


@behaviour("protocol version 99")
async def speaks_another_version(it: Misbehaving) -> None:
    it.line.say(Attach(99, ORIGIN, it.pool.description.pool))


@behaviour(f"protocol version {PROTOCOL_VERSION + 1}; {PROTOCOL_VERSION} is spoken here")
async def speaks_the_next_version(it: Misbehaving) -> None:
    it.line.say(Attach(PROTOCOL_VERSION + 1, ORIGIN, it.pool.description.pool))


@behaviour("no more of it")
async def refuses(it: Misbehaving) -> None:
    _, fds = await it.exported()
    for fd in fds:
        os.close(fd)
    it.line.say(Refused("no more of it"))


@behaviour("Attached with 2 or 3 was due")
async def attaches_without_descriptors(it: Misbehaving) -> None:
    message, _ = await it.attached()
    it.line.say(message)


@behaviour("Attached with 5 descriptors came")
async def attaches_with_more_descriptors(it: Misbehaving) -> None:
    message, fds = await it.attached()
    it.line.say(message, [*fds, 0, 0, 0])


@behaviour("for pool 4711")
async def attaches_to_another_pool(it: Misbehaving) -> None:
    message, fds = await it.attached()
    it.line.say(Attached(msgspec.structs.replace(message.attachment, pool=4711)), fds)


@behaviour("with header")
async def sends_the_page_of_another_life(it: Misbehaving) -> None:
    message, fds = await it.attached()
    it.line.say(Attached(msgspec.structs.replace(message.attachment, consumer=4711)), fds)


@behaviour("with seals 0x0")
async def sends_a_page_without_seals(it: Misbehaving) -> None:
    message, fds = await it.attached()
    page = it.own(os.memfd_create("unsealed", os.MFD_ALLOW_SEALING))
    os.truncate(page, 64 + 4 * SLOTS)
    it.line.say(message, [page, fds[1]])


@behaviour("were announced")
async def sends_a_page_of_another_size(it: Misbehaving) -> None:
    message, fds = await it.attached()
    page = AckPage.create(SLOTS - 1, message.attachment.pool, message.attachment.consumer)
    it.undo.callback(page.close)
    it.line.say(message, [page.segment.fd, fds[1]])


@behaviour("Permission denied")
async def sends_a_page_that_cannot_be_read(it: Misbehaving) -> None:
    message, fds = await it.attached()
    it.line.say(message, [it.own(os.open(f"/proc/self/fd/{fds[0]}", os.O_WRONLY)), fds[1]])


@behaviour("not a memfd")
async def sends_a_pipe_for_a_page(it: Misbehaving) -> None:
    message, fds = await it.attached()
    reading, writing = os.pipe()
    it.own(reading)
    it.own(writing)
    it.line.say(message, [reading, fds[1]])


@behaviour("sent the pidfd of process")
async def sends_the_pidfd_of_another(it: Misbehaving) -> None:
    message, fds = await it.attached()
    it.line.say(message, [fds[0], it.own(os.pidfd_open(os.getppid()))])


@behaviour("is not the pidfd of a process")
async def sends_no_pidfd(it: Misbehaving) -> None:
    message, fds = await it.attached()
    it.line.say(message, [fds[0], fds[0]])


@behaviour("has ended")
async def sends_the_pidfd_of_the_dead(it: Misbehaving) -> None:
    message, fds = await it.attached()
    it.line.say(message, [fds[0], it.own(pidfd_of_the_dead())])


@behaviour("said nothing for so long")
async def falls_asleep(it: Misbehaving) -> None:
    it.greet()


@pytest.mark.processes
@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_a_misbehaving_consumer_harms_nobody(
    name: str, path: str, pool: Pool, belongings: Callable[[], Any], left: Callable[[Any], list[str]]
) -> None:
    behave, reason = BEHAVIOURS[name]
    heard = Heard()
    async with heard.broker(path, pool, deadline_s=0.3 if behave is falls_asleep else DEADLINE_S) as broker:
        before = belongings()
        with capture_logs() as logs, ExitStack() as undo:
            misbehaving = Misbehaving(undo.enter_context(closing(Raw.to(path))), pool, undo)
            await behave(misbehaving)
            await eventually(lambda: broker.refused)
            assert reason in next(log["reason"] for log in logs if log["event"] == "consumer_refused")
        await eventually(lambda: not belongings().gained_since(before))
        assert broker.refused == 1
        assert heard.admitted == []
        assert pool.statistics().consumers == 0
        with Reader() as reader:
            assert await attach(path, ORIGIN, pool.description.pool, reader, DEADLINE_S) >= 0


async def test_the_refused_are_told_why(path: str, pool: Pool) -> None:
    async with Broker(path, pool, lambda origin, column: None):
        with closing(Raw.to(path)) as line:
            line.say(Attach(99, ORIGIN, pool.description.pool))
            message, _ = await line.hear()
            assert isinstance(message, Refused)
            assert message.reason == f"protocol version 99; {PROTOCOL_VERSION} is spoken here"


@pytest.fixture
def lines() -> Iterator[tuple[Line, Raw]]:
    """Both ends of a conversation, one of them raw."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(Line(ours, "a peer")) as line, closing(Raw(theirs)) as raw:
        yield line, raw


async def test_the_last_word_of_one_who_hung_up_is_heard_when_speaking(lines: tuple[Line, Raw]) -> None:
    line, raw = lines
    raw.say(Refused("because"))
    raw.close()
    with pytest.raises(AttachRefused, match=r"^because$"):
        line.say(Admitted(0))


async def test_the_last_word_of_one_who_hung_up_without_listening_is_heard(lines: tuple[Line, Raw]) -> None:
    line, raw = lines
    line.say(Admitted(0))
    raw.say(Refused("because"))
    raw.close()  # with something unread, which resets the connection
    with pytest.raises(AttachRefused, match=r"^because$"):
        await line.hear(Admitted)


async def test_after_shutting_nothing_more_can_be_said(lines: tuple[Line, Raw]) -> None:
    line, raw = lines
    assert not line.shut_and_look(Admitted)
    with pytest.raises(BrokenPipeError):
        raw.say(Admitted(0))


async def test_what_was_said_before_shutting_counts(lines: tuple[Line, Raw]) -> None:
    line, raw = lines
    raw.say(Admitted(0))
    assert line.shut_and_look(Admitted)


async def test_children_inherit_no_descriptor_that_was_passed(lines: tuple[Line, Raw]) -> None:
    line, raw = lines
    raw.say(Admitted(0), [0])
    with await line.hear(Admitted, fds=(1,)) as letter:
        assert not os.get_inheritable(letter.fds[0])


async def test_another_user_is_refused(path: str, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    async with Broker(path, pool, lambda origin, column: None) as broker:
        with closing(Raw.to(path)) as line:
            message, _ = await line.hear()
            assert isinstance(message, Refused)
            assert message.reason.startswith(f"a process of user {os.getuid()}; ")
        with Reader() as reader, pytest.raises(AttachRefused, match="only those of user"):
            await attach(path, ORIGIN, pool.description.pool, reader, DEADLINE_S)
        await eventually(lambda: broker.refused == 2)


def test_a_pidfd_of_a_thread_is_no_proof_of_death() -> None:
    try:
        pidfd = os.pidfd_open(os.getpid(), os.O_EXCL)
    except OSError as problem:
        pytest.skip(f"this kernel makes no pidfds of threads: {problem.strerror}")
    try:
        with pytest.raises(AttachRefused, match="not the pidfd of a process"):
            check_process(pidfd, os.getpid())
    finally:
        os.close(pidfd)


IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@pytest.fixture
def can_unshare(may_start_processes: None) -> None:
    if subprocess.run([*IN_A_NAMESPACE, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this machine lets us make no PID namespace")


@pytest.mark.processes
@pytest.mark.usefixtures("can_unshare")
async def test_b16_a_consumer_in_a_pid_namespace_that_cannot_be_seen_is_refused(path: str) -> None:
    pipe = asyncio.subprocess.PIPE
    script = str(PROGRAMS / "broker.py")
    process = await asyncio.create_subprocess_exec(*IN_A_NAMESPACE, sys.executable, script, path, stdout=pipe)
    try:
        pool = int(await told(process))
        with Reader() as reader, pytest.raises(AttachRefused, match="PID namespace cannot be seen from here"):
            await attach(path, ORIGIN, pool, reader, DEADLINE_S)
        assert "PID namespace" in await told(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_those_who_stall_block_nobody_else(path: str, pool: Pool) -> None:
    async with Broker(path, pool, lambda origin, column: None, deadline_s=DEADLINE_S, conversations=4):
        with ExitStack() as stalled, Reader() as reader:
            for _ in range(3):
                stalled.enter_context(closing(Raw.to(path))).say(
                    Attach(PROTOCOL_VERSION, ORIGIN, pool.description.pool)
                )
            await attach(path, ORIGIN, pool.description.pool, reader, DEADLINE_S / 2)


async def test_when_all_stall_their_deadline_makes_room(path: str, pool: Pool) -> None:
    async with Broker(path, pool, lambda origin, column: None, deadline_s=0.2, conversations=4) as broker:
        with ExitStack() as stalled, Reader() as reader:
            for _ in range(8):
                stalled.enter_context(closing(Raw.to(path)))
            await attach(path, ORIGIN, pool.description.pool, reader, DEADLINE_S)
            await eventually(lambda: broker.refused >= 8)


@asynccontextmanager
async def silent(path: str, times: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has so many conversations, and says nothing in any."""
    process = await start(str(PROGRAMS / "silent.py"), path, str(times))
    try:
        assert await told(process) == "silent"
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@pytest.mark.processes
async def test_a_process_that_holds_all_places_silently_keeps_nobody_out(path: str, pool: Pool) -> None:
    """Nor with the many that wait for a place in front of the others; its conversations never reach their deadline."""
    heard = Heard()
    async with heard.broker(path, pool, deadline_s=3600.0) as broker, silent(path, 500) as process:
        for _ in range(3):
            async with consumer(path, pool) as (good, line):
                assert line == str(heard.admitted[-1][1])
                assert good.returncode is None
        assert process.returncode is None
        assert broker.refused <= 500 - 64 + 3  # no more of its conversations are ended than others need


@pytest.mark.processes
async def test_of_several_processes_the_one_with_the_most_gives_way_and_the_only_ones_never(
    path: str, pool: Pool
) -> None:
    heard = Heard()
    async with heard.broker(path, pool, deadline_s=3600.0, conversations=6) as broker, AsyncExitStack() as undo:
        lone = [await undo.enter_async_context(silent(path, 1)) for _ in range(2)]
        await undo.enter_async_context(silent(path, 4))
        with capture_logs() as logs:
            async with consumer(path, pool):
                pass
        [refused] = [log["reason"] for log in logs if log["event"] == "consumer_refused"]
        assert not any(f"process {process.pid} " in refused for process in lone)
        assert broker.refused == 1


async def test_it_lives_on_when_descriptors_run_out(path: str, pool: Pool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Broker(path, pool, lambda origin, column: None):
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as client, Reader() as reader:
            with capture_logs() as logs:
                free = os.dup(0)
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
                try:
                    client.connect(path)
                    await eventually(lambda: any(log["event"] == "accept_failed" for log in logs))
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await attach(path, ORIGIN, pool.description.pool, reader, DEADLINE_S)


async def test_closing_ends_conversations_under_way(path: str, pool: Pool) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as client:
        async with Broker(path, pool, lambda origin, column: None):
            client.connect(path)
            line = Raw(client)
            line.say(Attach(PROTOCOL_VERSION, ORIGIN, pool.description.pool))
            message, fds = await line.hear()
            assert isinstance(message, Exported)
            for fd in fds:
                os.close(fd)
        assert await line.hear() == (None, [])
