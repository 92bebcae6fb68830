"""A span of a request, as OpenTelemetry has it, and the ids of spans."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

Attribute = str | int | float | tuple[str, ...] | tuple[int, ...]
Attributes = Mapping[str, Attribute]


class Span(msgspec.Struct, frozen=True):
    """Something that took its time. Times are CLOCK_MONOTONIC nanoseconds of this node."""

    name: str
    context: bytes  #: its own; see `traceparent`
    start_ns: int
    end_ns: int
    parent: bytes = b""  #: the context of its parent; empty: it has none
    remote: bool = False  #: that parent is of another process
    serves: bool = False  #: it answers a call from outside (SERVER); else it is INTERNAL
    attributes: Attributes = MappingProxyType({})
    links: tuple[bytes, ...] = ()  #: contexts
    problem: str | None = None  #: what went wrong, if something did


_random = random.Random()  # seeded by the kernel; asking it for every id would take a sixth of a request's spans


def new_span_id() -> bytes:
    """Eight random bytes that are not all zeros."""
    return (_random.getrandbits(64) or 1).to_bytes(8, "big")
