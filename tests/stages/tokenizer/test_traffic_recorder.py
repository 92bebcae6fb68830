"""Live traffic as a trace: what was asked, in order, without anybody waiting, and replayable as it is."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from structlog.testing import capture_logs

from tensorferry.cli.main import main
from tensorferry.codecs import messages as wire
from tensorferry.codecs.errors import DeploymentError
from tensorferry.codecs.frames import Buffer
from tensorferry.pipeline.deployment.spec import Deployment, LimitsSpec, TelemetrySpec, TokenizerSpec
from tensorferry.pipeline.recording import traffic
from tensorferry.pipeline.telemetry.counters import Counters
from tensorferry.replay.trace.loaded_trace import read_trace
from tensorferry.stages.processors.registry import make_processor
from tensorferry.stages.tokenizer.planner import Planner
from tensorferry.stages.tokenizer.text import TextEncoder
from tensorferry.stages.tokenizer.traffic_recorder import MOST_WAITING, Recorder

TRACE = Path(__file__).parents[2] / "data" / "traces" / "servegen.jsonl"


def picture(width: int, height: int) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (width, height), (9, 9, 9)).save(written, "JPEG")
    return written.getvalue()


def asked(*parts: wire.Part, number: int = 1) -> wire.Submit:
    return wire.Submit(number.to_bytes(16, "big"), 0, parts, 7, 1000)


def ids(count: int) -> wire.TokensPart:
    return wire.TokensPart(np.arange(count, dtype="<i4").tobytes())


def recorded(folder: Path, *requests: tuple[wire.Submit, Sequence[Buffer]], media: bool) -> tuple[list[Any], Counters]:
    counters = Counters()
    part, text = folder / "part", TextEncoder.from_file(None)
    recorder = Recorder(part, folder / "media" if media else None, text, LimitsSpec(), counters)
    for submit, frames in requests:
        recorder.take(submit, frames, time.monotonic_ns())
    recorder.close()
    return [json.loads(line) for line in part.read_text().splitlines()], counters


def test_metadata_holds_sizes_and_no_word(tmp_path: Path) -> None:
    request = asked(wire.TextPart("geheim"), wire.ImagePart(0), ids(5))
    (row,), _ = recorded(tmp_path, (request, [picture(30, 20)]), media=False)
    del row["at_ms"]
    assert row == {
        "id": "00000000000000000000000000000001",
        "text_tokens": 6 + 5,  # the bundled vocabulary is of bytes
        "images": [{"width": 30, "height": 20}],
        "output_tokens": 7,
    }
    assert "geheim" not in (tmp_path / "part").read_text()


def test_what_planning_knows_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of images and the number of tokens."""
    submit, frames = asked(wire.TextPart("geheim"), wire.ImagePart(0), ids(5)), [picture(30, 20)]
    text = TextEncoder.from_file(None)
    prompt = Planner(make_processor("qwen2-vl", {}, LimitsSpec()), text, LimitsSpec()).plan(submit, frames)
    recorder = Recorder(tmp_path / "part", None, text, LimitsSpec(), Counters())
    monkeypatch.setattr(recorder, "_count", lambda text: pytest.fail("counted again"))
    recorder.take(submit, [b"nobody reads this"], 1_500_000, prompt)
    recorder.close()
    row = json.loads((tmp_path / "part").read_text())
    assert row["at_ms"] == 1.5
    assert (row["text_tokens"], row["images"]) == (6 + 5, [{"width": 30, "height": 20}])


def test_what_others_have_asked_is_for_nobody_elses_eyes(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        recorded(tmp_path, (asked(wire.TextPart("geheim"), wire.ImagePart(0)), [picture(30, 20)]), media=True)
        record = tmp_path / "record.jsonl"
        (tmp_path / "part").rename(traffic.part_of(record, 0))
        traffic.gather(Deployment(name="it", telemetry=TelemetrySpec(record=str(record))))
    finally:
        os.umask(before)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) == 2
    assert {path.stat().st_mode & 0o777 for path in found} == {0o600}
    assert (tmp_path / "media").stat().st_mode & 0o777 == 0o700


