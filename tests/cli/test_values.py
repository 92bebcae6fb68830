"""Values that are out of bounds are refused before any work, with the option's name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tensorferry.cli.main import main

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "configs" / "local.yaml"
TRACE = ROOT / "tests" / "data" / "traces" / "servegen.jsonl"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e-300", "1e300", "0", "-1", "x"])
@pytest.mark.parametrize(
    ("option", "before"),
    [
        ("--rate", ["trace", "describe", str(TRACE)]),
        ("--rate", ["replay", str(TRACE), "--config", str(LOCAL)]),
        ("--timeout", ["submit", "--config", str(LOCAL), "--text", "x"]),
    ],
)
def test_a_number_is_finite_and_of_a_size_that_can_be_meant(option: str, before: list[str], value: str) -> None:
    result = CliRunner().invoke(main, [*before, f"{option}={value}"])
    assert result.exit_code == 2
    assert f"Error: Invalid value for '{option}': " in result.stderr


@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "-1", "x"])
@pytest.mark.parametrize(
    ("option", "before"),
    [
        ("--every", ["top", "--config", str(LOCAL)]),
        ("--timeout", ["status", "--config", str(LOCAL)]),
    ],
)
def test_a_time_is_finite_and_of_a_length_that_can_be_meant(option: str, before: list[str], value: str) -> None:
    result = CliRunner().invoke(main, [*before, f"{option}={value}"])
    assert result.exit_code == 2
    assert f"Error: Invalid value for '{option}': " in result.stderr


@pytest.mark.parametrize("command", ["cut", "convert"])
@pytest.mark.parametrize("value", ["nan", "inf", "0", "1.1", "-1"])
def test_a_share_is_a_share(tmp_path: Path, command: str, value: str) -> None:
    result = CliRunner().invoke(main, ["trace", command, str(TRACE), str(tmp_path / "out"), f"--share={value}"])
    assert result.exit_code == 2
    assert "Error: Invalid value for '--share': " in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "given",
    [
        ["--output-tokens", "4294967296"],
        ["--output-tokens", "9" * 5000],
        ["--text", os.fsdecode(b"\xff\xfe")],
        ["--image", "/dev/zero"],
        ["--video", "/dev/null"],
        ["--timeout", "1e-9"],
    ],
)
def test_what_cannot_be_submitted_names_its_option(given: list[str]) -> None:
    result = CliRunner().invoke(main, ["submit", "--config", str(LOCAL), "--text", "x", *given])
    assert result.exit_code == 2
    assert f"Error: Invalid value for '{given[0]}': " in result.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "command", ["config check", "up --config", "submit --text x --config", "start encoder --config"]
)
def test_a_pipe_is_no_deployment_file(tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    ran = subprocess.run(
        [sys.executable, "-m", "tensorferry", *command.split(), str(tmp_path / "pipe")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, "cannot be read: not a regular file" in ran.stderr) == (2, True), ran.stderr


@pytest.mark.parametrize("out", ["file/x", "/proc/nowhere", "x" * 256])
@pytest.mark.parametrize("command", ["replay", "sweep"])
def test_a_folder_that_cannot_be_made_is_wrong_usage(tmp_path: Path, command: str, out: str) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, [command, str(TRACE), "--config", str(LOCAL), "--out", str(tmp_path / out)])
    assert result.exit_code == 2
    assert "Invalid value for --out: " in result.stderr.replace("'", "")


@pytest.mark.parametrize("name", ["replay", "trace describe", "trace convert", "trace cut"])
def test_the_documented_synopsis_has_every_option(name: str) -> None:
    command: click.Command = main
    for part in name.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), part)
        assert found is not None
        command = found
    synopses = (ROOT / "docs" / "traces.md").read_text().split("```")[1::2]
    synopsis = next(text for text in synopses if f"tensorferry {name} " in text)
    options = {param.opts[0] for param in command.params if isinstance(param, click.Option)}
    assert {option for option in options if option not in synopsis} == set()
