"""The cost of a hostile line is proportional to its bytes, for any content."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path

import pytest

from tensorferry.codecs.errors import TraceError
from tensorferry.codecs.messages import VideoPart
from tensorferry.pipeline.client.prompt_parts import Video, prompt_on_wire
from tensorferry.replay.trace.loaded_trace import read_trace

MIB = 1 << 20
GOOD = b'{"at_ms": 1, "text_tokens": 5, "output_tokens": 1}\n'
HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
#: CPU a MiB, many times what these need: what is quadratic takes minutes.
MOST_S_A_MIB = 1.0
N = 2 * MIB
FILES = {
    "lists in each other": GOOD + b'{"at_ms": ' + b"[" * N + b"\n",
    "objects in each other": GOOD + b'{"a":' * (N // 5) + b"\n",
    "a number of digits": GOOD + b'{"at_ms": ' + b"9" * N + b', "output_tokens": 1}\n',
    "a number of decimals": GOOD + b'{"at_ms": 0.' + b"9" * N + b', "text_tokens": 1, "output_tokens": 1}\n',
    "a large exponent": GOOD + b'{"at_ms": 1e999999999, "text_tokens": 1, "output_tokens": 1}\n' * (N // 64),
    "a long text": GOOD + b'{"at_ms": 1, "output_tokens": 1, "text": "' + b"\\u0041" * (N // 6) + b'"}\n',
    "a long key": GOOD + b'{"' + b"k" * N + b'": 1}\n',
    "many keys": GOOD + b"{" + b",".join(b'"%d":1' % n for n in range(N // 10)) + b"}\n",
    "many images": GOOD + b'{"at_ms": 1, "output_tokens": 1, "images": [' + b"{}," * (N // 3) + b"{}]}\n",
    "many columns": HEADER + b",x" * (N // 2) + b"\n",
    "many cells": HEADER + b"\n2024-05-12 00:00:00,1,1" + b"," * N + b"\n",
    "quotes": HEADER + b"\n" + b'"' * N + b"\n",
    "a long number in a cell": HEADER + b"\n2024-05-12 00:00:00,1." + b"0" * N + b",1\n",
    "a long date": HEADER + b"\n2024-05-12 00:00:00." + b"0" * N + b",1,1\n",
    "line ends": GOOD + b"\n" * N,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_line_costs_no_more_than_its_bytes(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(FILES[name])
    started = time.process_time()
    try:
        trace = read_trace(path)
    except TraceError as refused:
        said = [str(refused)]
    else:
        said = [drop.problem for drop in trace.drops]
        assert trace.read == len(trace.requests) + len(trace.drops)
    assert all(len(sentence) < 2000 for sentence in said)
    assert time.process_time() - started < MOST_S_A_MIB * len(FILES[name]) / MIB


def test_a_frame_rate_may_be_a_fraction() -> None:
    assert prompt_on_wire([Video([b"a"], fps=Fraction(20, 3))], []) == (VideoPart(0, 1, (20, 3)),)
