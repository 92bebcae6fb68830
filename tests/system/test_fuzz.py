"""The short form of `make fuzz`: every socket of a deployment is fed malformed messages while good requests go on."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from benchmarks import fuzz as module
from benchmarks.flood import Burst
from benchmarks.fuzz import GROWTH_HANDLES, GROWTH_NBYTES, Look, Window, crashes, fuzz, report, settled
from benchmarks.malformed import SHARES, Layer, batch, layer_of, samples
from benchmarks.workload import Tally

from tensorferry.codecs.frames import Limits
from tensorferry.pipeline.deployment.spec import Deployment


@pytest.mark.processes
@pytest.mark.leaves("pyzmq keeps a thread and two descriptors for good after its first frame that is not copied")
async def test_b27_malformed_messages_at_every_socket_are_counted_refusals_and_good_requests_are_answered() -> None:
    found: Any = await fuzz(3, rounds=1, seconds=2.0, per_s=1500.0, good_per_s=5.0, made=3000, warm_s=0.5)
    assert found["wrong"] == [], found
    assert found["past_header"] >= 0.20
    assert found["past_schema"] >= 0.05
    assert found["counted_past_schema"]


def test_a_seed_says_what_is_sent_and_every_layer_has_its_share() -> None:
    starts, limits = samples(), Limits()
    made = batch(Random(7), starts, 3000, limits)
    assert made == batch(Random(7), starts, 3000, limits)
    assert made != batch(Random(8), starts, 3000, limits)
    assert all(layer_of(one.frames, limits) is one.layer for one in made)
    counts = Counter(one.layer for one in made)
    assert all(abs(counts[layer] / 3000 - share) < 0.03 for layer, share in SHARES.items())


# --- what it would find -------------------------------------------------------------------------------------------


def look(**changes: Any) -> Look:
    of_all: dict[str, Any] = {
        "pids": {"encoder-0": 5},
        "rss": {"encoder-0": 1 << 27},
        "threads": {"encoder-0": 7},
        "descriptors": {"encoder-0": 40},
        "counts": {"encoder-0": {"messages_refused": 10.0}},
    }
    return Look(**of_all | changes)


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (look(), None),
        (look(rss={"encoder-0": (1 << 27) + GROWTH_NBYTES}), None),
        (look(pids={"encoder-0": 6}), "encoder-0 has died"),
        (look(rss={"encoder-0": (1 << 27) + GROWTH_NBYTES + 1}), "grown from 134,217,728 bytes"),
        (look(threads={"encoder-0": 8 + GROWTH_HANDLES}), "grown from 7 threads"),
        (look(descriptors={"encoder-0": 41 + GROWTH_HANDLES}), "grown from 40 descriptors"),
    ],
)
def test_a_process_that_has_died_or_grown_is_found(after: Look, problem: str | None) -> None:
    found = after.worse_than(look())
    assert len(found) == bool(problem)
    assert all(problem is not None and problem in one for one in found)


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ({"messages_refused": 15.0}, ""),
        ({"messages_refused": 14.0}, "has refused 4 messages, and 5 were to be"),
        ({"messages_refused": 16.0}, "has refused 6 messages, and 5 were to be"),
        ({"messages_refused": 15.0, "messages_crashed": 1.0}, "1 messages brought out a bug"),
    ],
)
async def test_a_message_that_is_not_counted_or_counted_twice_or_crashes_is_found(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, float], problem: str
) -> None:
    monkeypatch.setattr(module, "START_S", 0.3)
    monkeypatch.setattr(module.Look, "now", lambda deployment: look(counts={"encoder-0": counts}))
    tally = Tally(9, Counter({Layer.HEADER: 2, Layer.SCHEMA: 2, Layer.STAGE: 5}), misplaced=1)
    deployment = Deployment(name="fuzzed")
    found = await settled(deployment, look(), {"encoder-0 inbox": tally, "scheduler-0 inbox": tally})
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_a_crash_in_the_log_is_found() -> None:
    lines = ['{"event": "message_refused", "level": "warning"}', '{"event": "peer_lost", "level": "warning"}']
    assert crashes("\n".join(lines)) == []
    for bad in ('{"event": "message_crashed", "level": "error"}', "Traceback (most recent call last):"):
        assert crashes("\n".join([*lines, bad])) == [f"in the log: {bad}"]


@pytest.mark.parametrize(
    ("flood_ms", "sent", "layers", "below"),
    [
        (14.0, 6000, {Layer.HEADER: 4, Layer.SCHEMA: 3, Layer.STAGE: 3}, ""),
        (16.0, 6000, {Layer.HEADER: 4, Layer.SCHEMA: 3, Layer.STAGE: 3}, "1.60 times"),
        (14.0, 4000, {Layer.HEADER: 4, Layer.SCHEMA: 3, Layer.STAGE: 3}, "4,000 messages a second"),
        (14.0, 6000, {Layer.HEADER: 9, Layer.STAGE: 1}, "10.0% past the header"),
        (14.0, 6000, {Layer.HEADER: 5, Layer.SCHEMA: 5}, "0.0% past the schema"),
    ],
)
def test_what_is_below_a_floor_says_so(flood_ms: float, sent: int, layers: dict[Layer, int], below: str) -> None:
    tally = Tally(sent, Counter({layer: share * sent // 10 for layer, share in layers.items()}))
    windows = [Window(False, [10.0] * 50), Window(True, [flood_ms] * 50)]
    found: Any = report(1, windows, [Burst(sent, 1.0, 0.0, {})], {"encoder-0 inbox": tally}, {}, [])
    assert len(found["below"]) == bool(below)
    assert below in "".join(found["below"])
