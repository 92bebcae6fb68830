"""Producers and consumers are killed and stopped at any moment, in real processes; nothing is wrong, lost or left.

A schedule is made from its seed: one or two producers, two or three consumers, and when each of them dies, stops, goes
on, or comes again with a new epoch: at the n-th line it runs of the code under test, or from outside in the midst of
the traffic, one or two at once. How the kernel runs them beside each other is not in the seed. `programs/lives` has the
processes; they use the real pool, publisher, reader and broker. What is checked, and where:

- no wrong byte is ever accepted: every 8-byte word of a tensor is its identity (`_judge` in `lives/consumer.py`);
- of a dead producer, what is ready is read to the end, and what is not is PeerGone (`_handle` there);
- a new life drops its former life's mail, and acknowledges for itself alone (`receive` there; `_quiet`);
- a stopped consumer's leases, and no others, stay until it runs or dies, and nobody writes over them (`_quiet`);
- then everything comes back, and no descriptor, mapping or process is left (`_quiet`, `_over`).

TENSORFERRY_DEATH_SEED=17 runs that one schedule; TENSORFERRY_PROTOCOL=long runs 300 instead of 60.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from tensorferry.codecs.errors import PeerGone
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool.reader import Reader
from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec, TimeoutsSpec
from tensorferry.pipeline.process.heartbeat import forget

PROGRAMS = Path(__file__).parents[2] / "programs"
DEADLINE_S = 20.0
SCHEDULES = 300 if os.environ.get("TENSORFERRY_PROTOCOL") == "long" else 60
PER_TEST = 10
TICKS = 100  #: of a schedule's traffic, four drafts each

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
Roles = tuple[str, ...]


class Broken(AssertionError):
    """A schedule has found something."""


# --- processes ------------------------------------------------------------------------------------------------


class Fate(NamedTuple):
    """What a process does to itself, and what is then done with it."""

    line: int
    signal: signal.Signals
    then: str  #: of a death: "come again" or ""; of a stop: "go on", "die" or "stay"


@dataclass
class Life:
    role: str
    rank: int
    epoch: int
    fate: Fate | None
    control: socket.socket
    pid: int
    pidfd: int
    state: str = "running"  #: or stopped, or dead
    answers: deque[Any] = field(default_factory=deque)

    def __str__(self) -> str:
        return f"{self.role}-{self.rank}"

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def is_stopped(self) -> bool:
        """As the kernel says; False for one that is dead."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def close(self) -> None:
        self.control.close()
        os.close(self.pidfd)


