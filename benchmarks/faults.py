"""What can be done to one process of a deployment that runs: each kind of fault has a name, and undoes itself.

Nothing here needs a privilege: limits are the process's own (prlimit, the soft ones), connections are cut through
descriptors that the kernel lends to whoever may trace the process, as a parent may (pidfd_getfd).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import resource
import secrets
import signal
import socket
import stat
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import PeerBusy
from tensorferry.codecs.frames import Limits
from tensorferry.codecs.pool.pool import new_nonce
from tensorferry.pipeline.channels.channels import Dealer, Outbox, open_context
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.runtime_dir import SOCKETS, Runtime
from tensorferry.pipeline.process.supervisor import Command, Supervisor, start_command

SHORTEST_S, LONGEST_S = 0.2, 5.0  #: how long a fault lasts that does
FLOOD = 64  #: messages in a row
LIMITED_S = 2.0  #: from the start of an interpreter until it has limited itself, at most
#: Less than any pool or page of acknowledgements has, more than a lock file says.
NO_MEMORY_NBYTES = 4096
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_PIDFD_GETFD = 438  #: Linux 5.6, the same number everywhere


class Fault(NamedTuple):
    """What is done to one process."""

    kind: str
    stage: str
    rank: int
    for_s: float  #: how long it lasts, where it does


def plan(seed: int, ranks: Mapping[str, int], counts: Mapping[str, int], longest_s: float = LONGEST_S) -> list[Fault]:
    """Who is hurt how, in order: of every kind so many, all stages in turn so that each has its part, shuffled."""
    rng = random.Random(seed)
    stages = list(ranks)
    found = []
    for kind, count in counts.items():
        for number in range(count):
            stage = stages[number % len(stages)]
            found.append(Fault(kind, stage, rng.randrange(ranks[stage]), rng.uniform(SHORTEST_S, longest_s)))
    rng.shuffle(found)
    return found


class Births:
    """How stages are started: with less than they need, while they are starved."""

    def __init__(self, file: Path) -> None:
        self._start: Command = start_command(file, ())
        self._most_nbytes: dict[tuple[str, int], int] = {}

    def command(self, stage: str, rank: int) -> Sequence[str]:
        most_nbytes = self._most_nbytes.get((stage, rank))
        command = self._start(stage, rank)
        if most_nbytes is None:
            return command
        return [sys.executable, "-P", "-c", _LIMITED, str(most_nbytes), *command]

    @contextmanager
    def limited(self, stage: str, rank: int, nbytes: int) -> Iterator[None]:
        """No file of a life that begins meanwhile can be larger, memory to share included."""
        self._most_nbytes[stage, rank] = nbytes
        try:
            yield
        finally:
            del self._most_nbytes[stage, rank]


#: Becomes the command that follows, under a limit.
_LIMITED = (
    "import os, resource, sys; "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_FSIZE)[1])); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


class Faults:
    """Does them to a running deployment. One process is starved of one thing at a time."""

    def __init__(self, deployment: Deployment, supervisor: Supervisor, births: Births) -> None:
        self._deployment, self._supervisor, self._births = deployment, supervisor, births
        self._runtime = Runtime.of(deployment)
        self._limits = Limits(inline_nbytes=deployment.limits.request_mb << 20)
        self._starved: set[tuple[str, int]] = set()

    async def inflict(self, fault: Fault) -> bool:
        """Until it is over; False: there was nobody to do it to, such as one that is just being born."""
        who = (fault.stage, fault.rank)
        if not self._supervisor.is_ready(*who) or (fault.kind in STARVE and who in self._starved):
            return False
        if fault.kind in STARVE:
            self._starved.add(who)
        try:
            await KINDS[fault.kind](self, fault)
        except (ProcessLookupError, psutil.NoSuchProcess):  # another fault was faster
            return False
        finally:
            if fault.kind in STARVE:
                self._starved.discard(who)
        return True

    # --- the kinds

    async def kill(self, fault: Fault) -> None:
        os.kill(self._pid(fault), signal.SIGKILL)

    async def stop(self, fault: Fault) -> None:
        """It does nothing for a while."""
        with self._held(fault) as pidfd:
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.for_s)
            finally:
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    async def memory(self, fault: Fault) -> None:
        """It gets no memory to share: neither a pool, should it be born again, nor a page to acknowledge another's in.

        So that it needs some, it is killed if it has a pool, and else an encoder whose pool it reads.
        """
        with self._births.limited(fault.stage, fault.rank, NO_MEMORY_NBYTES):
            with self._limited(fault, resource.RLIMIT_FSIZE, NO_MEMORY_NBYTES):
                who = fault if fault.stage != "scheduler" else self._another(fault, "encoder")
                os.kill(self._pid(who), signal.SIGKILL)
                await asyncio.sleep(fault.for_s)
        await self._relieve(fault)

    async def disk(self, fault: Fault) -> None:
        """What it writes to a file fails: its log, where that is one, its record, and in a next life its lock file."""
        with self._births.limited(fault.stage, fault.rank, 0):
            with self._limited(fault, resource.RLIMIT_FSIZE, 0):
                await asyncio.sleep(fault.for_s / 2)
                os.kill(self._pid(fault), signal.SIGKILL)
                await asyncio.sleep(fault.for_s / 2)
        await self._relieve(fault)

    async def descriptors(self, fault: Fault) -> None:
        """It can open nothing more, and somebody comes anew who wants to be connected."""
        with self._limited(fault, resource.RLIMIT_NOFILE, 1):  # what is open stays so
            others = [stage for stage in ("tokenizer", "encoder", "scheduler") if stage != fault.stage]
            other = self._another(fault, others[fault.rank % len(others)])
            os.kill(self._pid(other), signal.SIGKILL)
            await asyncio.sleep(fault.for_s)

    async def cut(self, fault: Fault) -> None:
        """All of its connections break, and what is on its way in them is lost."""
        sever(self._pid(fault), str(self._runtime.directory))

    async def unlinked(self, fault: Fault) -> None:
        """Its socket files are removed, as whoever cleans /tmp does, and somebody comes anew who needs them."""
        for suffix in SOCKETS:
            (self._runtime.directory / f"{fault.stage}-{fault.rank}{suffix}").unlink(missing_ok=True)
        other = self._another(fault, "encoder" if fault.stage != "encoder" else "tokenizer")
        os.kill(self._pid(other), signal.SIGKILL)

    async def flood(self, fault: Fault) -> None:
        """It is sent messages that mean nothing to it, as fast as it takes them; a tokenizer also more requests than it
        may take, by a client that reads no answer; and half of those whom it would hand its pool at once are silent."""
        until = asyncio.get_running_loop().time() + fault.for_s
        with open_context() as context, ExitStack() as undo:
            ways: list[Outbox | Dealer] = [
                Outbox(context, self._runtime.inbox(fault.stage, fault.rank), str(fault.stage), high_water=FLOOD)
            ]
            if fault.stage == "tokenizer":
                door = self._runtime.front_door(fault.rank)
                ways.append(Dealer(context, door, "flood", self._limits, lambda _: None, high_water=FLOOD))
            for way in ways:
                undo.callback(way.close)
            if fault.stage != "scheduler":  # who would have its pool, and then says nothing
                for _ in range(FLOOD // 2):
                    silent = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    with suppress(OSError):
                        silent.connect(self._runtime.broker(fault.stage, fault.rank))
            while asyncio.get_running_loop().time() < until:
                with suppress(PeerBusy):
                    for _ in range(FLOOD):
                        ways[0].send_nowait(_useless(fault))
                with suppress(PeerBusy):
                    for way in ways[1:]:
                        way.send_nowait(wire.Submit(secrets.token_bytes(16), 0, (wire.TextPart("flood"),), 1, 1000))
                await asyncio.sleep(0.001)

    # --- with

    def _pid(self, fault: Fault) -> int:
        return self._supervisor.processes[fault.stage, fault.rank]

    def _another(self, fault: Fault, stage: str) -> Fault:
        """A rank of a stage that is there, and of these the one that the fault's numbers say."""
        ranks = [rank for name, rank in self._supervisor.processes if name == stage]
        return fault._replace(stage=stage, rank=ranks[fault.rank % len(ranks)])

    @contextmanager
    def _held(self, fault: Fault) -> Iterator[int]:
        """A pidfd: what is done through it is done to this process, or, once it has died, to nobody."""
        pidfd = os.pidfd_open(self._pid(fault))
        try:
            yield pidfd
        finally:
            os.close(pidfd)

    async def _relieve(self, fault: Fault) -> None:
        """Give a life that began under a limit of the size of files what others have, once it has set that limit."""
        until = asyncio.get_running_loop().time() + LIMITED_S
        while asyncio.get_running_loop().time() < until:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                process = psutil.Process(self._pid(fault))
                hard = process.rlimit(resource.RLIMIT_FSIZE)[1]
                process.rlimit(resource.RLIMIT_FSIZE, (hard, hard))
            await asyncio.sleep(LIMITED_S / 10)

    @contextmanager
    def _limited(self, fault: Fault, limit: int, most: int) -> Iterator[None]:
        process = psutil.Process(self._pid(fault))
        soft, hard = process.rlimit(limit)
        process.rlimit(limit, (most, hard))
        try:
            yield
        finally:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.rlimit(limit, (soft, hard))


