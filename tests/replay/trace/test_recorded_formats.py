"""Published trace formats are recognised by content, and read with their units and identities."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.recording.request import ASSUMED_OUTPUT_TOKENS, Image, Request
from tensorferry.replay.trace.formats.servegen import Distribution
from tensorferry.replay.trace.formats.token_counts import Keys
from tensorferry.replay.trace.loaded_trace import Trace, load, read_trace
from tensorferry.replay.trace.trace_file import Recording

DATA = Path(__file__).parents[2] / "data" / "traces"
NS = 1_000_000_000
MS = 1_000_000
PIXEL = (Path(__file__).parents[2] / "data" / "images" / "pixel_1x1.png").read_bytes()
PIXEL_URI = f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(row, row): a trace file of these lines, objects as JSON."""

    def write(*rows: str | dict[str, Any], name: str = "trace") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def offsets(trace: Trace) -> list[int]:
    return [request.at_ns - trace.origin_ns for request in trace.requests]


def reasons(trace: Trace) -> list[tuple[int, str]]:
    return [(drop.line, drop.reason) for drop in trace.drops]


# --- columns -----------------------------------------------------------------------------------------------------


def test_burstgpt_has_six_columns_or_eight_and_is_told_by_their_names() -> None:
    six, eight = read_trace(DATA / "burstgpt_1.csv"), read_trace(DATA / "burstgpt_3.csv")
    assert six.format == eight.format == "burstgpt"
    assert [(r.text_tokens, r.output_tokens) for r in six.requests] == [(472, 18), (1087, 230), (417, 276)]
    assert offsets(six) == [0, 40 * NS, 113 * NS]
    assert [(r.text_tokens, r.output_tokens) for r in eight.requests] == [(906, 446), (36, 29), (1779, 123), (935, 178)]
    assert eight.origin == "19440110.000 s"  # 225 days that a replay must not wait
    assert offsets(eight) == [0, 51 * NS, 82 * NS, 144 * NS]
    assert eight.requests[0].session == "1722ac82-0a46-4bf0-aa08-89794e7a2b3f"
    assert eight.requests[0].took_ns == 43 * NS


def test_burstgpt_rows_of_the_api_have_no_session_and_failures_no_response(write: Write) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = write(header, "1.0,,3,GPT-4,5,0,5,API log", "2.0,,,GPT-4,0,0,0,API log", "3.0,,1,GPT-4,5,6,11,API log")
    trace = read_trace(path)
    assert reasons(trace) == [(3, "empty")]
    assert {request.session for request in trace.requests} == {""}
    assert trace.notes == {"no_output_tokens": 1}
    without = load(Recording(path), failures=False)
    assert reasons(without) == [(2, "recorded_failure"), (3, "empty")]
    assert without.read == len(without.requests) + len(without.drops)
    assert offsets(without) == [0]


def test_vidur_counts_seconds_from_zero(write: Write) -> None:
    trace = read_trace(write("arrived_at,num_prefill_tokens,num_decode_tokens", "0.0,374,44", "4.3145679,396,109"))
    assert (trace.format, offsets(trace)) == ("vidur", [0, 4_314_567_900])
    assert (trace.requests[0].text_tokens, trace.requests[0].output_tokens) == (374, 44)


# --- lengths -----------------------------------------------------------------------------------------------------


def test_bailian_has_mooncakes_keys_with_seconds_and_blocks_of_16(write: Write) -> None:
    trace = read_trace(DATA / "qwen_bailian.jsonl")
    first = trace.requests[0]
    assert (trace.format, first.block_tokens, len(first.blocks)) == ("qwen-bailian", 16, 32)
    assert (first.id, first.parent) == ("0", "")
    row = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132}
    trace = read_trace(write({**row, "type": "image", "turn": 2, "hash_ids": [1089, 1090]}))
    (request,) = trace.requests
    assert (request.at_ns, request.parent) == (61_114 * MS, "55")
    assert (request.images, request.context_tokens, request.text_tokens) == ((Image(),), 521, None)
    assert trace.notes["number_of_images_assumed"] == 1


