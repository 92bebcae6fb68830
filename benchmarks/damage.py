"""Damage to a file of any kind: what a broken disk, a cut connection or somebody malicious makes of it."""

from __future__ import annotations

from random import Random

#: Text that some parser may take for more than it is.
FRAGMENTS = (
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\r",
    b"\t",
    b"\x85",
    b"\xe2\x80\xa8",
    b"'",
    b'"',
    b"{",
    b"[" * 200,
    b"- " * 200,
    b": ",
    b"&a [*a]",
    b"*a",
    b"<<: *a",
    b"!!python/object/apply:os.system ['true']",
    b"!!binary x",
    b"---\n",
    b"...\n",
    b"%YAML 9.9\n",
    b"? ",
    b"| 0\n",
    b"1" * 400,
    b"-1",
    b"1e999",
    b".nan",
    b"0x" + b"f" * 40,
    b"null",
    b"2001-12-14t21:59:43.10-05:00",
)


def damaged(rng: Random, data: bytes) -> bytes:
    """One to three hurts: bits flipped, a piece lost, repeated, or overwritten, a fragment put in, the end missing."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        first, last = sorted(rng.randrange(len(found) + 1) for _ in range(2))
        last = min(last, first + 64)
        match rng.randrange(6):
            case 0 if found:
                found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
            case 1:
                del found[first:last]
            case 2:
                found[first:first] = found[first:last]
            case 3:
                found[first:last] = rng.choice((b"\xff", b"\0", b"\x7f")) * (last - first)
            case 4:
                found[first:first] = rng.choice(FRAGMENTS)
            case _:
                del found[first:]
    return bytes(found)
