"""The owner's side of a streamed answer: new tokens alone, text, and a client whose queue is full."""

from __future__ import annotations

import numpy as np
import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import SlowClient, StreamDiverged
from tensorferry.stages.tokenizer import answer_relay
from tensorferry.stages.tokenizer.answer_relay import AnswerRelay
from tensorferry.stages.tokenizer.detokenizer import Detokenizer
from tensorferry.stages.tokenizer.text import TextEncoder

OWNER, SCHEDULER = wire.Origin("tokenizer", 0, 3), wire.Origin("scheduler", 1, 9)
SUBMIT = wire.Submit(bytes(16), 2, (wire.TextPart("x"),), 16, 1000, stream=True)


class Client:
    """Takes what it is sent while it has room."""

    def __init__(self) -> None:
        self.got: list[wire.Delta] = []
        self.has_room = True

    def take(self, delta: wire.Delta) -> bool:
        if self.has_room:
            self.got.append(delta)
        return self.has_room


def relay_to(client: Client) -> AnswerRelay:
    return AnswerRelay(SUBMIT, OWNER, Detokenizer(TextEncoder.from_file(None).tokenizer), client.take)


def delta(first: int, letters: bytes, text: str = "") -> wire.Delta:
    ids = np.frombuffer(letters, np.uint8).astype("<i4").tobytes()
    return wire.Delta(bytes(16), 512, OWNER.epoch, SCHEDULER, first, ids, tuple(range(len(letters))), text)


def test_a_client_gets_its_own_submission_and_text_that_the_engine_did_not_make() -> None:
    client = Client()
    relay_to(client).take(delta(0, b"ab"))
    [got] = client.got
    assert (got.attempt, got.to, got.origin, got.text) == (2, 0, OWNER, "ab")


def test_the_text_of_an_engine_is_passed_on() -> None:
    client = Client()
    relay = relay_to(client)
    relay.take(delta(0, b"ab", "its own"))
    relay.take(delta(2, b"c"))
    assert [got.text for got in client.got] == ["its own", ""]


def test_what_a_client_has_no_room_for_comes_together_later() -> None:
    client = Client()
    relay = relay_to(client)
    client.has_room = False
    relay.take(delta(0, b"ab"))
    relay.take(delta(2, b"c"))
    client.has_room = True
    relay.take(delta(3, b"d"))
    [got] = client.got
    assert (got.first, len(got.token_ids) // 4, got.text) == (0, 4, "abcd")


def test_a_client_that_takes_nothing_for_long_is_given_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    client.has_room = False
    relay = relay_to(client)
    relay.take(delta(0, b"ab"))
    monkeypatch.setattr(answer_relay, "MOST_HELD_S", 0.0)
    with pytest.raises(SlowClient, match="3 tokens wait for it"):
        relay.take(delta(2, b"c"))


def test_s5_another_attempt_is_compared_and_only_its_new_tokens_are_sent() -> None:
    client = Client()
    relay = relay_to(client)
    relay.take(delta(0, b"abc"))
    relay.begin_attempt()
    relay.take(delta(0, b"ab"))
    relay.take(delta(2, b"cd"))
    assert [(got.first, len(got.token_ids) // 4, got.text) for got in client.got] == [(0, 3, "abc"), (3, 1, "d")]
    relay.begin_attempt()
    with pytest.raises(StreamDiverged):
        relay.take(delta(0, b"x"))