class Zygote:
    """The process that lives are forked from."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(DEADLINE_S)
        with theirs:
            command = [sys.executable, "-W", "error", str(PROGRAMS / "zygote.py"), str(theirs.fileno())]
            alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # a process with threads must not fork
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=alone)

    def fork(self, birth: Sequence[Any], fds: Sequence[int]) -> tuple[int, int]:
        """(pid, pidfd) of a new life."""
        socket.send_fds(self._socket, [encode(birth)], list(fds))
        data, [pidfd], _, _ = socket.recv_fds(self._socket, 64, 1, socket.MSG_CMSG_CLOEXEC)
        return decode(data), pidfd

    def reap(self) -> list[int]:
        """Bury the dead; the pids of those that live."""
        self._socket.send(encode(None))
        living: list[int] = decode(self._socket.recv(1 << 16))
        return living

    def close(self) -> None:
        self._socket.close()
        self._process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def zygote(may_start_processes: None) -> Iterator[Zygote]:
    started = Zygote()
    yield started
    started.close()


# --- a schedule -----------------------------------------------------------------------------------------------


class Schedule:
    """The plan of a seed, carried out."""

    def __init__(
        self, zygote: Zygote, folder: str, seed: int, fault: str = "", on: str = "", deadline_s: float = DEADLINE_S
    ) -> None:
        """fault: one that is planted into every life of the role `on`."""
        self._zygote, self._folder, self._fault, self._on = zygote, folder, fault, on
        self._deadline_s = deadline_s
        self._rng = random.Random(seed)
        self._undo = ExitStack()
        self._ticks = 0
        self._agenda: list[tuple[int, Callable[[], None]]] = []  # when, in ticks
        self._epochs: dict[int, Life] = {}
        self._lives: list[Life] = []  # that are not dead
        self.story: list[str] = []
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        """Raises Broken."""
        with self._undo:
            self._begin()
            self._play()
            self._quiet()
            self._over()

    def _begin(self) -> None:
        rng = self._rng
        sides = {"producer": rng.choice((1, 1, 2)), "consumer": rng.choice((2, 3, 3))}
        self._mailboxes: dict[str, list[tuple[socket.socket, socket.socket]]] = {}
        for role, ranks in sides.items():
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(ranks)]
            for end in (end for pair in pairs for end in pair):
                self._undo.callback(end.close)
            self._mailboxes[role] = pairs
        for role, ranks in sides.items():
            for rank in range(ranks):
                self._bear(role, rank, self._a_fate(0.4))
        for _ in range(rng.randint(1, 3)):
            act = rng.choice((self._kill, self._kill, self._stop, self._stop, self._kill_both))
            self._agenda.append((rng.randrange(TICKS), act))

    def _a_fate(self, likelihood: float) -> Fate | None:
        rng = self._rng
        if rng.random() > likelihood:
            return None
        line = int(10 ** rng.uniform(1.0, 4.0))
        if rng.random() < 0.6:
            return Fate(line, signal.SIGKILL, rng.choice(("come again", "come again", "")))
        return Fate(line, signal.SIGSTOP, rng.choice(("go on", "die", "stay")))

    def _bear(self, role: str, rank: int, fate: Fate | None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        epoch, seed = self._rng.getrandbits(62) + 1, self._rng.getrandbits(32)
        fault = self._fault if role == self._on else ""
        dying = (fate.line, int(fate.signal)) if fate is not None else None
        others = self._mailboxes["consumer" if role == "producer" else "producer"]
        fds = [theirs, self._mailboxes[role][rank][0], *(pair[1] for pair in others)]
        with theirs:
            birth = (role, rank, epoch, seed, self._folder, fault, dying)
            pid, pidfd = self._zygote.fork(birth, [one.fileno() for one in fds])
        life = Life(role, rank, epoch, fate, ours, pid, pidfd)
        self._undo.callback(life.close)
        self._undo.callback(self._kill_at_last, life)
        self._lives.append(life)
        self._epochs[epoch] = life
        self._note(f"{life} is born ({epoch}), {fate}")

    def _kill_at_last(self, life: Life) -> None:
        if life.state != "dead":
            life.signal(signal.SIGKILL)
            select.select([life.pidfd], [], [], DEADLINE_S)
            life.state = "dead"

    def _note(self, what: str) -> None:
        self.story.append(f"{self._ticks:4} {what}")

    def _those(self, state: str, role: str = "") -> list[Life]:
        return [life for life in self._lives if life.state == state and role in ("", life.role)]

    # --- what is done to them

    def _kill(self, role: str = "") -> None:
        victims = self._those("running", role) + self._those("stopped", role)
        if victims:
            self._end(self._rng.choice(victims), comes_again=self._rng.random() < 0.7)

    def _kill_both(self) -> None:
        victims = [self._rng.choice(side) for role in self._mailboxes if (side := self._those("running", role))]
        for life in victims:
            life.signal(signal.SIGKILL)
        for life in victims:
            self._end(life, comes_again=self._rng.random() < 0.7)

    def _stop(self) -> None:
        victims = self._those("running")
        if victims:
            life = self._rng.choice(victims)
            life.signal(signal.SIGSTOP)
            self._until(lambda: life.is_stopped() or self._is_dead(life), f"{life} has stopped")
            self._stopped(life, self._rng.choice(("go on", "die", "stay")))

    def _end(self, life: Life, comes_again: bool) -> None:
        """Kill a life, if it is not dead yet."""
        life.signal(signal.SIGKILL)
        self._until(lambda: self._is_dead(life), f"{life} has died")
        self._hear(life)  # its last words
        life.state = "dead"
        self._lives.remove(life)
        self._note(f"{life} died")
        self.seen[f"{life.role} killed"] += 1
        if comes_again:
            self._bear(life.role, life.rank, self._a_fate(0.2))
            self.seen["came again"] += 1

    def _stopped(self, life: Life, then: str) -> None:
        if life.state != "running" or self._is_dead(life):
            return
        life.state = "stopped"
        self._note(f"{life} stopped, to {then}")
        self.seen[f"{life.role} stopped"] += 1
        when = self._ticks + self._rng.randint(2, TICKS // 2)
        if then == "go on":
            self._agenda.append((when, lambda: self._wake(life)))
        elif then == "die":
            self._agenda.append((when, lambda: self._end_if_it_lives(life)))

    def _end_if_it_lives(self, life: Life) -> None:
        if life.state != "dead":
            self._end(life, comes_again=self._rng.random() < 0.5)

    def _wake(self, life: Life) -> None:
        if life.state == "stopped":
            life.signal(signal.SIGCONT)
            life.state = "running"
            self._note(f"{life} goes on")

    # --- what they say

    def _is_dead(self, life: Life) -> bool:
        return bool(select.select([life.pidfd], [], [], 0)[0])

    def _pump(self, timeout_s: float = 0.01) -> None:
        """Hear what is said, and notice what became of whom."""
        watched = {life.control.fileno(): life for life in self._those("running")}
        for fd in select.select(list(watched), [], [], timeout_s)[0]:
            self._hear(watched[fd])
        for life in self._those("running"):
            if self._is_dead(life):
                self._hear(life)
                fate = life.fate
                if fate is None or fate.signal != signal.SIGKILL:
                    raise Broken(f"{life} died by itself")
                self.seen["died of a line"] += 1
                self._end(life, comes_again=bool(fate.then))
            elif life.fate is not None and life.fate.signal == signal.SIGSTOP and life.is_stopped():
                then, life.fate = life.fate.then, None
                self.seen["stopped at a line"] += 1
                self._stopped(life, then)

    def _hear(self, life: Life) -> None:
        while True:
            try:
                data = life.control.recv(1 << 16, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionResetError):
                return
            if not data:
                return
            match decode(data):
                case ["tick"]:
                    self._ticks += 1
                case ["answer", value]:
                    life.answers.append(value)
                case ["left", before, after]:
                    if before != after:
                        raise Broken(f"{life} began with {before} descriptors and mappings, and left with {after}")
                    life.answers.append("left")
                case ["at", line]:
                    self._note(f"{life} is at {line}")
                case ["gone", epoch]:
                    if not self._is_dead(self._epochs[epoch]):
                        raise Broken(f"{life} says that {self._epochs[epoch]} is gone, which is not dead")
                    self.seen["not ready, and its producer dead"] += 1
                case [("wrong" | "crashed") as kind, problem]:
                    raise Broken(f"{life}: {kind}: {problem}")

    def _until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + self._deadline_s
        while not condition():
            if time.monotonic() > end:
                raise Broken(f"not within {self._deadline_s} s: {what}")
            threading.Event().wait(0.001)

    def _ask(self, life: Life, command: str) -> Any:
        life.control.send(encode([command]))
        end = time.monotonic() + self._deadline_s
        while not life.answers:
            self._pump()
            if life.state == "dead" or time.monotonic() > end:
                raise Broken(f"{life} does not answer {command}")
        return life.answers.popleft()

    # --- the acts of a schedule

    def _play(self) -> None:
        """Traffic, and the agenda in the midst of it."""
        end = time.monotonic() + self._deadline_s
        while self._ticks < TICKS or self._agenda:
            if not self._those("running", "producer"):
                if not self._agenda:
                    return
                self._ticks = max(self._ticks, min(when for when, _ in self._agenda))  # nobody moves time on
            due = [entry for entry in self._agenda if entry[0] <= self._ticks]
            for entry in due:
                self._agenda.remove(entry)
                entry[1]()
            self._pump()
            if time.monotonic() > end:
                raise Broken(f"only {self._ticks} ticks within {self._deadline_s} s")

    def _quiet(self) -> None:
        """No more traffic: all that is left is with consumers that are stopped, and stays with them."""
        self._disarm()
        for life in self._those("stopped", "producer"):
            self._wake(life)
        self._disarm()
        for producer in self._those("running", "producer"):
            self._ask(producer, "pause")
        self._all_idle()
        stopped = {life.epoch for life in self._those("stopped", "consumer")}
        for producer in self._those("running", "producer"):
            self._lent_to(producer, stopped)
            self.seen["KiB scribbled"] += self._ask(producer, "scribble") // 1024
        for life in self._those("stopped", "consumer"):
            if self._rng.random() < 0.5:
                self._wake(life)
            else:
                self._end(life, comes_again=False)
        self._disarm()
        self._all_idle()
        for producer in self._those("running", "producer"):
            self._lent_to(producer, set())
        for consumer in self._those("running", "consumer"):
            pools, mappings = self._ask(consumer, "forget")
            if pools > len(self._those("running", "producer")) or mappings != 3 * pools:
                raise Broken(f"{consumer} has {mappings} mappings, and {pools} pools of living producers")

    def _disarm(self) -> None:
        """Whoever runs does nothing to itself from now on."""
        end = time.monotonic() + self._deadline_s
        while armed := [life for life in self._those("running") if life.fate is not None]:
            life = armed[0]
            with suppress(BrokenPipeError):  # it has died at this moment
                life.control.send(encode(["disarm"]))
            while life.state != "dead" and not life.answers:
                self._pump()
                self._wake(life)  # if it has stopped at the last moment; the command waits for it
                if time.monotonic() > end:
                    raise Broken(f"{life} does not answer")
            if life.answers:
                life.answers.popleft()
                life.fate = None

    def _all_idle(self) -> None:
        """Consumers have taken all that was sent to them, and judged it."""
        for consumer in self._those("running", "consumer"):
            self._until(lambda consumer=consumer: self._ask(consumer, "idle"), f"{consumer} is idle")

    def _lent_to(self, producer: Life, epochs: set[int]) -> None:
        """Only leases that wait for these are out, in the end."""
        lent: tuple[int, dict[int, int]] = 0, {}

        def is_so() -> bool:
            nonlocal lent
            lent = self._ask(producer, "lent")
            return lent[1].keys() <= epochs and (bool(lent[1]) or not lent[0])

        try:
            self._until(is_so, "")
        except Broken:
            raise Broken(f"{producer} has lent {lent}; it should wait for none but {epochs}") from None
        self.seen["kept for the stopped"] += sum(lent[1].values())

    def _over(self) -> None:
        for consumer in self._those("running", "consumer"):
            self.seen.update(self._ask(consumer, "outcomes"))
        for life in self._those("running"):
            if self._ask(life, "leave") is not None or not self._answered(life, "left"):
                raise Broken(f"{life} does not leave")
            life.control.shutdown(socket.SHUT_WR)
            life.fate = Fate(0, signal.SIGKILL, "")  # it may end now
            self._until(lambda life=life: self._is_dead(life), f"{life} has ended")
            life.state = "dead"
        if left := self._zygote.reap():
            raise Broken(f"processes {left} are left")
        if left := os.listdir(self._folder):
            self.seen["sockets of the killed"] += len(left)

    def _answered(self, life: Life, wanted: str) -> bool:
        self._until(lambda: self._pump() or life.answers, f"{life} has {wanted}")
        return bool(life.answers.popleft() == wanted)


def play(zygote: Zygote, seed: int, fault: str = "", on: str = "", deadline_s: float = DEADLINE_S) -> Counter[str]:
    """Raises Broken with all there is to know."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        schedule = Schedule(zygote, folder, seed, fault, on, deadline_s)
        try:
            schedule.run()
        except Broken as found:
            story = "\n".join(schedule.story)
            raise Broken(f"{found}\n{story}\nreproduce: TENSORFERRY_DEATH_SEED={seed}") from None
        finally:
            zygote.reap()
    return schedule.seen