def test_ragpulse_writes_its_seconds_as_text_and_its_blocks_in_five_lists(write: Write) -> None:
    hashes = {"sys_prompt": [8325, 8326], "passages_ids": [6123], "history": [], "web_search": [7], "user_input": [9]}
    row = {"input_length": 3861, "output_length": 127, "hash_ids": hashes, "session_id": "1758081660427-xa8rbsd2uco1"}
    times = ["27", *map(str, range(28, 60)), "0", "5"]
    trace = read_trace(write(*({"timestamp": at, **row} for at in times), "", ""))
    assert (trace.format, trace.read, trace.drops) == ("ragpulse", 35, [])
    assert trace.requests[0].blocks == (8325, 8326, 6123, 7, 9)
    assert trace.requests[0].session == row["session_id"]
    assert (trace.inversions, trace.glued) == (1, True)  # two recordings, one after the other


def test_a_shuffled_file_does_not_look_glued() -> None:
    assert not read_trace(DATA / "azure_2023.shuffled.csv").inversions <= 1
    assert not read_trace(DATA / "mooncake.jsonl").glued


def test_a_trace_with_keys_of_its_own_is_read_by_them(write: Write) -> None:
    keys = Keys("timed-trace", NS, 64, time="t", prompt="in", output="out", blocks="h")
    path = write({"t": 19440110.5, "in": 70, "out": 3, "h": [1, 2]}, {"t": 19440111, "in": 5, "out": 1})
    trace = load(Recording(path, keys=keys))
    assert (trace.format, offsets(trace)) == ("timed-trace", [0, NS // 2])
    assert (trace.requests[0].blocks, trace.requests[0].block_tokens) == ((1, 2), 64)


# --- AIPerf ------------------------------------------------------------------------------------------------------


def test_aiperf_single_turn_has_words_and_references(write: Write) -> None:
    rows = [
        {"timestamp": 0, "text": "What is this?", "image": "a/b.jpg", "output_length": 64},
        {"timestamp": 250.5, "texts": ["Compare", {"name": "n", "contents": ["the two."]}], "images": [PIXEL_URI, "c"]},
        {"timestamp": 900, "text": "Describe.", "images": ["https://images.example.invalid/cat.jpg"]},
        {"timestamp": 1, "text": "a", "texts": ["b"]},
        {"timestamp": 1, "text": "a", "image": "b", "images": ["c"]},
        {"timestamp": 0, "delay": 5, "text": "a"},
        {"timestamp": 1, "text": "a", "audio": "x.wav"},
        {"timestamp": -1, "text": "a"},
        {"text": "a"},
    ]
    trace = read_trace(write(*rows))
    assert trace.format == "aiperf-single-turn"
    assert reasons(trace) == [
        (3, "remote_image"),
        (4, "conflict"),
        (5, "conflict"),
        (6, "conflict"),
        (7, "unsupported_media"),
        (8, "negative"),
        (9, "missing"),
    ]
    first, second = trace.requests
    assert (first.words, first.images, first.output_tokens) == ((0, "What is this?"), (Image(path="a/b.jpg"),), 64)
    assert second.words == (0, 1, "Compare", "the two.")
    assert second.images == (Image(data=PIXEL), Image(path="c"))
    assert second.output_tokens == ASSUMED_OUTPUT_TOKENS
    assert trace.notes == {"output_tokens_assumed": 1}


def test_an_image_uuid_without_an_image_means_the_one_before(write: Write) -> None:
    rows = [
        {"timestamp": 0, "session_id": "s", "text": "first", "images": ["x.jpg"], "image_uuids": ["u"]},
        {"timestamp": 5, "session_id": "s", "text": "again", "image_uuids": ["u"]},
        {"timestamp": 6, "session_id": "s", "text": "other", "image_uuids": ["v"]},
    ]
    trace = read_trace(write(*rows))
    assert reasons(trace) == [(3, "missing_image")]
    assert [request.images for request in trace.requests] == [(Image(path="x.jpg"),)] * 2
    assert all(request.continues and request.session == "s" for request in trace.requests)


def test_aiperf_multi_turn_counts_turns_and_loses_only_the_broken_ones(write: Write) -> None:
    turns = [
        {"text": "Hello", "timestamp": 100},
        {"text": "Hi", "delay": 1000},
        {"images": [3]},
        {"text": "x", "delay": 5},
    ]
    trace = read_trace(write({"session_id": "s", "turns": turns}, {"turns": [{"text": "y", "timestamp": 1234}]}))
    assert (trace.format, trace.read) == ("aiperf-multi-turn", 5)
    assert [(r.at_ns, r.think_ns, r.session) for r in trace.requests] == [
        (100 * MS, None, "s"),
        (1100 * MS, 1000 * MS, "s"),
        (1105 * MS, 5 * MS, "s"),
        (1234 * MS, None, "line 2"),
    ]
    assert reasons(trace) == [(1, "bad_value")]
    assert trace.drops[0].problem.startswith("turns[2]")


def test_aiperf_mooncake_rows_count_or_spell_their_prompt(write: Write) -> None:
    rows: list[dict[str, Any]] = [
        {"timestamp": 10.25, "input_length": 512, "output_length": 8},
        {"timestamp": 20, "text_input": "Hello world", "output_length": 4},
        {"timestamp": 40, "payload": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}},
        {"session_id": "abc", "timestamp": 50, "input_length": 300, "output_length": 40},
        {"session_id": "abc", "delay": 2, "input_length": 150, "output_length": 20},
        {"session_id": "new", "delay": 2, "input_length": 150, "output_length": 20},
        {"timestamp": 60, "input_length": 3, "text_input": "x", "output_length": 1},
    ]
    trace = read_trace(write(*rows))
    assert trace.format == "mooncake"
    assert reasons(trace) == [(6, "missing"), (7, "conflict")]
    counted, words, payload, first, second = trace.requests
    assert (counted.at_ns, counted.text_tokens, counted.continues) == (10_250_000, 512, False)
    assert (words.words, words.output_tokens) == (("Hello world",), 4)
    assert (payload.words, payload.output_tokens, payload.notes) == (("hi",), 5, ("roles_not_sent",))
    assert first.continues  # its row is the new turn alone
    assert second.continues
    assert (second.at_ns, second.think_ns) == (52 * MS, 2 * MS)


# --- captured requests -------------------------------------------------------------------------------------------


def chat(*content: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(content)}]}


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


