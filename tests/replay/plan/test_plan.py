"""Plans of pool sizes are tested by the ledger on known times, and by a real replay."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensorferry.cli.main import main
from tensorferry.replay.plan.forecast import MIB, Rules, Stay, Visit, forecast, plan
from tensorferry.replay.plan.pool_stays import measured
from tensorferry.replay.results.result_folder import read_run
from tensorferry.replay.trace.text_lines import Source

MakeRun = Callable[..., Path]
ROOT = Path(__file__).parents[3]
LOCAL = ROOT / "configs" / "local.yaml"
BUNDLED = ROOT / "examples" / "traces" / "servegen.jsonl"
MS = 1_000_000
ONE = Rules(workers=1, slots=64)


def cli(*arguments: str | Path | int) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def visit(at_ms: float, *kept: tuple[float, float], worker: int = 0) -> Visit:
    """kept: (MiB, ms) of each item."""
    return Visit(round(at_ms * MS), worker, tuple(Stay(round(mib * MIB), round(ms * MS)) for mib, ms in kept))


# --- the ledger against known times -------------------------------------------------------------------------------


def test_an_item_that_finds_no_room_is_a_fallback_and_takes_none() -> None:
    visits = [visit(0, (1, 10)), visit(5, (1, 10)), visit(10, (1, 10)), visit(12, (1, 1))]
    found = forecast(visits, ONE, 1)
    assert (found.items, found.fallbacks, found.share) == (4, 2, 0.5)
    assert found.peak_nbytes == MIB
    assert forecast(visits, ONE, 2).fallbacks == 1
    assert forecast(visits, ONE, 3).fallbacks == 0


def test_room_is_made_before_it_is_asked_for_at_the_same_instant() -> None:
    assert forecast([visit(0, (1, 10)), visit(10, (1, 10))], ONE, 1).fallbacks == 0


def test_each_worker_has_its_share() -> None:
    visits = [visit(0, (1, 10)), visit(0, (1, 10), worker=1), visit(1, (1, 10), worker=1)]
    assert forecast(visits, Rules(workers=2, slots=64), 2).fallbacks == 1
    assert forecast(visits, Rules(workers=2, slots=64), 3).fallbacks == 1  # 1 MiB each, as of a deployment's budget
    assert forecast(visits, Rules(workers=2, slots=64), 4).fallbacks == 0


def test_slots_run_out_too() -> None:
    visits = [visit(0, *[(0.01, 10)] * 5)]
    found = plan(visits, Rules(workers=1, slots=3))
    assert found.curve[-1].fallbacks == 2
    assert (found.under_1_percent_mb, found.under_01_percent_mb) == (None, None)


@pytest.mark.parametrize(("wait_ms", "fallbacks"), [(0, 2), (5, 1), (8, 0)])
def test_a_request_that_waits_finds_what_comes_back_meanwhile(wait_ms: int, fallbacks: int) -> None:
    """The first leaves at 10. One that came at 6 waits 4 for it and stays until 13. One of 5.5 more comes at 7."""
    visits = [visit(0, (1, 10)), visit(6, (1, 3)), visit(7, (1, 3))]
    assert forecast(visits, Rules(1, 64, wait_ms * MS), 1).fallbacks == fallbacks


def test_a_request_waits_for_all_of_its_items_and_holds_none_meanwhile() -> None:
    visits = [visit(0, (1, 10)), visit(1, (1, 10), (1, 10)), visit(2, (1, 2))]
    assert forecast(visits, Rules(1, 64, 20 * MS), 2).fallbacks == 0


def test_a_plan_names_the_least_budgets() -> None:
    """Of 2,000 items 21 come together. All but the 1 % allowed must find room."""
    visits = [visit(n * 100, (1, 50)) for n in range(1979)] + [visit(500_000, *[(1, 50)] * 21)]
    found = plan(visits, ONE)
    assert found.under_1_percent_mb == 2  # 19 of 2,000
    assert found.under_01_percent_mb == 20  # one of 2,000
    assert found.peak_nbytes == 21 * MIB
    budgets = [point.budget_mb for point in found.curve]
    assert budgets == sorted(set(budgets))
    assert (budgets[0], budgets[-1]) == (1, 21)
    assert [point.share for point in found.curve] == sorted((point.share for point in found.curve), reverse=True)


# --- measured times -----------------------------------------------------------------------------------------------


def kept(visits: Sequence[Visit]) -> list[list[int]]:
    return [[stay.kept_ns for stay in visit.stays] for visit in visits]


def test_a_run_gives_the_times_of_each_item_and_its_worker(make_run: MakeRun, tmp_path: Path) -> None:
    """Requests come every 50 ms, are planned after a tenth of their time and read after half of it."""
    run = read_run(make_run(tmp_path, [100, 40, 80], inline=(1,)))
    visits = measured(run, workers=2).visits
    assert [visit.at_ns // MS for visit in visits] == [10, 54, 108]
    assert [visit.worker for visit in visits] == [0, 1, 0]
    assert kept(visits) == [[40 * MS], [16 * MS], [32 * MS]]


def test_what_a_run_does_not_say_is_taken_to_be_longer_and_told(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is received after one twentieth of its time, and collected after 19."""
    whole = measured(read_run(make_run(tmp_path / "whole", [100, 40])), workers=1)
    assert (whole.items, whole.until_collected, whole.unplanned) == (2, 0, 0)
    config = {"name": "local", "pool": {"budget_mb": 4}}
    folder = make_run(tmp_path / "run", [100, 40], without=("read-0",), config=config)
    found = measured(read_run(folder), workers=1)
    assert (found.items, found.until_collected, found.unplanned) == (2, 2, 0)
    assert kept(found.visits) == [[85 * MS], [34 * MS]]
    older = measured(read_run(make_run(tmp_path / "older", [100, 40], without=("read-0", "planned"))), workers=1)
    assert kept(older.visits) == [[90 * MS], [36 * MS]]
    assert older.unplanned == 2

    monkeypatch.setattr(Source, "sha256", lambda source: "ab" * 32)
    asked = ("plan", BUNDLED, "--config", LOCAL, "--measured", folder)
    assert "The run does not say when 2 of 2 items were read" in cli(*asked).stdout
    as_json = cli(*asked, "--json")
    assert "2 of 2 items" in as_json.stderr
    assert json.loads(as_json.stdout)["curve"]
    unsaid = make_run(tmp_path / "unsaid", [100], config={"name": "local", "pool": {}})
    assert "no pool.budget_mb" in cli(*asked[:-1], unsaid).stderr
    nothing = make_run(tmp_path / "nothing", [100], without=("read-0", "collected"))
    assert "lacks the times of 'collected' for line 1" in cli(*asked[:-1], nothing).stderr


