"""A consumer: receives a proxy, looks whether the bytes are there, reads them on a stream, acknowledges, answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import hardware
from .laws import Law
from .producer import assigned
from .rules import Gate
from .world import (
    ERROR,
    GONE,
    POISON,
    READY,
    Answer,
    Encode,
    Import,
    Job,
    Life,
    Read,
    Released,
    Store,
    Wait,
    World,
    put,
)

if TYPE_CHECKING:
    from .explore import Step
    from .model import Model


def offer(m: Model, w: World, steps: list[Step]) -> None:
    for index, life in enumerate(w.lives):
        if not life.running or life.who == "P":
            continue
        if m.scenario.synchronises and any(life.streams):
            continue  # its one thread sits in a CUDA call that waits for everything queued (B1)
        for message in w.mail:
            if isinstance(message, Encode) and f"C{message.rank}" == life.who:
                steps.append((True, receive, (index, message)))
        for job in life.jobs:
            _offer_job(m, w, index, job, steps)
        for imported in life.imports:
            if w.is_over(imported) and (not m.rules.unmap_after_the_last_ack or not _is_used(w, life, imported)):
                steps.append((True, unmap, (index, imported)))
        for number, pool in enumerate(w.pools):
            if w.lives[pool.producer].running and w.page_of(number, index) is None:
                steps.append((True, attach, (index, number)))


def _offer_job(m: Model, w: World, index: int, job: Job, steps: list[Step]) -> None:
    pool_index, slot, generation = job.lease
    pool, request = w.pools[pool_index], w.requests[job.request]
    # A remote reader's release is a message it sends after the read, whether or not anybody wants the answer.
    loose = ("held", "doubted") if m.scenario.remote else ("held", "doubted", "queued")
    if job.state in loose and (request.outcome or request.attempt != job.attempt):
        steps.append((False, abandon, (index, job)))
    if job.state == "doubted":
        steps.append((True, decide, (index, job)))
    if job.state == "read":
        steps.append((True, answer, (index, job)))
    if job.state != "held":
        return
    if m.rules.gate is not Gate.HOST or m.scenario.remote:
        steps.append((True, queue_read, (index, job)))
    elif pool.lease[slot] != generation:
        steps.append((True, refuse, (index, job, "the lease is over")))
    elif pool.poison[slot] == generation:
        steps.append((True, refuse, (index, job, "it is poisoned")))
    elif pool.ready[slot] == generation:
        steps.append((True, queue_read, (index, job)))
    elif w.lives[pool.producer].state == "dead":
        steps.append((True, refuse, (index, job, "its producer died before it was ready")))
    else:
        if w.luck.deadlines:
            steps.append((False, time_out, (index, job)))
        if w.luck.doubts:
            steps.append((False, doubt, (index, job)))
    if w.luck.hits:
        steps.append((False, hit, (index, job)))


# --- joining ----------------------------------------------------------------------------------------------------------


def attach(m: Model, w: World, index: int, pool_index: int) -> None:
    """Map a pool and hand over an ack page of this life's own (R2), for a column of the pool's ledger."""
    pool, life = w.pools[pool_index], w.lives[index]
    book, column = m.books.admit(pool.book)
    m.tell and m.tell(f"{w.name(index)} attaches to the pool of {w.name(pool.producer)} as column {column}")
    pages = pool.pages
    if not m.rules.a_life_has_an_ack_page_of_its_own:
        for number, page in enumerate(pages):
            if w.lives[page.life].who == life.who:  # a fault: one page a rank, whoever lives there
                pages = put(pages, number, page._replace(life=index, column=column, struck=False))
    if pages == pool.pages:
        pages = (*pages, hardware.blank_page(index, column, m.scenario.slots))
    w.pool(pool_index, book=book, pages=pages)
    known = {i.chunk: i.memory for i in life.imports} if not m.rules.pool_ids_carry_a_nonce else {}
    new = tuple(
        Import(pool_index, chunk, pool.serials[chunk], known.get(chunk, memory))
        for chunk, memory in enumerate(pool.memory)
        if memory != GONE
    )
    w.life(index, imports=(*life.imports, *new))


# --- a proxy's life ---------------------------------------------------------------------------------------------------


def receive(m: Model, w: World, index: int, message: Encode) -> None:
    """R4: mail for another epoch is dropped. R6: a lease that is open here already, or acknowledged, is not new."""
    w.take(message)
    pool_index, _, generation = message.lease
    tag = (message.request, message.attempt, message.part)
    if m.rules.mail_is_for_one_epoch and message.life != index:
        m.tell and m.tell(f"{w.name(index)} drops mail of its former life")
        return
    if message.group and not _owns(m, w, w.lives[index], index, message):
        m.tell and m.tell(f"{w.name(index)} gets {w.request_name(message.request)}, whose item is not its own")
        return
    if not generation:
        m.tell and m.tell(f"{w.name(index)} reads {w.tag_name(tag)} from the message and answers")
        w.post(Answer(*tag, index, tag))
        return
    number = w.page_of(pool_index, index)
    mapped = m.scenario.budget or any(i.pool == pool_index for i in w.lives[index].imports)
    if number is None or not mapped:
        m.tell and m.tell(f"{w.name(index)} gets {w.lease_name(message.lease)} of a pool it does not have: an error")
        w.post(Answer(*tag, index, ERROR))
        return
    if _is_known(m, w, index, message.lease):
        m.tell and m.tell(f"{w.name(index)} drops a repeated proxy of {w.lease_name(message.lease)}")
        return
    m.tell and m.tell(f"{w.name(index)} receives the proxy of {w.lease_name(message.lease)}")
    copies = [job.copy for job in w.lives[index].jobs if job.lease == message.lease]
    copy = 1 + max(copies) if copies else 0
    for old in w.lives[index].jobs:
        if old.state == "released" and old.lease[:2] == message.lease[:2]:
            w.job(index, old, None)
    w.job(index, None, Job(message.lease, message.chunk, GONE, *tag, message.group, copy=copy))


def _is_known(m: Model, w: World, index: int, lease: tuple[int, int, int]) -> bool:
    """Whether this lease is open here, or was acknowledged here: its words say so; without words, its last entry."""
    if hardware.acknowledged(w, index, lease):
        return True
    for job in w.lives[index].jobs:
        if job.lease == lease and (job.state == "released" or m.rules.one_entry_per_lease_and_process):
            return True
        if m.scenario.remote and job.lease[:2] == lease[:2] and job.lease[2] > lease[2]:
            return True
    return False


def _owns(m: Model, w: World, life: Life, index: int, message: Encode) -> bool:
    """Whether the item is ours: a pure function of the message, never of what this process believes (R4)."""
    group = message.group
    if not m.rules.ranks_come_with_the_message:
        there = [other for other in group if int(w.lives[other].who[1:]) not in life.believes_gone]
        group = tuple(there) or group
    return assigned(group, message.request) == index


def queue_read(m: Model, w: World, index: int, job: Job) -> None:
    """Step 4: the CPU has seen ready, so the read is queued, and on the same stream behind it the acknowledgement."""
    imported = _find_import(m, w, index, job)
    held, job = job, job._replace(serial=imported.serial)
    w.job(index, held, job)
    stream, lease = job.request % 2, job.lease
    if m.tell:
        what = ("" if m.rules.gate is Gate.HOST else "a wait and ") + f"its read of {w.lease_name(lease)}"
        m.tell(f"{w.name(index)} queues {what} (m{imported.memory}) on stream {stream}")
    if m.rules.gate is not Gate.HOST:
        w.queue(index, stream, Wait(lease))
    w.queue(index, stream, Read(imported.memory, lease, job.copy))
    w.job(index, job, job._replace(state="queued"))
    if m.scenario.remote:
        return  # the acknowledgement is a message, sent once the read has completed
    pages = [w.page_of(lease[0], index)]
    if not m.rules.need_names_the_owner_alone:
        pages += [w.page_of(lease[0], other) for other in job.group if other != index]
    if m.rules.ack_follows_the_read:
        ack_stream = stream if m.rules.ack_is_on_the_reading_stream else 1 - stream
        w.queue(index, ack_stream, *(Store(page, lease) for page in pages if page is not None))
    else:
        _acknowledge(m, w, index, lease)


def _find_import(m: Model, w: World, index: int, job: Job) -> Import:
    """The mapped memory of a proxy's chunk; opened now if there is no import of the serial in the producer's word (R6).

    A proxy names no serial: while its lease is not acknowledged the word stands still."""
    pool, life = w.pools[job.lease[0]], w.lives[index]
    serial = pool.serials[job.chunk]
    for imported in life.imports:
        if (imported.pool, imported.chunk) == (job.lease[0], job.chunk):
            if imported.serial == serial or not m.rules.imports_are_keyed_by_serial:
                return imported
    imported = Import(job.lease[0], job.chunk, serial, pool.memory[job.chunk])
    w.life(index, imports=(*life.imports, imported))
    return imported


def answer(m: Model, w: World, index: int, job: Job) -> None:
    """R3: an answer leaves after the host saw ready without poison. The entry stays until the ack is seen (R6)."""
    pool_index, slot, generation = job.lease
    pool = w.pools[pool_index]
    good = pool.poison[slot] != generation and pool.ready[slot] != POISON
    tag = job.tag if good else ERROR
    m.tell and m.tell(f"{w.name(index)} answers {w.request_name(job.request, job.attempt)} with {w.tag_name(tag)}")
    w.post(Answer(job.request, job.attempt, job.part, index, tag))
    if m.scenario.remote:
        _release(w, index, job)
        return
    seen = hardware.acknowledged(w, index, job.lease)
    done = seen or not m.rules.entries_stay_until_the_ack_is_seen
    w.job(index, job, None if done else job._replace(state="answered"))


def refuse(m: Model, w: World, index: int, job: Job, why: str) -> None:
    """R3: a lease that will never be ready becomes an error."""
    m.tell and m.tell(f"{w.name(index)} cannot read {w.lease_name(job.lease)}: {why}")
    w.post(Answer(job.request, job.attempt, job.part, index, ERROR))
    if w.pools[job.lease[0]].lease[job.lease[1]] == job.lease[2]:
        _acknowledge(m, w, index, job.lease)
    w.job(index, job, None)


def doubt(m: Model, w: World, index: int, job: Job) -> None:
    """A look that finds a lease not ready, and then goes on to see whether its producer lives."""
    w.spend("doubts")
    m.tell and m.tell(f"{w.name(index)} looks at {w.lease_name(job.lease)}: not ready")
    w.job(index, job, job._replace(state="doubted"))


def decide(m: Model, w: World, index: int, job: Job) -> None:
    """A dead producer's words are final, so they are looked at once more after its death is proven."""
    pool, slot, generation = job.lease
    over = w.lives[w.pools[pool].producer].state == "dead" and not m.rules.a_death_is_followed_by_one_more_look
    if not over:
        m.tell and m.tell(f"{w.name(index)} looks at {w.lease_name(job.lease)} again")
        w.job(index, job, job._replace(state="held"))
        return
    refuse(m, w, index, job, "its producer is dead, and it was not ready")
    if w.pools[pool].ready[slot] == generation:
        m.broken(Law.FINISH, f"{w.lease_name(job.lease)} was ready, and {w.name(index)} refused it")


