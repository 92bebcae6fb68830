"""Comparisons of runs have intervals with the right coverage, group repeats, and give no verdict without evidence."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from scipy import stats

from tensorferry.cli import sweep
from tensorferry.cli.main import main
from tensorferry.replay.results.comparison import compare, find_runs, grouped
from tensorferry.replay.results.confidence import Estimate, Repeats, t_95
from tensorferry.replay.results.result_folder import read_run

MakeRun = Callable[..., Path]
LOCAL = Path(__file__).parents[3] / "configs" / "local-fingerprint.yaml"
TRACE = Path(__file__).parents[2] / "data" / "traces" / "servegen.jsonl"


def cli(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# --- intervals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", [1, 2, 7, 20, 22.9, 29, 30, 39, 100, 5000])
def test_the_table_of_t_is_as_wide_as_it_must_be(freedom: float) -> None:
    """Never narrower than the true quantile, but for its last digit; at most 2 % wider between two entries."""
    exact = stats.t.ppf(0.975, freedom)
    assert exact - 5e-5 <= t_95(freedom) <= exact * 1.02


def test_each_entry_of_the_table_of_t_is_exact() -> None:
    entries = [*range(1, 21), 25, 30, 40, 60, 120]
    assert [t_95(freedom) for freedom in entries] == pytest.approx(stats.t.ppf(0.975, entries), abs=5e-5)


def test_an_interval_is_the_one_that_scipy_has() -> None:
    values = (3.0, 4.5, 3.7, 5.2)
    found = Repeats(values).estimate
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((4.1, low, high), abs=1e-3)


def test_a_change_of_nothing_has_the_interval_of_welch() -> None:
    """Where both means are equal the ratio's error is that of their difference, as a part of the mean."""
    values, base = (9.0, 10.0, 11.0), (6.0, 10.0, 12.0, 12.0)
    found = Repeats(values).relative_to(Repeats(base))
    known = stats.ttest_ind(values, base, equal_var=False)
    wide = known.confidence_interval(0.95)
    assert found is not None
    assert found.value == 0
    assert found.high is not None
    assert found.low == -found.high
    # The table takes the next lower degrees of freedom, so it is a little wider than scipy's.
    assert (
        wide.high / 10
        <= found.high
        <= wide.high / 10 * t_95(math.floor(known.df)) / stats.t.ppf(0.975, known.df) * 1.001
    )


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_intervals_hold_the_truth_about_as_often_as_they_say(runs: int) -> None:
    """Of 2,000 experiments 19 in 20, but for four standard deviations of chance: runs differ by a tenth."""
    random = np.random.default_rng(11)
    held = changed = 0
    for _ in range(2000):
        repeats, base = (Repeats(tuple(random.normal(around, around / 10, runs))) for around in (3.0, 2.0))
        found, change = repeats.estimate, repeats.relative_to(base)
        assert change is not None
        held += bounds(found)[0] <= 3.0 <= bounds(found)[1]
        changed += bounds(change)[0] <= 0.5 <= bounds(change)[1]
    assert 0.93 <= held / 2000 <= 0.97
    assert 0.93 <= changed / 2000


def bounds(estimate: Estimate) -> tuple[float, float]:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


def test_one_run_says_nothing_of_other_runs() -> None:
    one, two = Repeats((3.0,)), Repeats((2.0, 2.5))
    assert one.estimate == Estimate(3.0)
    assert one.relative_to(Repeats((2.0,))) == Estimate(0.5)
    assert one.relative_to(two) == Estimate(3 / 2.25 - 1)
    assert two.relative_to(one) == Estimate(2.25 / 3 - 1)
    assert one.relative_to(Repeats((0.0,))) is None


def test_an_interval_ends_where_values_end() -> None:
    assert bounds(Repeats((0.0, 1.0), 1.0).estimate) == (0, 1)
    change = Repeats((0.0, 1.0)).relative_to(Repeats((1.0, 2.0)))
    assert change is not None
    assert change.low == -1


