"""Who has acknowledged what: a lease ends exactly when the books say, whatever its consumers do with it.

The machine plays with one pool and two consumers, another process (`programs/holder.py`) and this very one, and keeps
the books a second time. The tests after it are about words that no consumer should have written.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from structlog.testing import capture_logs

from tensorferry.codecs.errors import LeaseError, StaleLease
from tensorferry.codecs.messages import Origin, Proxy
from tensorferry.codecs.pool import ledger
from tensorferry.codecs.pool.export import Attachment
from tensorferry.codecs.pool.pool import Pool
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES, View
from tensorferry.pipeline.pools.broker import Broker, attach, recycle

PROGRAMS = Path(__file__).parents[2] / "programs"
DEADLINE_S = 20.0
NBYTES, SLOTS = 1 << 16, 4
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class Refused(Exception):
    """What a holder's command raised: the name of its class, and its text."""


class Holder:
    """A consumer process; `ask` runs one of its commands."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(DEADLINE_S)
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-W", "error", str(PROGRAMS / "holder.py"), str(number)]
            self._process = subprocess.Popen(command, pass_fds=[number])

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._socket.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def ask(self, command: str, *arguments: Any, fds: Sequence[int] = ()) -> Any:
        socket.send_fds(self._socket, [encode((command, *arguments))], list(fds))
        data, self.fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 16, socket.MSG_CMSG_CLOEXEC)
        error, value = decode(data)
        if error:
            raise Refused(error, value)
        return value

    def join(self, pool: Pool) -> int:
        """Attach to the pool; the column there."""
        export, fds = pool.export()
        answer = self.ask("attach", encode(export), fds=fds)
        for fd in fds:
            os.close(fd)
        return pool.admit(decode(answer, type=Attachment), self.fds)


class Here:
    """The same commands in this process: producer and consumer in one."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._blocks: dict[int, tuple[AbstractContextManager[View], View]] = {}

    def ask(self, command: str, *arguments: Any) -> Any:
        try:
            return getattr(self, f"_{command}")(*arguments)
        except StaleLease as problem:
            raise Refused("StaleLease", str(problem)) from None

    def _open(self, number: int, proxy: bytes) -> None:
        block = self._reader.open(decode(proxy, type=Proxy))
        self._blocks[number] = block, block.__enter__()

    def _look(self, number: int) -> str:
        return digest(self._blocks[number][1].data)

    def _end(self, number: int, fails: bool) -> None:
        block, _ = self._blocks.pop(number)
        swallowed = block.__exit__(ArithmeticError, ArithmeticError(), None) if fails else block.__exit__(*[None] * 3)
        assert not swallowed

    def _acknowledge(self, proxy: bytes) -> None:
        self._reader.acknowledge(decode(proxy, type=Proxy))

    def _stale(self) -> int:
        return self._reader.stale


def digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# --- the machine ------------------------------------------------------------------------------------------------


@dataclass
class Share:
    """What one consumer still has to do with a lease."""

    due: int  #: releases that are announced
    open: set[int] = field(default_factory=set)  #: its blocks, by number

    @property
    def over(self) -> bool:
        return self.due <= 0 and not self.open


@dataclass
class Lent:
    proxies: list[bytes]
    digests: list[str]
    shares: dict[int, Share]  #: by consumer
    slot: tuple[int, int]


any_of_them = st.integers(0, 63)


