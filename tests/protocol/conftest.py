"""Makes `leasemodel` importable, and writes what the searches saw at the end of the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    seen = [(name, value) for report in reports for name, value in report.user_properties]
    lines = [str(value) for name, value in seen if name == "protocol"]
    if not lines:
        return
    terminalreporter.section("lease protocol")
    for line in lines:
        terminalreporter.write_line(line)
    total = {name: sum(value for each, value in seen if each == name) for name in ("worlds", "steps", "found", "walks")}
    terminalreporter.write_line(
        f"{total['worlds']:,} worlds and {total['steps']:,} steps, all orders of events; "
        f"{total['walks']:,} seeds; {total['found']} planted faults found"
    )