def test_plans_need_times_of_this_trace(make_run: MakeRun, tmp_path: Path) -> None:
    asked = ("plan", BUNDLED, "--config", LOCAL)
    alone = cli(*asked)
    assert (alone.exit_code, "Missing option '--measured'" in alone.stderr) == (2, True), alone.stderr
    folder = make_run(tmp_path / "run", [10])
    result = cli(*asked, "--measured", folder)
    assert result.exit_code == 1
    assert "another trace" in result.stderr
    lost = cli(*asked, "--measured", folder, "--html", "/nowhere/plan.html")
    assert (lost.exit_code, lost.stdout) == (2, "")  # before anything is planned
    assert "no pools" in cli(*asked, "--set", "transport=cpu", "--measured", folder).stderr


@pytest.mark.parametrize("option", ["--processing-ms", "--encoding-ms", "--speed", "--start", "--limit", "--rate"])
def test_a_plan_takes_all_times_from_the_run(make_run: MakeRun, tmp_path: Path, option: str) -> None:
    result = cli("plan", BUNDLED, "--config", LOCAL, "--measured", make_run(tmp_path / "run", [10]), option, 1)
    assert (result.exit_code, "No such option" in result.stderr) == (2, True), result.stderr


@pytest.fixture
def of_bundled(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of the bundled trace with more items than a small pool has room for, of which one request failed."""
    monkeypatch.setattr(Source, "sha256", lambda source: "ab" * 32)
    config = {"name": "local", "pool": {"budget_mb": 4}}
    return make_run(tmp_path / "run", [4000] * 40, failed=(3,), config=config)


@pytest.mark.usefixtures("plots")
def test_a_plan_has_a_plot_here_and_in_a_page(of_bundled: Path, tmp_path: Path) -> None:
    asked = ("plan", BUNDLED, "--config", LOCAL, "--measured", of_bundled)
    result = cli(*asked, "--html", tmp_path / "plan.html")
    assert result.exit_code == 0, result.output
    for part in ("Fallbacks under 1 %: pool.budget_mb=", "█", "wrote"):
        assert part in result.stdout, part
    html = (tmp_path / "plan.html").read_text()
    assert html.count("<svg") == 1
    assert "Fallbacks under 0.1 %: pool.budget_mb=" in html
    found = json.loads(cli(*asked, "--json").stdout)
    assert f"pool.budget_mb={found['under_1_percent_mb']}." in result.stdout


def test_a_plan_says_how_many_of_the_requests_it_covers(of_bundled: Path) -> None:
    result = cli("plan", BUNDLED, "--config", LOCAL, "--measured", of_bundled)
    assert result.exit_code == 0, result.output
    assert "The plan covers 39 of the 40 requests read" in " ".join(result.stdout.split())


# --- beside a real replay ---------------------------------------------------------------------------------------


DEPLOYMENT = """
name: plan-test
transport: shm
runtime_dir: {runtime}/run
model: {{adapter: 'benchmarks.paced:Paced', options: {{ms_per_1000_patches: 180}}}}
encoder: {{ranks: 2, batch_patches: 4096}}
pool: {{budget_mb: 128}}
timeouts: {{heartbeat_s: 0.2, quarantine_s: 20.0}}
telemetry: {{log_level: error}}
"""


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.syspath_prepend(str(ROOT))
    with tempfile.TemporaryDirectory(prefix="tf-") as runtime:
        file = tmp_path / "deployment.yaml"
        file.write_text(DEPLOYMENT.format(runtime=runtime))
        yield file


@pytest.mark.processes
def test_the_ledger_against_a_runs_own_times_has_the_runs_own_fallbacks(deployment: Path, tmp_path: Path) -> None:
    """The bundled trace with a pool that is too small. What another size then has is `benchmarks/plan.py`'s to show.

    At a third of its speed, with encoding as much slower: what a busy machine adds is then little beside a stay.
    """
    folder = tmp_path / "run"
    asked = ["replay", BUNDLED, "--config", deployment, "--out", folder, "--speed", "0.33"]
    replayed = subprocess.run(
        [sys.executable, "-P", "-m", "tensorferry", *map(str, asked)], capture_output=True, text=True, timeout=100
    )
    assert replayed.returncode == 0, replayed.stderr
    run = read_run(folder)
    items = [item for row in run.rows for item in row.items if run.pooled(item)]
    had = sum(map(run.fell_back, items)) / len(items)
    found = forecast(measured(run, workers=1).visits, Rules(1, 4096), 128)
    assert 0.05 < had < 0.95
    assert abs(had - found.share) <= 0.02
    said = cli("plan", BUNDLED, "--config", deployment, "--measured", folder)
    assert said.exit_code == 0, said.output
    assert f"pool.budget_mb=128 and {had:.2%} fallbacks; the plan says {found.share:.2%}" in said.stdout