TEXT = {"type": "text", "text": "Describe"}


def test_openai_batch_keeps_the_order_of_words_and_images(write: Write) -> None:
    bodies = [
        {**chat(TEXT, image_url(PIXEL_URI), image_url("file:///a%20b/c.jpg")), "max_tokens": 100},
        {**chat(TEXT), "max_completion_tokens": 7, "tools": [{}]},
        chat(TEXT, image_url("https://a.invalid/b.jpg")),
        chat(TEXT, image_url("file://elsewhere/b.jpg")),
        chat(TEXT, image_url("b.jpg")),
        chat({"type": "input_audio", "input_audio": {}}),
        chat({"type": "image_url", "image_url": "data:image/png;base64,!"}),
        {"model": "m"},
        {"prompt": "plain", "max_tokens": 3},
    ]
    trace = read_trace(write(*({"custom_id": f"r{i}", "body": body} for i, body in enumerate(bodies))))
    assert trace.format == "openai-batch"
    assert reasons(trace) == [
        (3, "remote_image"),
        (4, "remote_image"),
        (5, "bad_value"),
        (6, "unsupported_media"),
        (7, "bad_value"),
        (8, "missing"),
    ]
    first, second, plain = trace.requests
    assert first.words == ("Be brief.", "Describe", 0, 1)
    assert first.images == (Image(data=PIXEL), Image(path="/a b/c.jpg"))
    assert (first.id, first.output_tokens) == ("r0", 100)
    assert (second.output_tokens, second.notes) == (7, ("roles_not_sent", "tools_not_sent"))
    assert plain.words == ("plain",)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///%ff.jpg", "bad_value"),
        ("file://[/a.jpg", "bad_value"),
        ("file:", "bad_value"),
        ("file:///a%00b", "bad_value"),
        ("data:image/png;base64", "bad_value"),
        ("data:,", "bad_value"),
        ("FILE://there/a.jpg", "remote_image"),
    ],
)
def test_a_reference_that_leads_nowhere_is_named(write: Write, url: str, reason: str) -> None:
    trace = read_trace(write({"custom_id": "a", "body": chat(TEXT)}, {"custom_id": "b", "body": chat(image_url(url))}))
    assert reasons(trace) == [(2, reason)]
    assert trace.drops[0].problem