def test_with_media_words_and_bytes_are_kept_in_order_and_equal_bytes_once(tmp_path: Path) -> None:
    frames = [picture(30, 20), picture(8, 8)]
    first = asked(wire.TextPart("a"), wire.ImagePart(1), wire.TextPart("b"), wire.ImagePart(0))
    rows, _ = recorded(tmp_path, (first, frames), (asked(wire.ImagePart(0)), [frames[1]]), media=True)
    assert [part if isinstance(part, str) else "image" for part in rows[0]["parts"]] == ["a", "image", "b", "image"]
    paths = [part["path"] for part in rows[0]["parts"] if not isinstance(part, str)]
    assert [(tmp_path / path).read_bytes() for path in paths] == [frames[1], frames[0]]
    assert rows[1]["parts"] == [{"path": paths[0]}]
    assert len(list((tmp_path / "media").iterdir())) == 2


def test_what_the_format_cannot_say_is_counted_and_left_out(tmp_path: Path) -> None:
    video = asked(wire.VideoPart(0, 1)), [picture(8, 8)]
    absent = asked(wire.ImagePart(3)), [picture(8, 8)]
    rows, counters = recorded(tmp_path, video, absent, (asked(ids(3)), []), media=False)
    assert [row["text_tokens"] for row in rows] == [3]
    assert counters.value("requests_unrecorded") == 2


def test_a_damaged_image_is_recorded_as_one(tmp_path: Path) -> None:
    (row,), _ = recorded(tmp_path, (asked(wire.ImagePart(0)), [b"\xff\xd8damaged"]), media=False)
    assert row["images"] == 1


