"""When a request comes: what a time may look like, in which unit it is, and who decides that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tensorferry.cli.main import main
from tensorferry.pipeline.replay.request import BrokenRow
from tensorferry.pipeline.replay.trace import read_trace
from tensorferry.pipeline.replay.values import WallClocks, wall_clock

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
