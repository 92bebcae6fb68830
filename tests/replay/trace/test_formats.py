"""Each variant of a trace file is read exactly, refused clearly, or loses only its bad rows."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tensorferry.codecs.errors import TraceError
from tensorferry.pipeline.recording.request import BrokenRow, Image, Request
from tensorferry.replay.trace.exact_numbers import WallClocks, wall_clock, wall_text
from tensorferry.replay.trace.loaded_trace import Trace, read_trace

DATA = Path(__file__).parents[2] / "data" / "traces"
MS = 1_000_000

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write("line", "line") or write(b"bytes"): a trace file."""

    def write(*lines: str | bytes, name: str = "trace") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))
        return path

    return write


def offsets(trace: Trace) -> list[int]:
    return [request.at_ns - trace.origin_ns for request in trace.requests]


def reasons(trace: Trace) -> list[tuple[int, str]]:
    return [(drop.line, drop.reason) for drop in trace.drops]


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert caught.value.file == str(path)
    return str(caught.value).removeprefix(str(path))


# --- the formats ---------------------------------------------------------------------------------------------


def test_azure_2023_has_seven_digits_crlf_and_no_last_line_end() -> None:
    trace = read_trace(DATA / "azure_2023.csv")
    assert (trace.format, trace.read, len(trace.requests), trace.drops) == ("azure-llm", 9, 9, [])
    assert trace.origin == "2023-11-16 18:17:03.97996"
    assert trace.requests[0] == Request(
        line=2, at_ns=wall_clock("2023-11-16 18:17:03.9799600", "")[0], output_tokens=10, text_tokens=4808
    )
    assert offsets(trace)[1] == 52_000_000
    assert trace.requests[-1].output_tokens == 7  # the row without a line end


def test_azure_2024_has_a_zone_and_whole_seconds_without_a_fraction(write: Write) -> None:
    trace = read_trace(DATA / "azure_2024.csv")
    assert (trace.format, trace.read, trace.drops) == ("azure-llm", 10, [])
    assert offsets(trace)[1] == 7_405_000
    mixed = read_trace(
        write(
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2024-05-12 00:00:00+00:00,1,1",
            "2024-05-12 00:00:01.001163+00:00,2,1",
        )
    )
    assert offsets(mixed) == [0, 1_001_163_000]


def test_azure_lmm_counts_images_within_its_context_tokens() -> None:
    trace = read_trace(DATA / "azure_lmm.csv")
    assert trace.format == "azure-lmm"
    text_only, one, *_ = trace.requests
    assert (text_only.text_tokens, text_only.context_tokens, text_only.images) == (770, None, ())
    assert (one.text_tokens, one.context_tokens, one.images) == (None, 949, (Image(),))
    assert offsets(trace)[1] == 5_550 * MS
    assert len(trace.requests[5].images) == 16


@pytest.mark.parametrize("dress", ["bom_crlf.csv", "quoted_reordered.csv", "semicolon.csv", "csv.gz"])
def test_the_same_rows_in_another_dress_are_the_same_requests(dress: str) -> None:
    assert read_trace(DATA / f"azure_lmm.{dress}").requests == read_trace(DATA / "azure_lmm.csv").requests


def test_compression_is_told_by_content_not_by_name(write: Write) -> None:
    plain = (DATA / "azure_lmm.csv").read_bytes()
    assert len(read_trace(write(plain, name="plain.csv.gz")).requests) == 10
    assert len(read_trace(write(gzip.compress(plain), name="packed.csv")).requests) == 10
    assert len(read_trace(write(plain.decode().encode("utf-16"), name="wide.csv")).requests) == 10
    tabs = plain.replace(b",", b"\t")
    assert len(read_trace(write(tabs, name="tabs.tsv")).requests) == 10


def test_mooncake_is_milliseconds_and_keeps_its_bursts_in_file_order() -> None:
    trace = read_trace(DATA / "mooncake.jsonl")
    assert trace.format == "mooncake"
    assert offsets(trace) == [0] * 10 + [3000 * MS] * 2
    assert [request.line for request in trace.requests] == list(range(1, 13))
    first = trace.requests[0]
    assert (first.text_tokens, first.output_tokens, first.block_tokens) == (6758, 500, 512)
    assert first.blocks == tuple(range(14))
    assert trace.notes == {}


