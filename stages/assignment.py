"""Which encoder rank encodes which item: pure functions that every process computes alike (promise E1).

The deployment file chooses one of them (`encoder.assignment`), and no message names it: an encoder checks each message
by its own file.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from heapq import heapify, heapreplace
from typing import Literal

from tensorferry.codecs.errors import BadMessage

Assignment = Literal["balanced", "affinity"]


def owners(
    assignment: Assignment, request: bytes, patches: Sequence[int], contents: Sequence[bytes], ranks: Sequence[int]
) -> list[int]:
    """The owner of every item, in item order, as an index into `ranks`, the numbers of the ranks that take work now.

    patches, contents: the patch count and the content hash of every item. Raises BadMessage as `assign` and `affine`.
    """
    if assignment == "affinity":
        return affine(contents, ranks)
    return assign(request, patches, len(ranks))


def first_rank(request: bytes, ranks: int) -> int:
    """The rank that gets the largest item of a request. Requests spread evenly over the ranks, whatever ids they have.

    The 8-byte BLAKE2b of the id, read as a big-endian integer, modulo `ranks`. The id itself is not
    used: clients that count, or begin ids with a host name, would load one rank.
    """
    if ranks < 1:
        raise BadMessage(f"an assignment over {ranks} ranks")
    return int.from_bytes(blake2b(request, digest_size=8).digest(), "big") % ranks


def assign(request: bytes, patches: Sequence[int], ranks: int) -> list[int]:
    """`balanced`: the rank, 0 .. ranks-1, of every item, in item order.

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


def affine(contents: Sequence[bytes], ranks: Sequence[int]) -> list[int]:
    """`affinity`: the place in `ranks` of every item, in item order; equal content goes to the same rank.

    contents: the content hash of every item. ranks: the ranks' numbers, 0 .. 2^31-1 each. Raises BadMessage for none.

    Rendezvous hashing: the rank with the greatest weight, of equal ones the first in the list. The weight of a rank
    is the 8-byte BLAKE2b of the content hash and then the rank's number in 4 bytes, big-endian; all read as
    big-endian integers. So the loss of a rank moves its own contents and no others, and its return brings them back.
    Source: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996.

    Nothing here balances: how even the load is depends on how many contents there are, and how popular each is.
    """
    if not ranks:
        raise BadMessage("an assignment over 0 ranks")
    numbers = [rank.to_bytes(4, "big") for rank in ranks]

    def place(content: bytes) -> int:
        weights = [blake2b(content + number, digest_size=8).digest() for number in numbers]
        return weights.index(max(weights))  # bytes of one length compare as big-endian integers do

    chosen = {content: place(content) for content in set(contents)}
    return [chosen[content] for content in contents]
