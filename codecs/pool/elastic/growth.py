"""Lets an elastic pool grow with demand and shrink when it is idle, in a thread of its own.

Making a chunk takes about a millisecond and giving one back as long, so neither is done where tensors are handed out:
the thread keeps a *spare*, free space of at least one chunk, and works whenever it is touched. A chunk's descriptor is
in the line of every consumer before anything is lent there, so a proxy never finds it missing.

A chunk is given back only when no lease touches it. A lease ends after its `ready` and its acknowledgements were seen
on the host, or have come, so nobody has work queued on such a chunk.

The thread outlives whatever fails there. A driver that has no memory is a full pool. A lost context is told to whoever
asks from then on, and nothing more is tried. Anything else is counted, and told once.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Protocol

from tensorferry.codecs.errors import FerryError, LeaseError
from tensorferry.codecs.memory.cuda_driver import lost_context
from tensorferry.codecs.memory.memory import Growing, Handle
from tensorferry.codecs.pool.control import AckPage, ControlPage
from tensorferry.codecs.pool.elastic.chunks import Chunks
from tensorferry.codecs.pool.elastic.descriptor_line import Sender
from tensorferry.codecs.pool.elastic.mail import ChunkMail
from tensorferry.codecs.pool.ledger import Grant, Ledger
from tensorferry.codecs.system.interruptible_lock import Lock

FIRST_S = 10.0  #: at most, for the first spare, which takes a few milliseconds
ASK_AGAIN_S = 0.002  #: by somebody who waits: others may have asked since, or taken what came
REFUSED_S = 1.0  #: that is not tried again what has failed: growing, or giving back
LOOK_S = 0.05  #: between two looks whether the spare can be had, while it cannot
LOOKS = 8  #: at idle chunks, in the time after which they are given back
MOST_LOOK_S, LEAST_LOOK_S = 0.5, 0.01


class Holder(Protocol):
    """As much of a consumer as this needs."""

    @property
    def page(self) -> AckPage | None: ...
    @property
    def line(self) -> Sender | ChunkMail | None: ...


class Growth:
    """The chunks of one pool. Methods are called under the pool's lock, save `start`, `wait` and `end`."""

    def __init__(
        self,
        memory: Growing,
        ledger: Ledger,
        control: ControlPage,
        consumers: Mapping[int, Holder],
        lock: Lock,
        reclaim: Callable[[], object],
        idle_s: float,
    ) -> None:
        """lock, ledger, control, consumers: the pool's. reclaim: ends leases that have come back. idle_s: after so long
        without a lease a chunk is given back, but the spare."""
        self.chunks = Chunks(memory.nbytes // memory.chunk_nbytes, memory.chunk_nbytes)
        self.grown = self.retired = 0
        self.refused = self.failed = 0  #: times that the GPU had no memory, and that anything else went wrong
        self._memory, self._ledger, self._control, self._consumers = memory, ledger, control, consumers
        self._lock, self._reclaim, self._idle_ns = lock, reclaim, int(idle_s * 1e9)
        self._handles: dict[int, Handle] = {}  # of mapped chunks, by position; the memory's
        self.wanted: Sequence[int] = ()  #: sizes that found no room
        self._not_before_ns = 0  # when the spare is looked for again
        self._refused_until_ns = 0
        self._stuck: set[int] = set()  # retired positions whose chunk could not be unmapped, and is still here
        self._shrink_from_ns = 0  # when that is tried again
        self._lost: Exception | None = None  # the problem that cost this process its GPU
        self._untold: Exception | None = None  # the first that was outlived, until somebody has been told
        self._unsent = False  # whether a chunk could not be sent to somebody
        self._ended = False
        self._wake = threading.Event()
        self._news = threading.Condition()
        self._round = 0  # counts what may have made room
        self._thread = threading.Thread(target=self._run, name="tensorferry-growth", daemon=True)
        self._begun = False  # the thread has: its start may be interrupted, and it begins later all the same
        self._beginning = threading.Lock()

    # --- for the pool, under its lock

    def ask(self, sizes: Sequence[int]) -> int | None:
        """Room is wanted for ranges of these sizes, all at once. What to `wait` with; None: growing cannot make it."""
        self.check_context()
        if self._ended or time.monotonic_ns() < self._refused_until_ns:
            return None
        self._hear()
        if not self.chunks.needed(self._ledger.free, sizes):
            return None
        self.wanted = tuple(sizes)
        self._wake.set()
        return self._round

    def check_context(self) -> None:
        """Raises the problem that cost this process its GPU, once the thread has met it: what is lent from then on
        could not be written."""
        if self._lost is not None:
            raise self._lost.with_traceback(None)  # else it would grow by every raise

    def problem(self) -> Exception | None:
        """What went wrong in the thread, for somebody to say so: a lost context, whenever it is asked for; else the
        first failure, once. Later ones are counted alone."""
        untold, self._untold = self._untold, None
        return self._lost or untold

    def found(self, sizes: Sequence[int]) -> None:
        """There is room for these now, however it came: grow no more for them. Whoever else asked for as much asks
        again."""
        if self.wanted == tuple(sizes):
            self.wanted = ()

    def lent(self, now_ns: int) -> None:
        """Something was lent: see to the spare."""
        if self._ledger.longest_free_nbytes < self.chunks.chunk_nbytes and now_ns >= self._not_before_ns:
            self._not_before_ns = now_ns + int(LOOK_S * 1e9)
            self._wake.set()

    def ended(self, leases: Sequence[Grant], now_ns: int) -> None:
        for grant in leases:
            self.chunks.touch(grant.offset, grant.nbytes, now_ns)

    def admitted(self, column: int) -> None:
        """A consumer has come: it is sent every chunk that there is."""
        for position in self.chunks.mapped:
            self._send(column, position)

    def struck(self, column: int) -> None:
        self.chunks.strike(column)

    def check_sent(self, column: int, grant: Grant) -> None:
        """Raises LeaseError for a consumer that does not have all chunks of a lease, as it does not take them."""
        for position in self.chunks.span(grant.offset, grant.nbytes):
            if not self.chunks.is_sent(position, column) and not self._send(column, position):
                problem = f"the consumer of column {column} does not take its chunk at {position}"
                raise LeaseError(grant.slot, grant.generation, problem)

    def sizes(self) -> tuple[int, int]:
        """Bytes that are mapped here, and bytes that are retired and that somebody still holds."""
        self._hear()
        return self.chunks.mapped_nbytes, self.chunks.retiring_nbytes

    def foreign(self, column: int) -> int:
        """How many words of a consumer name a chunk that there never was."""
        page = self._consumers[column].page
        return 0 if page is None else int((page.dropped_words() > self.chunks.last_serial).sum())

    def answered(self, column: int, mail: ChunkMail, taken: Collection[int], dropped: Collection[int]) -> int:
        """What a consumer says by message of chunks; how many of them there never were: then nothing is believed."""
        foreign = sum(serial > self.chunks.last_serial for serial in (*taken, *dropped))
        if not foreign:
            mail.answered(taken, dropped)
            self.chunks.let_go(column, dropped)
        return foreign

    # --- for others

    def start(self) -> None:
        """Start the thread, and wait for the first spare, which is there when the first tensor is, or cannot be had.
        `end` is to be called also where this was interrupted."""
        self._wake.set()
        self._thread.start()
        with self._news:
            self._news.wait_for(lambda: self._round, FIRST_S)

    def wait(self, since: int, until: float) -> None:
        """Until room may have been made after `ask` gave `since`, or it is time to ask again; at most until that time,
        of time.monotonic()."""
        patience_s = min(ASK_AGAIN_S, until - time.monotonic())
        with self._news:
            self._news.wait_for(lambda: self._round != since or self._ended, patience_s)

    def end(self) -> None:
        """End the thread, which takes as long as what it is doing. The chunks stay, and are the memory's to close."""
        with self._beginning:
            self._ended = True
        self._wake.set()
        if self._begun:
            self._thread.join()

    # --- the thread

    def _run(self) -> None:
        with self._beginning:
            self._begun = not self._ended
        while not self._ended:
            self._wake.wait(self._patience_s())
            self._wake.clear()
            for work in (self._grow, self._shrink):
                if self._lost is None:
                    try:
                        work()
                    except Exception as problem:
                        self._outlive(problem)

    def _outlive(self, problem: Exception) -> None:
        """Whatever was to be done is done later, or told to be impossible; the thread goes on."""
        with self._lock():
            self._grow_later()
            self._blame(problem)
        self._announce()

    def _blame(self, problem: Exception) -> None:
        if lost_context(problem) is not None:
            self._lost = problem
            return
        if not self.failed:
            self._untold = problem
        self.failed += 1

    def _grow_later(self) -> None:
        self._refused_until_ns = self._not_before_ns = _later_ns()

    def _patience_s(self) -> float | None:
        """How long nothing need be looked at: for ever where there is the spare alone, so an idle pool never wakes."""
        if self._lost is None and (len(self.chunks.mapped) > 1 or self._unsent or self._stuck):
            return min(MOST_LOOK_S, max(LEAST_LOOK_S, self._idle_ns / 1e9 / LOOKS))
        return None

    def _grow(self) -> None:
        """Map what is wanted, and a spare."""
        with self._lock():
            self._reclaim()
            self._hear()
            self._send_again()
            wanted, self.wanted = self.wanted, ()
            positions: list[int] = []
            if time.monotonic_ns() >= self._refused_until_ns:
                positions = self.chunks.needed(self._ledger.free, [*wanted, self.chunks.chunk_nbytes])
        for position in positions:
            if not self._map(position):
                break
        self._announce()

    def _map(self, position: int) -> bool:
        """Whether a chunk came there. Raises what is no lack of memory."""
        with self._lock():
            if self._ended:
                return False
            self.chunks.begin(position)
        try:
            handle = self._memory.grow(position)
        except BaseException as problem:  # whatever it was, no position stays one that is coming
            with self._lock():
                self.chunks.failed(position)
                if not isinstance(problem, FerryError) or lost_context(problem) is not None:
                    raise
                self.refused += 1
                self._grow_later()
            return False
        with self._lock():
            serial = self.chunks.came(position, time.monotonic_ns())
            self._handles[position] = handle
            self._control.set_chunk(position, serial)  # before it is sent: what is in no word is taken for retired
            self._ledger.grow(position * self.chunks.chunk_nbytes, self.chunks.chunk_nbytes)
            self.grown += 1
            self._not_before_ns = 0
            for column in self._consumers:  # still before anything is lent there
                self._send(column, position)
        self._announce()
        return True

    def _shrink(self) -> None:
        """Give back what nobody has used for so long, but a spare; first what could not be given back before.

        While that cannot be, no more is retired: where it is, it can still be lent.
        """
        if time.monotonic_ns() < self._shrink_from_ns:
            return
        for stuck in sorted(self._stuck):
            self._unmap(stuck)
        while not self._stuck and (position := self._retire()) is not None:
            self._unmap(position)

    def _retire(self) -> int | None:
        """Retire a chunk; None: there is none that nobody needs."""
        with self._lock():
            position = None if self._ended or self._lost is not None else self._surplus()
            if position is not None:
                self._tell_retired(position)
                self.chunks.retire(position)
                self._control.set_chunk(position, 0)
                del self._handles[position]
        return position

    def _unmap(self, position: int) -> None:
        """Give up a chunk that is retired. If it cannot be, it stays in the budget, and is tried again."""
        try:
            self._memory.shrink(position)
        except Exception as problem:
            with self._lock():
                self._stuck.add(position)
                self._shrink_from_ns = _later_ns()
                self._blame(problem)
            self._announce()
            return
        with self._lock():
            self._stuck.discard(position)
            self.chunks.unmapped(position)
            self.retired += 1

    def _surplus(self) -> int | None:
        """An idle position that the ledger has let go of, and that leaves a spare."""
        nbytes, free = self.chunks.chunk_nbytes, sorted(self._ledger.free)
        for position in self.chunks.idle(time.monotonic_ns() - self._idle_ns):
            # Asked here first, as the ledger looks at one range after another.
            at = bisect_right(free, position * nbytes, key=itemgetter(0)) - 1
            if at >= 0 and free[at][1] >= (position + 1) * nbytes and self._ledger.shrink(position * nbytes, nbytes):
                if self._ledger.longest_free_nbytes >= nbytes:
                    return position
                self._ledger.grow(position * nbytes, nbytes)
        return None

    # ---

    def _hear(self) -> None:
        """See what consumers have dropped. One that is quarantined is not believed."""
        if self.chunks.retiring_nbytes:
            for column, consumer in self._consumers.items():
                if consumer.page is not None and column not in self._ledger.quarantined:
                    self.chunks.dropped(column, consumer.page.dropped_words())

    def _send(self, column: int, position: int) -> bool:
        line = self._consumers[column].line
        if line is None or not line.send(self.chunks.serial(position), position, self._handles[position]):
            self._unsent |= line is not None and not line.is_shut
            return False
        self.chunks.sent(position, column)
        return True

    def _tell_retired(self, position: int) -> None:
        for column, consumer in self._consumers.items():
            if isinstance(consumer.line, ChunkMail) and self.chunks.is_sent(position, column):
                consumer.line.retire(self.chunks.serial(position), position)

    def _send_again(self) -> None:
        if self._unsent:
            self._unsent = False
            for column in self._consumers:
                for position in self.chunks.mapped:
                    if not self.chunks.is_sent(position, column):
                        self._send(column, position)

    def _announce(self) -> None:
        with self._news:
            self._round += 1
            self._news.notify_all()


def _later_ns() -> int:
    """When what has failed may be tried again, of time.monotonic_ns()."""
    return time.monotonic_ns() + int(REFUSED_S * 1e9)