def test_a_time_that_no_index_can_hold_is_out_of_range(write: Write) -> None:
    """Centuries from its start, whatever the unit; eight bytes of nanoseconds end in 2262."""
    row = {"text_tokens": 1, "output_tokens": 1}
    trace = read_trace(write(*({"at_ms": at, **row} for at in (9_223_372_036_855, 9_199_999_999_999, 5))))
    assert reasons(trace) == [(1, "out_of_range")]
    dates = ("9999-01-01T00:00:00Z,1,1", "1066-10-14T09:00:00Z,1,1", "2024-01-01T00:00:00Z,1,1")
    trace = read_trace(write("TIMESTAMP,ContextTokens,GeneratedTokens", *dates))
    assert reasons(trace) == [(2, "out_of_range"), (3, "out_of_range")]


def test_a_trace_without_times_takes_them_from_a_rate(write: Write) -> None:
    rows = [{"custom_id": f"r{i}", "body": {"prompt": "x"}} for i in range(4)]
    path = write(*rows)
    assert not Recording(path).scheduled
    paced = Recording(path, rate=8.0)
    assert paced.scheduled
    assert offsets(load(paced)) == [0, 125 * MS, 250 * MS, 375 * MS]
    with pytest.raises(TraceError, match="times of its own"):
        Recording(DATA / "mooncake.jsonl", rate=8.0)


def test_vllm_custom_image_has_files_or_content(write: Write) -> None:
    content = [{"type": "text", "text": "Compare "}, {"type": "image", "image": "a.jpg"}, image_url("b.png")]
    trace = read_trace(write({"prompt": "How many?", "image_files": ["a.jpg", "b.png"]}, {"content": content}))
    assert trace.format == "vllm-custom-image"
    assert [request.words for request in trace.requests] == [(0, 1, "How many?"), ("Compare ", 0, 1)]


