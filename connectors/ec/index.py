"""What an engine's scheduler knows of outputs: which requests need which, and which are here. Knows no socket and no
clock.

The rule that everything rests on: an item is *held* once every rank of the engine has said that it holds it, and stays
held until it is let go of, which happens when no request claims it any more. So what is said to be there does load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tensorferry.connectors.ec.messages import LetGo, Take


@dataclass(slots=True)
class Claim:
    """A request waits for an item, or reads it."""

    rows: int
    until: float


@dataclass(slots=True)
class Entry:
    """One holding of an item."""

    hold: int
    claims: dict[str, Claim] = field(default_factory=dict)  #: by request
    rows: dict[int, int] = field(default_factory=dict)  #: by rank, of those that hold it
    refusal: str = ""  #: why it can never be read


class Index:
    """See the module. Times are of any one clock, in seconds."""

    def __init__(self, ranks: int, patience_s: float) -> None:
        """ranks: of the engine, each of which must hold an item before it counts as held."""
        self._ranks, self._patience_s = ranks, patience_s
        self._entries: dict[str, Entry] = {}
        self._items_of: dict[str, set[str]] = {}  #: by request
        self._failed: dict[str, str] = {}  #: request -> why
        self._loads: dict[str, None] = {}  #: items, in order
        self._drops: dict[str, int] = {}  #: items that nobody claims, which the ranks hold
        self._holds = 0
        self._say: list[Take | LetGo] = []

    # --- requests

    def need(self, request: str, items: Iterable[tuple[str, int]], now: float) -> bool:
        """Whether all of these (item, rows) are held; the request claims those that it did not claim yet."""
        all_held = True
        for name, rows in items:
            entry = self._claimed(request, name, rows, now)
            claim = entry.claims[request]
            if self._is_held(entry):
                found = next(iter(entry.rows.values()))
                if found != claim.rows:
                    self._failed.setdefault(request, f"{name}: {found} rows; the prompt has room for {claim.rows}")
                    all_held = False
            else:
                all_held = False
                if entry.refusal:
                    self._failed.setdefault(request, f"{name}: {entry.refusal}")
        return all_held

    def is_held(self, name: str) -> bool:
        """Whether an item would load in this step."""
        entry = self._entries.get(name)
        return entry is not None and self._is_held(entry)

    def allocated(self, name: str) -> None:
        """The engine has made room for an item, and reads it in this step. Not held: the engine encodes it itself."""
        if self.is_held(name):
            self._loads[name] = None

    def missing(self, request: str, name: str, now: float) -> bool:
        """Whether an item that a request claims is given up: it cannot be used, or patience is over."""
        entry = self._entries.get(name)
        if entry is None or request not in entry.claims or self._is_held(entry):
            return False
        return bool(entry.refusal) or now >= entry.claims[request].until

    def let_go(self, request: str, name: str) -> None:
        """The request needs this item no more."""
        entry = self._entries.get(name)
        if entry is None or entry.claims.pop(request, None) is None:
            return
        items = self._items_of[request]
        items.discard(name)
        if not items:
            del self._items_of[request]
        if entry.claims:
            return
        if self._is_held(entry):
            self._drops[name] = entry.hold  # a step that reads it may be under way: ranks hear of it behind that
        else:
            del self._entries[name]
            self._say.append(LetGo(name, entry.hold))

    def finished(self, request: str) -> None:
        """The request has ended, however it did."""
        for name in list(self._items_of.get(request, ())):
            self.let_go(request, name)
        self._failed.pop(request, None)

    def unavailable(self, now: float) -> dict[str, str]:
        """Requests that cannot be served, and why; each is named until it has `finished`."""
        for name, entry in self._entries.items():
            if self._is_held(entry):
                continue
            for request, claim in entry.claims.items():
                if now >= claim.until:
                    waited = f"nobody has sent it for {self._patience_s:g} s (patience_s)"
                    self._failed.setdefault(request, f"{name}: {waited}")
        return dict(self._failed)

    # --- ranks

    def joined(self, now: float) -> list[Take]:
        """What a rank is to be told that has just come."""
        return [self._take(name, entry, now) for name, entry in self._entries.items() if entry.claims]

    def held(self, name: str, hold: int, rank: int, rows: int) -> None:
        """A rank holds an item. No-op for a holding that is over."""
        entry = self._entries.get(name)
        if entry is not None and entry.hold == hold and not self._is_held(entry) and 0 <= rank < self._ranks:
            entry.rows[rank] = rows
            if len(set(entry.rows.values())) > 1:
                entry.refusal = f"the ranks got different numbers of rows: {sorted(set(entry.rows.values()))}"

    def refused(self, name: str, hold: int, reason: str) -> None:
        """What a rank got of an item cannot be used."""
        entry = self._entries.get(name)
        if entry is not None and entry.hold == hold and not self._is_held(entry):
            entry.refusal = reason

    # --- what is to be said

    def say(self) -> Sequence[Take | LetGo]:
        """What every rank is to be told now, each once."""
        said, self._say = self._say, []
        return said

    def step(self, runs: bool) -> tuple[list[str], list[tuple[str, int]]]:
        """What the ranks do in this step: items to load, and then (item, hold) to let go of.

        runs: whether the ranks will hear of it; of a step that computes nothing they do not.
        """
        if not runs:
            return [], []
        loads, drops = list(self._loads), list(self._drops.items())
        self._loads.clear()
        self._drops.clear()
        for name, _ in drops:
            del self._entries[name]
        return loads, drops

    @property
    def claims(self) -> int:
        """How many there are, of all requests."""
        return sum(len(entry.claims) for entry in self._entries.values())

    def _claimed(self, request: str, name: str, rows: int, now: float) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            self._holds += 1
            entry = self._entries[name] = Entry(self._holds)
        if request not in entry.claims:
            entry.claims[request] = Claim(rows, now + self._patience_s)
            self._items_of.setdefault(request, set()).add(name)
            self._drops.pop(name, None)  # it is held still
            if not self._is_held(entry):
                self._say.append(self._take(name, entry, now))
        return entry

    def _take(self, name: str, entry: Entry, now: float) -> Take:
        until = max(claim.until for claim in entry.claims.values())
        return Take(name, entry.hold, max(1, round(1000 * (until - now))))

    def _is_held(self, entry: Entry) -> bool:
        return len(entry.rows) == self._ranks and not entry.refusal
