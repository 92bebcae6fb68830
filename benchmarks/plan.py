"""Does `tensorferry plan` say what a replay then finds? The bundled trace, with room for everything and with less."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.results import Outcome, Scale, Verdict, measurement
from tensorferry.replay.plan.forecast import MIB, Rules, forecast
from tensorferry.replay.plan.forecast import plan as plan_of
from tensorferry.replay.plan.pool_stays import measured
from tensorferry.replay.results.result_folder import Run, read_run

_ROOT = Path(__file__).parents[1]
_TRACE = _ROOT / "examples" / "traces" / "servegen.jsonl"
_REQUESTS = 80  #: all of it
_PACE_MS = 480  #: of 1,000 patches in a rank
_RUN_S = 120.0
_POINTS = 2.0
#: Encoding takes a set time and is what limits it, so that two runs differ by little but what is planned.
_DEPLOYMENT = """
name: plan-benchmark
transport: shm
runtime_dir: {folder}/run
model: {{adapter: 'benchmarks.paced:Paced', options: {{ms_per_1000_patches: {pace_ms}}}}}
encoder: {{ranks: {ranks}, batch_patches: 4096}}
pool: {{budget_mb: 1024}}
telemetry: {{log_level: error}}
"""


def plan(scale: Scale) -> Outcome:
    """A run without fallbacks, and of what it says of 0.6 and 0.9 of its peak: how far a run with so much is away."""
    whole = scale.shrink == 1
    with TemporaryDirectory(prefix="ferry-") as folder:
        deployment = Path(folder) / "deployment.yaml"
        deployment.write_text(
            _DEPLOYMENT.format(folder=folder, ranks=2 if whole else 1, pace_ms=_PACE_MS // scale.shrink),
            encoding="utf-8",
        )
        visits = measured(_replayed(deployment, 1024, scale), workers=1).visits
        rules = Rules(workers=1, slots=4096)
        peak_mb = plan_of(visits, rules).peak_nbytes // MIB
        found, apart, own_apart = [], [], []
        for part in (0.6, 0.9) if whole else (0.6,):
            budget_mb = max(1, round(peak_mb * part))
            run = _replayed(deployment, budget_mb, scale)
            items = [item for row in run.rows for item in row.items if run.pooled(item)]
            had = 100 * sum(map(run.fell_back, items)) / max(1, len(items))
            said = 100 * forecast(visits, rules, budget_mb).share
            own = 100 * forecast(measured(run, workers=1).visits, rules, budget_mb).share
            apart.append(abs(had - said))
            own_apart.append(abs(had - own))
            details = {"planned_pct": said, "by_its_own_times_pct": own}
            found.append(measurement(f"fallbacks with {budget_mb} of {peak_mb} MiB", "%", [had], details=details))
    verdicts = tuple(
        Verdict.of(f"{what} within {_POINTS:g} points of the replay", max(points) if whole else None, "<=", _POINTS)
        for what, points in (("the plan", apart), ("the ledger against that replay's own times", own_apart))
    )
    return Outcome("plan", "Plan a pool and replay with it", tuple(found), verdicts)


def _replayed(deployment: Path, budget_mb: int, scale: Scale) -> Run:
    out = deployment.parent / str(budget_mb)
    options = (
        "--speed",
        "0.25" if scale.shrink == 1 else "max",
        "--limit",
        str(max(8, scale.of(_REQUESTS))),
        "--set",
        f"pool.budget_mb={budget_mb}",
    )
    asked = ("replay", _TRACE, "--config", deployment, "--out", out, *options)
    subprocess.run(
        [sys.executable, "-P", "-m", "tensorferry", *map(str, asked)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_RUN_S,
        check=True,
    )
    return read_run(out)
