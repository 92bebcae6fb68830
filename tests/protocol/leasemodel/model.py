"""One case to search: a scenario, the rules in force, and which laws the search watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tensorferry.codecs.pool.ledger import Ledger

from . import chance, consumer, hardware, owner, producer, recycler
from .books import Books
from .explore import Step
from .laws import Law, LawBroken
from .rules import PROTOCOL, Rules
from .world import BLANK, AckPage, Import, Life, Luck, Pool, Request, World


@dataclass(frozen=True)
class Scenario:
    """A small world. Consumers are ranks C0 .. ; request r prefers rank r modulo their number."""

    name: str
    items: tuple[int, ...] = (1, 1)  #: one entry a request: its items, each for an owner of its own
    ranks: int = 1
    readers: str = "owner"  #: who is told: the item's owner; `all`, who all read; `group`: all, and the owner reads
    slots: int = 2
    ranges: int = 1
    first_generation: int = 1
    attempts: int = 1
    inline: bool = False  #: a full pool sends inline, at once; else the request waits
    remote: bool = False  #: consumers are on another node: they see no words, and acknowledge by message
    synchronises: bool = False  #: consumers make CUDA calls that wait for all that is queued (B1)
    budget: int | None = None  #: pieces of physical memory; given, the pool is elastic
    luck: Luck = field(default_factory=Luck)


class Model:
    def __init__(
        self,
        scenario: Scenario,
        rules: Rules = PROTOCOL,
        watched: frozenset[Law] = frozenset(Law),
        ledger: type[Ledger] = Ledger,
    ) -> None:
        self.scenario, self.rules, self.watched = scenario, rules, watched
        self.books = Books(scenario.ranges, scenario.slots, ledger, scenario.first_generation)
        #: Set while a trace is told. Steps say what they do by `m.tell and m.tell(...)`, which costs a search nothing.
        self.tell: Callable[[str], None] | None = None

    def broken(self, law: Law, story: str) -> None:
        """A law does not hold. Ends the search by LawBroken, unless the search does not watch this law."""
        if law in self.watched:
            raise LawBroken(law, story)

    def start(self) -> World:
        """Every process runs its first life, and every consumer has attached to the pool."""
        s, w = self.scenario, World()
        none = (0,) * s.slots
        book, pages, lives = self.books.new, [], [Life("P")]
        for rank in range(s.ranks):
            book, column = self.books.admit(book)
            pages.append(AckPage(1 + rank, column, none))
            lives.append(Life(f"C{rank}", imports=tuple(Import(0, chunk, 0, chunk) for chunk in range(s.ranges))))
        w.lives = tuple(lives)
        chunks = tuple(range(s.ranges))
        w.pools = (Pool(0, book, none, none, none, chunks, (0,) * s.ranges, tuple(pages)),)
        w.memory = (BLANK,) * s.ranges
        w.mail, w.lost = (), ()
        w.requests = tuple(Request(items) for items in s.items)
        w.luck = s.luck
        return w

    def steps(self, w: World) -> list[Step]:
        """Everything that can happen next, in an order that never changes."""
        steps: list[Step] = []
        for part in (hardware, producer, recycler, consumer, owner, chance):
            part.offer(self, w, steps)
        return steps

    def take(self, w: World, step: Step) -> World:
        """The world after a step. Raises LawBroken."""
        new = w.fork()
        step[1](self, new, *step[2])
        return new

    def rest(self, w: World) -> None:
        """Nothing goes on by itself in this world any more: it must be tidy. Raises LawBroken."""
        for index, life in enumerate(w.lives):
            if any(life.streams):
                self.broken(Law.WEDGE, f"{w.name(index)} has work queued that can never run")
            waiting = [job for job in life.jobs if job.state != "released"]
            if life.running and (waiting or life.drafts):
                self.broken(Law.WEDGE, f"{w.name(index)} waits for ever with {(*waiting, *life.drafts)}")
            if life.running and any(map(w.is_over, life.imports)):
                self.broken(Law.WEDGE, f"{w.name(index)} keeps memory mapped that will never be lent again")
        for number, request in enumerate(w.requests):
            if not request.outcome:
                self.broken(Law.WEDGE, f"request {w.request_name(number)} never ends")
        for index, pool in enumerate(w.pools):
            if w.lives[pool.producer].running:
                self._rest_of_pool(w, index)

    def _rest_of_pool(self, w: World, index: int) -> None:
        pool = w.pools[index]
        ledger = self.books.see(pool.book)
        for page in pool.pages:
            if not page.struck and not w.lives[page.life].alive:
                self.broken(Law.WEDGE, f"{w.name(page.life)} is dead and never struck")
        for grant in ledger.leases():
            lease = index, grant.slot, grant.generation
            owing = [
                page.life
                for page in pool.pages
                if not page.struck
                and grant in ledger.outstanding(page.column)
                and page.words[grant.slot] != grant.generation
            ]
            if not owing or any(w.lives[life].running and (life, lease) not in w.lost for life in owing):
                who = ", ".join(map(w.name, owing)) or "nobody"
                self.broken(Law.LEAK, f"{w.lease_name(lease)} never comes back; it waits for {who}")
