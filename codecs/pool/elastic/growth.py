"""Lets an elastic pool grow with demand and shrink when it is idle, in a thread of its own.

Making a chunk takes about a millisecond and giving one back as long, so neither is done where tensors are handed out.
The thread keeps a *spare*, free space of at least one chunk, and works whenever a lease has begun to use it.

A chunk is given back only when no lease touches it. A lease ends after its `ready` and its acknowledgements were seen
on the host, or have come, so no process has work queued on such a chunk.

The pool and the thread share three things, all under the pool's lock. The pool writes `wanted`, and the thread takes
it. The thread replaces `state`, and the pool reads it. Both use the ledger, `chunks` and `deliveries`, which are
complete whenever the lock is free.

No failure ends the thread. A driver that has no memory is a full pool. A lost context is raised to all who ask from
then on, and nothing more is tried. Anything else is counted, and reported once.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.memory.cuda_driver import lost_context
from tensorferry.codecs.memory.memory import Growing, Handle
from tensorferry.codecs.pool.control import ControlPage
from tensorferry.codecs.pool.elastic.chunks import Chunks
from tensorferry.codecs.pool.elastic.deliveries import Deliveries, Holder
from tensorferry.codecs.pool.elastic.growth_state import GrowthState
from tensorferry.codecs.pool.ledger import Grant, Ledger
from tensorferry.codecs.system.deadline import Deadline
from tensorferry.codecs.system.interruptible_lock import Lock

FIRST_S = 10.0  #: to wait for the first spare at most, which takes a few milliseconds
ASK_AGAIN_S = 0.002  #: after which a waiting lease asks again: others may have asked since, or taken what came
LOOK_S = 0.05  #: between two looks whether the spare can be had, while it cannot
LOOKS = 8  #: at idle chunks, in the time after which they are given back
MOST_LOOK_S, LEAST_LOOK_S = 0.5, 0.01


class Growth:
    """The chunks of one pool. Methods are called under the pool's lock, save those under "without the lock"."""

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
        self.deliveries = Deliveries(self.chunks, consumers)
        self.state = GrowthState()
        self.wanted: Sequence[int] = ()  #: sizes that found no room
        self._memory, self._ledger, self._control = memory, ledger, control
        self._lock, self._reclaim, self._idle_ns = lock, reclaim, int(idle_s * 1e9)
        self._sought_ns = 0  # when `lent` woke the thread last, for the spare
        self._is_reported = False  # whether `problem` has given the first one
        self._ended = False
        self._wake = threading.Event()
        self._news = threading.Condition()
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name="tensorferry-growth", daemon=True)
        self._begun = False  # the thread has: its start may be interrupted, and it begins later all the same
        self._beginning = threading.Lock()

    # --- for the pool, under its lock

    def ask(self, sizes: Sequence[int]) -> int | None:
        """Ask for room for ranges of these sizes, all at once. Returns what to `wait` with, or None if growing cannot
        make the room."""
        self.check_context()
        if self._ended or time.monotonic_ns() < self.state.grow_from_ns:
            return None
        self._look_for_dropped()
        if not self.chunks.needed(self._ledger.free, sizes):
            return None
        self.wanted = tuple(sizes)
        self.look()
        return self._rounds

    def check_context(self) -> None:
        """Raises the problem that cost this process its GPU, once the thread has met it: what is lent from then on
        could not be written."""
        if self.state.lost is not None:
            raise self.state.lost.with_traceback(None)  # else it would grow by every raise

    def problem(self) -> Exception | None:
        """The problem that cost this process its GPU, as often as it is asked for; else the thread's first one, once.
        Later ones are only counted."""
        if self.state.lost is not None:
            return self.state.lost
        if self._is_reported or self.state.first_problem is None:
            return None
        self._is_reported = True
        return self.state.first_problem

    def found(self, sizes: Sequence[int]) -> None:
        """There is room for these now, however it came, so the pool need not grow for them. A second lease that wants
        as much asks again."""
        if self.wanted == tuple(sizes):
            self.wanted = ()

    def lent(self, now_ns: int) -> None:
        """Wake the thread if what was just lent is of the spare. While no spare comes: once in LOOK_S."""
        if self._ledger.longest_free_nbytes >= self.chunks.chunk_nbytes or now_ns < self.state.grow_from_ns:
            return
        if self._sought_ns <= self.state.came_ns or now_ns >= self._sought_ns + int(LOOK_S * 1e9):
            self._sought_ns = now_ns
            self.look()

    def ended(self, leases: Sequence[Grant], now_ns: int) -> None:
        for grant in leases:
            self.chunks.touch(grant.offset, grant.nbytes, now_ns)

    def sizes(self) -> tuple[int, int]:
        """Bytes that are mapped here, and bytes that are retired and still held by a process."""
        self._look_for_dropped()
        return self.chunks.mapped_nbytes, self.chunks.retiring_nbytes

    # --- without the lock

    @property
    def idle_s(self) -> float:
        """After so long without a lease a chunk is given back, but the spare. May be set at any time."""
        return self._idle_ns / 1e9

    @idle_s.setter
    def idle_s(self, idle_s: float) -> None:
        self._idle_ns = int(idle_s * 1e9)
        self.look()

    @property
    def rounds(self) -> int:
        """How often the thread has done something that may have made room, or found nothing to do."""
        return self._rounds

    def look(self) -> None:
        """Have the thread look now whether a chunk is wanted, or idle."""
        self._wake.set()

    def patience_s(self) -> float | None:
        """How long the thread may sleep. None, until it is woken, where the spare alone is mapped: an idle pool costs
        nothing."""
        state = self.state
        if state.lost is None and (len(self.chunks.mapped) > 1 or self.deliveries.has_unsent or state.stuck):
            return min(MOST_LOOK_S, max(LEAST_LOOK_S, self.idle_s / LOOKS))
        return None

    def start(self) -> None:
        """Start the thread, and wait for the first spare, which is there when the first tensor is, or cannot be had.
        `end` is to be called also where this was interrupted."""
        self.look()
        self._thread.start()
        with self._news:
            self._news.wait_for(lambda: self._rounds, FIRST_S)

    def wait(self, since: int, deadline: Deadline) -> None:
        """Wait until room may have been made after `ask` gave `since`, or until it is time to ask again."""
        with self._news:
            self._news.wait_for(lambda: self._rounds != since or self._ended, min(ASK_AGAIN_S, deadline.left_s))

    def end(self) -> None:
        """End the thread, which finishes its step first. The chunks stay, and are the memory's to close."""
        with self._beginning:
            self._ended = True
        self.look()
        if self._begun:
            self._thread.join()

    # --- the thread: one round

    def _run(self) -> None:
        with self._beginning:
            self._begun = not self._ended
        while not self._ended:
            self._wake.wait(self.patience_s())
            self._wake.clear()
            self._try(self._grow)
            self._try(self._shrink)

    def _try(self, work: Callable[[], None]) -> None:
        """Do a part of the round, unless the GPU is lost. After a failure the thread goes on."""
        if self.state.lost is None:
            try:
                work()
            except Exception as problem:
                with self._lock():
                    self.state = self.state.after(problem)
                self._announce()

    # --- the thread: growing. One chunk is begun under the lock, made without it, and entered under it.

    def _grow(self) -> None:
        """Map what is wanted, and a spare."""
        for position in self._positions_to_map():
            if not self._begin(position):
                break
            try:
                handle = self._memory.grow(position)  # takes a millisecond
            except BaseException as problem:  # any kind: no position may stay one that is coming
                self._enter_failure(position, problem)
                break
            self._enter(position, handle)
            self._announce()
        self._announce()

    def _positions_to_map(self) -> list[int]:
        with self._lock():
            self._reclaim()
            self._look_for_dropped()
            self.deliveries.send_again()
            wanted, self.wanted = self.wanted, ()
            if time.monotonic_ns() < self.state.grow_from_ns:
                return []
            return self.chunks.needed(self._ledger.free, [*wanted, self.chunks.chunk_nbytes])

    def _begin(self, position: int) -> bool:
        """False: the pool is closed."""
        with self._lock():
            if not self._ended:
                self.chunks.begin(position)
            return not self._ended

    def _enter(self, position: int, handle: Handle) -> None:
        with self._lock():
            now_ns = time.monotonic_ns()
            serial = self.chunks.came(position, now_ns)
            self._control.set_chunk(position, serial)  # before it is sent: what is in no word is taken for retired
            self._ledger.grow(position * self.chunks.chunk_nbytes, self.chunks.chunk_nbytes)
            self.state = self.state.came(now_ns)
            self.deliveries.offer(position, handle)  # still before anything is lent there

    def _enter_failure(self, position: int, problem: BaseException) -> None:
        """Raises the problem, unless it is a lack of memory."""
        with self._lock():
            self.chunks.failed(position)
            if not isinstance(problem, FerryError) or lost_context(problem) is not None:
                raise problem
            self.state = self.state.without_memory()

    # --- the thread: shrinking. One chunk is retired under the lock, unmapped without it, and entered under it.

    def _shrink(self) -> None:
        """Give back the chunks that were idle for `idle_s`, but a spare; first those that could not be given back
        before.

        While a chunk cannot be unmapped, no more are retired: a chunk that is not retired can still be lent.
        """
        if time.monotonic_ns() < self.state.shrink_from_ns:
            return
        for stuck in sorted(self.state.stuck):
            self._unmap(stuck)
        while not self.state.stuck and (position := self._retire()) is not None:
            self._unmap(position)

    def _retire(self) -> int | None:
        """Retire a chunk; None: none can be spared."""
        with self._lock():
            position = None if self._ended or self.state.lost is not None else self._surplus()
            if position is not None:
                self.deliveries.withdraw(position)
                self.chunks.retire(position)
                self._control.set_chunk(position, 0)
        return position

    def _unmap(self, position: int) -> None:
        """Give up a chunk that is retired. If it cannot be unmapped, it stays in the budget, and is tried again."""
        try:
            self._memory.shrink(position)  # takes a millisecond
        except Exception as problem:
            with self._lock():
                self.state = self.state.stuck_at(position, problem)
            self._announce()
            return
        with self._lock():
            self.chunks.unmapped(position)
            self.state = self.state.gave_back(position)

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

    def _look_for_dropped(self) -> None:
        self.deliveries.look_for_dropped(self._ledger.quarantined)

    def _announce(self) -> None:
        with self._news:
            self._rounds += 1
            self._news.notify_all()