def test_mooncake_rows_with_too_few_ids_are_noted(write: Write) -> None:
    row = {"timestamp": 27482, "input_length": 6955, "output_length": 0, "hash_ids": [1, 2]}
    trace = read_trace(write(json.dumps(row)))
    assert trace.notes == {"fewer_block_ids_than_tokens": 1, "no_output_tokens": 1}
    assert offsets(trace) == [0]
    assert trace.origin == "27.482 s"


def test_servegen_has_seconds_with_exponents_and_tokens_for_every_image(write: Write) -> None:
    trace = read_trace(DATA / "servegen.jsonl")
    assert (trace.format, trace.read, trace.drops) == ("servegen", 6, [])
    assert trace.requests[0] == Request(
        line=1, at_ns=0, output_tokens=29, id="0", text_tokens=50, images=(Image(tokens=4),)
    )
    row = {"timestamp": 0.25, "data": {"text_tokens": 5, "output_tokens": 1, "audio_tokens": [7]}}
    assert reasons(read_trace(write(json.dumps(row)))) == [(1, "unsupported_media")]


def test_our_own_format(write: Write) -> None:
    trace = read_trace(
        write(
            '{"at_ms": 0, "id": "a", "text": "hello", "output_tokens": 3}',
            '{"at_ms": 10.25, "id": 7, "text_tokens": 12, "images": [{"path": "a/b.jpg"}], "output_tokens": 1}',
            '{"at_ms": 1.5e1, "images": [{"width": 640, "height": 480}, {"tokens": 300}], "output_tokens": 4}',
            '{"at_ms": 15, "images": 2, "output_tokens": 1}',
            '{"at_ms": 15, "images": 2, "context_tokens": 900, "output_tokens": 1}',
            '{"at_ms": 15, "context_tokens": 900, "output_tokens": 1}',
        )
    )
    assert (trace.format, trace.drops) == ("tensorferry", [])
    assert offsets(trace) == [0, 10_250_000, *[15 * MS] * 4]
    assert trace.requests[0].text == "hello"
    assert trace.requests[1].images == (Image(path="a/b.jpg"),)
    assert trace.requests[1].id == "7"
    assert trace.requests[2].images == (Image(width=640, height=480), Image(tokens=300))
    assert trace.requests[3].images == (Image(), Image())
    assert [(request.text_tokens, request.context_tokens) for request in trace.requests[3:]] == [
        (None, None),
        (None, 900),
        (900, None),
    ]


def test_an_epoch_time_in_milliseconds_keeps_every_nanosecond(write: Write) -> None:
    """A double would have 244 ns steps here."""
    times = ["1731780000000.000001", "1731780000000.000002", "1731780000000.123457"]
    rows = [f'{{"at_ms": {at}, "text_tokens": 1, "output_tokens": 1}}' for at in times]
    assert offsets(read_trace(write(*rows))) == [0, 1, 123_456]


# --- order ---------------------------------------------------------------------------------------------------


def test_unsorted_rows_are_sorted_and_the_inversions_counted() -> None:
    trace = read_trace(DATA / "azure_2023.shuffled.csv")
    times = [request.at_ns for request in trace.requests]
    assert times == sorted(times)
    assert offsets(trace)[0] == 0
    by_line = [request.at_ns for request in sorted(trace.requests, key=lambda request: request.line)]
    assert trace.inversions == sum(a > b for a, b in pairwise(by_line)) > 5


def test_ties_keep_the_order_of_the_file(write: Write) -> None:
    rows = [(5, "a"), (3, "b"), (5, "c"), (3, "d"), (5, "e")]
    lines = [f'{{"at_ms": {at}, "id": "{name}", "text_tokens": 1, "output_tokens": 1}}' for at, name in rows]
    trace = read_trace(write(*lines))
    assert [request.id for request in trace.requests] == ["b", "d", "a", "c", "e"]
    assert trace.inversions == 2


