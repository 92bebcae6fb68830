"""The short form of `make soak`: a trend is told from noise, and a leak that was planted is found."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy", reason="pip install 'tensorferry[test]'")

from benchmarks.soak import soak
from benchmarks.trend import trend

AT_S = [float(second) for second in range(200)]


def series(kind: str, seed: int) -> list[float]:
    """200 samples of something that has about 100 MiB, with noise of 1."""
    rng = np.random.default_rng(seed)
    noise, at = rng.normal(0, 1, 200), np.arange(200)
    shapes = {
        "flat": np.zeros(200),
        "leak": at * 0.05,
        "shrinks": at * -0.05,
        "one step early": np.where(at > 20, 3.0, 0.0),
        "spikes": np.where(rng.random(200) < 0.05, 50.0, 0.0),
        "wave": 3.0 * np.sin(at / 5),
        "hardly": at * 0.005,
    }
    return list(100.0 + shapes[kind] + noise)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "leak", "shrinks", "one step early", "spikes", "wave", "hardly"])
def test_only_what_goes_up_for_good_and_by_more_than_matters_is_a_trend(kind: str) -> None:
    assert {trend(AT_S, series(kind, seed), matters=2.0).goes_up for seed in range(5)} == {kind == "leak"}


def test_a_leak_of_whole_numbers_is_found_between_steps() -> None:
    """A descriptor every 40 seconds: most neighbours are equal."""
    found = trend(AT_S, [60.0 + second // 40 for second in range(200)], matters=1.0)
    assert found.goes_up
    assert found.growth == pytest.approx(5, rel=0.1)


def test_too_few_samples_have_no_trend() -> None:
    assert not trend([0.0, 1.0], [0.0, 100.0], matters=1.0).goes_up


@pytest.mark.processes
@pytest.mark.timeout(120)
async def test_what_a_stage_leaks_is_found_and_it_is_named() -> None:
    found = await soak(3.0, plant=["descriptors", "memory"], leak_every_s=0.1)
    wrong = found["wrong"]
    assert isinstance(wrong, list)
    named = {text.partition(" goes up")[0] for text in wrong}
    assert {"tokenizer-0: descriptors", "tokenizer-0: rss_mib"} <= named, found