def machine(holder: Holder) -> type[RuleBasedStateMachine]:
    class LeasesEndWhenTheBooksSay(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.undo = ExitStack()
            self.pool = self.undo.enter_context(Pool.create(NBYTES, SLOTS))
            reader = self.undo.enter_context(Reader())
            self.undo.callback(holder.ask, "detach", self.pool.description.pool)
            self.consumers: list[Any] = [holder, Here(reader)]
            self.columns = [holder.join(self.pool), self.pool.admit(*reader.attach(*self.pool.export()))]
            self.publisher = Publisher(self.pool, inline_below_nbytes=0)
            self.lent: list[Lent] = []
            self.gone: list[Lent] = []
            self.blocks: dict[int, tuple[Lent, int, str]] = {}
            self.serial = 0

        def teardown(self) -> None:
            for number in list(self.blocks):
                self._end(number, fails=False)
            self.undo.close()

        # --- what may happen

        @rule(
            tensors=st.integers(1, 3),
            uses=st.integers(1, 2),
            told=st.sets(st.integers(0, 1)),
            fails=st.booleans(),
        )
        def publish(self, tensors: int, uses: int, told: set[int], fails: bool) -> None:
            """To both, one or nobody: then it is cancelled. A block that fails later leaves it to who was told."""
            self.serial += 1
            data = [np.full(100 * (place + 1), self.serial % 251, np.uint8) for place in range(tensors)]
            payloads: list[Any] = []
            with ExitStack() as block:
                if fails:
                    block.enter_context(pytest.raises(ArithmeticError))
                with self.publisher.publish(*data) as draft:
                    for consumer in sorted(told):
                        payloads = draft.dispatch(self.columns[consumer], [], consumers=len(told), uses=uses)
                    if fails:
                        raise ArithmeticError
            if draft.transport == "shm" and told:
                slot = payloads[0].slot, payloads[0].generation
                shares = {consumer: Share(tensors * uses) for consumer in told}
                proxies = [encode(payload) for payload in payloads]
                self.lent.append(Lent(proxies, [digest(array) for array in data], shares, slot))

        @precondition(lambda self: self.lent)
        @rule(which=any_of_them, who=any_of_them, place=any_of_them)
        def open(self, which: int, who: int, place: int) -> None:
            lent, consumer = self._pick(which, who)
            place %= len(lent.proxies)
            share = lent.shares[consumer]
            if share.over:
                self._refused(consumer, "open", len(self.blocks), lent.proxies[place], text="acknowledged here already")
                return
            self.serial += 1
            self.consumers[consumer].ask("open", self.serial, lent.proxies[place])
            share.open.add(self.serial)
            self.blocks[self.serial] = lent, consumer, lent.digests[place]

        @precondition(lambda self: self.blocks)
        @rule(which=any_of_them, fails=st.booleans())
        def end(self, which: int, fails: bool) -> None:
            self._end(sorted(self.blocks)[which % len(self.blocks)], fails)

        @precondition(lambda self: self.lent)
        @rule(which=any_of_them, who=any_of_them, place=any_of_them)
        def acknowledge(self, which: int, who: int, place: int) -> None:
            lent, consumer = self._pick(which, who)
            proxy = lent.proxies[place % len(lent.proxies)]
            share = lent.shares[consumer]
            if share.over:
                self._refused(consumer, "acknowledge", proxy, text="acknowledged here already")
                return
            self.consumers[consumer].ask("acknowledge", proxy)
            share.due -= 1

        @precondition(lambda self: self.gone)
        @rule(which=any_of_them, who=st.integers(0, 1))
        def acknowledge_late(self, which: int, who: int) -> None:
            """What is over, and its slot perhaps another's already."""
            lent = self.gone[which % len(self.gone)]
            again = any(other.slot[0] == lent.slot[0] for other in self.lent)
            if again or who in lent.shares:  # else nobody ever told it so, and it cannot know
                self._refused(who, "acknowledge", lent.proxies[0], text="over|acknowledged here already")

        # --- what must be so

        @invariant()
        def a_lease_is_out_until_everybody_is_done_with_it(self) -> None:
            over = [lent for lent in self.lent if all(share.over for share in lent.shares.values())]
            self.lent = [lent for lent in self.lent if lent not in over]
            self.gone += over
            while self.pool.reclaim():
                pass
            ledger = self.pool._ledger
            assert {lease[:2] for lease in ledger.leases()} == {lent.slot for lent in self.lent}

        @invariant()
        def what_is_open_is_what_was_written(self) -> None:
            for number, (_, consumer, wanted) in self.blocks.items():
                assert self.consumers[consumer].ask("look", number) == wanted

        # --- how

        def _pick(self, which: int, who: int) -> tuple[Lent, int]:
            lent = self.lent[which % len(self.lent)]
            told = sorted(lent.shares)
            return lent, told[who % len(told)]

        def _end(self, number: int, fails: bool) -> None:
            lent, consumer, _ = self.blocks.pop(number)
            self.consumers[consumer].ask("end", number, fails)
            share = lent.shares[consumer]
            share.open.remove(number)
            share.due -= 1

        def _refused(self, consumer: int, command: str, *arguments: Any, text: str) -> None:
            """As stale, counted, and nothing else."""
            before = self.consumers[consumer].ask("stale")
            with pytest.raises(Refused, match=f"StaleLease.*({text})"):
                self.consumers[consumer].ask(command, *arguments)
            assert self.consumers[consumer].ask("stale") == before + 1

    return LeasesEndWhenTheBooksSay


@pytest.mark.processes
@pytest.mark.parametrize("few", [0, 16], ids=["scanned", "looked up"])
def test_b09_a_lease_ends_when_each_consumer_is_done_and_not_before(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(ledger, "FEW", few)
    with Holder() as holder:
        laws = settings(max_examples=40, stateful_step_count=40)
        run_state_machine_as_test(lambda: machine(holder)(), settings=laws)


# --- words that nobody should have written ---------------------------------------------------------------------------


@pytest.fixture
def holder(may_start_processes: None) -> Iterator[Holder]:
    with Holder() as holder:
        yield holder


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.create(NBYTES, SLOTS) as pool:
        yield pool


def send(pool: Pool, *columns: int) -> Proxy:
    """A lease for these consumers; the proxy is the same for all."""
    with Publisher(pool, inline_below_nbytes=0).publish(np.full(1000, 7, np.uint8)) as draft:
        payloads = [draft.dispatch(column, [], consumers=len(columns))[0] for column in columns]
    assert isinstance(payloads[-1], Proxy)
    return payloads[-1]


def out(pool: Pool) -> int:
    """Leases that have not come back."""
    pool.reclaim()
    return pool.statistics().lent_slots


def test_an_acknowledgement_is_invalid_when_its_slot_has_not_had_that_generation(pool: Pool, holder: Holder) -> None:
    column = holder.join(pool)
    for _ in range(3 * SLOTS):  # every slot to its third generation
        with pool.lease(1):
            pass
        pool.reclaim()
    name = pool.description.pool
    for word in (0, 1, 2, 3):
        holder.ask("store", name, 2, word)
        assert pool.check_words() == [], word
    assert pool.statistics().acks_invalid == 0
    holder.ask("store", name, 2, 4)
    holder.ask("store", name, 0, (1 << 32) - 1)
    assert pool.check_words() == [column]
    assert pool.check_words() == [], "it is told once"
    statistics = pool.statistics()
    assert (statistics.acks_invalid, statistics.quarantined_consumers, statistics.consumers) == (2, 1, 1)


@pytest.mark.processes
def test_a_consumer_with_an_invalid_acknowledgement_is_dispatched_nothing_more_and_not_believed(
    pool: Pool, holder: Holder
) -> None:
    """Its right word may be as accidental as the wrong one, and it may still read what it has."""
    with Holder() as other:
        bad, good = holder.join(pool), other.join(pool)
        its, both = send(pool, bad), send(pool, bad, good)
        holder.ask("store", pool.description.pool, SLOTS - 1, 99)
        assert pool.check_words() == [bad]
        with pool.lease(1000) as lease:
            with pytest.raises(LeaseError, match=f"the consumer of column {bad} is quarantined"):
                lease.dispatch([good, bad])
            lease.dispatch([good])
        for proxy in (its, both):
            holder.ask("acknowledge", encode(proxy))
        other.ask("acknowledge", encode(both))
        assert out(pool) == 3
        slot, generation, offset, _ = lease.grant
        own = Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (1000,))
        other.ask("acknowledge", encode(own))
        assert out(pool) == 2, "what the other one is done with comes back"
        holder.kill()
        assert pool.strike_dead() == [bad]
        assert out(pool) == 0
        statistics = pool.statistics()
        assert (statistics.quarantined_consumers, statistics.struck_consumers, statistics.acks_invalid) == (0, 1, 1)
        assert holder_is_served(pool, other, good)


def holder_is_served(pool: Pool, holder: Holder, column: int) -> bool:
    holder.ask("acknowledge", encode(send(pool, column)))
    return out(pool) == 0


def test_looking_at_the_words_of_a_closed_pool_finds_nothing(holder: Holder) -> None:
    with Pool.create(NBYTES, SLOTS) as pool:
        holder.join(pool)
        holder.ask("store", pool.description.pool, 0, 5)
    assert pool.check_words() == []


async def test_the_recycler_finds_them_and_the_broker_says_whose_they_are(pages: Any, pool: Pool) -> None:
    """And producer and consumer may be one process, by the broker too."""
    origins = [Origin("encoder", rank, rank + 1) for rank in range(2)]
    told: list[tuple[Origin, int]] = []
    with (
        tempfile.TemporaryDirectory(prefix="tf-") as folder,
        capture_logs() as logs,
        Reader(origins[0].epoch) as good,
        Reader(origins[1].epoch) as bad,
    ):
        path = f"{folder}/pool.sock"
        broker = Broker(path, pool, lambda *_: None, on_quarantined=lambda *whom: told.append(whom))
        async with broker:
            name = pool.description.pool
            columns = [
                await attach(path, origin, name, reader, DEADLINE_S)
                for origin, reader in zip(origins, (good, bad), strict=True)
            ]
            recycling = asyncio.create_task(recycle(pool, 0.001, broker.check_words))
            proxy = send(pool, columns[0])
            with good.open(proxy) as view:
                assert view.data.tolist() == [7] * 1000
                del view
            pages.acks[-1].acknowledge(3, 1)  # the second reader's
            async with asyncio.timeout(DEADLINE_S):
                while not told or pool.statistics().lent_slots:  # noqa: ASYNC110 - the recycler sets no event
                    await asyncio.sleep(0)
            recycling.cancel()
            await asyncio.wait([recycling])
    assert told == [(origins[1], columns[1])]
    events = [log for log in logs if log["event"] == "consumer_quarantined"]
    assert [(event["stage"], event["rank"], event["column"]) for event in events] == [("encoder", 1, columns[1])]
