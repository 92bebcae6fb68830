"""Which encoder rank encodes which item: one pure function that every process computes alike (promise E1)."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from heapq import heapify, heapreplace

from tensorferry.codecs.errors import BadMessage


def first_rank(request: bytes, ranks: int) -> int:
    """Where a request starts, so where its largest item goes: spread evenly whatever the ids look like.

    The 8-byte BLAKE2b of the id, read as a big-endian integer, modulo `ranks`. The id itself would do if it
    were always random; clients that count, or put a host name in front, would then load one rank.
    """
    if ranks < 1:
        raise BadMessage(f"an assignment over {ranks} ranks")
    return int.from_bytes(blake2b(request, digest_size=8).digest(), "big") % ranks


def assign(request: bytes, patches: Sequence[int], ranks: int) -> list[int]:
    """The rank, 0 .. ranks-1, of every item, in item order.

    request: the request id. patches: the patch count of every item, each >= 0. Raises BadMessage for less
    than one rank or a negative count: both come from a peer.

    Largest item first (equal ones by index) onto the rank with the fewest patches so far; equally loaded
    ranks are taken in the order s, s+1, .., ranks-1, 0, .., s-1 with s = `first_rank`. Integers only, so
    every implementation agrees; `tests/vectors/assignment.json` has cases to check one against. No rank gets
    more than the mean plus one largest item.
    """
    first = first_rank(request, ranks)
    if patches and min(patches) < 0:
        raise BadMessage(f"an item of {min(patches)} patches")
    owners = [0] * len(patches)
    # (load, places after the first rank); the second makes every key unique, so no tie is left to the heap.
    loads = [(0, place) for place in range(ranks)]
    heapify(loads)
    for index in sorted(range(len(patches)), key=lambda index: (-patches[index], index)):
        load, place = loads[0]
        owners[index] = (first + place) % ranks
        heapreplace(loads, (load + patches[index], place))
    return owners
