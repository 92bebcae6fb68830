"""Whatever order the peers act in, the ledger keeps its laws."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def test_the_ledger_keeps_its_laws(laws: type[RuleBasedStateMachine]) -> None:
    """No byte is lent twice, none is lost, freed neighbours join, and a lease ends when its words say so."""
    run_state_machine_as_test(laws, settings=settings(max_examples=120, stateful_step_count=40))