def test_nobody_waits_for_a_recorder_that_does_not_keep_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped at its first request; what comes beyond those that may wait is counted."""
    goes_on, counters = threading.Event(), Counters()
    encode = TextEncoder.encode
    monkeypatch.setattr(TextEncoder, "encode", lambda self, text: goes_on.wait(20) and encode(self, text))
    recorder = Recorder(tmp_path / "part", None, TextEncoder.from_file(None), LimitsSpec(), counters)
    began = time.monotonic()
    for _ in range(MOST_WAITING + 10):
        recorder.take(asked(wire.TextPart("x")), [], 0)
    assert time.monotonic() - began < 10
    assert 9 <= counters.value("requests_unrecorded") <= 10
    goes_on.set()
    recorder.close()
    assert (
        len((tmp_path / "part").read_text().splitlines()) + counters.value("requests_unrecorded") == MOST_WAITING + 10
    )


def test_b10_a_full_disk_ends_no_worker_and_what_is_missing_is_counted(tmp_path: Path) -> None:
    counters = Counters()
    with capture_logs() as logs:
        recorder = Recorder(Path("/dev/full"), None, TextEncoder.from_file(None), LimitsSpec(), counters)
        for _ in range(20):
            recorder.take(asked(wire.TextPart("x")), [], 0)
        recorder.close()
    assert [log["event"] for log in logs] == ["not_recorded"]
    assert "No space left on device" in logs[0]["problem"]
    assert counters.value("requests_unrecorded") == 20


@pytest.mark.parametrize("gone", ["part", "media"])
def test_a_folder_that_has_gone_ends_no_worker(tmp_path: Path, gone: str) -> None:
    """Nor its recorder: what could not be written at first may be later, and what waits must not wait for ever."""
    folder, counters = tmp_path / "folder", Counters()
    folder.mkdir()
    part = folder / "part" if gone == "part" else tmp_path / "part"
    if gone == "part":
        folder.rmdir()
    with capture_logs() as logs:
        recorder = Recorder(part, folder / "media", TextEncoder.from_file(None), LimitsSpec(), counters)
        shutil.rmtree(folder, ignore_errors=True)
        for _ in range(3):
            recorder.take(asked(wire.ImagePart(0)), [picture(8, 8)], 0)
        recorder.close()
    assert [log["event"] for log in logs] == ["not_recorded"]
    assert counters.value("requests_unrecorded") == 3


# --- one file of all workers ------------------------------------------------------------------------------------


def deployment(record: Path, workers: int = 2) -> Deployment:
    return Deployment(name="x", tokenizer=TokenizerSpec(workers=workers), telemetry=TelemetrySpec(record=str(record)))


def test_parts_become_one_file_in_the_order_of_time(tmp_path: Path) -> None:
    record = tmp_path / "day.jsonl"
    line = '{{"at_ms": {}, "text_tokens": 1, "output_tokens": 1}}\n'
    traffic.part_of(record, 0).write_text(
        line.format(1.5) + line.format(9) + "\n" + line.format(10) + '{"at_ms": 11, "te'
    )
    traffic.part_of(record, 1).write_text(line.format(2) + '{"at_ms": 3, "t\n' + line.format(9.5))
    traffic.gather(deployment(record))
    assert [request.at_ns for request in read_trace(record).requests] == [
        1_500_000,
        *(n * 500_000 for n in (4, 18, 19, 20)),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["day.jsonl"]


def test_nothing_is_recorded_over(tmp_path: Path) -> None:
    record = tmp_path / "day.jsonl"
    traffic.refuse_existing(deployment(record))
    traffic.gather(deployment(record))  # no worker has written
    assert not record.exists()
    traffic.part_of(record, 1).touch()
    with pytest.raises(DeploymentError, match="tokenizer-1"):
        traffic.refuse_existing(deployment(record))
    with pytest.raises(DeploymentError, match="no folder"):
        traffic.refuse_existing(deployment(tmp_path / "absent" / "day.jsonl"))


# --- the commands -----------------------------------------------------------------------------------------------


DEPLOYMENT = """
name: record-test
transport: shm
runtime_dir: {runtime}/run
model: {{adapter: fingerprint}}
pool: {{budget_mb: 16}}
embeddings_pool: {{budget_mb: 16}}
tokenizer: {{workers: 2}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0}}
telemetry: {{log_level: error}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tf-") as runtime:
        path = tmp_path / "deployment.yaml"
        path.write_text(DEPLOYMENT.format(runtime=runtime))
        yield path


def record_a_replay(file: Path, trace: Path, record: Path, *options: str) -> None:
    program = [sys.executable, "-P", "-m", "tensorferry"]
    up = [*program, "up", "--config", str(file), "--record", str(record), *options]
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            assert "is ready" in serving.stdout.readline()
            replay = [*program, "replay", str(trace), "--config", str(file), "--attach", "--speed", "2"]
            subprocess.run(replay, check=True, capture_output=True, timeout=60)
            serving.send_signal(signal.SIGINT)
            assert serving.wait(30) == 0
        finally:
            serving.kill()


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [(), ("--record-media",)])
def test_a_record_of_a_replay_is_replayed_as_the_same_requests(
    file: Path, tmp_path: Path, options: Sequence[str]
) -> None:
    """Record a replay, replay the record, record that. Requests of one instant may reach two workers in any order."""
    records = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    record_a_replay(file, TRACE, records[0], *options)
    record_a_replay(file, *records, *options)

    def requests(path: Path) -> list[str]:
        """Each without its time, its id and the name of the record."""
        rows = [json.loads(line) for line in path.read_text().replace(f"{path.name}.media", "media").splitlines()]
        return sorted(json.dumps({key: row[key] for key in row if key not in ("at_ms", "id")}) for row in rows)

    assert requests(records[0]) == requests(records[1])
    sent = read_trace(TRACE).requests
    once = [json.loads(line) for line in records[0].read_text().splitlines()]
    assert sorted(row["text_tokens"] for row in once) == sorted(request.text_tokens or 0 for request in sent)
    assert sum(len(row["images"]) for row in once) == sum(len(request.images) for request in sent)
    assert not list(tmp_path.glob("*.part"))
    if options:
        kept = [
            {path.name for path in tmp_path.joinpath(f"{name}.jsonl.media").iterdir()} for name in ("first", "second")
        ]
        assert kept[0] == kept[1] != set()


def test_media_are_kept_only_where_a_record_is() -> None:
    result = CliRunner().invoke(main, ["up", "--config", "x.yaml", "--record-media"])
    assert result.exit_code == 2
    assert "--record" in result.output
