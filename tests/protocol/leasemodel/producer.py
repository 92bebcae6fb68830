"""The producer: takes a lease, has it written, says so, tells the readers, lets go, takes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.pool.ledger import Grant

from . import hardware, owner, recycler
from .books import GRANULE
from .world import GONE, READY, Draft, Encode, Part, Request, Store, World, Write, column_of, put

if TYPE_CHECKING:
    from .explore import Step
    from .model import Model


def offer(m: Model, w: World, steps: list[Step]) -> None:
    for index, pool in enumerate(w.pools):
        life = w.lives[pool.producer]
        if not life.running:
            continue
        for draft in life.drafts:
            _offer_draft(m, w, index, draft, steps)
        for number, request in enumerate(w.requests):
            if not any(draft.request == number for draft in life.drafts):
                _offer_request(m, w, index, number, request, steps)


def _offer_request(m: Model, w: World, pool: int, number: int, request: Request, steps: list[Step]) -> None:
    if request.outcome or (request.plan and request.made == len(request.plan)):
        return
    if not request.plan and not _plan(m, w, pool, number):
        return  # nobody is there to read: the owner gives up, or a consumer attaches
    if w.pools[pool].memory[0] == GONE:
        recycler.offer_growth(m, w, pool, steps)
    elif not isinstance(m.books.lend(w.pools[pool].book)[1], FerryError):
        steps.append((True, reserve, (pool, number)))
    elif m.scenario.inline:
        steps.append((True, send_inline, (pool, number)))


def _offer_draft(m: Model, w: World, pool: int, draft: Draft, steps: list[Step]) -> None:
    request = w.requests[draft.request]
    if draft.refused != GONE:
        steps.append((True, retract, (pool, draft)))
    elif request.outcome or request.attempt != draft.attempt:
        elsewhere = not m.rules.redispatch_is_a_new_lease and not request.outcome and draft.told
        if elsewhere and _plan(m, w, pool, draft.request):
            steps.append((True, send_again, (pool, draft)))
        else:
            steps.append((True, take_back, (pool, draft)))
    elif not draft.published:
        steps.append((True, publish, (pool, draft)))
    elif len(draft.told) < len(request.plan[draft.part].told):
        # Across nodes nobody can look at ready, so the write has ended before anybody is told.
        if not m.scenario.remote or w.pools[pool].ready[draft.slot] == draft.generation:
            steps.append((True, tell, (pool, draft)))
            if w.luck.refusals:
                steps.append((False, send_refuses, (pool, draft)))
                if draft.told:
                    steps.append((False, send_raises, (pool, draft)))


# --- a lease's life, by docs/protocol.md ---------------------------------------------------------------------------


def _plan(m: Model, w: World, pool: int, number: int) -> tuple[Part, ...]:
    """Who will be told of which lease, and who of them must acknowledge (R2). Empty: nobody is attached and running."""
    s, request = m.scenario, w.requests[number]
    there = [page.life for page in w.pools[pool].pages if not page.struck and w.lives[page.life].running]
    there.sort(key=lambda life: w.lives[life].who)
    if not there:
        return ()
    first = number + request.attempt - 1
    if s.readers == "all":
        return (Part(tuple(there), tuple(there)),)
    if s.readers == "group":
        group = tuple(there)
        owner = (assigned(group, number),)
        return (Part(group, owner if m.rules.need_names_the_owner_alone else group),)
    owners = [there[(first + item) % len(there)] for item in range(request.items)]
    if not m.rules.need_names_every_reader:
        return (Part(tuple(owners), tuple(owners[:1])),)  # one packed lease, whoever owns the items
    return tuple(Part((owner,), (owner,)) for owner in owners)


def assigned(group: tuple[int, ...], number: int) -> int:
    """The pure function of the message that says who of a group owns a request's item (E1)."""
    return group[(number + 1) % len(group)]


def reserve(m: Model, w: World, pool_index: int, number: int) -> None:
    """Step 1: a range, a slot, a generation; `lease = g`; the write is queued on a worker thread's stream."""
    pool, request = w.pools[pool_index], w.requests[number]
    plan = request.plan or _plan(m, w, pool_index, number)
    book, grant = m.books.lend(pool.book)
    assert isinstance(grant, Grant)
    draft = Draft(
        number, request.attempt, request.made, grant.slot, grant.generation, grant.offset // GRANULE, number % 2
    )
    lease = pool_index, grant.slot, grant.generation
    memory = pool.memory[draft.chunk]
    m.tell and m.tell(
        f"{w.name(pool.producer)} lends {w.lease_name(lease)} (m{memory}) to {w.request_name(number, request.attempt)}"
        f" and queues its write on stream {draft.stream}"
    )
    w.pool(pool_index, book=book, lease=put(pool.lease, grant.slot, grant.generation))
    tag = (number, request.attempt, request.made)
    w.queue(pool.producer, draft.stream, Write(memory, lease, tag))
    w.draft(pool.producer, None, draft)
    due = _due(m, number, request.due, plan, draft.part)
    w.request(number, plan=plan, made=request.made + 1, due=due)


