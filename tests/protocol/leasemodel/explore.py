"""The search: every order of events of a small world, or one order of a large one, by chance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .laws import LawBroken

#: (fair, function, arguments). A fair step happens sooner or later by itself; an unfair one may, or may not.
Step = tuple[bool, Callable[..., Any], tuple[Any, ...]]


class Searchable(Protocol):
    """What a model offers to a search; a world is anything with `key()`."""

    tell: Callable[[str], None] | None  #: while set, steps say what they do

    def start(self) -> Any: ...
    def steps(self, world: Any, /) -> list[Step]: ...
    def take(self, world: Any, step: Step, /) -> Any: ...
    def rest(self, world: Any, /) -> None: ...


@dataclass
class Finding:
    """What a search saw."""

    states: int = 0
    transitions: int = 0
    rests: int = 0  #: worlds in which nothing goes on by itself
    depth: int = 0
    taken: Counter[str] = field(default_factory=Counter)  #: steps by name
    broken: LawBroken | None = None
    trace: list[str] = field(default_factory=list)

    def story(self) -> str:
        """How the law came to be broken, a line a step."""
        lines = [f"{number:>3}  {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([*lines, f"  => {self.broken.law.name}: {self.broken.story}" if self.broken else "  no fault"])


def search(model: Searchable, most: int = 2_000_000) -> Finding:
    """Every reachable world, breadth first, so that the law broken first is broken by a shortest trace.

    A world is remembered by its 64-bit hash: among a million, the chance that two share one is 1 in 37 million.
    most: worlds after which this is not the small case that it was meant to be.
    """
    finding = Finding()
    start = model.start()
    first = hash(start.key())
    came_from: dict[int, tuple[int, int]] = {first: (first, -1)}
    layer = [(first, start)]
    while layer:
        following = []
        for here, world in layer:
            number = -1
            try:
                steps = model.steps(world)
                if not any(step[0] for step in steps):
                    finding.rests += 1
                    model.rest(world)
                for number, step in enumerate(steps):
                    finding.taken[step[1].__name__] += 1
                    new = model.take(world, step)
                    there = hash(new.key())
                    if there not in came_from:
                        came_from[there] = here, number
                        following.append((there, new))
            except LawBroken as broken:
                finding.broken = broken
                path = [number] if number >= 0 else []
                while here != first:
                    here, number = came_from[here]
                    path.append(number)
                finding.trace = _told(model, path[::-1])
                layer = following = []
                break
        assert len(came_from) <= most, f"more than {most} worlds"
        finding.depth += 1
        layer = following
    finding.states = len(came_from)
    finding.transitions = finding.taken.total()
    return finding


def walk(model: Searchable, seed: int, most: int = 2_000) -> Finding:
    """One order of events, by chance, until nothing goes on by itself; some seeds have more mishaps than others."""
    finding, dice, path = Finding(), random.Random(seed), []
    mishaps = dice.choice((1 / 4, 1 / 10, 1 / 30))
    world = model.start()
    try:
        while True:
            steps = model.steps(world)
            fair = [number for number, step in enumerate(steps) if step[0]]
            if not fair:
                finding.rests += 1
                model.rest(world)
            unfair = [number for number, step in enumerate(steps) if not step[0]]
            if not fair and (not unfair or dice.random() < 0.5):
                break
            number = dice.choice(unfair if unfair and (not fair or dice.random() < mishaps) else fair)
            path.append(number)
            finding.taken[steps[number][1].__name__] += 1
            world = model.take(world, steps[number])
            assert len(path) < most, f"no rest after {most} steps"
    except LawBroken as broken:
        finding.broken = broken
        finding.trace = _told(model, path)
    finding.states = finding.transitions = finding.depth = len(path)
    return finding


def _told(model: Searchable, path: list[int]) -> list[str]:
    """Take the same steps again, and write down what they say."""
    lines: list[str] = []
    world = model.start()
    for number in path:
        said: list[str] = []
        model.tell = said.append
        try:
            world = model.take(world, model.steps(world)[number])
        except LawBroken:
            pass
        finally:
            model.tell = None
        lines.append("; ".join(said))
    return lines