def test_the_trace_starts_at_the_first_row_that_is_kept(write: Write) -> None:
    trace = read_trace(
        write(
            '{"timestamp": 0, "input_length": -1, "output_length": 1}',
            '{"timestamp": 19440110000, "input_length": 5, "output_length": 1}',
            '{"timestamp": 19440110250, "input_length": 5, "output_length": 1}',
        )
    )
    assert offsets(trace) == [0, 250 * MS]
    assert trace.span_ns == 250 * MS


def test_limit_reads_only_so_many_rows(write: Write) -> None:
    trace = read_trace(DATA / "azure_lmm.csv", limit=3)
    assert (trace.read, len(trace.requests)) == (3, 3)
    truncated_later = (DATA / "mooncake.jsonl").read_bytes()[:-50]
    assert read_trace(write(truncated_later), limit=11).drops == []


# --- broken rows ---------------------------------------------------------------------------------------------

HEADER = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens"
GOOD = "2024-10-15T12:00:00.269Z,1,770,491"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2024-10-15T12:00:00.269Z,1,770", "field_count"),
        ("2024-10-15T12:00:00.269Z,1,770,491,9", "field_count"),
        (",1,770,491", "missing"),
        ("2024-10-15T12:00:00.269Z,1,,491", "missing"),
        ("2024-10-15T12:00:00.269Z,NaN,770,491", "not_a_number"),
        ("2024-10-15T12:00:00.269Z,1,inf,491", "not_a_number"),
        ("2024-10-15T12:00:00.269Z,1,0x10,491", "not_a_number"),
        ("2024-10-15T12:00:00.269Z,1,7_7,491", "not_a_number"),
        ("2024-10-15T12:00:00.269Z,1,\u0663,491", "not_a_number"),
        ("2024-10-15T12:00:00.269Z,-1,770,491", "negative"),
        ("2024-10-15T12:00:00.269Z,1,770,-491", "negative"),
        ("2024-10-15T12:00:00.269Z,1.5,770,491", "not_whole"),
        ("2024-10-15T12:00:00.269Z,1,1e9,491", "out_of_range"),
        ("2024-10-15T12:00:00.269Z,1,1e9999,491", "out_of_range"),
        ("2024-10-15T12:00:00.269Z,5000,770,491", "out_of_range"),
        ("2024-10-15T12:00:00.269Z,1,99999999999999999999999,491", "out_of_range"),
        ("2024-10-15T12:00:00.269Z,0,0,491", "empty"),
        ("2024-10-15 12:00:00.269,1,770,491", "mixed_zones"),
        ("2024-13-15T12:00:00.269Z,1,770,491", "bad_time"),
        ("2024-10-15T24:00:00.269Z,1,770,491", "bad_time"),
        ("2024-10-15T12:00:00.2690000000Z,1,770,491", "bad_time"),
        ("1729000000,1,770,491", "bad_time"),
        (HEADER, "bad_time"),
        ('"2024-10-15T12:00:00.269Z,1,770,491', "bad_csv"),
    ],
)
def test_a_broken_csv_row_is_dropped_alone_and_named(write: Write, row: str, reason: str) -> None:
    trace = read_trace(write(HEADER, GOOD, row, GOOD))
    assert reasons(trace) == [(3, reason)]
    assert trace.drops[0].problem
    assert trace.read == 3 == len(trace.requests) + len(trace.drops)


