"""Seeded choices that are the same in every process, on every machine, in every run."""

from __future__ import annotations

from hashlib import blake2b


def choose(seed: int, *what: str | int) -> int:
    """A number below 2^64 that depends on the seed and on `what`, and on nothing else.

    Not Python's `hash`, which differs from process to process for strings, and not a running generator, whose
    answers depend on what was asked before: the same row of a trace gives the same bytes under any --limit.
    """
    return int.from_bytes(blake2b(repr((seed, what)).encode(), digest_size=8).digest(), "little")
