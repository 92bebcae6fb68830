"""R9 in a model of its own: two encoder ranks, each with a half of two requests and a pool for one embedding.

A rank borrows a half's features, encodes them, puts the embedding into its own pool and lets the features go; the
scheduler needs both halves of a request. If ranks wait for space while they hold features, and the scheduler
keeps what it has until a request is whole, each rank can wait for ever for what the other cannot send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.pool.ledger import Grant

from .books import Books
from .explore import Step
from .laws import Law, LawBroken
from .rules import PROTOCOL, Rules

RANKS = REQUESTS = 2


class Half(NamedTuple):
    """What became of one request on one rank: new -> borrowed -> sent -> kept by the scheduler -> over."""

    state: str = "new"
    lease: Grant | None = None  #: of the embedding; None: it travelled inline


class Crowd(NamedTuple):
    """All halves, by request, then rank; each rank's ledger and what the scheduler acknowledged of it."""

    halves: tuple[tuple[Half, ...], ...]
    books: tuple[int, ...]
    acks: tuple[tuple[int, ...], ...]
    ready: tuple[tuple[int, ...], ...]

    def key(self) -> Any:
        return tuple(self)


class Pressure:
    def __init__(self, rules: Rules = PROTOCOL, watched: frozenset[Law] = frozenset(Law)) -> None:
        self.rules, self.watched = rules, watched
        self.books = Books(ranges=1, slots=2)
        self.tell: Callable[[str], None] | None = None

    def start(self) -> Crowd:
        book, column = self.books.admit(self.books.new)  # the scheduler is column 0 of every rank's pool
        assert column == 0
        none = (0, 0)
        return Crowd(((Half(),) * RANKS,) * REQUESTS, (book,) * RANKS, (none,) * RANKS, (none,) * RANKS)

    def steps(self, w: Crowd) -> list[Step]:
        steps: list[Step] = []
        for rank in range(RANKS):
            busy = any(halves[rank].state == "borrowed" for halves in w.halves)
            full = isinstance(self.books.lend(w.books[rank])[1], FerryError)
            for number, halves in enumerate(w.halves):
                if halves[rank].state == "new" and not busy:
                    steps.append((True, borrow, (number, rank)))
                elif halves[rank].state == "borrowed" and (not full or self.rules.embeddings_never_wait):
                    steps.append((True, send, (number, rank)))
                elif halves[rank].state == "sent":
                    steps.append((True, arrive, (number, rank)))
            if self.books.reclaim(w.books[rank], w.ready[rank], ((0, w.acks[rank]),))[1]:
                steps.append((True, reclaim, (rank,)))
        return steps

    def take(self, w: Crowd, step: Step) -> Crowd:
        new: Crowd = step[1](self, w, *step[2])
        return new

    def rest(self, w: Crowd) -> None:
        for number, halves in enumerate(w.halves):
            for rank, half in enumerate(halves):
                if half.state != "over" and Law.WEDGE in self.watched:
                    raise LawBroken(Law.WEDGE, f"request {'ab'[number]} on E{rank} stays {half.state} for ever")
        for rank, book in enumerate(w.books):
            if self.books.see(book).lent_slots and Law.LEAK in self.watched:
                raise LawBroken(Law.LEAK, f"E{rank}'s pool does not come back")


def borrow(m: Pressure, w: Crowd, number: int, rank: int) -> Crowd:
    m.tell and m.tell(f"E{rank} borrows its features of {'ab'[number]} and encodes them")
    return _now(w, number, rank, Half("borrowed"))


def send(m: Pressure, w: Crowd, number: int, rank: int) -> Crowd:
    """An embedding leaves by lease, or inline when there is no room: at once, because features are held (R9)."""
    book, grant = m.books.lend(w.books[rank])
    if isinstance(grant, FerryError):
        m.tell and m.tell(f"E{rank} sends its half of {'ab'[number]} inline, and lets the features go")
        return _now(w, number, rank, Half("sent"))
    m.tell and m.tell(f"E{rank} puts its half of {'ab'[number]} into its pool, sends it, and lets the features go")
    book = m.books.settle(m.books.dispatch(book, grant, 0)[0], grant)
    w = _now(w, number, rank, Half("sent", grant))
    ready = _put(w.ready, rank, _put(w.ready[rank], grant.slot, grant.generation))
    return w._replace(books=_put(w.books, rank, book), ready=ready)


def arrive(m: Pressure, w: Crowd, number: int, rank: int) -> Crowd:
    """The scheduler copies out on arrival and acknowledges (R9), or keeps it until the request is whole."""
    if m.rules.schedulers_copy_out_on_arrival:
        m.tell and m.tell(f"the scheduler copies E{rank}'s half of {'ab'[number]} and acknowledges")
        return _acknowledge(w, number, rank)
    m.tell and m.tell(f"the scheduler keeps E{rank}'s half of {'ab'[number]} as it is")
    w = _now(w, number, rank, w.halves[number][rank]._replace(state="kept"))
    if all(half.state == "kept" for half in w.halves[number]):
        for each in range(RANKS):
            w = _acknowledge(w, number, each)
    return w


def reclaim(m: Pressure, w: Crowd, rank: int) -> Crowd:
    m.tell and m.tell(f"E{rank} reclaims")
    book, _ = m.books.reclaim(w.books[rank], w.ready[rank], ((0, w.acks[rank]),))
    return w._replace(books=_put(w.books, rank, book))


def _acknowledge(w: Crowd, number: int, rank: int) -> Crowd:
    lease = w.halves[number][rank].lease
    if lease is not None:
        w = w._replace(acks=_put(w.acks, rank, _put(w.acks[rank], lease.slot, lease.generation)))
    return _now(w, number, rank, Half("over"))


def _now(w: Crowd, number: int, rank: int, half: Half) -> Crowd:
    return w._replace(halves=_put(w.halves, number, _put(w.halves[number], rank, half)))


def _put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])