def time_out(m: Model, w: World, index: int, job: Job) -> None:
    """A consumer gives up before the bytes are ready; it acknowledges, which is safe because of R1."""
    w.spend("deadlines")
    refuse(m, w, index, job, "it is not ready in time")


def hit(m: Model, w: World, index: int, job: Job) -> None:
    """E4: an embedding-cache hit acknowledges without reading, ready or not."""
    w.spend("hits")
    m.tell and m.tell(f"{w.name(index)} has {w.request_name(job.request)} in its cache, acknowledges and answers")
    w.post(Answer(job.request, job.attempt, job.part, index, (job.request, job.attempt, job.part)))
    _give_back(m, w, index, job)


def abandon(m: Model, w: World, index: int, job: Job) -> None:
    """A request was given up. What is not queued is acknowledged by the CPU; what is, by its stream alone (R5)."""
    m.tell and m.tell(f"{w.name(index)} abandons {w.lease_name(job.lease)}, {job.state}")
    if job.state in ("held", "doubted"):
        _give_back(m, w, index, job)
    elif m.rules.what_is_queued_is_released_by_its_stream:
        w.job(index, job, job._replace(state="abandoned"))
    else:
        _give_back(m, w, index, job)


def _release(w: World, index: int, job: Job) -> None:
    """Acknowledge by message; the entry stays, as a note of the last generation of its slot that was given back."""
    w.post(Released(index, job.lease))
    w.job(index, job, job._replace(state="released"))


