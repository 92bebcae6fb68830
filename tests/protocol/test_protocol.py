"""The lease protocol, with the ledger that ships, in every order of events of small worlds (see `leasemodel`).

TENSORFERRY_PROTOCOL=long searches larger worlds too, and walks 20 times as many seeds; TENSORFERRY_PROTOCOL_SEEDS
sets by how many seeds each large world is walked. `-s` prints the shortest trace of every planted fault.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import fields

import pytest
from leasemodel.attacks import ATTACKS, LEDGER_FAULTS, Attack
from leasemodel.explore import search, walk
from leasemodel.laws import Law
from leasemodel.model import Model
from leasemodel.pressure import Pressure
from leasemodel.rules import PROTOCOL, Rules
from leasemodel.scenarios import LARGE, LONG, SMALL

from tensorferry.codecs.pool.ledger import Ledger

LONG_RUN = os.environ.get("TENSORFERRY_PROTOCOL") == "long"
SEEDS = int(os.environ.get("TENSORFERRY_PROTOCOL_SEEDS", "4000" if LONG_RUN else "200"))

#: Everything that can happen without a fault.
STEPS = {
    "run_stream", "reserve", "send_inline", "publish", "tell", "send_refuses", "retract", "send_raises", "take_back",
    "reclaim", "strike", "receive_released", "grow", "attach", "receive", "queue_read", "answer", "refuse", "doubt",
    "decide", "time_out", "hit", "abandon", "unmap", "take_answer", "give_up", "cancel", "kill", "stop", "wake",
    "restart", "hear", "duplicate", "lose", "retire", "poison",
}  # fmt: skip

Record = Callable[[str, object], None]


def model_of(
    scenario: str, rules: Rules = PROTOCOL, watched: frozenset[Law] = frozenset(Law), ledger: type[Ledger] = Ledger
) -> Model | Pressure:
    """watched: the laws that end the search; what a fault does beside breaking its own is not looked at."""
    if scenario == "pressure":
        return Pressure(rules, watched)
    return Model((SMALL | LONG)[scenario], rules, watched, ledger)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [*SMALL, "pressure", *(LONG if LONG_RUN else ())])
@pytest.mark.timeout(1200 if LONG_RUN else 120)
def test_no_order_of_events_breaks_a_law(scenario: str, record_property: Record) -> None:
    model = model_of(scenario)
    finding = search(model)
    line = (
        f"{scenario:<30} {finding.states:>8,} worlds {finding.transitions:>9,} steps, {finding.depth:>2} deep, "
        f"{finding.rests:>4} at rest; ledger: {len(model.books):>3} states, {model.books.questions:>4} questions"
    )
    print(line)
    record_property("protocol", line)
    record_property("worlds", finding.states)
    record_property("steps", finding.transitions)
    assert finding.broken is None, finding.story()
    assert finding.rests, "no world was ever at rest, so half of the laws were never asked"


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_every_attack_is_found(attack: Attack, record_property: Record) -> None:
    finding = search(model_of(attack.scenario, attack.rules, frozenset({attack.law})))
    assert finding.broken is not None, f"{attack.says}: nothing found in {finding.states} worlds"
    told(record_property, attack.name, attack.says, finding.broken.law, len(finding.trace), finding.states)
    print(finding.story())
    assert finding.broken.law is attack.law, finding.story()


@pytest.mark.parametrize(("ledger", "scenario", "law"), LEDGER_FAULTS, ids=[f.__name__ for f, _, _ in LEDGER_FAULTS])
def test_every_fault_of_the_ledger_is_found(
    ledger: type[Ledger], scenario: str, law: Law, record_property: Record
) -> None:
    finding = search(model_of(scenario, ledger=ledger))
    assert finding.broken is not None, f"{ledger.__doc__}: nothing found in {finding.states} worlds"
    told(record_property, "-", ledger.__name__, finding.broken.law, len(finding.trace), finding.states)
    print(finding.story())
    assert finding.broken.law is law, finding.story()


def told(record: Record, name: str, says: str, law: Law, steps: int, worlds: int) -> None:
    line = f"{name:<4} {says:<86} {law.name:<11} after {steps:>2} steps, {worlds:>6,} worlds"
    print(line)
    record("protocol", line)
    record("found", 1)


def test_every_clause_is_attacked_and_every_law_falls() -> None:
    """A switch that no attack throws, or a law that no attack breaks, would show nothing."""
    for clause in fields(Rules):
        thrown = [a for a in ATTACKS if getattr(a.rules, clause.name) != getattr(PROTOCOL, clause.name)]
        assert thrown, f"no attack breaks {clause.name}"
    fallen = {attack.law for attack in ATTACKS} | {law for _, _, law in LEDGER_FAULTS}
    assert fallen == set(Law)


@pytest.mark.parametrize("clause", ["embeddings_never_wait", "schedulers_copy_out_on_arrival"])
def test_either_clause_of_r9_keeps_ranks_going_without_the_other(clause: str) -> None:
    finding = search(Pressure(Rules(**{clause: False})))
    assert finding.broken is None, finding.story()


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LARGE)
@pytest.mark.timeout(1200 if LONG_RUN else 120)
def test_no_seed_breaks_a_law(scenario: str, record_property: Record) -> None:
    model, steps, rests = Model(LARGE[scenario]), 0, 0
    for seed in range(SEEDS):
        finding = walk(model, seed)
        assert finding.broken is None, f"seed {seed}\n{finding.story()}"
        steps, rests = steps + finding.transitions, rests + finding.rests
    line = f"{scenario:<30} {SEEDS:>8,} seeds  {steps:>9,} steps; ledger: {len(model.books):,} states"
    print(line)
    record_property("protocol", line)
    record_property("walks", SEEDS)
    assert rests >= SEEDS


@pytest.mark.slow
def test_every_step_can_happen() -> None:
    """Else the model proves less than it says."""
    taken: Counter[str] = Counter()
    for scenario in LARGE.values():
        model = Model(scenario)
        for seed in range(100):
            taken += walk(model, seed).taken
    assert set(taken) == STEPS
