"""Small worlds, each searched completely: together they have every mishap, alone each stays small.

Where nothing else is said there are two requests of one item, one consumer, two slots, one range and one attempt.
"""

from __future__ import annotations

from tensorferry.codecs.pool.ledger import LAST_GENERATION

from .model import Scenario
from .world import Luck

SMALL = {
    scenario.name: scenario
    for scenario in (
        Scenario("plain"),
        Scenario("two ranges", ranges=2, luck=Luck(deadlines=1)),
        Scenario("one slot", slots=1, luck=Luck(hits=1, cancels=1, deadlines=1)),
        Scenario("the last generations", slots=1, first_generation=LAST_GENERATION, inline=True, luck=Luck(cancels=1)),
        Scenario("cache hits", luck=Luck(hits=1)),
        Scenario("hits and cancels", luck=Luck(hits=1, cancels=1)),
        Scenario("a consumer dies", attempts=2, luck=Luck(kills=1, restarts=1)),
        Scenario("a process stops", ranks=2, attempts=2, inline=True, luck=Luck(stops=1)),
        Scenario("the producer dies", luck=Luck(producer_kills=1, doubts=1)),
        Scenario("the producer restarts", attempts=2, luck=Luck(producer_kills=1, restarts=1)),
        Scenario("all read", ranks=2, readers="all", luck=Luck(refusals=1)),
        Scenario("all read, one dies", ranks=2, readers="all", luck=Luck(refusals=1, kills=1)),
        Scenario("all read, one comes back", items=(1,), ranks=2, readers="all", luck=Luck(kills=1, restarts=1)),
        Scenario("three read", items=(1,), ranks=3, readers="all", luck=Luck(kills=1)),
        Scenario("both ends die", items=(1,), attempts=2, luck=Luck(kills=1, producer_kills=1, restarts=1)),
        Scenario("two owners", ranks=2, items=(2, 1), luck=Luck(cancels=1)),
        Scenario("a group", ranks=2, readers="group", luck=Luck(kills=1)),
        Scenario("a group, and rumours", ranks=2, readers="group", inline=True, luck=Luck(stops=1, rumours=1)),
        Scenario("three, and rumours", items=(1,), ranks=3, readers="group", luck=Luck(stops=1, rumours=1)),
        Scenario("doubled mail", luck=Luck(duplicates=1, cancels=1)),
        Scenario("lost mail", ranks=2, attempts=2, inline=True, luck=Luck(losses=1)),
        Scenario("another node", slots=1, remote=True, luck=Luck(duplicates=2)),
        Scenario("another node dies", remote=True, luck=Luck(duplicates=1, kills=1, restarts=1)),
        Scenario("an elastic pool", budget=2, luck=Luck(retirements=2)),
        Scenario("an elastic pool at its budget", budget=1, luck=Luck(retirements=1)),
        Scenario("calls that synchronise", synchronises=True, luck=Luck(producer_kills=1)),
    )
}

#: Too many to search completely; walked by chance, a seed a walk.
LARGE = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "a crowd",
            items=(2, 1, 1, 2),
            ranks=3,
            slots=3,
            ranges=2,
            attempts=3,
            inline=True,
            luck=Luck(
                kills=2, producer_kills=1, restarts=2, stops=2, cancels=1, refusals=1, duplicates=1, losses=1, hits=1,
                deadlines=1, doubts=1,
            ),
        ),
        Scenario(
            "a crowd that reads alike",
            items=(1, 1, 1),
            ranks=3,
            readers="all",
            slots=2,
            ranges=2,
            attempts=2,
            inline=True,
            luck=Luck(
                kills=2, producer_kills=1, restarts=2, refusals=2, duplicates=2, hits=1, cancels=1, deadlines=1,
                doubts=1,
            ),
        ),
        Scenario(
            "a crowded group",
            items=(1, 1, 1, 1),
            ranks=3,
            readers="group",
            slots=2,
            ranges=2,
            attempts=2,
            inline=True,
            luck=Luck(kills=1, restarts=1, stops=2, rumours=2, duplicates=1, cancels=1),
        ),
        Scenario(
            "a crowd elsewhere",
            items=(1, 1, 1, 1),
            ranks=2,
            remote=True,
            slots=2,
            ranges=2,
            attempts=2,
            inline=True,
            luck=Luck(kills=1, restarts=1, stops=1, cancels=1, duplicates=3, hits=1),
        ),
        Scenario(
            "an elastic crowd",
            items=(1, 1, 1),
            ranks=2,
            attempts=2,
            budget=2,
            inline=True,
            luck=Luck(kills=1, restarts=1, stops=1, cancels=1, retirements=3, hits=1),
        ),
    )
}  # fmt: skip

#: Searched completely by `make protocol` only.
LONG = {
    scenario.name: scenario
    for scenario in (
        Scenario("one dies, one stops", ranks=2, attempts=2, inline=True, luck=Luck(kills=1, stops=1)),
        Scenario("two lives end", luck=Luck(kills=2, restarts=2, cancels=1)),
        Scenario("both ends die, two requests", attempts=2, luck=Luck(kills=1, producer_kills=1, restarts=1)),
        Scenario("two ranges and a group", ranks=2, ranges=2, readers="group", luck=Luck(kills=1)),
        Scenario("two ranges, one dies", ranges=2, luck=Luck(kills=1, restarts=1, cancels=1)),
        Scenario("doubled mail and deaths", luck=Luck(duplicates=2, kills=1, restarts=1)),
    )
}
