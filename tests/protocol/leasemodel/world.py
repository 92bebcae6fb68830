"""Everything there is at one moment, as immutable records that can be hashed and compared.

A world is forked, then fields of the fork are replaced; records are never changed in place. Words hold
generations; memory holds tags instead of bytes: whose they are, or that they are nobody's or torn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

#: Whose bytes: (request, attempt, part).
Tag = tuple[int, ...]
BLANK: Tag = (-1,)  #: memory nobody has written yet
TORN: Tag = (-2,)  #: a write is under way or was cut off, or the bytes changed while they were read
ERROR: Tag = (-3,)  #: an answer that is an error, not a value

POISON = 1 << 20  #: in faulty worlds: a value that lets every wait go (R3)
GONE = -1  #: a chunk that is not mapped, a column or a rank that there is not

#: Which page a word is on: the producer's ready words, or the ack page of that number.
READY = -1


# --- streams: a CUDA stream, or the copy thread of a host pool; work runs in order, behind the CPU's back -----------


class Write(NamedTuple):
    memory: int
    lease: tuple[int, int, int]  #: (pool, slot, generation)
    tag: Tag
    begun: bool = False
    kind: str = "write"


class Read(NamedTuple):
    memory: int
    lease: tuple[int, int, int]
    copy: int  #: which entry of the reader table gets the bytes
    seen: Tag | None = None  #: what was there when the read began
    kind: str = "read"


class Store(NamedTuple):
    """A control word written by the stream (cuStreamWriteValue32), so after everything queued before it."""

    page: int
    lease: tuple[int, int, int]
    kind: str = "store"


class Wait(NamedTuple):
    """In faulty worlds only (R3): the stream is held until ready has come (cuStreamWaitValue32)."""

    lease: tuple[int, int, int]
    kind: str = "wait"


Op = Write | Read | Store | Wait
Streams = tuple[tuple[Op, ...], ...]


# --- what programs remember -------------------------------------------------------------------------------------------


class Draft(NamedTuple):
    """A producer's open lease: its block has not ended."""

    request: int
    attempt: int
    part: int
    slot: int
    generation: int
    chunk: int
    stream: int  #: that writes the bytes (R5)
    published: bool = False  #: ready is queued behind the write
    told: tuple[int, ...] = ()  #: lives that were sent a proxy
    refused: int = GONE  #: a column that was marked, and whose send then refused


class Job(NamedTuple):
    """A consumer's open proxy, an entry of its reader table."""

    lease: tuple[int, int, int]
    chunk: int
    serial: int  #: as the producer's word was when the read was queued; GONE: it is not yet
    request: int
    attempt: int
    part: int
    group: tuple[int, ...]
    state: str = "held"  #: held (-> doubted) -> queued -> read -> answered; or abandoned, or released
    tag: Tag = BLANK
    copy: int = 0  #: 0, unless a fault lets a lease have several entries


class Import(NamedTuple):
    """Physical memory of a peer that is mapped here."""

    pool: int
    chunk: int
    serial: int
    memory: int


class Life(NamedTuple):
    """One life of one process: running; stopped (its streams go on); draining (dead, but its work is not); dead."""

    who: str
    number: int = 0
    state: str = "running"
    streams: Streams = ((), ())
    drafts: tuple[Draft, ...] = ()
    jobs: tuple[Job, ...] = ()
    imports: tuple[Import, ...] = ()
    believes_gone: tuple[int, ...] = ()  #: ranks: this life's view of the membership

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def alive(self) -> bool:
        return self.state in ("running", "stopped")


class AckPage(NamedTuple):
    life: int
    column: int
    words: tuple[int, ...]
    struck: bool = False  #: written off; the producer looks at it no more


class Pool(NamedTuple):
    """One life's pool: its ledger (by number, see `books`), its words, its memory."""

    producer: int
    book: int
    lease: tuple[int, ...]
    ready: tuple[int, ...]
    poison: tuple[int, ...]
    memory: tuple[int, ...]  #: of each chunk; GONE: not mapped
    serials: tuple[int, ...]  #: of each chunk: which physical memory this is (R6)
    pages: tuple[AckPage, ...] = ()


# --- mail: outlives its receiver, arrives in any order ----------------------------------------------------------------


class Encode(NamedTuple):
    rank: int  #: whose mailbox
    life: int  #: the epoch that was meant (R4)
    lease: tuple[int, int, int]  #: generation 0: inline, the bytes are in the message
    chunk: int
    request: int
    attempt: int
    part: int
    group: tuple[int, ...]  #: the ordered ranks of the assignment (R4); empty: the receiver is the reader
    kind: str = "encode"


class Answer(NamedTuple):
    request: int
    attempt: int
    part: int
    life: int
    tag: Tag
    kind: str = "answer"


class Released(NamedTuple):
    """An acknowledgement by message, across nodes, sent once the read has completed."""

    life: int
    lease: tuple[int, int, int]
    kind: str = "released"


Mail = Encode | Answer | Released


# --- requests, as their owner knows them ------------------------------------------------------------------------------


class Part(NamedTuple):
    """One lease of an attempt: who is told of it, and who of them must acknowledge."""

    told: tuple[int, ...]
    need: tuple[int, ...]


class Request(NamedTuple):
    """The owner keeps the source until the outcome, so every attempt can be made anew."""

    items: int
    attempt: int = 1
    plan: tuple[Part, ...] = ()
    made: int = 0  #: parts whose lease was taken
    due: tuple[tuple[int, int], ...] = ()  #: (part, life) answers of this attempt still to come
    outcome: str = ""
    lost: bool = False  #: a message of this attempt was lost


