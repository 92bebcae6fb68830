"""A row with any content is at worst dropped alone. Every format gets values of types that its keys do not allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorferry.codecs.errors import TraceError
from tensorferry.replay.trace.convert import convert
from tensorferry.replay.trace.loaded_trace import read_trace
from tensorferry.replay.trace.selection import Selection
from tensorferry.replay.trace.trace_file import Recording

DATA = Path(__file__).parents[2] / "data" / "traces"

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 5}
CAPTURED = {"endpointInput": {"data": json.dumps(CHAT), "encoding": "JSON"}}
#: A good row of each format; what is wrong is put somewhere into it.
ROWS: dict[str, dict[str, Any]] = {
    "tensorferry": {
        "at_ms": 1,
        "id": "a",
        "text_tokens": 5,
        "images": [{"tokens": 5}, {"width": 3, "height": 4}],
        "blocks": [1],
        "block_tokens": 16,
        "session": "s",
        "parent": "p",
        "continues": True,
        "think_ms": 1,
        "took_ms": 2,
        "output_tokens": 1,
    },
    "sagemaker": {"captureData": CAPTURED, "eventMetadata": {"eventId": "e", "inferenceTime": "2026-04-29T00:03:18Z"}},
    "dynamo": {
        "event": {
            "schema": "dynamo.request.trace.v1",
            "event_type": "request_end",
            "agent_context": {"session_id": "s"},
            "request": {
                "request_id": "r",
                "input_tokens": 5,
                "output_tokens": 1,
                "request_received_ms": 5,
                "total_time_ms": 1.5,
                "replay": {"trace_block_size": 16, "input_sequence_hashes": [1]},
            },
        }
    },
    "qwen-bailian": {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 1.5,
        "input_length": 5,
        "output_length": 1,
        "type": "text",
        "hash_ids": [1],
    },
    "ragpulse": {
        "timestamp": "1",
        "input_length": 5,
        "output_length": 1,
        "hash_ids": {"sys_prompt": [1]},
        "session_id": "s",
    },
    "openai-batch": {"custom_id": "a", "body": CHAT},
    "servegen": {
        "request_id": 1,
        "timestamp": 0.5,
        "data": {"text_tokens": 5, "image_tokens": [5], "output_tokens": 1},
    },
    "aiperf-multi-turn": {"session_id": "s", "turns": [{"text": "a", "timestamp": 1}, {"texts": ["b"], "delay": 5}]},
    "mooncake": {"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]},
    "vllm-custom-image": {"prompt": "a", "image_files": ["b.jpg"]},
    "aiperf-single-turn": {"timestamp": 1, "text": "a", "image": "b.jpg", "image_uuids": ["u"], "output_length": 5},
}

URIS = ["data:,", "data:image/png;base64,===", "file://a/b", "file:%ff", "file://[", "file:", "http://a"]
TEXTS = [*URIS, "\0", "-1", "1e9999", "\ud800"]
odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**60, 2**70)
    | st.integers(-(2**70), -(2**60))
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "url", "text", "a"]), inner),
    max_leaves=6,
)


def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Every place in a document, itself left out."""
    pairs: list[tuple[object, object]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    return [found for key, inner in pairs for found in [(*path, key), *places(inner, (*path, key))]]


def with_odd(row: dict[str, Any], place: tuple[Any, ...], value: object) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(row))
    inner: Any = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_odd_value_costs_its_row_alone(tmp_path: Path, name: str, data: st.DataObject) -> None:
    row = ROWS[name]
    bad = with_odd(row, data.draw(st.sampled_from(places(row))), data.draw(odd))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in (row, bad, row)), "utf-8")
    trace = read_trace(path)
    assert trace.format == name
    assert trace.read == len(trace.requests) + len(trace.drops)
    good = len(row["turns"]) if "turns" in row else 1
    assert sum(request.line in (1, 3) for request in trace.requests) == 2 * good
    assert all(drop.line == 2 and drop.problem for drop in trace.drops)
    recording = Recording(path)
    survey = recording.survey()
    assert list(recording.in_order(survey)) == trace.requests
    convert(recording, survey, Selection(), tmp_path / "own")
    own = read_trace(tmp_path / "own")
    assert ([request.at_ns for request in own.requests], own.drops) == ([r.at_ns for r in trace.requests], [])


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bytes_that_are_changed_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """A file with damage anywhere gives a trace with drops, or one error that names it."""
    files = sorted(path for path in DATA.iterdir() if path.suffix != ".md")
    content = bytearray(data.draw(st.sampled_from(files)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = tmp_path / "trace"
    path.write_bytes(content)
    try:
        trace = read_trace(path)
    except TraceError as problem:
        said = str(problem)
    else:
        assert trace.read == len(trace.requests) + len(trace.drops)
        said = str(trace.path)
    assert str(path) in said