def test_values_that_do_not_differ_have_an_interval_of_no_length() -> None:
    assert bounds(Repeats((2.0, 2.0)).estimate) == (2, 2)
    assert Repeats((3.0, 3.0)).relative_to(Repeats((2.0, 2.0, 2.0))) == Estimate(0.5, 0.5, 0.5)


# --- runs -------------------------------------------------------------------------------------------------------


def config(budget_mb: int, name: str = "a") -> dict[str, Any]:
    return {"name": name, "runtime_dir": f"/run/{name}", "pool": {"budget_mb": budget_mb, "slots": 9}}


def noisy(around_ms: float, seed: int) -> Sequence[float]:
    return np.random.default_rng(seed).normal(around_ms, 5, 40).tolist()


@pytest.fixture
def four_runs(make_run: MakeRun, tmp_path: Path) -> Path:
    """Two with 256 MiB, and two with 64, that are slower and half of whose items fall back."""
    for number in (1, 2):
        make_run(tmp_path / "a" / str(number), noisy(100, number), config=config(256, f"n{number}"))
        make_run(tmp_path / "b" / str(number), noisy(150, number), config=config(64), inline=range(0, 40, 2))
    return tmp_path


def test_repeats_are_put_together_and_named_by_what_differs(four_runs: Path) -> None:
    """The names and folders of a deployment differ too, but do not separate repeats."""
    groups = grouped(find_runs([four_runs]))
    assert [(group.name, len(group.runs)) for group in groups] == [("pool.budget_mb=256", 2), ("pool.budget_mb=64", 2)]


def test_a_difference_that_is_there_is_told_with_its_direction(four_runs: Path) -> None:
    first, second = compare(grouped(find_runs([four_runs]))).lines
    assert first.values["p50"].change is None
    change = second.values["p50"].change
    assert change is not None
    assert change.value == pytest.approx(0.5, abs=0.05)
    verdicts = {key: value.verdict for key, value in second.values.items()}
    assert verdicts["p50"] == "worse"
    assert second.values["fallbacks"].estimate.value == 0.5
    assert (first.values["fallbacks"].estimate.value, verdicts["fallbacks"]) == (0, "")


def test_a_row_has_the_mean_of_what_its_runs_say(four_runs: Path) -> None:
    first, _ = compare(grouped(find_runs([four_runs]))).lines
    summaries = [read_run(Path(folder)).summary for folder in first.folders]
    latencies = [summary.latency_ms.from_intended for summary in summaries]
    for key in ("p50", "p90", "p99"):
        own = [getattr(latency, key) / 1e3 for latency in latencies]
        assert first.values[key].estimate.value == pytest.approx(np.mean(own))
    assert first.values["ok_per_s"].estimate.value == pytest.approx(np.mean([s.per_second.ok for s in summaries]))


def test_single_runs_have_no_interval_and_no_verdict(make_run: MakeRun, tmp_path: Path) -> None:
    """That holds for any distance between them, and any number of requests."""
    make_run(tmp_path / "a", noisy(100, 1), config=config(1))
    make_run(tmp_path / "b", noisy(900, 2), config=config(2))
    comparison = compare(grouped(find_runs([tmp_path])))
    for line in comparison.lines:
        for value in line.values.values():
            assert (value.estimate.low, value.estimate.high, value.verdict) == (None, None, "")
            assert value.change is None or value.change.low is None
    assert any("repeat it" in warning for warning in comparison.warnings)


def test_equal_runs_get_no_verdict(make_run: MakeRun, tmp_path: Path) -> None:
    for number in range(3):
        make_run(tmp_path / f"a{number}", noisy(100, number), config=config(1))
        make_run(tmp_path / f"b{number}", noisy(100, 10 + number), config=config(2))
    groups = grouped(find_runs([tmp_path]))
    assert [group.name for group in groups] == ["pool.budget_mb=1", "pool.budget_mb=2"]
    for line in compare(groups).lines:
        assert not [key for key, value in line.values.items() if value.verdict]


