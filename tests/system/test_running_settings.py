"""Settings that are given beside a running deployment's: what differs is refused, with both values."""

from __future__ import annotations

import select
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorferry.cli import running
from tensorferry.cli.main import main
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.pipeline.process.running_settings import Settings, differences, told
from tensorferry.pipeline.process.runtime_dir import Runtime

DEADLINE_S = 60.0
TRACE = Path(__file__).parents[1] / "data" / "traces" / "servegen.jsonl"

DEPLOYMENT = """\
name: running-settings
runtime_dir: {runtime}/run
transport: auto
model: {{adapter: fingerprint}}
pool: {{budget_mb: 16}}
embeddings_pool: {{budget_mb: 16}}
encoder: {{cache_mb: 16}}
timeouts: {{heartbeat_s: 0.1, quarantine_s: 20.0}}
telemetry: {{log_level: warning}}
"""

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tf-") as runtime:
        file = tmp_path / "deployment.yaml"
        file.write_text(DEPLOYMENT.format(runtime=runtime), encoding="utf-8")
        yield file


@pytest.fixture
def up(may_start_processes: None, file: Path, tmp_path: Path) -> Iterator[Path]:
    """A deployment that runs, and records."""
    record = ("--record", str(tmp_path / "day.jsonl"))
    command = [sys.executable, "-P", "-m", "tensorferry", "up", "--config", str(file), *record]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], DEADLINE_S)[0]
            assert "is ready" in process.stdout.readline()
            yield file
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
    assert not [path for path in Runtime.of(load(file)).directory.glob("*") if path.suffix == ".settings"]


def tensorferry(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "tensorferry", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.processes
def test_what_attaches_with_other_settings_is_refused_with_both_values(up: Path, until: Callable[..., None]) -> None:
    replay = ("replay", TRACE, "--config", up, "--attach", "--speed", "max", "--limit", "2")
    submit = ("submit", "--config", up, "--text", "x")
    other = ("--set", "pool.budget_mb=32", "--set", "tokenizer.workers=2")
    for command in (replay, submit):
        refused = tensorferry(*command, *other)
        assert refused.returncode == 2, refused.stderr
        assert "--set: pool.budget_mb: 32 here, but encoder-0 runs with 16" in refused.stderr
        assert "--set: tokenizer.workers: 2 here, but encoder-0 runs with 1\n" in refused.stderr
        assert refused.stderr.count("give the settings that the deployment was started with") == 1
        served = tensorferry(*command, "--set", "telemetry.log_level=error")
        assert served.returncode == 0, served.stderr
        assert "settings" not in served.stderr
    up.write_text(up.read_text().replace("cache_mb: 16", "cache_mb: 24"))  # after it was started
    refused = tensorferry(*replay)
    assert refused.returncode == 2
    assert f"{up}:7: encoder.cache_mb: 24 here, but encoder-0 runs with 16; give the settings" in refused.stderr

    directory = Runtime.of(load(up)).directory
    for path in directory.glob("*.settings"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.unlink()
    until(lambda: len(told(Runtime.of(load(up)))) == 3, DEADLINE_S)  # made again, as the sockets are
    assert tensorferry(*submit, *other).returncode == 2


@pytest.mark.processes
def test_a_deployment_of_text_alone_is_attached_to_with_the_file_it_was_started_with(tmp_path: Path) -> None:
    """It makes no pools, whatever transport its file names."""
    with tempfile.TemporaryDirectory(prefix="tf-") as runtime:
        file = tmp_path / "text.yaml"
        file.write_text(
            f"name: text\nruntime_dir: {runtime}/run\ntransport: shm\nmodel: {{adapter: text-only}}\n"
            "telemetry: {log_level: warning}\n"
        )
        command = [sys.executable, "-P", "-m", "tensorferry", "up", "--config", str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert select.select([process.stdout], [], [], DEADLINE_S)[0]
                assert "is ready" in process.stdout.readline()
                answered = tensorferry("submit", "--config", file, "--text", "x")
                process.terminate()
                assert process.wait(DEADLINE_S) == 0
            finally:
                process.kill()
    assert answered.returncode == 0, answered.stderr


def test_where_no_settings_are_left_a_replay_says_that_none_were_compared(
    up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all processes are on another machine."""
    monkeypatch.setattr(running, "told", lambda runtime: {})
    attached = CliRunner().invoke(
        main, ["replay", str(TRACE), "--config", str(up), "--attach", "--speed", "max", "--limit", "2"]
    )
    assert attached.exit_code == 0, attached.output
    assert "settings_not_compared" in attached.output


# --- without processes --------------------------------------------------------------------------------------------


@pytest.fixture
def deployment(file: Path) -> Deployment:
    return load(file)


def test_the_dead_and_what_cannot_be_read_tell_nothing(deployment: Deployment) -> None:
    runtime = Runtime.of(deployment)
    assert told(runtime) == {}
    with runtime.own("encoder", 0), runtime.own("encoder", 1):
        Settings(deployment, runtime, "encoder", 0)
        Settings(deployment, runtime, "encoder", 7)  # nobody is that
        runtime.settings("encoder", 1).write_text("{half")
        assert list(told(runtime)) == ["encoder-0"]
        assert differences(deployment, told(runtime)) == []
    assert [path.name for path in runtime.directory.iterdir()] == ["encoder-7.settings"]


def test_keys_that_only_one_of_them_has_differ(deployment: Deployment) -> None:
    running = {"tokenizer-0": {"limits": {"brand_new": 3}, "scheduler": {"options": {}}}}
    said = {one.key: str(one) for one in differences(deployment, running)}
    assert said["limits.brand_new"] == "not set here, but tokenizer-0 runs with 3"
    assert said["name"] == '"running-settings" here, but tokenizer-0 runs without it'
    assert not {"transport", "gpus", "runtime_dir", "telemetry.log_level"} & said.keys()
