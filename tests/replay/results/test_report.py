"""The report has numbers that add up and files that programs can read, and says nothing false."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Literal

import pytest
from msgspec import structs
from rich.console import Console

from tensorferry.codecs.errors import OutputError
from tensorferry.codecs.messages import Gauge, ItemReport, Mark, Member
from tensorferry.pipeline.recording.request import Drop, Request
from tensorferry.replay.results.report import print_report, results, write_report
from tensorferry.replay.results.summary import Setup, Summary, drops_of, quantiles, summarise
from tensorferry.replay.run.gauge_samples import PoolUse, pool_use
from tensorferry.replay.run.progress import preparing, replaying
from tensorferry.replay.run.schedule import Speed
from tensorferry.replay.run.sender import Outcome, Replay, Snapshot
from tensorferry.replay.trace.loaded_trace import Trace
from tensorferry.replay.workload.prepare import Invented, Preparation, Prepared
from tensorferry.replay.workload.token_ids import TokenSource

MS = 1_000_000
START_NS = 5_000 * MS


def item(transport: str, nbytes: int) -> ItemReport:
    return ItemReport(1, (1, 4, 6), 6, transport, nbytes, b"\xab\xcd")


def marks(*steps: tuple[str, int]) -> tuple[Mark, ...]:
    return tuple(Mark(step, START_NS + at_ms * MS) for step, at_ms in steps)


def a_run(speed: str = "2") -> tuple[Trace, Preparation, Replay]:
    """The run has eight rows: one is broken, one cannot be made, six are prepared, five sent, and three are ok."""
    requests = [Request(line=line, at_ns=line * 100 * MS, output_tokens=1, id=f"r{line}") for line in range(2, 9)]
    trace = Trace(
        Path("traces/day.csv"), "ab" * 32, "azure-lmm", True, 8, requests, [Drop(1, "missing", "x is empty")], 2, {}
    )
    prepared = [Prepared(request, (b"i",), 0, None) for request in requests[1:]]
    invented = Invented(["rocket.jpg"], images_of_modelled_size=6, different_images=4, prompts=6)
    preparation = Preparation(prepared, [Drop(2, "missing_image", "a.jpg: No such file")], invented)
    replay = Replay(prepared, TokenSource(9, [], 0), Speed.parse(speed), deadline_s=1.0)
    replay.start_ns = START_NS
    received = marks(("received", 2), ("encoded", 8), ("encoded", 6), ("answered", 9))
    replay.outcomes = [
        Outcome(prepared[0], 0, 1 * MS, False, 11 * MS, "ok", items=(item("shm", 900_000),), marks=received),
        Outcome(prepared[1], 50 * MS, 51 * MS, False, 71 * MS, "ok", items=(item("inline", 900_000), item("shm", 5))),
        Outcome(prepared[2], 100 * MS, 103 * MS, True, 133 * MS, "ok", items=(item("inline", 100),)),
        Outcome(prepared[3], 150 * MS, 150 * MS, False, 151 * MS, "failed", "busy", "full"),
        Outcome(prepared[4], 200 * MS, 200 * MS, False, 201 * MS, "failed", "BadItem", "item 0: truncated"),
    ]
    replay.interrupted = True
    return trace, preparation, replay


def setup(speed: str = "2", **options: object) -> Setup:
    options = {"concurrency": 3, "pooled_from_nbytes": 32 << 10, **options}
    return Setup("local", "shm", Speed.parse(speed), 7, **options)  # type: ignore[arg-type]


def summary_of(speed: str = "2", **options: object) -> Summary:
    return summarise(*a_run(speed), setup(speed), **options)  # type: ignore[arg-type]


def test_the_counts_add_up() -> None:
    requests = summary_of().requests
    assert (requests.read, requests.sent, requests.ok, requests.failed, requests.dropped) == (8, 5, 3, 2, 3)
    assert requests.read == requests.sent + requests.dropped
    assert requests.sent == requests.ok + requests.failed
    assert requests.delayed == 1


def test_every_dropped_and_failed_request_is_counted_by_reason_with_lines() -> None:
    summary = summary_of()
    assert {(r.reason, r.count, *r.examples) for r in summary.dropped} == {
        ("missing", 1, "line 1: x is empty"),
        ("missing_image", 1, "line 2: a.jpg: No such file"),
        ("interrupted", 1, "line 8"),
    }
    assert {(r.reason, r.count, *r.examples) for r in summary.failed} == {
        ("busy", 1, "line 6: full"),
        ("BadItem", 1, "line 7: item 0: truncated"),
    }


def test_latency_counts_from_the_intended_time_and_from_the_send() -> None:
    latency = summary_of().latency_ms
    assert latency.from_intended is not None
    assert latency.from_sent is not None
    assert (latency.from_intended.p50, latency.from_intended.max) == (21, 33)
    assert (latency.from_sent.p50, latency.from_sent.max) == (20, 30)


def test_lateness_is_of_every_send() -> None:
    lateness = summary_of().lateness_ms
    assert lateness is not None
    assert (lateness.p50, lateness.p99, lateness.max) == (1, 3, 3)


def test_rates() -> None:
    rates = summary_of().per_second
    assert rates.scheduled == pytest.approx(20)
    assert rates.sent == pytest.approx(20)
    assert rates.ok == pytest.approx(15)
    assert rates.window_s == pytest.approx(0.2)


@pytest.mark.parametrize("status", ["failed", "ok"])
def test_one_late_outcome_leaves_the_rates_alone(status: Literal["failed", "ok"]) -> None:
    trace, preparation, replay = a_run()
    one = replay.outcomes[0].request
    replay.outcomes = [Outcome(one, n * 10 * MS, n * 10 * MS, False, n * 10 * MS + 5 * MS, "ok") for n in range(200)]
    replay.outcomes.append(Outcome(one, 2000 * MS, 2000 * MS, False, 14_000 * MS, status))
    rates = summarise(trace, preparation, replay, setup()).per_second
    assert (rates.scheduled, rates.sent, rates.ok) == (pytest.approx(100), pytest.approx(100), pytest.approx(100))


def test_rates_of_what_is_sent_at_once_are_those_of_the_answers() -> None:
    trace, preparation, replay = a_run("max")
    one = replay.outcomes[0].request
    replay.outcomes = [Outcome(one, 0, 0, False, (n + 1) * 10 * MS, "ok") for n in range(100)]
    rates = summarise(trace, preparation, replay, setup("max")).per_second
    assert rates.window_s == pytest.approx(0.9)
    assert (rates.scheduled, rates.ok) == (None, pytest.approx(100))


def test_without_a_schedule_there_is_no_lateness() -> None:
    summary = summary_of("max")
    assert summary.lateness_ms is None
    assert summary.latency_ms.from_intended is None
    assert summary.latency_ms.from_sent is not None
    assert summary.per_second.scheduled is None


def test_items_are_counted_by_transport_and_large_inline_ones_are_fallbacks() -> None:
    items = summary_of().items
    assert (items.count, items.rows, items.nbytes) == (4, 24, 1_800_105)
    assert {name: (c.items, c.nbytes) for name, c in items.by_transport.items()} == {
        "inline": (2, 900_100),
        "shm": (2, 900_005),
    }
    assert items.fallbacks is not None
    assert (items.fallbacks.items, items.fallbacks.nbytes) == (1, 900_000)


def test_inline_is_no_fallback_where_it_is_the_transport() -> None:
    assert summarise(*a_run(), setup(pooled_from_nbytes=None)).items.fallbacks is None


def test_steps_are_in_order_and_count_from_the_send_and_from_the_step_before() -> None:
    """Two ranks encoded at 8 and at 6 ms: the request was encoded at 8. It was sent at 1 ms."""
    steps = {step.step: (step.since_sent.p50, step.since_previous.p50) for step in summary_of().steps}
    assert list(steps.items()) == [("received", (1, 1)), ("encoded", (7, 6)), ("answered", (8, 1))]


def test_requests_that_skip_steps_do_not_upset_the_order() -> None:
    """One with images takes 90 ms to be encoded; three of text alone are answered at 5 ms."""
    trace, preparation, replay = a_run()
    for outcome in replay.outcomes[:3]:
        outcome.status, outcome.marks = "ok", marks(("received", 2), ("answered", 5))
    replay.outcomes[3].status = "ok"
    replay.outcomes[3].marks = marks(("received", 152), ("encoded", 240), ("answered", 250))
    steps = summarise(trace, preparation, replay, setup()).steps
    assert [(step.step, step.requests) for step in steps] == [("received", 4), ("encoded", 1), ("answered", 4)]


def test_quantiles_are_values_that_occurred() -> None:
    q = quantiles(value * MS for value in range(1, 101))
    assert q is not None
    assert (q.p50, q.p90, q.p99, q.max) == (50, 90, 99, 100)
    one = quantiles([7 * MS])
    assert one is not None
    assert (one.p50, one.p99) == (7, 7)
    assert quantiles([]) is None


@pytest.mark.parametrize(
    ("count", "maxima"),
    [(1, ["p50", "p90", "p99"]), (2, ["p90", "p99"]), (9, ["p90", "p99"]), (10, ["p99"]), (99, ["p99"]), (100, [])],
)
def test_a_percentile_that_is_the_maximum_is_said_to_be(count: int, maxima: list[str]) -> None:
    q = quantiles(range(count))
    assert q is not None
    assert (q.count, q.maxima) == (count, maxima)
    assert [name for name in ("p50", "p90", "p99") if getattr(q, name) == q.max] == maxima


def test_the_table_says_which_percentiles_are_maxima() -> None:
    said = printed(summary_of())
    assert "p90 and p99 of 3 latencies are their maximum" in said
    assert "p90 and p99 of 5 sends are their maximum" in said
    assert "steps: p99 of fewer than 100 requests is their maximum" in said


def test_late_sends_degrade_a_run() -> None:
    trace, preparation, replay = a_run()
    assert not summarise(trace, preparation, replay, setup()).run.degraded
    for outcome in replay.outcomes:
        outcome.sent_ns += 501 * MS
    assert summarise(trace, preparation, replay, setup()).run.degraded


def test_pool_use_comes_from_the_gauges() -> None:
    gauges = {"pool_capacity_nbytes": 8e6, "pool_peak_lent_nbytes": 5e6, "pool_refused": 3.0, "drafts_pool": 9.0}
    told = tuple(Gauge(name, value) for name, value in gauges.items())
    members = [Member("tokenizer", 0, 1, "ready", told), Member("scheduler", 1, 1, "ready")]
    assert pool_use(members) == {"tokenizer-0": PoolUse(8_000_000, 5_000_000, 3)}


# --- exit status -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strict", "status"), [(False, 0), (True, 5)])
def test_a_degraded_run_fails_strictly_and_only_then(strict: bool, status: int) -> None:
    trace, preparation, replay = a_run()
    replay.interrupted = False
    replay.outcomes = [Outcome(replay.outcomes[0].request, 0, 900 * MS, False, 901 * MS, "ok")]
    summary = summarise(trace, preparation, replay, setup(strict=strict))
    assert summary.run.degraded
    assert summary.exit_status == status
    assert "DEGRADED" in printed(summary)


@pytest.mark.parametrize(
    ("ok", "failed", "interrupted", "error", "status"),
    [
        (3, 0, False, "", 0),
        (3, 1, False, "", 3),
        (3, 0, True, "", 3),
        (3, 0, False, "gone", 3),
        (0, 3, False, "", 4),
        (0, 0, False, "", 4),
        (0, 0, True, "", 4),
    ],
)
def test_exit_status(ok: int, failed: int, interrupted: bool, error: str, status: int) -> None:
    trace, preparation, replay = a_run()
    replay.outcomes = replay.outcomes[:ok] + replay.outcomes[3:4] * failed
    replay.interrupted = interrupted
    assert summarise(trace, preparation, replay, setup(), error=error).exit_status == status


# --- files -------------------------------------------------------------------------------------------------------


def test_the_files_hold_one_line_for_every_row_read(tmp_path: Path) -> None:
    trace, preparation, replay = a_run()
    summary = summarise(trace, preparation, replay, setup(), pools={"tokenizer-0": PoolUse(10, 5, 0)})
    folder = tmp_path / "new" / "out"
    for _ in range(2):  # the second time over the first
        write_report(folder, summary, replay.outcomes, drops_of(trace, preparation, replay), replay.start_ns)
    assert sorted(path.name for path in folder.iterdir()) == ["gauges.jsonl", "results.jsonl", "summary.json"]
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert sorted(row["line"] for row in rows) == list(range(1, 9))
    read = json.loads((folder / "summary.json").read_text())
    assert {key: read["requests"][key] for key in ("read", "sent", "ok", "failed", "dropped")} == {
        "read": 8,
        "sent": 5,
        "ok": 3,
        "failed": 2,
        "dropped": 3,
    }
    by_status = [row["status"] for row in rows]
    assert {status: by_status.count(status) for status in by_status} == {"ok": 3, "failed": 2, "dropped": 3}
    assert read["trace"]["sha256"] == "ab" * 32
    assert read["pools"] == {"tokenizer-0": {"capacity_nbytes": 10, "peak_lent_nbytes": 5, "refused": 0}}


def test_a_result_row_says_when_and_how() -> None:
    trace, preparation, replay = a_run()
    first = next(results(replay.outcomes, drops_of(trace, preparation, replay), replay.start_ns))
    assert first == {
        "line": 3,
        "turn": 0,
        "id": "r3",
        "status": "ok",
        "reason": "",
        "problem": "",
        "at_ms": 0,
        "intended_ms": 0,
        "sent_ms": 1,
        "done_ms": 11,
        "latency_from_intended_ms": 11,
        "latency_from_sent_ms": 10,
        "delayed": False,
        "session": "",
        "waited": False,
        "images": {"in_trace": 0, "from_file": 0, "invented": 0},
        "prompt_tokens": 0,
        "output_tokens": 0,
        "items": [{"rank": 1, "grid": (1, 4, 6), "rows": 6, "transport": "shm", "nbytes": 900_000, "digest": "abcd"}],
        "marks_ms": {"received": 2, "encoded": 8, "answered": 9},
    }


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, preparation, replay = a_run()
    summary = summarise(trace, preparation, replay, setup())
    (tmp_path / "summary.json").write_text("old")
    (tmp_path / "results.jsonl").mkdir()
    with pytest.raises(OutputError, match=r"results\.jsonl: Is a directory"):
        write_report(tmp_path, summary, replay.outcomes, [], 0)
    assert (tmp_path / "summary.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


# --- for people --------------------------------------------------------------------------------------------------


def printed(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_report(console, summary)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_says_everything_that_matters() -> None:
    said = printed(summary_of(pools={"tokenizer-0": PoolUse(64 << 20, 5 << 20, 3)}))
    for part in (
        "day.csv (azure-lmm) through local",
        "starts at 1970-01-01 00:00:00.2, spans 0.600 s; 2 rows out of order, sorted",
        "speed 2, at most 3 in flight, seed 7, transport shm",
        "8 read = 5 sent + 3 dropped; sent = 3 ok + 2 failed",
        "1 delayed by the ceiling of 3",
        "latency from intended time  21.00  33.00  33.00  33.00",
        "latency from actual send    20.00  30.00  30.00  30.00",
        "lateness of sending          1.00   3.00   3.00   3.00",
        "20.00 scheduled, 20.00 sent, 15.00 ok, over 0.200 s",
        "4, 24 embeddings: 2 by inline (879.0 KiB), 2 by shm (878.9 KiB)",
        "1 items (878.9 KiB) went inline because a pool had no room",
        "tokenizer-0 5.0 MiB of 64.0 MiB, full 3 times",
        "6 images: size and picture (the trace has only their number)",
        "4 different ones, from rocket.jpg",
        "6 prompts: token ids",
        "encoded",
        "dropped: 1 x missing (line 1: x is empty)",
        "failed: 1 x BadItem (line 7: item 0: truncated)",
        "interrupted: sending stopped",
    ):
        assert part in said, part


def test_a_run_without_a_schedule_is_not_called_one() -> None:
    said = printed(summary_of("max"))
    assert "as fast as possible" in said
    assert "speed max has no schedule" in said
    assert "lateness of sending" not in said
    assert "intended time " not in said
    assert "scheduled" not in said


def test_what_a_trace_says_is_never_markup() -> None:
    trace, preparation, replay = a_run()
    trace = structs.replace(trace, path=Path("[red]day.csv"))
    preparation.invented.photos = ["[bold]a.jpg"]
    replay.outcomes[0].marks = marks(("[/step]", 4))
    replay.outcomes[3].problem = "[bold]not[/bold] [/oops]"
    said = printed(summarise(trace, preparation, replay, setup()))
    for part in ("[red]day.csv", "[bold]a.jpg", "[/step]", "[bold]not[/bold] [/oops]"):
        assert part in said, part


def test_a_run_that_ended_early_says_why() -> None:
    trace, preparation, replay = a_run()
    replay.interrupted = False
    said = printed(summarise(trace, preparation, replay, setup(), error="encoder-1 was killed"))
    assert "the deployment failed: encoder-1 was killed" in said
    assert "1 x deployment_failed (line 8)" in said
    assert "interrupted" not in said
    replay.interrupted = True  # and the deployment failed when it was to stop
    assert "1 x interrupted (line 8)" in printed(summarise(trace, preparation, replay, setup(), error="not drained"))


# --- progress ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_ends_with_everything_done(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
    with preparing(console) as progress:
        for done in range(1, 4):
            progress(done, 3)
    with replaying(console) as watch:
        watch(Snapshot(total=9, sent=5, ok=3, failed=1, in_flight=1, delayed=0, elapsed_s=1.0))
        watch(Snapshot(total=9, sent=9, ok=7, failed=2, in_flight=0, delayed=4, elapsed_s=2.0))
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "3 of 3" in said
    assert "9 of 9" in said
    assert "2 failed, 4 delayed" in said
    if not terminal:
        assert said.count("\n") == 2
        assert "\x1b" not in said