class Luck(NamedTuple):
    """How often each mishap may still happen."""

    kills: int = 0
    producer_kills: int = 0
    restarts: int = 0
    stops: int = 0
    cancels: int = 0
    refusals: int = 0  #: sends that refuse, and blocks that raise between two sends
    duplicates: int = 0
    losses: int = 0
    hits: int = 0  #: embedding-cache hits
    deadlines: int = 0  #: consumers that give a lease up before it is ready
    doubts: int = 0  #: looks at a lease that is not ready, apart from what the consumer then does
    retirements: int = 0  #: of chunks
    rumours: int = 0  #: that a rank is gone


class World:
    __slots__ = ("lives", "lost", "luck", "mail", "memory", "pools", "requests")

    lives: tuple[Life, ...]
    pools: tuple[Pool, ...]
    memory: tuple[Tag, ...]
    mail: tuple[Mail, ...]
    requests: tuple[Request, ...]
    lost: tuple[tuple[int, tuple[int, int, int]], ...]  #: (life, lease) whose proxy never arrived
    luck: Luck

    def fork(self) -> World:
        new = World.__new__(World)
        new.lives, new.pools, new.memory, new.mail = self.lives, self.pools, self.memory, self.mail
        new.requests, new.lost, new.luck = self.requests, self.lost, self.luck
        return new

    def key(self) -> tuple[Any, ...]:
        return self.lives, self.pools, self.memory, self.mail, self.requests, self.lost, self.luck

    # --- changes, on a fork

    def life(self, index: int, **changes: Any) -> Life:
        """Change a life; returns it as it is now."""
        life = self.lives[index]._replace(**changes)
        self.lives = put(self.lives, index, life)
        return life

    def queue(self, index: int, stream: int, *ops: Op) -> None:
        streams = self.lives[index].streams
        self.life(index, streams=put(streams, stream, streams[stream] + ops))

    def pool(self, index: int, **changes: Any) -> None:
        self.pools = put(self.pools, index, self.pools[index]._replace(**changes))

    def request(self, index: int, **changes: Any) -> None:
        self.requests = put(self.requests, index, self.requests[index]._replace(**changes))

    def job(self, index: int, old: Job | None, new: Job | None) -> None:
        """Add an entry to a reader table (old: None), replace it, or remove it (new: None)."""
        jobs = self.lives[index].jobs
        self.life(index, jobs=tuple(sorted(job for job in (*(j for j in jobs if j != old), new) if job is not None)))

    def draft(self, index: int, old: Draft | None, new: Draft | None) -> None:
        drafts = self.lives[index].drafts
        self.life(index, drafts=tuple(d for d in (*(d for d in drafts if d != old), new) if d is not None))

    def post(self, message: Mail) -> None:
        self.mail = tuple(sorted((*self.mail, message), key=_mail_order))

    def take(self, message: Mail) -> None:
        place = self.mail.index(message)
        self.mail = self.mail[:place] + self.mail[place + 1 :]

    def spend(self, what: str) -> None:
        self.luck = self.luck._replace(**{what: getattr(self.luck, what) - 1})

    # --- questions

    def latest(self, who: str) -> int:
        """The youngest life of a process."""
        return max(index for index, life in enumerate(self.lives) if life.who == who)

    def page_of(self, pool: int, life: int) -> int | None:
        """The number of a life's ack page; None: it has not attached."""
        for number, page in enumerate(self.pools[pool].pages):
            if page.life == life:
                return number
        return None

    def ops(self) -> Iterator[tuple[int, Op]]:
        for index, life in enumerate(self.lives):
            for stream in life.streams:
                for op in stream:
                    yield index, op

    def is_over(self, imported: Import) -> bool:
        """Whether memory mapped by a consumer will never be lent again: its producer is dead, or retired it."""
        pool = self.pools[imported.pool]
        return self.lives[pool.producer].state == "dead" or pool.serials[imported.chunk] != imported.serial

    def physical(self) -> int:
        """Pieces of memory that exist: mapped by a living producer, or still imported by anybody living."""
        held = {memory for pool in self.pools if self.lives[pool.producer].state != "dead" for memory in pool.memory}
        held |= {i.memory for life in self.lives if life.state != "dead" for i in life.imports}
        return len(held - {GONE})

    # --- names, for traces

    def name(self, life: int) -> str:
        who, number = self.lives[life][:2]
        return f"{who}/{number + 1}" if number else who

    def request_name(self, request: int, attempt: int = 1) -> str:
        return "abcdefgh"[request] + ("" if attempt == 1 else f"#{attempt}")

    def lease_name(self, lease: tuple[int, int, int]) -> str:
        pool, slot, generation = lease
        return f"{'' if pool == 0 else f'pool {pool} '}slot {slot} g{generation}"

    def tag_name(self, tag: Tag) -> str:
        named = {BLANK: "bytes nobody wrote", TORN: "torn bytes", ERROR: "an error"}.get(tag)
        return named or f"the bytes of {self.request_name(tag[0], tag[1])}{f'.{tag[2]}' if tag[2] else ''}"


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def column_of(w: World, pool_index: int, life: int) -> int:
    """The column that a life was given when it attached; the producer may not know yet that it was struck."""
    page = w.page_of(pool_index, life)
    return GONE if page is None else w.pools[pool_index].pages[page].column


def _mail_order(message: Mail) -> tuple[Any, ...]:
    return (message.kind, *message)
