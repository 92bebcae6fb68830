"""The request owner: keeps the source, counts attempts, takes one answer, gives up on those who do not answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .laws import Law
from .world import ERROR, Answer, Released, World

if TYPE_CHECKING:
    from .explore import Step
    from .model import Model


def offer(m: Model, w: World, steps: list[Step]) -> None:
    for message in w.mail:
        if isinstance(message, Answer):
            steps.append((True, take_answer, (message,)))
    for number, request in enumerate(w.requests):
        if not request.outcome:
            if _is_hopeless(m, w, number):
                steps.append((True, give_up, (number,)))
            if w.luck.cancels:
                steps.append((False, cancel, (number,)))


def _is_hopeless(m: Model, w: World, number: int) -> bool:
    """Whether waiting on is for nothing: someone who owes an answer, or the work for it, is not there any more."""
    request = w.requests[number]
    if request.lost or any(not w.lives[life].running or _is_stuck(m, w, life) for _, life in request.due):
        return True
    unmade = not request.plan or request.made < len(request.plan)
    making = any(draft.request == number for life in w.lives if life.running for draft in life.drafts)
    if unmade or not request.due:
        producing = any(w.lives[pool.producer].running for pool in w.pools)
        reading = any(life.running for life in w.lives if life.who != "P")
        return not (producing and reading)
    # Everything was made, and whoever is due runs: an answer comes, unless the one who was to tell them is gone.
    return not making and not _is_under_way(w, number)


def _is_stuck(m: Model, w: World, life: int) -> bool:
    """In faulty worlds: this life's one thread waits for its streams, and a stream waits for a dead producer (B1)."""
    heads = [stream[0] for stream in w.lives[life].streams if stream]
    dead = any(op.kind == "wait" and not w.lives[w.pools[op.lease[0]].producer].alive for op in heads)
    return dead and m.scenario.synchronises


def _is_under_way(w: World, number: int) -> bool:
    """Whether one who owes an answer has the proxy, or will receive it; or has answered."""
    request, this = w.requests[number], (number, w.requests[number].attempt)
    due = {life for _, life in request.due}
    for message in w.mail:
        if not isinstance(message, Released) and (message.request, message.attempt) == this and message.life in due:
            return True
    return any((job.request, job.attempt) == this for life in due for job in w.lives[life].jobs)


def take_answer(m: Model, w: World, message: Answer) -> None:
    """R4: the first answer of the current attempt wins; whatever comes later is dropped (tombstones)."""
    w.take(message)
    request, key = w.requests[message.request], (message.part, message.life)
    name = w.request_name(message.request, message.attempt)
    current = not request.outcome and message.attempt == request.attempt and key in request.due
    if not current and m.rules.the_first_current_answer_wins:
        m.tell and m.tell(f"the owner drops {w.name(message.life)}'s answer to {name}")
        return
    m.tell and m.tell(f"the owner takes {w.name(message.life)}'s answer to {name}: {w.tag_name(message.tag)}")
    if message.tag == ERROR:
        end_attempt(m, w, message.request)
        return
    if message.tag != (message.request, message.attempt, message.part):
        m.broken(Law.TAINT, f"{w.tag_name(message.tag)} were accepted as {w.request_name(message.request)}'s")
    due = tuple(owed for owed in request.due if owed != key)
    w.request(message.request, due=due)
    if not due and request.made == len(request.plan):
        end(m, w, message.request, "result")


def give_up(m: Model, w: World, number: int) -> None:
    """A rank is dead, stopped or unreachable; or a deadline has passed."""
    m.tell and m.tell(f"the owner gives {w.request_name(number, w.requests[number].attempt)} up")
    end_attempt(m, w, number)


def cancel(m: Model, w: World, number: int) -> None:
    """The client does not want it any more."""
    w.spend("cancels")
    m.tell and m.tell(f"the client cancels {w.request_name(number)}")
    end(m, w, number, "cancelled")


def end_attempt(m: Model, w: World, number: int) -> None:
    """R4: the next attempt is made anew from the source, with new leases; after the last one the request fails."""
    request = w.requests[number]
    if request.outcome:
        return
    if request.attempt == m.scenario.attempts:
        end(m, w, number, "failed")
    else:
        w.request(number, attempt=request.attempt + 1, plan=(), made=0, due=(), lost=False)


def end(m: Model, w: World, number: int, outcome: str) -> None:
    """The one outcome. What remains of the request is a tombstone."""
    before = w.requests[number].outcome
    m.tell and m.tell(f"request {w.request_name(number)} ends: {outcome}")
    if before:
        m.broken(Law.ONE_OUTCOME, f"request {w.request_name(number)} ended as {before}, and then again as {outcome}")
    w.request(number, outcome=outcome, plan=(), made=0, due=(), lost=False)