def _give_back(m: Model, w: World, index: int, job: Job) -> None:
    """Acknowledge from the CPU, and forget."""
    if m.scenario.remote:
        _release(w, index, job)
    else:
        _acknowledge(m, w, index, job.lease)
        w.job(index, job, None)


def _acknowledge(m: Model, w: World, index: int, lease: tuple[int, int, int]) -> None:
    """The CPU's own acknowledgement: right only while nothing of this lease is queued (R5)."""
    page = w.page_of(lease[0], index)
    if page is not None:
        hardware.store(m, w, index, page, lease)


# --- leaving memory ---------------------------------------------------------------------------------------------------


def _is_used(w: World, life: Life, imported: Import) -> bool:
    """Whether something of ours is still to be read or acknowledged there (R7)."""
    if any(job.lease[0] == imported.pool and job.serial == imported.serial for job in life.jobs):
        return True
    return any(_touches(op, imported) for stream in life.streams for op in stream)


def _touches(op: object, imported: Import) -> bool:
    if isinstance(op, Read):
        return op.memory == imported.memory
    return isinstance(op, Store) and op.page != READY and op.lease[0] == imported.pool


def unmap(m: Model, w: World, index: int, imported: Import) -> None:
    """R7: after our own last acknowledgement there is visible; unmapping does not wait, and would pull it away."""
    m.tell and m.tell(f"{w.name(index)} unmaps m{imported.memory}")
    life = w.lives[index]
    for stream in life.streams:
        for op in stream:
            if _touches(op, imported):
                m.broken(Law.UNMAP, f"{w.name(index)} unmaps m{imported.memory} while its {op.kind} there is queued")
    w.life(index, imports=tuple(i for i in life.imports if i != imported))