STARVE = frozenset({"memory", "descriptors", "disk"})
KINDS: dict[str, Callable[[Faults, Fault], Awaitable[None]]] = {
    "kill": Faults.kill,
    "stop": Faults.stop,
    "memory": Faults.memory,
    "descriptors": Faults.descriptors,
    "disk": Faults.disk,
    "cut": Faults.cut,
    "unlinked": Faults.unlinked,
    "flood": Faults.flood,
}


def _useless(fault: Fault) -> wire.Message:
    """Well-formed, and of no use to anybody: of a process that nobody knows, or for another life."""
    nobody = wire.Origin("encoder", 1000, new_nonce())
    messages: list[wire.Message] = [
        wire.Heartbeat(nobody, 0, ()),
        wire.Hello(wire.PROTOCOL_VERSION, nobody, "ipc:///nowhere"),
        wire.Cancel(secrets.token_bytes(16), 0, new_nonce()),
        wire.Failed(secrets.token_bytes(16), 0, wire.Failure("Flood", "of nothing", nobody), new_nonce()),
        wire.Collected(secrets.token_bytes(16), 0, new_nonce(), nobody),
        wire.Embeddings(secrets.token_bytes(16), 0, new_nonce(), nobody, (), ()),
        wire.Drained(nobody),
    ]
    return secrets.choice(messages)


