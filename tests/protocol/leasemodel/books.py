"""The ledger that ships, driven by a search: every answer is the real one, asked once.

A search branches, and a real ledger cannot be in two states at once. So a world holds a *number* that stands for
a state of a ledger; asking a question of that state clones the ledger which reached it, asks the clone, and
remembers the answer and the number of the state that came out. States are told apart by everything a ledger
holds except its statistics and scratch space.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np

from tensorferry.codecs.errors import FerryError
from tensorferry.codecs.pool.ledger import Grant, Ledger

from .laws import Law, LawBroken

GRANULE = 256  #: a range of the model is one granule

#: Attributes of a ledger that never decide anything.
_IDLE = {"_scratch", "_pending", "peak_lent_nbytes", "peak_lent_slots"}

Pages = tuple[tuple[int, tuple[int, ...]], ...]  #: (column, words)


class Books:
    def __init__(self, ranges: int, slots: int, ledger: type[Ledger] = Ledger, first: int = 1) -> None:
        """first: generation of every slot."""
        self._slots = slots
        self._ledgers: list[Ledger] = []
        self._numbers: dict[Any, int] = {}
        self._answers: dict[Any, tuple[int, Any]] = {}
        self.new = self._file(ledger(ranges * GRANULE, slots, granule=GRANULE, first_generation=first))

    def __len__(self) -> int:
        """Distinct states that a ledger was driven to."""
        return len(self._ledgers)

    @property
    def questions(self) -> int:
        """Distinct (state, question) pairs that a ledger was asked."""
        return len(self._answers)

    def see(self, book: int) -> Ledger:
        """The ledger, to look at only."""
        return self._ledgers[book]

    def admit(self, book: int) -> tuple[int, int]:
        return self._ask(book, ("admit",), lambda ledger: ledger.admit())

    def strike(self, book: int, column: int) -> int:
        return self._must(book, ("strike", column), lambda ledger: ledger.strike(column))

    def lend(self, book: int) -> tuple[int, Grant | FerryError]:
        return self._ask(book, ("lend",), lambda ledger: ledger.lend(GRANULE))

    def dispatch(self, book: int, grant: Grant, column: int) -> tuple[int, FerryError | None]:
        return self._ask(book, ("dispatch", grant, column), lambda ledger: ledger.dispatch(grant, (column,)))

    def retract(self, book: int, grant: Grant, column: int) -> int:
        return self._must(book, ("retract", grant, column), lambda ledger: ledger.retract(grant, column))

    def settle(self, book: int, grant: Grant) -> int:
        return self._must(book, ("settle", grant), lambda ledger: ledger.settle(grant))

    def acknowledge(self, book: int, slot: int, generation: int, column: int) -> tuple[int, FerryError | None]:
        question = ("acknowledge", slot, generation, column)
        return self._ask(book, question, lambda ledger: ledger.acknowledge(slot, generation, column))

    def reclaim(self, book: int, ready: tuple[int, ...], acks: Pages) -> tuple[int, list[Grant]]:
        def ask(ledger: Ledger) -> list[Grant]:
            words = {column: np.array(page, np.uint32) for column, page in acks}
            written = np.array(ready, np.uint32)
            if ledger._looked_up(written, words) != ledger._scanned(written, words):
                raise LawBroken(Law.BOOKS, "the ledger's two ways to see what is over disagree")
            return ledger.reclaim(written, words)

        return self._ask(book, ("reclaim", ready, acks), ask)

    def _must(self, book: int, question: tuple[Any, ...], ask: Callable[[Ledger], None]) -> int:
        book, refusal = self._ask(book, question, ask)
        if refusal is not None:
            raise LawBroken(Law.BOOKS, f"the ledger refused {question}: {refusal}")
        return book

    def _ask(self, book: int, question: tuple[Any, ...], ask: Callable[[Ledger], Any]) -> tuple[int, Any]:
        key = book, question
        known = self._answers.get(key)
        if known is None:
            known = self._answers[key] = self._really_ask(book, question, ask)
        return known

    def _really_ask(self, book: int, question: tuple[Any, ...], ask: Callable[[Ledger], Any]) -> tuple[int, Any]:
        ledger = deepcopy(self._ledgers[book])
        try:
            answer = ask(ledger)
        except FerryError as refusal:
            if _freeze(ledger) != _freeze(self._ledgers[book]):
                raise LawBroken(Law.BOOKS, f"the ledger refused {question} ({refusal}) and yet changed") from refusal
            return book, refusal
        except Exception as bug:
            raise LawBroken(Law.BOOKS, f"the ledger answered {question} with {bug!r}") from bug
        return self._file(ledger), answer

    def _file(self, ledger: Ledger) -> int:
        frozen = _freeze(ledger)
        number = self._numbers.get(frozen)
        if number is None:
            _check(ledger, self._slots)
            number = self._numbers[frozen] = len(self._ledgers)
            self._ledgers.append(ledger)
        return number


def _check(ledger: Ledger, slots: int) -> None:
    """The ledger's own laws, in every state it is ever driven to."""
    leases = sorted(ledger.leases(), key=lambda grant: grant.offset)
    for one, other in pairwise(leases):
        if one.offset + one.nbytes > other.offset:
            raise LawBroken(Law.BOOKS, f"{one} and {other} share bytes")
    if len({grant.slot for grant in leases}) < len(leases):
        raise LawBroken(Law.BOOKS, f"a slot is lent twice: {leases}")
    if sum(grant.nbytes for grant in leases) + ledger.free_nbytes != ledger.capacity_nbytes:
        raise LawBroken(Law.BOOKS, f"bytes are lost: {ledger.free_nbytes} free beside {leases}")
    if ledger.free_slots + ledger.retired_slots + len(leases) != slots:
        raise LawBroken(Law.BOOKS, f"slots are lost: {ledger.free_slots} free of {slots} beside {leases}")
    if not leases and ledger.longest_free_nbytes != ledger.capacity_nbytes:
        raise LawBroken(Law.BOOKS, f"nothing is lent, yet the free bytes lie in {ledger.free_ranges} ranges")


def _freeze(value: Any) -> Any:
    """A hashable picture of everything a ledger holds."""
    if isinstance(value, dict):
        return tuple(sorted((key, _freeze(item)) for key, item in value.items()))
    if isinstance(value, set):
        return tuple(sorted(value))
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, tuple | list | deque):
        return tuple(map(_freeze, value))
    if hasattr(value, "__dict__"):
        return _freeze({name: item for name, item in vars(value).items() if name not in _IDLE})
    return value
