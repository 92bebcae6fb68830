"""Who gets a request from its owner, and which bad item is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import BadItem, PeerGone
from tensorferry.codecs.pool.publisher import Publisher
from tensorferry.pipeline.deployment.spec import Deployment, SchedulerSpec
from tensorferry.pipeline.peers.peer import Peer
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.stages.loop_watch import Watch
from tensorferry.stages.processors.base import BadMedia, Plan
from tensorferry.stages.tokenizer import dispatch as module
from tensorferry.stages.tokenizer.dispatch import Dispatch
from tensorferry.stages.tokenizer.planner import Prompt
from tensorferry.stages.tokenizer.request import Request


def dispatch(usable: list[int], **spec: int) -> Dispatch:
    """Of a deployment with these scheduler ranks usable."""
    unused, counters = cast(Any, None), Counters()
    ranks = [Peer("scheduler", rank, unused, True, 1.0) for rank in usable]
    stage: Any = SimpleNamespace(
        deployment=Deployment(name="test", scheduler=SchedulerSpec(**spec)),
        peers=SimpleNamespace(usable=lambda stage: ranks),
        publisher=Publisher(None),
        counters=counters,
    )
    return Dispatch(stage, unused, unused, Watch("tokenizer.processor", "qwen2_vl", counters))


def attending(usable: list[int], **spec: int) -> Counter[tuple[int, ...]]:
    """How many of 300 requests each set of ranks attends to."""
    sender = dispatch(usable, **spec)
    groups = (sender.attention_group(number.to_bytes(8, "big") + bytes(8)) for number in range(300))
    return Counter(tuple(peer.rank for peer in group) for group in groups)


@pytest.mark.parametrize(
    ("spec", "groups"),
    [
        ({"groups": 1, "tp_size": 4, "attention_tp_size": 4}, [(0, 1, 2, 3)]),
        ({"groups": 1, "tp_size": 4, "attention_tp_size": 2}, [(0, 1), (2, 3)]),
        ({"groups": 1, "tp_size": 4, "attention_tp_size": 1}, [(0,), (1,), (2,), (3,)]),
        ({"groups": 2, "tp_size": 2, "attention_tp_size": 2}, [(0, 1), (2, 3)]),
    ],
)
def test_e6_each_request_goes_to_one_attention_group_and_all_get_their_share(
    spec: dict[str, int], groups: list[tuple[int, ...]]
) -> None:
    found = attending([0, 1, 2, 3], **spec)
    assert found == dict.fromkeys(groups, 300 // len(groups))


def test_c5_a_group_that_is_not_whole_gets_nothing() -> None:
    spec = {"groups": 1, "tp_size": 4, "attention_tp_size": 2}
    assert attending([0, 2, 3], **spec) == {(2, 3): 300}
    with pytest.raises(PeerGone, match="no attention group has all of its ranks ready"):
        attending([0, 2], **spec)


async def test_b33_of_several_bad_items_the_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last fails first: threads end in any order."""
    failed: list[bytes] = []

    def write(processor: Any, source: bytes, plan: Plan, out: Any) -> bytes:
        failed.append(source)
        raise BadMedia(f"item {source.decode()} is damaged")

    async def at_once(threads: Any, work: Callable[[], bytes]) -> bytes:
        return work()

    monkeypatch.setattr(module, "write", write)
    monkeypatch.setattr(module, "run_to_end", at_once)
    plan = Plan("image", (1, 2, 2), (4, 12), "float32", 1)
    prompt = Prompt(np.zeros(4, np.int32), [(0, 1)] * 4, [b"0", b"1", b"2", b"3"], [plan] * 4, 0)
    request = Request(b"client", wire.Submit(bytes(16), 0, (wire.TextPart("a"),), 1, 1000), 1.0)
    with pytest.raises(BadItem, match="item 1 is damaged") as found:
        await dispatch([0]).send(request, prompt, [3, 1, 2])
    assert (found.value.index, failed) == (1, [b"3", b"1", b"2"])
