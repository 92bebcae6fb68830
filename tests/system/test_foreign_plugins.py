"""pytest itself, where plug-ins are installed that this project does not ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_the_gpu_tests_are_found_beside_a_benchmark_plugin_that_warns(tmp_path: Path) -> None:
    """As pytest-benchmark 4 and 5.1 do beside xdist, when pytest is configured."""
    plugin = "import warnings\ndef pytest_configure(config):\n    warnings.warn('disabled beside xdist')\n"
    (tmp_path / "stub_benchmark.py").write_text(plugin)
    info = tmp_path / "stub_benchmark-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stub-benchmark\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[pytest11]\nbenchmark = stub_benchmark\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-n",
        "2",
        "-m",
        "gpu",
        "tests/gpu/test_cuda_pools.py",
    ]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
