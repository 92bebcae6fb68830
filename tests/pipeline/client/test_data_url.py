"""`data:` URLs: one reader, wherever one may stand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorferry.codecs.errors import BadRequest
from tensorferry.pipeline.client import prompt_parts
from tensorferry.pipeline.client.data_url import read_data_url
from tensorferry.pipeline.recording.request import BrokenRow
from tensorferry.replay.trace.formats.media import image_at

GIVEN = {
    "data:image/png;base64,AAEC": b"\0\1\2",
    "DATA:image/png;BASE64,AAEC": b"\0\1\2",
    "data:image/png; base64,AAEC": b"\0\1\2",
    "data:image/png;charset=utf-8;name=a;base64 ,AAEC": b"\0\1\2",
    "data:;base64,AAEC": b"\0\1\2",
    "data:;base64,AA EC\r\n": b"\0\1\2",
    "data:;base64,%41%41EC": b"\0\1\2",
    "data:;base64,AAE": b"\0\1",
    "data:;base64,AAE=": b"\0\1",
    "data:,a%00b": b"a\0b",
    "data:image/gif;base64x,AAEC": b"AAEC",
    "data:base64,AAEC": b"AAEC",
    "data:text/plain,a,b": b"a,b",
}
REFUSED = {
    "data:image/png;base64": "has no comma",
    "data:;base64,": "has no data",
    "data:,": "has no data",
    "data:;base64,====": "not base64",
    "data:;base64,A": "not base64",
    "data:;base64,A-_B": "not base64",
    "data:;base64,\N{SNOWMAN}": "not base64",
}


def of_a_prompt(url: str) -> bytes:
    frames: list[bytes | memoryview] = []
    prompt_parts.on_wire(prompt_parts.Image(url), frames)
    return bytes(frames[0])


def of_a_trace(url: str) -> bytes:
    return image_at(url, "image_url").data


READERS: tuple[Callable[[str], bytes], ...] = (read_data_url, of_a_prompt, of_a_trace)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("url", GIVEN)
def test_every_reader_gives_the_same_bytes(reader: Callable[[str], bytes], url: str) -> None:
    assert reader(url) == GIVEN[url]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("url", REFUSED)
def test_every_reader_says_what_is_wrong(reader: Callable[[str], bytes], url: str) -> None:
    with pytest.raises((ValueError, BadRequest, BrokenRow)) as refused:
        reader(url)
    assert REFUSED[url] in str(refused.value)
    assert len(str(refused.value)) < 300


def test_no_other_module_reads_them() -> None:
    """Whoever does would have rules of its own."""
    root = Path(__file__).parents[3]
    readers = [
        str(path.relative_to(root))
        for folder in ("codecs", "pipeline", "replay", "stages", "cli")
        for path in (root / folder).rglob("*.py")
        if "unquote_to_bytes" in path.read_text(encoding="utf-8")
        or json.dumps("base64,") in path.read_text(encoding="utf-8")
    ]
    assert readers == ["pipeline/client/data_url.py"]
