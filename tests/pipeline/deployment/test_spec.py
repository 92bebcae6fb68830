"""What follows from a deployment's numbers."""

from __future__ import annotations

from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec, TokenizerSpec, most_requests


def test_a_rank_keeps_twice_what_all_tokenizers_may_have_in_flight() -> None:
    spec = Deployment(name="a", tokenizer=TokenizerSpec(workers=3), limits=LimitsSpec(in_flight_requests=5))
    assert most_requests(spec) == 30
