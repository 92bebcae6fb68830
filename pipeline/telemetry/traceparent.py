"""The context of a trace: as the `traceparent` header of HTTP, and as the 25 bytes that travel in our messages.

Source: W3C Trace Context, section 3.2 (version 00: trace id 16 bytes, parent id 8, flags 1, in lower-case hexadecimal).
"""

from __future__ import annotations

import re

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 0x01  #: whoever began the trace records it


def parse(header: str) -> bytes | None:
    """The context in a header. None where it is malformed: a trace is then begun anew, as the standard has it."""
    found = _HEADER.fullmatch(header.strip())
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    known = version != "ff" and not (version == "00" and more)
    return bytes.fromhex(trace + span + flags) if known and int(trace, 16) and int(span, 16) else None


def header(context: bytes) -> str:
    """The header that hands a context on."""
    return f"00-{trace_id(context).hex()}-{span_id(context).hex()}-{context[24:].hex()}"


def made(trace: bytes, span: bytes, flags: int) -> bytes:
    """A context of 16 and 8 bytes, neither all zeros."""
    return trace + span + bytes([flags])


def trace_id(context: bytes) -> bytes:
    return context[:16]


def span_id(context: bytes) -> bytes:
    return context[16:24]


def sampled(context: bytes) -> bool:
    return bool(context[24] & SAMPLED)
