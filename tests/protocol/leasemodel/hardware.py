"""What goes on by itself: streams run what was queued on them, also when the CPU is stopped or its process is dead.

Writes and reads take time: they begin, and they end, and anything may happen in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .laws import Law
from .world import POISON, READY, TORN, AckPage, Read, Store, Wait, World, Write, put

if TYPE_CHECKING:
    from .explore import Step
    from .model import Model


def offer(m: Model, w: World, steps: list[Step]) -> None:
    for index, life in enumerate(w.lives):
        for number, stream in enumerate(life.streams):
            if stream and not (isinstance(stream[0], Wait) and _is_held(w, stream[0])):
                steps.append((True, run_stream, (index, number)))


def _is_held(w: World, wait: Wait) -> bool:
    pool, slot, generation = wait.lease
    return w.pools[pool].ready[slot] < generation


def run_stream(m: Model, w: World, index: int, number: int) -> None:
    op = w.lives[index].streams[number][0]
    if isinstance(op, Write):
        _write(m, w, index, number, op)
    elif isinstance(op, Read):
        _read(m, w, index, number, op)
    else:
        _next(w, index, number, None)
        if isinstance(op, Store):
            m.tell and m.tell(f"{w.name(index)}'s stream {number} stores {word_name(w, op.page, op.lease)}")
            store(m, w, index, op.page, op.lease)
        else:
            m.tell and m.tell(f"{w.name(index)}'s stream {number} is let go")


def _write(m: Model, w: World, index: int, number: int, op: Write) -> None:
    if not op.begun:
        m.tell and m.tell(f"{w.name(index)}'s stream {number} begins to write {w.tag_name(op.tag)} to m{op.memory}")
        for other, access in w.ops():
            if isinstance(access, Write | Read) and access.memory == op.memory and access.lease != op.lease:
                state = "running" if access[-2] not in (False, None) else "queued"
                m.broken(
                    Law.OVERLAP,
                    f"the write of {w.lease_name(op.lease)} begins while {w.name(other)}'s {access.kind} "
                    f"of {w.lease_name(access.lease)} is {state} on the same bytes",
                )
        w.memory = put(w.memory, op.memory, TORN)
        _next(w, index, number, op._replace(begun=True))
    else:
        m.tell and m.tell(f"{w.name(index)}'s stream {number} has written {w.tag_name(op.tag)} to m{op.memory}")
        w.memory = put(w.memory, op.memory, op.tag)
        _next(w, index, number, None)


def _read(m: Model, w: World, index: int, number: int, op: Read) -> None:
    now = w.memory[op.memory]
    if op.seen is None:
        m.tell and m.tell(f"{w.name(index)}'s stream {number} begins to read m{op.memory}: {w.tag_name(now)}")
        _next(w, index, number, op._replace(seen=now))
        return
    got = now if now == op.seen else TORN
    m.tell and m.tell(f"{w.name(index)}'s stream {number} has read {w.tag_name(got)} from m{op.memory}")
    _next(w, index, number, None)
    for job in w.lives[index].jobs:
        if job.lease == op.lease and job.copy == op.copy:
            w.job(index, job, job._replace(tag=got, state="read" if job.state == "queued" else job.state))


def _next(w: World, index: int, number: int, op: Write | Read | None) -> None:
    """The head of a stream moves on; the last end of a dead process's work is what its pidfd waits for (R8)."""
    life = w.lives[index]
    stream = life.streams[number][1:] if op is None else (op, *life.streams[number][1:])
    life = w.life(index, streams=put(life.streams, number, stream))
    if life.state == "draining" and not any(life.streams):
        bury(w, index)


def bury(w: World, index: int) -> None:
    """A process is gone, and its pidfd says so; the kernel takes back what it had mapped."""
    w.life(index, state="dead", streams=((), ()), imports=())


def store(m: Model, w: World, writer: int, page: int, lease: tuple[int, int, int]) -> None:
    """A generation arrives in a control word."""
    pool_index, slot, generation = lease
    pool = w.pools[pool_index]
    if page == READY:
        words, its_writer = pool.ready, pool.producer
    else:
        words, its_writer = pool.pages[page].words, pool.pages[page].life
    if its_writer != writer:
        m.broken(Law.ONE_WRITER, f"{w.name(writer)} stores {word_name(w, page, lease)}, {w.name(its_writer)}'s word")
    if words[slot] > generation:
        m.broken(Law.FORWARD, f"{w.name(writer)} stores {word_name(w, page, lease)} over {words[slot]}")
    words = put(words, slot, generation)
    if page == READY:
        w.pool(pool_index, ready=words)
        return
    w.pool(pool_index, pages=put(pool.pages, page, pool.pages[page]._replace(words=words)))
    for job in w.lives[its_writer].jobs:  # the CPU sees its acknowledgement: the reader table may forget (R6)
        if job.lease == lease and job.state in ("answered", "abandoned"):
            w.job(its_writer, job, None)


def blank_page(life: int, column: int, slots: int) -> AckPage:
    return AckPage(life, column, (0,) * slots)


def acknowledged(w: World, life: int, lease: tuple[int, int, int]) -> bool:
    """Whether a life sees its own acknowledgement of a lease, or of a later one in the same slot."""
    pool, slot, generation = lease
    page = w.page_of(pool, life)
    return page is not None and w.pools[pool].pages[page].words[slot] >= generation


def word_name(w: World, page: int, lease: tuple[int, int, int]) -> str:
    pool, slot, generation = lease
    where = "ready" if page == READY else f"ack of column {w.pools[pool].pages[page].column}"
    return f"{where}[{slot}] = {'poison' if generation == POISON else generation}{f' in pool {pool}' if pool else ''}"
