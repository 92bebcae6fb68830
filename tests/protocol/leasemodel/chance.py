"""What befalls the processes and their mail: every mishap may happen at any moment, as often as the luck says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import hardware
from .rules import Gate
from .world import BLANK, GONE, POISON, Answer, Encode, Life, Pool, Released, Wait, World, put

if TYPE_CHECKING:
    from .explore import Step
    from .model import Model


def offer(m: Model, w: World, steps: list[Step]) -> None:
    luck = w.luck
    for index, life in enumerate(w.lives):
        if life.alive and (luck.producer_kills if life.who == "P" else luck.kills):
            steps.append((False, kill, (index, False)))
            if any(life.streams):
                steps.append((False, kill, (index, True)))
        if life.running and luck.stops:
            steps.append((False, stop, (index,)))
        if life.state == "stopped":
            steps.append((False, wake, (index,)))
        if luck.restarts and not life.alive and w.latest(life.who) == index:
            steps.append((False, restart, (index,)))
        if luck.rumours and life.running and life.who != "P":
            for other in w.lives:
                if other.state == "stopped" and other.who != "P" and int(other.who[1:]) not in life.believes_gone:
                    steps.append((False, hear, (index, int(other.who[1:]))))
    for message in w.mail:
        if luck.duplicates and (not isinstance(message, Answer)):
            steps.append((False, duplicate, (message,)))
        if luck.losses and isinstance(message, Encode) and w.lives[message.life].alive:
            steps.append((False, lose, (message,)))
    for index, pool in enumerate(w.pools):
        producer = w.lives[pool.producer]
        if producer.running and luck.retirements and pool.memory[0] != GONE and not m.books.see(pool.book).lent_slots:
            steps.append((False, retire, (index,)))
        if not producer.alive and m.rules.gate is Gate.HOST:
            for slot, generation in enumerate(pool.lease):
                if generation not in (pool.ready[slot], pool.poison[slot]):
                    steps.append((False, poison, (index, slot)))
    if m.rules.gate is not Gate.HOST:
        _offer_release(m, w, steps)


def kill(m: Model, w: World, index: int, draining: bool) -> None:
    """SIGKILL. The CPU is gone at once; what its streams have queued is dropped, or goes on (R8)."""
    w.spend("producer_kills" if w.lives[index].who == "P" else "kills")
    m.tell and m.tell(f"{w.name(index)} is killed; its queued work {'goes on' if draining else 'is dropped'}")
    w.life(index, state="draining", jobs=(), drafts=())
    if not draining:
        hardware.bury(w, index)


def stop(m: Model, w: World, index: int) -> None:
    """SIGSTOP, or a very slow process: nobody can tell it from a dead one by waiting."""
    w.spend("stops")
    m.tell and m.tell(f"{w.name(index)} is stopped")
    w.life(index, state="stopped")


def wake(m: Model, w: World, index: int) -> None:
    m.tell and m.tell(f"{w.name(index)} wakes up")
    w.life(index, state="running")


def restart(m: Model, w: World, index: int) -> None:
    """The next life of a process, under a new epoch; it has its predecessor's mailbox, and nothing else of it."""
    w.spend("restarts")
    old = w.lives[index]
    w.lives = (*w.lives, Life(old.who, old.number + 1))
    m.tell and m.tell(f"{w.name(len(w.lives) - 1)} starts")
    if old.who == "P":
        none, ranges = (0,) * m.scenario.slots, m.scenario.ranges
        chunks = tuple(range(len(w.memory), len(w.memory) + ranges))
        w.memory = (*w.memory, *(BLANK,) * ranges)
        w.pools = (*w.pools, Pool(len(w.lives) - 1, m.books.new, none, none, none, chunks, (0,) * ranges))


def hear(m: Model, w: World, index: int, rank: int) -> None:
    """One process comes to believe that a rank is gone; others do not, or later (R4)."""
    w.spend("rumours")
    m.tell and m.tell(f"{w.name(index)} believes that C{rank} is gone")
    w.life(index, believes_gone=tuple(sorted((*w.lives[index].believes_gone, rank))))


def duplicate(m: Model, w: World, message: Encode | Released) -> None:
    w.spend("duplicates")
    m.tell and m.tell(f"a message about {w.lease_name(message.lease)} is doubled")
    w.post(message)


def lose(m: Model, w: World, message: Encode) -> None:
    """A proxy is lost on its way to a living process: for all the producer knows, it may be read any time."""
    w.spend("losses")
    m.tell and m.tell(f"the proxy of {w.lease_name(message.lease)} for {w.name(message.life)} is lost")
    w.take(message)
    w.lost = tuple(sorted((*w.lost, (message.life, message.lease))))
    if w.requests[message.request].attempt == message.attempt and not w.requests[message.request].outcome:
        w.request(message.request, lost=True)


def retire(m: Model, w: World, index: int) -> None:
    """R7: only a chunk that no lease touches. Its next memory has the next serial."""
    w.spend("retirements")
    pool = w.pools[index]
    m.tell and m.tell(f"{w.name(pool.producer)} retires chunk 0, m{pool.memory[0]}")
    serial = pool.serials[0] + m.rules.serials_are_not_used_again
    w.pool(index, memory=put(pool.memory, 0, GONE), serials=put(pool.serials, 0, serial))


def poison(m: Model, w: World, index: int, slot: int) -> None:
    """The supervisor says of a dead producer's lease that it will never be valid, in a word of its own (R3)."""
    pool = w.pools[index]
    lease = index, slot, pool.lease[slot]
    m.tell and m.tell(f"the supervisor poisons {w.lease_name(lease)}")
    w.pool(index, poison=put(pool.poison, slot, pool.lease[slot]))


# --- faulty worlds: streams stuck on a wait (R3) ----------------------------------------------------------------------


def _offer_release(m: Model, w: World, steps: list[Step]) -> None:
    for index, life in enumerate(w.lives):
        for stream in life.streams:
            if stream and isinstance(stream[0], Wait):
                pool, slot, generation = stream[0].lease
                stuck = w.pools[pool].ready[slot] < generation and not w.lives[w.pools[pool].producer].alive
                # The watch over peers runs in the consumer's own loop, which may sit in a call that waits (R10).
                watching = life.running and not m.scenario.synchronises
                if stuck and watching:
                    steps.append((True, let_go, (index, stream[0])))


def let_go(m: Model, w: World, index: int, wait: Wait) -> None:
    """A fault: the wait on a dead producer's word is satisfied from the CPU, and garbage looks ready."""
    pool, slot, generation = wait.lease
    m.tell and m.tell(f"{w.name(index)} lets its stream go that waits for {w.lease_name(wait.lease)}")
    value = generation if m.rules.gate is Gate.STREAM else POISON
    w.pool(pool, ready=put(w.pools[pool].ready, slot, value))