def test_counts_may_be_written_as_floats(write: Write) -> None:
    trace = read_trace(write(HEADER, "2024-10-15T12:00:00.269Z,1.0,1e3, 491 "))
    assert trace.drops == []
    assert trace.requests[0].context_tokens == 1000


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"at_ms": 1, "text_tokens": 5', "not_json"),
        ("[]", "not_json"),
        ("null", "not_json"),
        ("[" * 5000, "not_json"),
        ('{"at_ms": NaN, "text_tokens": 5, "output_tokens": 1}', "not_json"),
        ('{"text_tokens": 5, "output_tokens": 1}', "missing"),
        ('{"at_ms": null, "text_tokens": 5, "output_tokens": 1}', "missing"),
        ('{"at_ms": 1, "text_tokens": 5}', "missing"),
        ('{"at_ms": "1", "text_tokens": 5, "output_tokens": 1}', "not_a_number"),
        ('{"at_ms": true, "text_tokens": 5, "output_tokens": 1}', "not_a_number"),
        ('{"at_ms": 1e99999999999999999999, "text_tokens": 5, "output_tokens": 1}', "not_a_number"),
        ('{"at_ms": 1e9999, "text_tokens": 5, "output_tokens": 1}', "out_of_range"),
        ('{"at_ms": -0.5, "text_tokens": 5, "output_tokens": 1}', "negative"),
        ('{"at_ms": 1, "text_tokens": 5.5, "output_tokens": 1}', "not_whole"),
        ('{"at_ms": 1, "text_tokens": 5, "output_token": 1}', "unknown_key"),
        ('{"at_ms": 1, "text": "a", "text_tokens": 5, "output_tokens": 1}', "conflict"),
        ('{"at_ms": 1, "context_tokens": 5, "text_tokens": 5, "output_tokens": 1}', "conflict"),
        ('{"at_ms": 1, "context_tokens": 5, "images": [{"path": "a"}], "output_tokens": 1}', "conflict"),
        ('{"at_ms": 1, "text": 5, "output_tokens": 1}', "bad_value"),
        ('{"at_ms": 1, "text": "", "output_tokens": 1}', "empty"),
        ('{"at_ms": 1, "images": [], "output_tokens": 1}', "empty"),
        ('{"at_ms": 1, "images": [{}], "output_tokens": 1}', "conflict"),
        ('{"at_ms": 1, "images": [{"path": "a", "tokens": 3}], "output_tokens": 1}', "conflict"),
        ('{"at_ms": 1, "images": [{"width": 3}], "output_tokens": 1}', "conflict"),
        ('{"at_ms": 1, "images": [{"width": 0, "height": 3}], "output_tokens": 1}', "out_of_range"),
        ('{"at_ms": 1, "images": [{"width": 60000, "height": 60000}], "output_tokens": 1}', "out_of_range"),
        ('{"at_ms": 1, "images": [{"url": "a"}], "output_tokens": 1}', "unknown_key"),
        ('{"at_ms": 1, "images": [{"path": "http://a/b.jpg"}], "output_tokens": 1}', "bad_value"),
        ('{"at_ms": 1, "images": [{"path": "data:image/png;base64,AA"}], "output_tokens": 1}', "bad_value"),
        ('{"at_ms": 1, "images": [{"data": "not base64"}], "output_tokens": 1}', "bad_value"),
        ('{"at_ms": 1, "parts": ["a"], "text": "b", "output_tokens": 1}', "conflict"),
        ('{"at_ms": 1, "parts": ["a"], "images": 1, "output_tokens": 1}', "conflict"),
        ('{"at_ms": 1, "parts": "a", "output_tokens": 1}', "bad_value"),
        ('{"at_ms": 1, "parts": [], "output_tokens": 1}', "empty"),
        ('{"at_ms": 1, "text_tokens": 5, "blocks": [1], "output_tokens": 1}', "missing"),
        ('{"at_ms": 1, "text_tokens": 5, "continues": 1, "output_tokens": 1}', "bad_value"),
        ('{"at_ms": 1, "text_tokens": 5, "think_ms": -1, "output_tokens": 1}', "negative"),
        ('{"at_ms": 1, "images": ["a.jpg"], "output_tokens": 1}', "bad_value"),
        ('{"at_ms": 1, "images": "a.jpg", "output_tokens": 1}', "not_a_number"),
        ('{"at_ms": 1, "id": [1], "text_tokens": 5, "output_tokens": 1}', "bad_value"),
    ],
)
def test_a_broken_json_row_is_dropped_alone_and_named(write: Write, row: str, reason: str) -> None:
    good = '{"at_ms": 5, "text_tokens": 5, "output_tokens": 1}'
    trace = read_trace(write(good, row, good))
    assert reasons(trace) == [(2, reason)]
    assert trace.drops[0].problem
    assert trace.read == 3 == len(trace.requests) + len(trace.drops)


