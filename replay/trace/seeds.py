"""Seeded choices, which are the same in every process, on every machine and in every run."""

from __future__ import annotations

from hashlib import blake2b


def choose(seed: int, *what: str | int) -> int:
    """Return a number below 2^64 that depends only on the seed and on `what`.

    Python's `hash` of a string differs between processes. The numbers of a generator depend on earlier calls, but a row
    of a trace must give the same bytes under any --limit.
    """
    return int.from_bytes(blake2b(repr((seed, what)).encode(), digest_size=8).digest(), "little")