def test_what_makes_runs_hard_to_compare_is_said(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(tmp_path / "a", [10, 20])
    make_run(tmp_path / "b", [10, 20], speed="2")
    path = tmp_path / "b" / "summary.json"
    path.write_text(path.read_text().replace("ab" * 32, "ef" * 32).replace('"degraded": false', '"degraded": true'))
    groups = grouped(find_runs([tmp_path]))
    assert [group.name for group in groups] == ["--speed=1", "--speed=2"]
    said = "\n".join(compare(groups).warnings)
    for part in ("different traces", "b: DEGRADED", "repeat it", "p99 of 2 latencies is their maximum"):
        assert part in said, part


def test_runs_without_an_answer_are_compared_by_what_they_have(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(tmp_path / "a", [10, 20])
    make_run(tmp_path / "b", [10, 20], failed=(0, 1), config={"transport": "cpu"})
    result = cli("compare", tmp_path)
    assert result.exit_code == 0, result.output
    assert "100.00 %" in result.stdout


# --- the commands -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
def test_compare_prints_a_table_or_json_and_writes_a_page(four_runs: Path, tmp_path: Path) -> None:
    html = tmp_path / "compare.html"
    result = cli("compare", four_runs / "a", four_runs / "b", "--html", html)
    assert result.exit_code == 0, result.output
    for part in ("latency p99", "pool.budget_mb=64", "worse", "50.00 %"):
        assert part in result.stdout, part
    page = html.read_text()
    assert page.count("<svg") == 6
    assert "&lt;" not in page.split("</style>")[1]  # nothing was escaped twice
    lines = json.loads(cli("compare", four_runs, "--json").stdout)["lines"]
    assert [len(line["folders"]) for line in lines] == [2, 2]


def test_compare_refuses_a_folder_without_runs(tmp_path: Path) -> None:
    result = cli("compare", tmp_path)
    assert result.exit_code == 1
    assert "it has no run" in result.stderr


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("a.b=1,2", ["a.b=1", "a.b=2"]),
        ("a=x", ["a=x"]),
        ("a=[0,1],[2]", ["a=[0,1]", "a=[2]"]),
        ("a='x,y',z", ["a='x,y'", "a=z"]),
        ("a={b: 1, c: 2}", ["a={b: 1, c: 2}"]),
        ("a=,1", ["a=", "a=1"]),
    ],
)
def test_values_of_a_setting_are_separated_by_commas_outside_of_brackets(setting: str, found: list[str]) -> None:
    assert sweep.alternatives(setting) == found


def test_all_combinations_are_swept_in_order() -> None:
    found = [cell.settings for cell in sweep.cells(("a=1,2", "b=x,y"))]
    assert found == [("a=1", "b=x"), ("a=1", "b=y"), ("a=2", "b=x"), ("a=2", "b=y")]
    assert [cell.name for cell in sweep.cells(())] == ["as it is"]


def test_a_sweep_that_cannot_be_sound_runs_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ("sweep", TRACE, "--config", LOCAL, "--out", out, "--set")
    assert cli(*asked, "pool.budget_mb").exit_code == 2
    result = cli(*asked, "pool.budget_mb=64,lots")
    assert result.exit_code == 2
    assert "lots" in result.stderr
    assert not out.exists()
    out.mkdir()
    (out / "x").touch()
    assert "is not empty" in cli(*asked, "pool.budget_mb=64").stderr


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("--nonsense",), 2, "No such option"),
        (("--speed", "fast"), 2, "--speed"),
        (("--out", "elsewhere"), 2, "--out cannot be passed to every replay"),
        (("--set", "pool.budget_mb=1"), 2, "--set cannot be"),
        (("--config", "other.yaml"), 2, "--config cannot be"),
        (("--attach",), 2, "--attach cannot be"),
        (("--dry-run",), 2, "--dry-run cannot be"),
        (("--overwrite",), 2, "--overwrite cannot be"),
        (("--rate", "3"), 1, "takes no rate"),
    ],
)
def test_options_that_no_replay_can_have_are_refused_before_the_first(
    tmp_path: Path, options: Sequence[str], status: int, said: str
) -> None:
    out = tmp_path / "out"
    result = cli("sweep", TRACE, "--config", LOCAL, "--out", out, "--set", "pool.budget_mb=64", "--", *options)
    assert (result.exit_code, said in result.stderr) == (status, True), result.output
    assert not out.exists()


