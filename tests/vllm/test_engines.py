"""Encoder outputs between real vLLM engines: the same tokens, and what becomes of each fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.vllm.conftest import MAX_TOKENS, Engine, Lab

pytestmark = pytest.mark.timeout(900)

PATIENCE_S = 3.0
MANY = 40  #: items of 20 rows: more than the engine's encoder cache has room for


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.leaves("engines live as long as the module")
def test_tokens_are_those_of_transformers_and_of_the_engine_s_own_tower(
    lab_of: Callable[[str], Lab], family: str
) -> None:
    lab = lab_of(family)
    assert lab.answers["lead"] > 0.005, "a near tie decides nothing"
    with lab.engine() as alone:
        own = [alone.ask(request)[0] for request in _with_images(lab)]
    assert [outcome["tokens"] for outcome in own] == lab.answers["tokens"]
    with lab.engine("ec_producer") as producer, lab.engine("ec_consumer") as consumer:
        producer.wait()
        for request in _with_images(lab)[1:]:
            producer.ask(request | {"max_tokens": 1})
        served = [consumer.ask(request)[0]["tokens"] for request in (lab.without(*names) for names in _names())]
        assert served == lab.answers["tokens"]
        assert consumer.stop() == 0
        assert producer.stop() == 0


def _names() -> list[tuple[str, ...]]:
    return [(), ("a0",), ("b0", "b1")]


def _with_images(lab: Lab) -> list[dict[str, object]]:
    return [lab.with_images(*names, max_tokens=MAX_TOKENS) for names in _names()]


class Pair:
    """A producer, and a consumer whose core and worker are processes of their own."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        arguments = {"max_num_batched_tokens": 512}
        settings = {"patience_s": PATIENCE_S, "keep_s": PATIENCE_S, "arguments": arguments}
        self.producer: Engine = lab.engine("ec_producer", **dict(settings, arguments=dict(arguments)))
        self.consumer: Engine = lab.engine("ec_consumer", one_process=False, **settings)
        self.producer.wait()
        self.consumer.wait()
        self.right = lab.answers["tokens"][1]

    def make(self, *names: str) -> None:
        self.producer.ask(*[self.lab.with_images(name, image=0) for name in names])

    def read(self, *names: str) -> list[object]:
        """For each item its tokens if they are right, else the reason why the request ended."""
        outcomes = self.consumer.ask(*[self.lab.without(name, image=0) for name in names])
        return [True if outcome["tokens"] == self.right else outcome["finish"] for outcome in outcomes]


@pytest.fixture(scope="module")
def pair(lab_of: Callable[[str], Lab]) -> Pair:
    return Pair(lab_of("qwen3_vl"))


@pytest.mark.leaves("engines live as long as the module")
class TestFaults:
    """In this order, with one pair of engines, which live through all of it but the last."""

    def test_items_are_served_again_and_beside_one_that_nobody_makes(self, pair: Pair) -> None:
        pair.make("x0", "x1")
        assert pair.read("x0", "never", "x1", "x0") == [True, "error", True, True]
        assert pair.read("x0", "x0") == [True, True]

    def test_an_item_that_was_missing_is_served_once_it_is_made(self, pair: Pair) -> None:
        assert pair.read("late") == ["error"]
        pair.make("late")
        assert pair.read("late") == [True]

    def test_an_item_that_the_engine_has_evicted_comes_again(self, pair: Pair) -> None:
        names = [f"many{number}" for number in range(MANY)]
        pair.make(*names)
        assert pair.read(*names) == [True] * MANY
        assert pair.read(*names) == [True] * MANY

    def test_an_item_that_all_have_forgotten_fails_and_is_made_again(self, pair: Pair) -> None:
        """The producer by age while another request runs out of patience, the consumer by room."""
        pair.make("old")
        assert pair.read("old") == [True]
        names = [f"more{number}" for number in range(MANY)]
        pair.make(*names)
        assert pair.read(*names) == [True] * MANY
        assert pair.read("nobody", "nobody") == ["error", "error"]
        assert pair.read("old") == ["error"]
        pair.make("old")
        assert pair.read("old") == [True]

    def test_a_producer_that_is_killed_fails_what_only_it_had_and_its_successor_serves(self, pair: Pair) -> None:
        pair.make("last")
        assert pair.read("last") == [True]
        pair.producer.kill()
        assert pair.read("gone", "last") == ["error", True]
        pair.producer = pair.lab.engine("ec_producer")
        pair.make("gone")
        assert pair.read("gone") == [True]
        assert pair.consumer.stop() == 0
        assert pair.producer.stop() == 0
