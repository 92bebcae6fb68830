"""Who reads a lease, and so who must acknowledge it: one consumer, an attention group, or everybody.

With attention data parallelism the tensor-parallel ranks of a scheduler group fall into attention groups of equal size,
and one of these attends to a request. Counting all ranks then leaves a lease waiting for readers that never come;
counting too few gives its bytes away under one that still reads.
"""

from __future__ import annotations

from tensorferry.codecs.errors import BadMessage


def column_of(rank: int, consumers: int) -> int:
    """The column of a global rank among consumers 0 .. n-1. A subgroup's own numbering would collide."""
    if rank < 0 or consumers < 1:
        raise BadMessage(f"rank {rank} among {consumers} consumers")
    return rank % consumers


def acknowledging(requested: int, declared: int, attention_group: int) -> int:
    """How many consumers must acknowledge when `requested` are asked for: never more than the proxy declares.

    attention_group: ranks of an attention group. Raises BadMessage for a number that is none of one, the attention
    group, everybody.
    """
    count = min(requested, declared)
    if count not in (1, min(attention_group, declared), declared):
        raise BadMessage(
            f"{requested} of {declared} consumers should acknowledge: only 1, an attention group of {attention_group}, "
            f"or all {declared} can"
        )
    return count
