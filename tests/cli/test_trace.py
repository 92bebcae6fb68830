"""`tensorferry trace` describes a trace correctly, and the traces that it writes equal their source."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from tensorferry.cli.main import main
from tensorferry.pipeline.recording.request import Request
from tensorferry.replay.trace.convert import convert
from tensorferry.replay.trace.describe import Spread, describe
from tensorferry.replay.trace.loaded_trace import Trace, read_trace
from tensorferry.replay.trace.selection import Selection
from tensorferry.replay.trace.trace_file import Recording

DATA = Path(__file__).parents[1] / "data" / "traces"
MS = 1_000_000

Write = Callable[..., Path]


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, ["trace", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def told(path: Path, *options: str) -> dict[str, Any]:
    result = run("describe", path, "--json", *options)
    assert result.exit_code == 0, result.output
    said: dict[str, Any] = json.loads(result.stdout)
    return said


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*rows: dict[str, Any], name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def at(*times_ms: float, **fields: Any) -> list[dict[str, Any]]:
    return [{"at_ms": time, "text_tokens": 5, "output_tokens": 2, **fields} for time in times_ms]


# --- describe ----------------------------------------------------------------------------------------------------


def test_a_description_says_where_when_and_how_much() -> None:
    said = told(DATA / "azure_lmm.csv")
    assert (said["format"], said["rows"], said["requests"], said["dropped"]) == ("azure-lmm", 10, 10, {})
    assert (said["origin"], said["end"]) == ("2024-10-15 12:00:00.269", "2024-10-22 11:59:59.964")
    assert said["span_s"] == 7 * 86_400 - 0.305
    assert said["prompt_tokens"]["total"] == 12_859
    assert said["output_tokens"] == {
        "count": 10, "total": 1395, "mean": 139.5, "p50": 76, "p90": 326, "p99": 491, "max": 491
    }  # fmt: skip
    assert (said["images"]["requests"], said["images"]["count"]) == (7, 22)
    assert said["images"]["known_by"] == {"number": 22}
    assert said["invented"] == {"prompts: token ids": 10, "images: size and picture": 22}


def test_burstiness_is_arithmetic(write: Write) -> None:
    """There are 12 requests at known times: two are a millisecond apart, the others a second."""
    times = [0, 1, 1000, *range(2000, 11_000, 1000)]
    arrivals = told(write(*at(*times)))["arrivals"]
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert arrivals["per_s"] == pytest.approx(11 / 10)
    assert arrivals["gap_cv"] == pytest.approx(deviation / mean)
    assert arrivals["busiest_per_s"] == {"1 s": 2.0, "10 s": 1.1}
    counts = [2, *[1] * 9]  # of the ten whole seconds
    average = sum(counts) / 10
    assert arrivals["dispersion"]["1 s"] == pytest.approx(sum((c - average) ** 2 for c in counts) / 10 / average)
    assert (arrivals["most_at_once"], arrivals["longest_silence_s"]) == (1, 1.0)


def test_a_burst_at_one_instant_is_one(write: Write) -> None:
    arrivals = told(write(*at(5, 5, 5, 8, 8)))["arrivals"]
    assert arrivals["most_at_once"] == 3
    assert told(write(*at(5)))["arrivals"]["per_s"] is None


def test_mooncake_blocks_give_the_ideal_hit_rate(write: Write) -> None:
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1}
    said = told(write({**row, "hash_ids": [1, 2]}, {**row, "hash_ids": [1, 3]}, {**row, "hash_ids": [1, 2]}))
    assert said["blocks"] == {"count": 6, "different": 3, "seen_before": 0.5}


def test_conversations_are_counted_through_their_links(write: Write) -> None:
    row = {"input_length": 16, "output_length": 1, "type": "text"}
    links = [(1, -1), (2, 1), (3, 2), (4, 99), (5, 99), (6, -1)]
    rows = [{"chat_id": i, "parent_chat_id": p, "timestamp": i, **row} for i, p in links]
    assert told(write(*rows))["sessions"]["turns"]["max"] == 3
    assert told(write(*rows))["sessions"]["count"] == 3  # 1-2-3, what 99 began before the recording, and 6


def test_what_a_replay_would_invent_is_said(write: Write) -> None:
    turns = [{"text": "a", "timestamp": 0, "image": "x.jpg"}, {"text": "b", "delay": 5}]
    said = told(write({"session_id": "s", "turns": turns}))
    assert said["invented"] == {"prompts: answers of the turns before": 1, "requests: output length": 2}
    assert said["sessions"]["think_times"] == 1
    batch = write({"custom_id": "a", "body": {"prompt": "x", "max_tokens": 3}})
    assert told(batch)["invented"] == {"requests: their time": 1}
    assert "only an order" in run("describe", batch).stdout
    assert told(batch, "--rate", "5")["invented"] == {"requests: their time": 1}


def test_drops_and_order_are_said_for_people(write: Write) -> None:
    path = write(*at(5, 3, 9))
    path.write_text(path.read_text() + "{broken\n")
    said = run("describe", path).stdout
    for part in (
        "4 read = 3 requests + 1 dropped",
        "1 x not_json",
        "line 4: ",
        "1 rows are earlier than the row before, by at most 0.002 s",
    ):
        assert part in said, part
    glued = run("describe", write(*at(*range(0, 9000, 100), 0, 1))).stdout
    assert "looks like several recordings" in " ".join(glued.split())


def test_quantiles_of_counts_are_nearest_rank() -> None:
    assert Spread.of({}) is None
    assert Spread.of({7: 1}) == Spread(1, 7, 7.0, 7, 7, 7, 7)
    assert Spread.of({1: 50, 2: 40, 3: 9, 4: 1}) == Spread(100, 161, 1.61, 1, 2, 3, 4)


def test_what_is_no_trace_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("hello\n")
    result = run("describe", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert run("describe", tmp_path / "absent").exit_code == 2


# --- convert -----------------------------------------------------------------------------------------------------


def bare(requests: list[Request]) -> list[Request]:
    """Return a request without the fields that depend on the file."""
    return [msgspec.structs.replace(request, line=0, turn=0, notes=()) for request in requests]


@pytest.mark.parametrize("file", sorted(path.name for path in DATA.iterdir() if path.suffix != ".md"))
def test_a_converted_trace_is_the_same_trace(tmp_path: Path, file: str) -> None:
    if "no_header" in file or "truncated" in file:
        assert run("convert", DATA / file, tmp_path / "out").exit_code == 1
        assert not list(tmp_path.iterdir())
        return
    result = run("convert", DATA / file, tmp_path / "out")
    assert result.exit_code == 0, result.output
    before, after = read_trace(DATA / file), read_trace(tmp_path / "out")
    assert (after.format, after.drops, after.inversions) == ("tensorferry", [], 0)
    assert bare(after.requests) == bare(before.requests)
    again = tmp_path / "again"
    assert run("convert", tmp_path / "out", again).exit_code == 0
    assert again.read_bytes() == (tmp_path / "out").read_bytes()


def test_everything_a_request_can_say_survives(write: Write, tmp_path: Path) -> None:
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    rows: list[dict[str, Any]] = [
        {"at_ms": 1731780000000.000001, "text": "a"},
        {"at_ms": 5, "id": "x", "parts": ["a ", {"data": pixel}, " b"], "session": "s", "continues": True},
        {"at_ms": 6, "text_tokens": 40, "blocks": [2**64 - 1, 7], "block_tokens": 16, "parent": "x", "think_ms": 0.5},
        {"at_ms": 7, "context_tokens": 40, "images": 2, "took_ms": 3},
        {"at_ms": 8, "images": [{"width": 3, "height": 4}, {"tokens": 5}, {"path": "a.jpg"}]},
    ]
    path = write(*({**row, "output_tokens": 1} for row in rows))
    path.write_text(path.read_text().replace("1731780000000.0", "1731780000000.000001"))
    assert run("convert", path, tmp_path / "out").exit_code == 0
    before, after = read_trace(path), read_trace(tmp_path / "out")
    assert (len(before.requests), before.drops) == (5, [])
    assert bare(after.requests) == bare(before.requests)
    assert before.requests[-1].at_ns == 1_731_780_000_000_000_001


@pytest.mark.parametrize("command", ["convert", "cut"])
def test_a_dash_is_the_standard_output_which_is_the_traces_alone(tmp_path: Path, command: str) -> None:
    part = ("--start", "5.5s", "--end", "7.2s")
    said = run(command, DATA / "azure_lmm.csv", "-", *part)
    assert said.exit_code == 0, said.output
    assert said.stderr.startswith("-: 10 read = 3 written + 7 left + 0 dropped")
    assert run(command, DATA / "azure_lmm.csv", tmp_path / "out", *part).exit_code == 0
    assert said.stdout_bytes == (tmp_path / "out").read_bytes()
    assert json.loads(run(command, DATA / "azure_lmm.csv", "-", *part, "--json").stderr)["out"] == "-"


def test_the_standard_input_is_no_trace_and_a_file_of_that_name_is(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(*at(1, 2), name="-")
    refused = run("describe", "-")
    assert (refused.exit_code, "read twice" in refused.stderr) == (2, True)
    assert run("describe", "./-").exit_code == 0


@pytest.mark.parametrize("command", ["convert", "cut"])
def test_nothing_selected_is_nothing_written_to_a_stream_either(command: str) -> None:
    said = run(command, DATA / "azure_lmm.csv", "-", "--start", "900h")
    assert (said.exit_code, said.stdout_bytes) == (1, b"")
    assert "all of its 10 requests lie outside" in said.stderr


@pytest.mark.processes
def test_a_reader_that_has_enough_ends_a_conversion(write: Write) -> None:
    path = write(*at(*range(20_000)))
    asked = [sys.executable, "-P", "-m", "tensorferry", "trace", "convert", str(path), "-"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as converting:
        assert converting.stdout is not None
        assert converting.stderr is not None
        assert json.loads(converting.stdout.readline())["at_ms"] == 0
        converting.stdout.close()
        assert b"Traceback" not in converting.stderr.read()
        assert converting.wait(60) == 1


def test_images_stay_where_they_are(write: Write, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    path = write({"at_ms": 1, "images": [{"path": "a/b.jpg"}, {"path": "/c.jpg"}], "output_tokens": 1})
    assert run("convert", path, tmp_path / "deep" / "out").exit_code == 0
    (request,) = read_trace(tmp_path / "deep" / "out").requests
    assert [image.path for image in request.images] == ["../a/b.jpg", "/c.jpg"]


def test_a_conversion_that_fails_leaves_what_was_there(write: Write, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old")
    path = write(*at(1, 2))
    recording = Recording(path)
    survey = recording.survey()

    class Failing(Selection):
        def within(self, at_ns: int) -> bool:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        convert(recording, survey, Failing(), out)
    assert out.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "trace.jsonl"]


def test_a_trace_without_times_cannot_be_converted_without_a_rate(write: Write, tmp_path: Path) -> None:
    batch = write(*({"custom_id": str(i), "body": {"prompt": "x", "max_tokens": 3}} for i in range(3)))
    result = run("convert", batch, tmp_path / "out")
    assert (result.exit_code, "--rate" in result.stderr) == (1, True)
    assert run("convert", batch, tmp_path / "out", "--rate", "4").exit_code == 0
    assert [request.at_ns // MS for request in read_trace(tmp_path / "out").requests] == [0, 250, 500]


# --- cut ---------------------------------------------------------------------------------------------------------


def cut(path: Path, out: Path, *options: str) -> Trace:
    result = run("cut", path, out, *options)
    assert result.exit_code == 0, result.output
    return read_trace(out)


def test_a_cut_keeps_header_lines_and_their_bytes(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    trace = cut(DATA / "azure_lmm.csv", out, "--start", "5.5s", "--end", "2024-10-15 12:00:07.4")
    source = (DATA / "azure_lmm.csv").read_text().splitlines()
    assert out.read_text().splitlines() == [source[0], *source[2:5]]
    assert (trace.format, len(trace.requests)) == ("azure-lmm", 3)
    result = run("cut", DATA / "azure_lmm.csv", out, "--end", "1s", "--json")
    written = json.loads(result.stdout)
    assert (written["read"], written["kept"], written["left"], written["dropped"]) == (10, 1, 9, {})


def test_a_cut_of_a_shuffled_file_stays_shuffled(tmp_path: Path) -> None:
    trace = cut(DATA / "azure_2023.shuffled.csv", tmp_path / "out", "--start", "30s")
    whole = read_trace(DATA / "azure_2023.shuffled.csv")
    wanted = [request for request in whole.requests if request.at_ns >= whole.origin_ns + 30_000 * MS]
    assert bare(trace.requests) == bare(wanted)
    assert 0 < len(wanted) < 20
    assert trace.inversions
    with (tmp_path / "out").open() as file:
        assert next(csv.reader(file)) == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@pytest.mark.parametrize("file", ["azure_lmm.csv.gz", "azure_lmm.bom_crlf.csv", "azure_lmm.semicolon.csv"])
def test_a_cut_from_any_dress_is_readable(tmp_path: Path, file: str) -> None:
    assert len(cut(DATA / file, tmp_path / "out", "--end", "7.2s").requests) == 4


def test_turns_go_where_their_conversation_goes(write: Write, tmp_path: Path) -> None:
    """A delay after a turn that was cut away would have no origin."""
    rows: list[dict[str, Any]] = [
        {"session_id": "a", "timestamp": 0, "text": "x"},
        {"session_id": "b", "timestamp": 500, "text": "x"},
        {"session_id": "a", "delay": 600, "text": "x"},
        {"session_id": "b", "delay": 600, "text": "x"},
    ]
    trace = cut(write(*rows), tmp_path / "out", "--start", "400ms")
    assert ([request.session for request in trace.requests], trace.drops) == (["b", "b"], [])
    assert trace.requests[1].at_ns == 1100 * MS


def test_a_share_keeps_whole_conversations(write: Write, tmp_path: Path) -> None:
    rows = [{**row, "session": f"s{number % 40}"} for number, row in enumerate(at(*range(200)))]
    path = write(*rows)
    half = cut(path, tmp_path / "half", "--share", "0.5")
    sessions = {request.session for request in half.requests}
    assert 10 < len(sessions) < 30
    assert len(half.requests) == 5 * len(sessions)
    assert cut(path, tmp_path / "again", "--share", "0.5").requests == half.requests
    fewer = cut(path, tmp_path / "fewer", "--share", "0.2")
    assert {request.session for request in fewer.requests} < sessions
    other = cut(path, tmp_path / "other", "--share", "0.5", "--seed", "1")
    assert {request.session for request in other.requests} != sessions


def test_a_share_of_linked_requests_keeps_their_trees(write: Write, tmp_path: Path) -> None:
    row = {"input_length": 16, "output_length": 1, "type": "text"}
    rows = [{"chat_id": i, "parent_chat_id": i - 60 if i >= 60 else -1, "timestamp": i, **row} for i in range(180)]
    trace = cut(write(*rows), tmp_path / "out", "--share", "0.5")
    kept = {int(request.id) % 60 for request in trace.requests}
    assert 15 < len(kept) < 45
    assert len(trace.requests) == 3 * len(kept)


def test_relative_images_are_not_torn_from_their_trace(write: Write, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    path = write({"at_ms": 1, "images": [{"path": "a.jpg"}], "output_tokens": 1})
    result = run("cut", path, tmp_path / "deep" / "out")
    assert (result.exit_code, "beside it" in result.stderr) == (1, True)
    assert run("cut", path, tmp_path / "out").exit_code == 0


def test_drawn_requests_have_no_lines_to_cut(tmp_path: Path) -> None:
    (tmp_path / "chunk-1-trace.csv").write_text("0,0.1,1,Gamma,1,1\n")
    (tmp_path / "chunk-1-dataset.json").write_text('{"0": {"text_tokens": "{5: 1.0}", "output_tokens": "{5: 1.0}"}}')
    result = run("cut", tmp_path, tmp_path / "out")
    assert (result.exit_code, "trace convert" in result.stderr) == (1, True)
    assert "60 read = 60 written" in run("convert", tmp_path, tmp_path / "out.jsonl").stdout


def test_a_description_is_made_from_any_order() -> None:
    recording = Recording(DATA / "azure_2023.shuffled.csv")
    survey = recording.survey()
    said = describe(recording, survey, recording.in_order(survey))
    assert said.requests == 20
    assert said.inversions == survey.inversions > 5