def sever(pid: int, path: str, made_by: int | None = None) -> int:
    """Break a process's connections through socket files whose paths begin so; how many. What it has not read is lost.

    made_by: of those that others made to it, only these of this process. Raises ProcessLookupError.
    """
    broken = 0
    pidfd = os.pidfd_open(pid)
    try:
        for fd in _descriptors(pid):
            with suppress(OSError), _borrowed(pidfd, fd) as found:  # it may close it just now
                if found is not None and _is_connection(found, path) and made_by in (None, _maker(found)):
                    _drop(found)
                    broken += 1
    finally:
        os.close(pidfd)
    return broken


def _maker(connection: socket.socket) -> int:
    """Who has connected; of one's own connection, who listens. Source: unix(7), SO_PEERCRED."""
    pid: int = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    return pid


def _descriptors(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None


@contextmanager
def _borrowed(pidfd: int, fd: int) -> Iterator[socket.socket | None]:
    """A socket of another process; None: it is something else. Source: pidfd_getfd(2)."""
    copy: int = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with ExitStack() as undo:
        undo.callback(os.close, copy)
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            yield None
            return
        with socket.socket(fileno=copy) as found:
            undo.pop_all()
            yield found


def _drop(connection: socket.socket) -> None:
    """Break it, and take out of it what its owner has not read yet."""
    connection.setblocking(False)
    for _ in range(2):
        with suppress(BlockingIOError):
            while connection.recv(1 << 20):
                pass
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _is_connection(found: socket.socket, path: str) -> bool:
    """Whether this is one end of a connection through a socket file of the deployment; ZeroMQ's, and no broker's."""
    if (found.family, found.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
        return False
    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ends = (found.getsockname(), found.getpeername())
    return not listens and any(isinstance(end, str) and end.startswith(path) for end in ends)
