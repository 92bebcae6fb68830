"""When a client takes a tokenizer for silent, gone, or closed to its keys."""

from __future__ import annotations

import pytest

from tensorferry.pipeline.channels.interface import Denial
from tensorferry.pipeline.client.door import MOST_DENIALS, SILENT_GREETINGS, Presence, SignsOfLife

HUNG_UP, REFUSED = Denial("it hung up", final=False), Denial("its key is another", final=True)


def presences(life: SignsOfLife, heartbeats: int) -> list[Presence]:
    found = []
    for _ in range(heartbeats):
        life.heartbeat_passed()
        found.append(life.presence)
    return found


@pytest.mark.parametrize("patience", [2, 3, 7])
def test_a_tokenizer_is_silent_after_three_heartbeats_and_gone_beyond_the_patience(patience: int) -> None:
    life = SignsOfLife(patience)
    assert life.presence is Presence.HERE
    found = presences(life, patience + 2)
    here, silent = SILENT_GREETINGS - 1, patience - SILENT_GREETINGS + 1
    assert found == [Presence.HERE] * here + [Presence.SILENT] * silent + [Presence.GONE] * (
        patience + 2 - here - silent
    )
    life.answered()
    assert life.presence is Presence.HERE
    assert presences(life, 1) == [Presence.HERE]


def test_a_broken_connection_makes_a_tokenizer_silent_at_once_and_never_less_overdue() -> None:
    life = SignsOfLife(patience=5)
    life.connection_broke()
    assert life.presence is Presence.SILENT
    assert presences(life, 3) == [Presence.SILENT, Presence.SILENT, Presence.GONE]
    life.connection_broke()
    assert life.presence is Presence.GONE


def test_keys_are_refused_at_once_or_by_several_interrupted_handshakes_in_a_row() -> None:
    life = SignsOfLife(patience=5)
    assert [life.handshake_failed(HUNG_UP, "it") for _ in range(MOST_DENIALS + 1)] == [False, False, True, False]
    assert life.presence is Presence.DENIED
    assert life.denied == "it: it hung up (see security.keys)"
    life.answered()
    assert life.presence is Presence.HERE
    assert not life.handshake_failed(HUNG_UP, "it"), "the count began again"
    assert life.handshake_failed(REFUSED, "it")
    presences(life, 9)
    assert life.presence is Presence.DENIED
    assert life.is_overdue
