"""A file that is not a trace, or an empty selection, is refused with the mistake and its place."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensorferry.cli.main import main
from tensorferry.codecs.errors import TraceError
from tensorferry.replay.trace.formats.token_counts import keys_of
from tensorferry.replay.trace.loaded_trace import read_trace
from tensorferry.replay.workload.image_models import image_model

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "traces"
LOCAL = ROOT / "configs" / "local.yaml"


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# --- folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["describe"], ["convert", "OUT"], ["cut", "OUT"]])
def test_a_folder_of_two_formats_names_a_file_of_each(tmp_path: Path, command: list[str]) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    shutil.copy(DATA / "azure_2023.csv", folder / "a.csv")
    shutil.copy(DATA / "servegen.jsonl", folder / "b.jsonl")
    name, *out = command
    result = run("trace", name, folder, *(tmp_path / one for one in out))
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"Error: {folder / 'b.jsonl'}: it has the format servegen, but {folder / 'a.csv'} has azure"
    )
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("name", ["LICENSE", "zz.md"])
def test_a_file_that_is_no_part_is_named(tmp_path: Path, name: str) -> None:
    shutil.copy(DATA / "servegen.jsonl", tmp_path / "s.jsonl")
    (tmp_path / name).write_text("Apache License\nVersion 2.0\n")
    with pytest.raises(TraceError, match=f"{name}:1: it is not a trace that replay knows"):
        read_trace(tmp_path)


def test_the_bundled_folder_says_which_file_is_no_trace() -> None:
    result = run("trace", "describe", ROOT / "examples" / "traces")
    assert (result.exit_code, "examples/traces/LICENSE-ServeGen.txt:" in result.stderr) == (1, True)


def test_parts_may_go_on_without_a_header_or_be_empty(tmp_path: Path) -> None:
    header, *rows = (DATA / "azure_2023.csv").read_text().splitlines(keepends=True)
    (tmp_path / "0").write_text("")
    (tmp_path / "1.csv").write_text(header + rows[0])
    (tmp_path / "2.csv").write_text(rows[1] + rows[2])
    (tmp_path / "3.csv").write_text(header + rows[3])
    assert [request.line for request in read_trace(tmp_path).requests] == [2, 3, 4, 6]


def test_columns_in_another_order_are_no_part(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,3,4\n")
    (tmp_path / "2.csv").write_text("TIMESTAMP,GeneratedTokens,ContextTokens\n2023-11-16 18:17:03,3,4\n")
    with pytest.raises(TraceError, match=r"2\.csv:1: its columns differ from those of .*1\.csv"):
        read_trace(tmp_path)


@pytest.mark.parametrize("odd", ["pipe", "dangling"])
def test_what_is_no_file_in_a_folder_is_named(tmp_path: Path, odd: str) -> None:
    shutil.copy(DATA / "servegen.jsonl", tmp_path / "s.jsonl")
    if odd == "pipe":
        os.mkfifo(tmp_path / odd)
    else:
        (tmp_path / odd).symlink_to("nowhere")
    with pytest.raises(TraceError, match=f"{odd}: it is neither a file nor a folder"):
        read_trace(tmp_path)


# --- nothing left ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [["trace", "describe"], ["trace", "convert"], ["trace", "cut"], ["replay", "--dry-run", "--config", str(LOCAL)]],
)
def test_a_trace_of_no_usable_row_is_none(tmp_path: Path, command: list[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"at_ms": -1, "text": "a", "output_tokens": 1}\n{"at_ms": 0, "text": 3, "output_tokens": 1}\n')
    out = [tmp_path / "out"] if command[1] in ("convert", "cut") else []
    result = run(*command, trace, *out)
    assert result.exit_code == 1
    said = (
        "none of its 2 rows can be used: 1 x negative, 1 x bad_value; line 1: at_ms is -1; line 2: text is not a string"
    )
    assert result.stderr.splitlines()[-1] == f"Error: {trace}: {said}"
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize("command", ["convert", "cut"])
@pytest.mark.parametrize("option", ["--start=9d", "--share=1e-9"])
def test_a_selection_of_nothing_writes_nothing(tmp_path: Path, command: str, option: str) -> None:
    result = run("trace", command, DATA / "servegen.jsonl", tmp_path / "out", option)
    assert (result.exit_code, "lie outside the window or the share" in result.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["trace", "convert"], ["trace", "cut"], ["replay", "--config", str(LOCAL)]])
@pytest.mark.parametrize("end", ["5", "10"])
def test_a_window_that_ends_before_it_starts_is_wrong_usage(tmp_path: Path, command: list[str], end: str) -> None:
    out = [tmp_path / "out"] if command[0] == "trace" else []
    result = run(*command, DATA / "servegen.jsonl", *out, "--start", "10", "--end", end)
    assert (result.exit_code, "Invalid value for --end: it must be after --start" in result.stderr) == (2, True)


def test_a_window_of_a_date_and_a_time_is_compared_too(tmp_path: Path) -> None:
    window = ["--start", "1h", "--end", "2024-10-15 12:00:01"]
    result = run("trace", "cut", DATA / "azure_lmm.csv", tmp_path / "out", *window)
    assert (result.exit_code, "is not after --start" in result.stderr) == (1, True)


def test_a_dry_run_writes_its_plan(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    result = run("replay", DATA / "servegen.jsonl", "--config", LOCAL, "--dry-run", "--out", out)
    assert (result.exit_code, f"wrote the plan to {out}" in result.stdout) == (0, True), result.output
    [reason] = json.loads((out / "summary.json").read_text())["dropped"]
    assert (reason["reason"], reason["count"]) == ("not_started", 6)


# --- what is wrong with a row, and what would be right -----------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('"at_ms": 1e999, "text": "a"', r"at_ms is 1E\+999; it may have 19 digits before the point at most"),
        (f'"at_ms": {"9" * 30}, "text": "a"', r"at_ms is 1\.000E\+30; it may have 19 digits"),
        (f'"at_ms": {"9" * 5000}, "text": "a"', r"it has a number of thousands of digits"),
        ('"at_ms": 1, "images": {"path": "a"}', r"images is \"\{'path': 'a'\}\"; give a list of images"),
    ],
)
def test_a_row_that_is_refused_says_value_and_remedy(tmp_path: Path, row: str, said: str) -> None:
    (tmp_path / "t.jsonl").write_text(
        f'{{"at_ms": 0, "text": "a", "output_tokens": 1}}\n{{{row}, "output_tokens": 1}}\n'
    )
    [drop] = read_trace(tmp_path / "t.jsonl").drops
    assert drop.reason in ("out_of_range", "not_a_number")
    assert re.match(said, drop.problem), drop.problem


def test_a_key_that_is_given_twice_is_said() -> None:
    with pytest.raises(ValueError, match="has time= twice"):
        keys_of("time=a,prompt=b,time=b")


def test_a_list_without_sizes_is_said(tmp_path: Path) -> None:
    (tmp_path / "sizes.csv").write_text("w,h\n3,4\n")
    with pytest.raises(TraceError, match=r"a list is a CSV file with the columns width and height$"):
        image_model(str(tmp_path / "sizes.csv"), 0)
    with pytest.raises(ValueError, match="sides of 1 to"):
        image_model("99999999x99999999", 0)