def seeds() -> list[range]:
    one = os.environ.get("TENSORFERRY_DEATH_SEED")
    if one is not None:
        return [range(int(one), int(one) + 1)]
    return [range(first, first + PER_TEST) for first in range(0, SCHEDULES, PER_TEST)]


@pytest.mark.processes
@pytest.mark.parametrize("seeds", seeds(), ids=lambda seeds: f"seeds {seeds[0]} to {seeds[-1]}")
def test_l12_deaths_and_stops_at_any_time_lose_nothing_and_leave_nothing(
    zygote: Zygote, seeds: range, record_property: Callable[[str, object], None]
) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += play(zygote, seed)
    events = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
    record_property("schedules", f"deaths, seeds {seeds[0]} to {seeds[-1]}: {events}")
    print(f"seeds {seeds[0]} to {seeds[-1]}: {events}")
    if len(seeds) == PER_TEST:
        killed = seen["producer killed"], seen["consumer killed"]
        stopped = seen["producer stopped"] + seen["consumer stopped"]
        assert min(*killed, stopped, seen["read"] // 50, seen["came again"]) > 1, f"hardly anything happened: {seen}"


CORRUPT = "where all should be|poisoned, and read|StaleLease"

#: (who has it, what it does, how it shows)
FAULTS = [
    ("consumer", "acknowledges before it has read", CORRUPT),
    ("consumer", "acknowledges before its stream has read", CORRUPT),
    ("consumer", "reads what is not ready", CORRUPT),
    ("consumer", "reads its former life's mail", f"{CORRUPT}|which is not dead|not attached"),
    ("consumer", "gives up what a dead producer had finished", "given up although it is ready"),
    ("consumer", "waits for the dead", "consumer-[0-2] is idle"),
    ("consumer", "forgets the lease of a block that failed", "has lent|mappings"),
    ("consumer", "keeps a descriptor", "began with"),
    ("consumer", "keeps what it has detached", "mappings"),
    ("producer", "publishes before it has written", CORRUPT),
    ("producer", "lends before the writer is done", CORRUPT),
    ("producer", "ends a lease at its first acknowledgement", CORRUPT),
    ("producer", "takes back what it has sent", CORRUPT),
    ("producer", "strikes whoever is slow", CORRUPT),
    ("producer", "never strikes", "has lent|mappings"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("role", "fault", "shows"), FAULTS, ids=[fault for _, fault, _ in FAULTS])
def test_the_schedules_find_it(zygote: Zygote, role: str, fault: str, shows: str) -> None:
    for seed in range(40):
        try:
            play(zygote, seed, fault, role, deadline_s=1.0)
        except Broken as found:
            print(f"{fault}: found by seed {seed}: {str(found).partition(chr(10))[0]}")
            if re.search(shows, str(found)):
                return
    pytest.fail("not found")


async def test_c3_a_dead_producer_s_pool_is_unmapped_once_its_requests_are_over(
    start_peer: Callable[[], Any], belongings: Callable[[], Any], left: Callable[..., list[str]]
) -> None:
    """A stage's own upkeep: producers that come and go leave nothing in their consumers."""
    timeouts, limits = TimeoutsSpec(heartbeat_s=0.01), LimitsSpec(request_timeout_s=0.3)
    with Reader() as reader:
        deployment = Deployment(name="forgetting", timeouts=timeouts, limits=limits)
        stage: Any = SimpleNamespace(reader=reader, deployment=deployment)
        forgetting = asyncio.create_task(forget(stage))
        await asyncio.sleep(0)
        before = belongings()
        producers = [start_peer(), start_peer()]
        for producer in producers:
            producer.ask("create", 1 << 16, 8)
            column, _ = producer.offer(reader)
            proxy = decode(producer.ask("publish", column, bytes(8)), type=Proxy)
        killed_at = time.monotonic()
        producers[1].kill()
        with reader.open(proxy) as view:
            assert view.data.tolist() == [0] * 8, "what was ready can be read for a while"
            del view
        async with asyncio.timeout(DEADLINE_S):
            while len(reader.pools) > 1:  # noqa: ASYNC110 - the upkeep sets no event
                await asyncio.sleep(0.01)
        assert time.monotonic() - killed_at > limits.request_timeout_s
        with pytest.raises(PeerGone), reader.open(proxy):
            raise AssertionError("opened")
        producers[0].kill()
        async with asyncio.timeout(DEADLINE_S):
            while reader.pools:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert left(before) == []
        forgetting.cancel()
        await asyncio.wait([forgetting])
