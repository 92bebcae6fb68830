"""Times of requests: their forms, their units, and the decision on the unit."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tensorferry.cli.main import main
from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.recording.request import BrokenRow
from tensorferry.replay.run.conversations import Turns
from tensorferry.replay.run.schedule import Speed
from tensorferry.replay.trace.exact_numbers import WallClocks, wall_clock
from tensorferry.replay.trace.formats.token_counts import keys_of
from tensorferry.replay.trace.loaded_trace import read_trace
from tensorferry.replay.trace.trace_file import Recording, Tally

NS = 1_000_000_000
MS = 1_000_000
BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}


def written(tmp_path: Path, *rows: str | dict[str, Any]) -> Path:
    path = tmp_path / "trace"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# --- zones ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ["+99:99", "+00:60", "-12:01", "+14:01", "-99:00", "+1401", "+2400"])
def test_a_zone_that_is_nowhere_is_refused_with_its_value(zone: str) -> None:
    text = f"2024-05-12T00:00:00.5{zone}"
    clocks = WallClocks("t")
    clocks.read("2024-05-12T00:00:00.5Z")
    for read in (lambda: wall_clock(text, "t"), lambda: clocks.read(text)):
        with pytest.raises(BrokenRow) as refused:
            read()
        assert (refused.value.reason, text in str(refused.value), "-12:00 to +14:00" in str(refused.value)) == (
            "bad_time",
            True,
            True,
        )


@pytest.mark.parametrize(("zone", "east_min"), [("-12:00", -720), ("+14:00", 840), ("+05:45", 345), ("-0330", -210)])
def test_the_zones_there_are_are_taken(zone: str, east_min: int) -> None:
    assert wall_clock(f"2024-05-12T00:00:00{zone}", "t")[0] == wall_clock("2024-05-12T00:00:00Z", "t")[0] - (
        east_min * 60 * NS
    )


def sagemaker(at: str) -> dict[str, Any]:
    captured = {"endpointInput": {"data": json.dumps(BODY), "encoding": "JSON"}}
    return {"captureData": captured, "eventMetadata": {"eventId": "e", "inferenceTime": at}}


@pytest.mark.parametrize("kind", ["azure", "sagemaker"])
def test_a_row_of_no_zone_is_dropped_with_its_line(tmp_path: Path, kind: str) -> None:
    times = ("2024-05-12T00:00:00+00:00", "2024-05-12T00:00:01+99:99", "2024-05-12T00:00:02+00:00")
    if kind == "azure":
        rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{at},1,1" for at in times)]
    else:
        rows = [sagemaker(at) for at in times]
    trace = read_trace(written(tmp_path, *rows))
    assert (len(trace.requests), trace.span_ns) == (2, 2 * NS)
    ((line, problem),) = [(drop.line, drop.problem) for drop in trace.drops]
    assert (line, times[1] in problem) == (len(rows) - 1, True)


def test_a_window_names_no_such_zone_either(tmp_path: Path) -> None:
    path = written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-12T00:00:00+00:00,1,1")
    result = CliRunner().invoke(
        main, ["trace", "cut", str(path), str(tmp_path / "out"), "--start", "2024-05-12T00:00:00+99:99"]
    )
    assert (result.exit_code, "+99:99" in result.output) == (2, True)


# --- units ---------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "a"}]
LENGTHS = {"input_length": 5, "output_length": 1}
#: A row of each format that has JSON lines, without its time, and where that belongs.
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "tensorferry": ({"at_ms": 0, "text_tokens": 5, "output_tokens": 1}, "at_ms"),
    "sagemaker": (sagemaker("2024-05-12T00:00:00Z"), ""),
    "dynamo": (
        {
            "event": {
                "schema": "dynamo.request.trace.v1",
                "event_type": "request_end",
                "request": {"request_id": "r", "input_tokens": 5, "output_tokens": 1},
            }
        },
        "",
    ),
    "qwen-bailian": ({"chat_id": 1, "parent_chat_id": -1, **LENGTHS}, "timestamp"),
    "ragpulse": ({"hash_ids": {"a": [1]}, **LENGTHS}, "timestamp"),
    "openai-batch": ({"custom_id": "a", "body": BODY}, "created"),
    "servegen": ({"data": {"text_tokens": 5, "output_tokens": 1}}, "timestamp"),
    "aiperf-multi-turn": ({"turns": [{"text": "a"}]}, ""),
    "mooncake": (LENGTHS, "timestamp"),
    "vllm-custom-image": ({"prompt": "a"}, "created"),
    "aiperf-single-turn": ({"text": "a"}, "timestamp"),
}


@pytest.mark.parametrize("messages", [{"messages": MESSAGES}, {"text": "a"}, {"input_length": 5, "output_length": 1}])
def test_seconds_since_1970_are_no_milliseconds(tmp_path: Path, messages: dict[str, Any]) -> None:
    at = ("1717171717.25", "1717171718.5", "1717171720")
    path = written(tmp_path, *(json.dumps(messages)[:-1] + f', "timestamp": {one}}}' for one in at))
    trace = read_trace(path)
    assert [request.at_ns - trace.origin_ns for request in trace.requests] == [0, 1250 * MS, 2750 * MS]
    assert (trace.wall, trace.origin) == (True, "2024-05-31 16:08:37.25")
    assert trace.notes["time_unit_by_its_numbers"] == 3
    result = CliRunner().invoke(main, ["trace", "describe", str(path), "--json"])
    told = json.loads(result.stdout)["unit_decided"]
    assert "timestamp is taken as s since 1970, for its size (1717171717.25)" in told
    assert "taken as s since 1970" in CliRunner().invoke(main, ["trace", "describe", str(path)]).stdout.replace(
        "\n", " "
    )
    asked = Recording(path, keys=keys_of("unit=ms"))
    assert (asked.decided, asked.survey().span_ns) == ("", 2_750_000)


@pytest.mark.parametrize(
    ("times", "span_ns"),
    [
        ((1717171717250, 1717171718250), NS),
        ((1717171717250000, 1717171718250000), NS),
        ((1717171717250000000, 1717171718250000000), NS),
        ((0, 3000), 3 * NS),
        ((1_000_000_000, 1_400_000_000), 400_000 * NS),  # days apart as seconds: an offset in milliseconds
    ],
)
def test_the_unit_is_told_by_size_and_spacing(tmp_path: Path, times: tuple[int, ...], span_ns: int) -> None:
    assert read_trace(written(tmp_path, *({**LENGTHS, "timestamp": at} for at in times))).span_ns == span_ns


@pytest.mark.parametrize("name", ROWS)
def test_time_alone_can_be_told_of_every_format(tmp_path: Path, name: str) -> None:
    row = ROWS[name][0]
    turns = row.get("turns")
    rows = [{**row, "turns": [{**turns[0], "t": at}]} if turns else {**row, "t": at} for at in (1.5, 4)]
    path = written(tmp_path, *rows)
    recording = Recording(path, keys=keys_of("time=t,unit=s"))
    assert (recording.name, recording.timed) == (name, True)
    assert [request.at_ns for request in recording.requests(Tally())] == [1500 * MS, 4 * NS]
    for command in (["describe"], ["convert", "-"], ["cut", "-"]):
        arguments = ["trace", command[0], str(path), *command[1:], "--keys", "time=t,unit=s"]
        assert CliRunner().invoke(main, arguments).exit_code == 0, command


@pytest.mark.parametrize(
    "header", ["TIMESTAMP,ContextTokens,GeneratedTokens", "Timestamp,Request tokens,Response tokens"]
)
def test_time_alone_can_be_told_of_columns(tmp_path: Path, header: str) -> None:
    path = written(tmp_path, f"{header},ms", "?,1,1,500", "?,1,1,2000")
    recording = Recording(path, keys=keys_of("time=ms,unit=ms"))
    assert [request.at_ns for request in recording.requests(Tally())] == [500 * MS, 2 * NS]


@pytest.mark.parametrize("name", ["openai-batch", "vllm-custom-image", "mooncake", "aiperf-single-turn"])
def test_created_of_openai_is_seconds_since_1970(tmp_path: Path, name: str) -> None:
    row = {"messages": MESSAGES} if name == "mooncake" else ROWS[name][0]
    trace = read_trace(written(tmp_path, *({**row, "created": at} for at in (1717171717, 1717171719))))
    assert (trace.format, trace.span_ns, trace.wall) == (name, 2 * NS, True)


@pytest.mark.parametrize("place", [(), ("body",), ("response", "body")])
@pytest.mark.parametrize("key", ["created", "created_at"])
def test_created_is_read_in_the_row_and_both_bodies(tmp_path: Path, place: tuple[str, ...], key: str) -> None:
    rows = []
    for at in (1717171717, 1717171719):
        inner = row = copy.deepcopy(ROWS["openai-batch"][0])
        for name in place:
            inner = inner.setdefault(name, {})
        inner[key] = at
        rows.append(row)
    assert read_trace(written(tmp_path, *rows)).span_ns == 2 * NS


def test_created_in_milliseconds_is_told_by_its_size(tmp_path: Path) -> None:
    path = written(tmp_path, *({**ROWS["openai-batch"][0], "created": at} for at in (1717171717250, 1717171719250)))
    recording = Recording(path)
    assert recording.survey().span_ns == 2 * NS
    assert "created is taken as ms since 1970" in recording.decided


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (
            (1717171717.25, 1717430917.25),
            "timestamp is taken as ms, although its size (1717171717.25) is that of a date in s",
        ),
        ((1717171717, 1717171717500), "timestamp is taken as ms, although its sizes (1717171717 to 1717171717500)"),
        ((0, 3_000_000_000), ""),
        ((1717171717000, 1719171717000), ""),
    ],
    ids=["days-apart", "two-units", "offsets", "dates"],
)
def test_a_unit_that_is_kept_against_the_numbers_is_told(tmp_path: Path, times: tuple[float, ...], told: str) -> None:
    decided = Recording(written(tmp_path, *({**LENGTHS, "timestamp": at} for at in times))).decided
    assert decided.startswith(told)
    assert bool(decided) == bool(told)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["Timestamp,Request tokens,Response tokens", "1717171717000,1,1"], "--keys time=Timestamp,unit=UNIT"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "1717171717,1,1"], "--keys time=TIMESTAMP,unit=s"),
        ([{"data": {"text_tokens": 5, "output_tokens": 1}, "timestamp": 10**17}], "--keys time=timestamp,unit=UNIT"),
    ],
    ids=["seconds", "dates", "json"],
)
def test_a_number_that_is_no_time_says_how_to_give_the_unit(tmp_path: Path, lines: list[Any], told: str) -> None:
    result = CliRunner().invoke(main, ["trace", "describe", str(written(tmp_path, *lines))])
    assert (result.exit_code, told in result.output) == (1, True), result.output


def test_a_trace_of_no_known_times_says_how_to_name_them(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a", "timestamp": 5})
    result = CliRunner().invoke(main, ["trace", "convert", str(path), "-"])
    assert (result.exit_code, "--keys time=FIELD" in str(result.exception) + result.output) == (1, True)


def test_what_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, {**ROWS["openai-batch"][0], "t": 5})
    for keys, told in (("unit=s", "name their field"), ("time=t", "say it, as in --keys time=t,unit=s")):
        with pytest.raises(TraceError, match=told):
            Recording(path, keys=keys_of(keys))


# --- turns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "turns", "text_input"])
def test_a_later_turn_of_no_time_follows_the_answer_before(tmp_path: Path, kind: str) -> None:
    key = "text" if kind == "turns" else kind
    turns: list[dict[str, Any]] = [{key: "a", "timestamp": 100}, {key: "b"}, {key: "c", "delay": 20}, {key: "d"}]
    rows = [{"session_id": "s", "turns": turns}] if kind == "turns" else [{"session_id": "s", **one} for one in turns]
    trace = read_trace(written(tmp_path, *rows))
    assert not trace.drops
    assert [(one.at_ns // MS, one.think_ns) for one in trace.requests] == [
        (100, None),
        (100, 0),
        (120, 20 * MS),
        (120, 0),
    ]
    due = Turns(trace.requests, "think", Speed.parse("1"))
    assert due.starting == [0]
    assert due.answered(0, 7 * NS) == [(7 * NS, 1)]