def test_a_sweep_of_no_trace_runs_nothing(tmp_path: Path) -> None:
    result = cli("sweep", __file__, "--config", LOCAL, "--out", tmp_path / "out")
    assert (result.exit_code, "not a trace" in result.stderr) == (1, True), result.output
    assert not (tmp_path / "out").exists()


@pytest.fixture
def runtime() -> Iterator[str]:
    """Give a folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        yield f"runtime_dir={path}/run"


@pytest.mark.processes
@pytest.mark.usefixtures("plots")
def test_a_sweep_runs_every_version_as_often_as_asked(tmp_path: Path, runtime: str) -> None:
    """The sweep makes real replays of real deployments."""
    out = tmp_path / "out"
    result = cli(
        *("sweep", TRACE, "--config", LOCAL, "--set", "transport=shm,cpu", "--set", "encoder.ranks=1"),
        *("--set", "timeouts.heartbeat_s=0.1", "--set", runtime, "--repeat", "1", "--out", out),
        *("--", "--speed", "max", "--limit", "2"),
    )
    assert result.exit_code == 0, result.output + "".join(path.read_text() for path in out.rglob("*.log"))
    assert [run.summary.run.transport for run in find_runs([out])] == ["shm", "cpu"]
    assert "run 2 of 2: transport=cpu" in result.stdout
    assert "2 ok of 2" in result.stdout
    assert "latency p50" in result.stdout


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_interrupted_keeps_what_it_has(tmp_path: Path, runtime: str, how: signal.Signals) -> None:
    """Ctrl-C reaches the replay too, and SIGTERM is passed on to it. The replay reports, and no further run begins."""
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored under `&`
    program += "from tensorferry.cli.main import main; sys.exit(main())"
    asked = ["sweep", TRACE, "--config", LOCAL, "--repeat", "3", "--out", tmp_path / "out", "--set", "encoder.ranks=1"]
    asked += ["--set", "model.adapter=fingerprint", "--set", runtime, "--", "--speed", "0.00001"]
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program, *map(str, asked)], stdout=subprocess.PIPE, text=True, process_group=0
    ) as sweeping:
        try:
            log = tmp_path / "out" / "01" / "1.log"
            until = time.monotonic() + 40
            while not (log.exists() and "requests done" in log.read_text()):  # said every five seconds
                assert sweeping.poll() is None
                assert time.monotonic() < until
                threading.Event().wait(0.05)
            if how == signal.SIGINT:
                os.killpg(sweeping.pid, how)
            else:
                sweeping.send_signal(how)
            said, _ = sweeping.communicate(timeout=40)
        finally:
            sweeping.kill()
    assert "interrupted: no further runs" in said
    assert sweeping.returncode in (3, 4)
    assert len(find_runs([tmp_path / "out"])) == 1


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_replay_ends_when_its_sweep_is_killed(tmp_path: Path, runtime: str) -> None:
    asked = ["sweep", TRACE, "--config", LOCAL, "--out", tmp_path / "out", "--set", "encoder.ranks=1"]
    asked += ["--set", "model.adapter=fingerprint", "--set", runtime, "--", "--speed", "0.00001"]
    with subprocess.Popen(
        [sys.executable, "-m", "tensorferry", *map(str, asked)], stdout=subprocess.DEVNULL, process_group=0
    ) as sweeping:
        try:
            children = Path(f"/proc/{sweeping.pid}/task/{sweeping.pid}/children")
            until = time.monotonic() + 40
            while not children.read_text() or b"replay" not in command_of(children):
                assert sweeping.poll() is None
                assert time.monotonic() < until
                threading.Event().wait(0.05)
            replaying = os.pidfd_open(int(children.read_text()))
            sweeping.kill()
            try:
                poll = select.poll()
                poll.register(replaying, select.POLLIN)
                assert poll.poll(40_000), "it goes on without its sweep"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(replaying, signal.SIGTERM)
                os.close(replaying)
        finally:
            sweeping.kill()


def command_of(children: Path) -> bytes:
    """The command line of the first child, b"" if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{children.read_text().split()[0]}/cmdline").read_bytes()
    return b""