def test_a_row_that_is_not_utf8_costs_that_row(write: Write) -> None:
    good = b'{"at_ms": 5, "text": "gr\xc3\xbcn", "output_tokens": 1}\n'
    trace = read_trace(write(good, good.replace(b"\xc3\xbc", b"\xfc"), good))
    assert reasons(trace) == [(2, "not_utf8")]
    assert trace.requests[0].text == "grün"


def test_blank_lines_are_no_rows(write: Write) -> None:
    good = '{"at_ms": 5, "text_tokens": 5, "output_tokens": 1}'
    trace = read_trace(write("", good, "", "  \r", good, ""))
    assert (trace.read, trace.drops) == (2, [])
    assert [request.line for request in trace.requests] == [2, 5]


def test_a_broken_first_row_does_not_hide_the_format(write: Write) -> None:
    trace = read_trace(write('{"at_ms": 0, "text_t', '{"at_ms": 5, "text_tokens": 5, "output_tokens": 1}'))
    assert (trace.format, reasons(trace)) == ("tensorferry", [(1, "not_json")])


def test_only_the_first_few_drops_of_a_reason_keep_their_sentence(write: Write) -> None:
    trace = read_trace(write(HEADER, *["x,1,1,1"] * 100))
    assert (trace.read, len(trace.drops), trace.requests) == (100, 100, [])
    assert sum(bool(drop.problem) for drop in trace.drops) == 5


# --- files that are no trace ------------------------------------------------------------------------------------


def pickled(sentinel: Path) -> bytes:
    """A protocol 4 pickle that touches a file, put together by hand."""
    call = f"import pathlib; pathlib.Path({str(sentinel)!r}).touch()".encode()
    return b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93\x8c" + bytes([len(call)]) + call + b"\x85R."


def test_a_pickle_is_refused_unread(write: Write, tmp_path: Path) -> None:
    sentinel = tmp_path / "s"
    for name, data in (("dump.pkl", pickled(sentinel)), ("dump.jsonl", gzip.compress(pickled(sentinel)))):
        said = refusal(write(data, name=name))
        assert "pickle" in said
        assert "docs/traces.md" in said
    line = write(b'{"at_ms": 5, "text_tokens": 5, "output_tokens": 1}\n' + pickled(sentinel))
    assert len(read_trace(line).drops) == 1
    assert not sentinel.exists()


def test_a_gzip_file_cut_short_is_one_clear_error(write: Write) -> None:
    assert "ends early" in refusal(DATA / "azure_lmm.truncated.csv.gz")
    whole = gzip.compress((DATA / "azure_lmm.csv").read_bytes())
    for cut in range(2, len(whole) - 1, 7):
        assert "gzip" in refusal(write(whole[:cut])), cut
    assert "damaged" in refusal(write(whole[:60] + bytes(20) + whole[80:]))
    assert "twice" in refusal(write(gzip.compress(whole)))


def test_no_header_is_refused_with_the_header_to_add() -> None:
    said = refusal(DATA / "azure_lmm.no_header.csv")
    assert said.startswith(":1: it has no header")
    assert "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens" in said


def test_a_missing_or_doubled_column_is_named(write: Write) -> None:
    assert "no column TIMESTAMP" in refusal(write("ContextTokens,GeneratedTokens", "1,2"))
    assert "ContextTokens occurs twice" in refusal(write(f"{HEADER},contexttokens", f"{GOOD},7"))


