"""The recycler of a pool: looks at words, hears releases, strikes the dead, and grows the pool again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import hardware
from .laws import Law
from .world import BLANK, Released, World, column_of, put

if TYPE_CHECKING:
    from .explore import Step
    from .model import Model


def offer(m: Model, w: World, steps: list[Step]) -> None:
    for index, pool in enumerate(w.pools):
        if not w.lives[pool.producer].running:
            continue
        for number, page in enumerate(pool.pages):
            if not page.struck and _is_proven_dead(m, w, page.life):
                steps.append((True, strike, (index, number)))
        if m.books.reclaim(pool.book, *_words(m, w, index))[1]:
            steps.append((True, reclaim, (index,)))
        for message in w.mail:
            if isinstance(message, Released) and message.lease[0] == index:
                steps.append((True, receive_released, (message,)))


def offer_growth(m: Model, w: World, pool: int, steps: list[Step]) -> None:
    if not m.rules.retired_memory_counts_while_imported or w.physical() < (m.scenario.budget or 0):
        steps.append((True, grow, (pool,)))


def _words(m: Model, w: World, pool_index: int) -> tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...]]:
    """What the ledger is shown: the producer's own ready words, and the ack pages of all who are attached."""
    pool = w.pools[pool_index]
    ready = pool.ready if m.rules.reclaim_needs_ready else pool.lease
    by_message = m.scenario.remote and m.rules.released_messages_touch_the_ledger_only
    return ready, () if by_message else tuple((p.column, p.words) for p in pool.pages if not p.struck)


def reclaim(m: Model, w: World, pool_index: int) -> None:
    """Step 5: the ledger compares words, and ends what is ready and acknowledged by all it needs (R1)."""
    pool = w.pools[pool_index]
    book, ended = m.books.reclaim(pool.book, *_words(m, w, pool_index))
    if m.tell:
        names = ", ".join(w.lease_name((pool_index, grant.slot, grant.generation)) for grant in ended)
        m.tell(f"{w.name(pool.producer)} reclaims {names}")
    w.pool(pool_index, book=book)


def _is_proven_dead(m: Model, w: World, life: int) -> bool:
    """R8: the pidfd fires once the dead process's work has drained; nothing else proves anything."""
    state = w.lives[life].state
    if state == "stopped":
        return not m.rules.a_timeout_is_no_proof
    if state == "draining":
        return not m.rules.a_death_is_proven_after_its_drain
    return state == "dead"


def strike(m: Model, w: World, pool_index: int, number: int) -> None:
    """Write off a dead consumer: ledger state, never a store into anybody's words (R1)."""
    pool = w.pools[pool_index]
    page = pool.pages[number]
    m.tell and m.tell(f"{w.name(pool.producer)} strikes {w.name(page.life)}, column {page.column}")
    book = m.books.strike(pool.book, page.column)
    w.pool(pool_index, book=book, pages=put(pool.pages, number, page._replace(struck=True)))


def receive_released(m: Model, w: World, message: Released) -> None:
    """An acknowledgement by message goes to the ledger, which compares generations; repeats are refused there."""
    w.take(message)
    pool_index, slot, generation = message.lease
    pool = w.pools[pool_index]
    m.tell and m.tell(
        f"{w.name(pool.producer)} hears that {w.name(message.life)} gave {w.lease_name(message.lease)} back"
    )
    if m.rules.released_messages_touch_the_ledger_only:
        column = column_of(w, pool_index, message.life)
        w.pool(pool_index, book=m.books.acknowledge(pool.book, slot, generation, column)[0])
    else:
        hardware.store(m, w, message.life, w.page_of(pool_index, message.life) or 0, message.lease)


def grow(m: Model, w: World, pool_index: int) -> None:
    """A chunk of new physical memory, under a new serial; what importers still hold counts in the budget (R7)."""
    pool = w.pools[pool_index]
    memory = len(w.memory)
    w.memory = (*w.memory, BLANK)
    m.tell and m.tell(f"{w.name(pool.producer)} grows chunk 0 again, serial {pool.serials[0]}, as m{memory}")
    w.pool(pool_index, memory=put(pool.memory, 0, memory))
    if w.physical() > (m.scenario.budget or 0):
        m.broken(Law.BUDGET, f"{w.physical()} pieces of memory exist, {m.scenario.budget} are the budget")