def _due(
    m: Model, number: int, due: tuple[tuple[int, int], ...], plan: tuple[Part, ...], part: int
) -> tuple[tuple[int, int], ...]:
    """The answers still to come, with those of one more part."""
    told = plan[part].told
    readers = (assigned(told, number),) if m.scenario.readers == "group" else told
    return tuple(sorted((*due, *((part, life) for life in readers))))


def _group(m: Model, part: Part) -> tuple[int, ...]:
    """The ordered ranks that a message carries (R4)."""
    return part.told if m.scenario.readers == "group" else ()


def send_inline(m: Model, w: World, pool_index: int, number: int) -> None:
    """L5: the pool is full, so the bytes travel in the message; no lease, nothing to give back (R9)."""
    pool, request = w.pools[pool_index], w.requests[number]
    plan = request.plan or _plan(m, w, pool_index, number)
    part = request.made
    m.tell and m.tell(f"{w.name(pool.producer)} sends {w.request_name(number, request.attempt)} inline: pool full")
    for life in plan[part].told:
        rank = int(w.lives[life].who[1:])
        w.post(Encode(rank, life, (pool_index, 0, 0), 0, number, request.attempt, part, _group(m, plan[part])))
    w.request(number, plan=plan, made=part + 1, due=_due(m, number, request.due, plan, part))


def publish(m: Model, w: World, pool_index: int, draft: Draft) -> None:
    """Step 2: ready goes on the stream that writes, so it comes after the bytes (R5)."""
    producer = w.pools[pool_index].producer
    lease = pool_index, draft.slot, draft.generation
    stream = draft.stream if m.rules.ready_is_on_the_writing_stream else 1 - draft.stream
    if m.rules.ready_follows_the_write:
        m.tell and m.tell(f"{w.name(producer)} queues ready of {w.lease_name(lease)} on stream {stream}")
        w.queue(producer, stream, Store(READY, lease))
    else:
        m.tell and m.tell(f"{w.name(producer)}'s CPU stores ready of {w.lease_name(lease)} at once")
        hardware.store(m, w, producer, READY, lease)
    w.draft(producer, draft, draft._replace(published=True))


def tell(m: Model, w: World, pool_index: int, draft: Draft) -> None:
    """Step 3: a column is marked, then its proxy is sent; the last send is the end of the block, which settles."""
    pool, request = w.pools[pool_index], w.requests[draft.request]
    part = request.plan[draft.part]
    life = part.told[len(draft.told)]
    last = len(draft.told) + 1 == len(part.told)
    if m.rules.a_column_is_marked_before_its_send:
        reached = life not in part.need or _mark(m, w, pool_index, draft, life) != GONE
    else:
        reached = True
        for each in part.told if last else ():
            _mark(m, w, pool_index, draft, each)
    if reached:
        m.tell and m.tell(
            f"{w.name(pool.producer)} sends {w.name(life)} the proxy of {_lease_name(w, pool_index, draft)}"
        )
        w.post(_proxy(w, pool_index, draft, life, _group(m, part)))
    told = draft._replace(told=(*draft.told, life))
    w.draft(pool.producer, draft, told)
    if last and m.rules.redispatch_is_a_new_lease:
        _settle(m, w, pool_index, told)


def _mark(m: Model, w: World, pool_index: int, draft: Draft, life: int) -> int:
    """The ledger is told that this life must acknowledge. Returns its column; GONE: it was struck, so is not told."""
    column = column_of(w, pool_index, life)
    for page in w.pools[pool_index].pages if not m.rules.a_column_is_of_one_life else ():
        if w.lives[page.life].who == w.lives[life].who and not page.struck:
            column = page.column  # a fault: the rank has a column already
            break
    book, refusal = m.books.dispatch(w.pools[pool_index].book, _grant(draft), column)
    if refusal is not None:
        m.tell and m.tell(f"the ledger refuses to name {w.name(life)}, so it is not told: {refusal}")
        return GONE
    w.pool(pool_index, book=book)
    return column