@pytest.mark.parametrize("encoding", ["JSON", "BASE64"])
def test_sagemaker_is_a_tree_of_hours(tmp_path: Path, encoding: str) -> None:
    def data(value: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(value)
        return {
            "data": base64.b64encode(text.encode()).decode() if encoding == "BASE64" else text,
            "encoding": encoding,
        }

    def row(second: int, **output: int) -> str:
        captured: dict[str, Any] = {"endpointInput": data({**chat(TEXT), "max_tokens": 50})}
        if output:
            captured["endpointOutput"] = data({"usage": output})
        when = {"eventId": f"e{second}", "inferenceTime": f"2026-04-29T00:03:{second:02}Z"}
        return json.dumps({"captureData": captured, "eventMetadata": when})

    for hour, lines in {"01": [row(20, completion_tokens=8), "{", row(20)], "00": [row(10)]}.items():
        (tmp_path / hour).mkdir()
        (tmp_path / hour / "capture.jsonl").write_text("\n".join(lines))
    trace = read_trace(tmp_path)
    assert (trace.format, trace.read, offsets(trace)) == ("sagemaker", 4, [0, 10 * NS, 10 * NS])
    assert [request.output_tokens for request in trace.requests] == [50, 8, 50]
    assert [request.id for request in trace.requests] == ["e10", "e20", "e20"]
    assert reasons(trace) == [(3, "not_json")]
    assert trace.drops[0].problem.startswith("01/capture.jsonl:2: ")
    assert trace.folder == tmp_path


def test_dynamo_is_sorted_by_arrival_and_keeps_64_bit_identities() -> None:
    trace = read_trace(DATA / "dynamo.jsonl.gz")
    assert (trace.format, trace.read, len(trace.requests)) == ("dynamo", 61, 17)
    assert Counter(reason for _, reason in reasons(trace)) == {"not_a_request": 44}
    assert (trace.inversions, trace.span_ns) == (3, 162_147 * MS)
    assert sum(request.text_tokens or 0 for request in trace.requests) == 66_520
    assert sum(request.output_tokens for request in trace.requests) == 8_094
    assert max(block for request in trace.requests for block in request.blocks) == 18_435_288_317_095_910_706
    assert len({request.session for request in trace.requests}) == 5
    assert trace.requests[0].block_tokens == 16
    assert trace.requests[0].took_ns == 1_381_891_193


# --- ServeGen's clients ------------------------------------------------------------------------------------------


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    """Two clients: one has a busy window and an idle one, the other sends audio."""
    fields = {"text_tokens": "{139: 1.0}", "image_tokens": "{299: 0.25, 510: 0.75}", "image_count": "{0: 0.5, 2: 5e-1}"}
    fields |= {"output_tokens": "{23: 1.0}", "audio_count": "{0: 1.0}", "video_count": "{0: 1.0}"}
    folder = tmp_path / "mm-image"
    folder.mkdir()
    (folder / "chunk-0-trace.csv").write_bytes(
        b"0,2.0,1.5,Gamma,0.25,1.0\r\n600,0,0,,0,0\r\n1200,1.0,1,Weibull,1.2,1.0\r\n"
    )
    (folder / "chunk-0-dataset.json").write_text(json.dumps({"0": fields, "21600": fields}))
    (folder / "chunk-3-trace.csv").write_bytes(b"600,0.5,1.0,Gamma,1.0,2.0\r\n")
    (folder / "chunk-3-dataset.json").write_text(json.dumps({"0": {**fields, "audio_count": "{1: 1.0}"}}))
    return folder


def test_clients_are_drawn_with_their_rates_seeded(clients: Path) -> None:
    trace = load(Recording(clients, seed=7))
    assert (trace.format, trace.drawn, trace.read) == ("servegen-clients", True, 1200 + 600 + 300)
    assert {reason for _, reason in reasons(trace)} == {"unsupported_media"}
    seconds = [request.at_ns / NS for request in trace.requests]
    assert sum(second < 600 for second in seconds) == 1200
    assert not any(600 <= second < 1200 for second in seconds)
    assert sum(1200 <= second < 1800 for second in seconds) == 600
    assert seconds == sorted(seconds)
    gaps = [b - a for a, b in pairwise(seconds[:1200])]
    variation = (mean(gap**2 for gap in gaps) - mean(gaps) ** 2) ** 0.5 / mean(gaps)
    assert 1.7 < variation < 2.3  # of a gamma distribution of the shape 0.25: 2
    assert seconds[1199] > 580  # the window is filled, however long its gaps were
    images = Counter(image.tokens for request in trace.requests for image in request.images)
    assert set(images) == {299, 510}
    assert 0.7 < images[510] / images.total() < 0.8
    assert 0.45 < mean(not request.images for request in trace.requests) < 0.55
    assert load(Recording(clients, seed=7)).requests == trace.requests
    assert load(Recording(clients, seed=8)).requests != trace.requests


def test_one_client_is_known_by_the_name_of_its_file(clients: Path) -> None:
    assert read_trace(clients / "chunk-0-trace.csv").read == 1800
    (clients / "chunk-0-dataset.json").unlink()
    with pytest.raises(TraceError, match=r"chunk-0-dataset\.json, is not beside it"):
        read_trace(clients)


@pytest.mark.parametrize(
    "line", ["600,x,1,Gamma,1,1", "600,1,1,Pareto,1,1", "600,1,1,Gamma,0,1", "600,1", "600,1e9,1,Gamma,1,1"]
)
def test_a_broken_client_is_named_with_its_line(clients: Path, line: str) -> None:
    (clients / "chunk-3-trace.csv").write_text(f"0,0,0,,0,0\n{line}\n")
    with pytest.raises(TraceError, match=r"chunk-3-trace\.csv:2: "):
        read_trace(clients)


@pytest.mark.parametrize(
    "text", ["__import__('os')", "{1: 2", "{1: x}", "{}", "{1: -1}", "{-1: 1}", "{9999999999: 1.0}"]
)
def test_frequencies_are_read_and_never_run(text: str) -> None:
    with pytest.raises(ValueError, match=r"frequenc"):
        Distribution.parse(text, 1 << 22)


def test_draws_follow_the_frequencies() -> None:
    pdf = Distribution.parse("{4: 0.25, 7: 0.5, 9: 2.5e-1, }", 100)
    assert [pdf.at(share) for share in (0.0, 0.2, 0.3, 0.7, 0.8, 0.999999)] == [4, 4, 7, 7, 9, 9]


# --- reading without holding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_an_unsorted_file_comes_in_order_through_its_index(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "trace"
    data = (DATA / "azure_2023.shuffled.csv").read_bytes()
    path.write_bytes(gzip.compress(data) if packed else data)
    recording = Recording(path)
    assert list(recording.in_order(recording.survey())) == read_trace(path).requests


def test_turns_of_one_line_come_in_order_through_the_index(write: Write) -> None:
    rows = [
        {
            "session_id": str(start),
            "turns": [{"text": "a", "timestamp": start}, {"text": 5}, {"text": "b", "delay": 40}],
        }
        for start in (30, 0, 10)
    ]
    path = write(*rows)
    recording = Recording(path)
    in_order = list(recording.in_order(recording.survey()))
    assert in_order == read_trace(path).requests
    assert [request.at_ns // MS for request in in_order] == [0, 10, 30, 40, 50, 70]


def test_delays_stay_after_their_turn_through_the_index(write: Write) -> None:
    """Such a row alone has no time."""
    rows = [
        {"session_id": "s", "timestamp": 50, "text": "a"},
        {"session_id": "s", "delay": 20, "text": "b"},
        {"timestamp": 3, "text": "c"},
        {"session_id": "s", "timestamp": 60, "text": "d"},
    ]
    recording = Recording(write(*rows))
    requests = list(recording.in_order(recording.survey()))
    assert [request.at_ns // MS for request in requests] == [3, 50, 60, 70]
    assert requests[3].think_ns == 20 * MS


def test_a_survey_counts_what_a_trace_holds(write: Write) -> None:
    path = write({"at_ms": 5, "text": "a", "output_tokens": 0}, "{", {"at_ms": 3, "text": "b", "output_tokens": 1})
    tally = Recording(path).survey()
    assert (tally.read, tally.kept, tally.inversions, tally.largest_fall_ns) == (3, 2, 1, 2 * MS)
    assert (tally.first_ns, tally.last_ns) == (3 * MS, 5 * MS)
    assert (tally.dropped, tally.notes) == ({"not_json": 1}, {"no_output_tokens": 1})
    assert [drop.line for drop in tally.named] == [2]


def test_requests_know_their_words_however_they_were_given() -> None:
    request = Request(line=1, at_ns=0, output_tokens=1, text="a", images=(Image(), Image()))
    assert request.words == (0, 1, "a")
    assert Request(line=1, at_ns=0, output_tokens=1, layout=("a", 0), images=(Image(),)).words == ("a", 0)
