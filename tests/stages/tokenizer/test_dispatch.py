"""Who gets a request from its owner, and which bad item is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tensorferry.codecs.errors import BadItem, PeerGone
from tensorferry.pipeline.deployment.spec import Deployment, SchedulerSpec
from tensorferry.stages.processors.base import BadMedia
from tensorferry.stages.tokenizer import dispatch as module
from tensorferry.stages.tokenizer.dispatch import Dispatch


def dispatch(usable: list[int], **spec: int) -> Dispatch:
    """Of a deployment with these scheduler ranks usable."""
    ranks = [SimpleNamespace(rank=rank) for rank in usable]
    stage: Any = SimpleNamespace(
        deployment=Deployment(name="test", scheduler=SchedulerSpec(**spec)),
        peers=SimpleNamespace(usable=lambda stage: ranks),
    )
    return Dispatch(stage, None, None, None)  # type: ignore[arg-type]


def attending(usable: list[int], **spec: int) -> Counter[tuple[int, ...]]:
    """How many of 300 requests each set of ranks attends to."""
    sender = dispatch(usable, **spec)
    groups = (sender._attention_group(number.to_bytes(8, "big") + bytes(8)) for number in range(300))
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
    sender = dispatch([0])
    failed: list[int] = []

    def write(prompt: Any, index: int, draft: Any) -> bytes:
        failed.append(index)
        raise BadMedia(f"item {index} is damaged")

    async def at_once(threads: Any, work: Callable[[], bytes]) -> bytes:
        return work()

    sender._write = write  # type: ignore[method-assign]
    monkeypatch.setattr(module, "run_to_end", at_once)
    with pytest.raises(BadItem, match="item 1 is damaged") as found:
        await sender._process(None, dict.fromkeys([3, 1, 2]))  # type: ignore[arg-type]
    assert (found.value.index, failed) == (1, [3, 1, 2])