def _proxy(w: World, pool_index: int, draft: Draft, life: int, group: tuple[int, ...]) -> Encode:
    rank, lease = int(w.lives[life].who[1:]), (pool_index, draft.slot, draft.generation)
    return Encode(rank, life, lease, draft.chunk, draft.request, draft.attempt, draft.part, group)


def send_refuses(m: Model, w: World, pool_index: int, draft: Draft) -> None:
    """A send refuses as a whole, which is certain: the peer is not connected."""
    part = w.requests[draft.request].plan[draft.part]
    life = part.told[len(draft.told)]
    w.spend("refusals")
    producer = w.pools[pool_index].producer
    column = _mark(m, w, pool_index, draft, life) if life in part.need else GONE
    m.tell and m.tell(f"{w.name(producer)}'s send of {_lease_name(w, pool_index, draft)} to {w.name(life)} refuses")
    w.draft(producer, draft, draft._replace(refused=column))
    if column == GONE:
        owner.end_attempt(m, w, draft.request)


def retract(m: Model, w: World, pool_index: int, draft: Draft) -> None:
    """What was certainly not sent is taken off again, and the attempt is over."""
    pool = w.pools[pool_index]
    m.tell and m.tell(f"{w.name(pool.producer)} retracts column {draft.refused}, the lease is not sent there")
    w.pool(pool_index, book=m.books.retract(pool.book, _grant(draft), draft.refused))
    w.draft(pool.producer, draft, draft._replace(refused=GONE))
    owner.end_attempt(m, w, draft.request)


def send_raises(m: Model, w: World, pool_index: int, draft: Draft) -> None:
    """The block ends between two sends, by an exception: somebody was told, so it settles and is not cancelled."""
    w.spend("refusals")
    producer = w.pools[pool_index].producer
    if m.rules.a_column_is_marked_before_its_send:
        m.tell and m.tell(f"{w.name(producer)}'s block of {_lease_name(w, pool_index, draft)} raises between two sends")
        _settle(m, w, pool_index, draft)
    else:
        m.tell and m.tell(
            f"{w.name(producer)}'s block of {_lease_name(w, pool_index, draft)} raises between two sends: "
            f"not all were sent, so it cancels"
        )
        _cancel(m, w, pool_index, draft)
    owner.end_attempt(m, w, draft.request)


def take_back(m: Model, w: World, pool_index: int, draft: Draft) -> None:
    """The request was cancelled, or a later attempt has begun: the block ends."""
    producer = w.pools[pool_index].producer
    m.tell and m.tell(f"{w.name(producer)} ends the block of {_lease_name(w, pool_index, draft)}")
    if draft.told:
        _settle(m, w, pool_index, draft)
    else:
        _cancel(m, w, pool_index, draft)


def _cancel(m: Model, w: World, pool_index: int, draft: Draft) -> None:
    """R1: nobody was told, but the writer may still write: ready is queued behind it, and reclaim waits for that."""
    pool = w.pools[pool_index]
    lease = pool_index, draft.slot, draft.generation
    if not m.rules.cancel_waits_for_the_writer:
        hardware.store(m, w, pool.producer, READY, lease)
    elif not draft.published:
        w.queue(pool.producer, draft.stream, Store(READY, lease))
    w.pool(pool_index, book=m.books.settle(pool.book, _grant(draft)))
    w.draft(pool.producer, draft, None)


def _settle(m: Model, w: World, pool_index: int, draft: Draft) -> None:
    pool = w.pools[pool_index]
    w.pool(pool_index, book=m.books.settle(pool.book, _grant(draft)))
    w.draft(pool.producer, draft, None)


def send_again(m: Model, w: World, pool_index: int, draft: Draft) -> None:
    """A fault (R4): the lease of an owner that does not answer goes to another, who is to acknowledge for both."""
    pool, attempt = w.pools[pool_index], w.requests[draft.request].attempt
    plan = _plan(m, w, pool_index, draft.request)
    m.tell and m.tell(f"{w.name(pool.producer)} takes {w.name(draft.told[-1])} off {_lease_name(w, pool_index, draft)}")
    column = column_of(w, pool_index, draft.told[-1])
    w.pool(pool_index, book=m.books.retract(pool.book, _grant(draft), column))
    w.draft(pool.producer, draft, draft._replace(attempt=attempt, told=()))
    w.request(draft.request, plan=plan, made=1, due=tuple((0, life) for life in plan[0].told))


def _grant(draft: Draft) -> Grant:
    return Grant(draft.slot, draft.generation, draft.chunk * GRANULE, GRANULE)


def _lease_name(w: World, pool_index: int, draft: Draft) -> str:
    return w.lease_name((pool_index, draft.slot, draft.generation))