@pytest.mark.parametrize(
    ("first_line", "told"),
    [
        (
            "600,0.935,0.7622347122530804,Weibull,1.3303845222743667,1.1677856341320065",
            "statistics of a ServeGen client",
        ),
        ('{ "trace_id": "a", "spans": [', "OpenTelemetry"),
        ('{ "data": [ { "payloads": [', "inputs.json"),
        ('[{"at_ms": 1}]', "JSON array"),
        ('{"a": 1}', "keys a"),
        ("{", "none of the first 2 lines"),
        ("hello", "not a trace"),
        ("\x00\x01\x02", "not a trace"),
        ("PK\x03\x04", "zip"),
        ("version https://git-lfs.github.com/spec/v1", "Git LFS"),
    ],
)
def test_what_replay_does_not_read_is_named(write: Write, first_line: str, told: str) -> None:
    assert told in refusal(write(first_line, first_line))


def test_nothing_to_read(write: Write, tmp_path: Path) -> None:
    assert "empty" in refusal(write(b""))
    assert "empty" in refusal(write("", "  "))
    assert "without a row" in refusal(write(HEADER))
    assert "No such file" in refusal(tmp_path / "absent")
    assert "not a regular file" in refusal(Path("/dev/null"))
    (tmp_path / "nothing").mkdir()
    assert "without a file" in refusal(tmp_path / "nothing")


# --- times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ns", "zoned"),
    [
        ("1970-01-01 00:00:00", 0, False),
        ("1970-01-01 00:00:00.0000001", 100, False),
        ("1970-01-01T00:00:00.269Z", 269 * MS, True),
        ("1970-01-01 00:00:01+00:00", 1000 * MS, True),
        ("1970-01-01T01:30:00.5+01:30", 500 * MS, True),
        ("1969-12-31T23:00:00-01:00", 0, True),
        ("2024-02-29T12:00:00Z", 1_709_208_000_000 * MS, True),
    ],
)
def test_times_are_exact(text: str, ns: int, zoned: bool) -> None:
    assert wall_clock(text, "t") == (ns, zoned)


def test_a_run_of_times_is_read_as_each_alone() -> None:
    """The cached minute, zone and number of digits of the time before must not change a result."""
    texts = [
        "2024-10-15T12:00:00.269Z",
        "2024-10-15T12:00:00.2690",
        "2024-10-15T12:00:59.2Z",
        "2024-10-15T12:00:59Z",
        "2024-10-15T12:01:00.123456789Z",
        "2024-10-15T12:01:00.123456789+02:00",
        "2024-10-15T12:01:01.5+02:00",
        "2024-10-15T12:01:01.5+03:00",
        "2024-10-15T12:01:01.5",
        "2024-10-15T12:01:02.25",
        "2024-10-15 12:01:02.25",
    ]
    clocks = WallClocks("t")
    for first in texts:
        for second in texts:
            assert clocks.read(first) == wall_clock(first, "t")
            assert clocks.read(second) == wall_clock(second, "t")
    for broken in (
        "2024-10-15T12:01:60.5",
        "2024-10-15T12:01:02.\u0663",
        "2024-10-15T12:01:02.",
        "2024-10-15T12:01:02.x",
    ):
        with pytest.raises(BrokenRow):
            clocks.read(broken)


def test_a_naive_time_never_meets_the_local_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Berlin, 02:30 happened twice that night; in the trace it happened once."""
    before = wall_clock("2023-10-29 02:30:00.1234567", "t")
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        assert wall_clock("2023-10-29 02:30:00.1234567", "t") == before
        assert wall_clock("2023-10-29 03:30:00", "t")[0] - wall_clock("2023-10-29 01:30:00", "t")[0] == 7_200_000 * MS
    time.tzset()
    assert wall_text(before[0]) == "2023-10-29 02:30:00.1234567"


def test_fractions_of_milliseconds_apart_stay_apart(write: Write) -> None:
    """Kept to two digits, these four would be 0, 0, 0 and 10 ms."""
    rows = [f"2024-10-15T12:00:00.{ms:03}Z,0,5,1" for ms in (1, 2, 9, 11)]
    assert offsets(read_trace(write(HEADER, *rows))) == [0, MS, 8 * MS, 10 * MS]


def test_errors_survive_a_trip_between_processes() -> None:
    problem = BrokenRow("missing", "at_ms is missing")
    assert str(type(problem)(*problem.args)) == str(problem) == "at_ms is missing"
