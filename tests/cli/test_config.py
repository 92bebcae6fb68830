"""The command line: lazy subcommands, errors as one sentence and an exit status, `config check` and `show`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tensorferry import __version__
from tensorferry.cli.config import load_deployment
from tensorferry.cli.main import COMMANDS, friendly_errors, main
from tensorferry.codecs.errors import ConfigError, DeploymentError, PeerBusy
from tensorferry.pipeline.deployment.load import load
from tensorferry.pipeline.deployment.spec import Deployment

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SOUND = "name: a\ntransport: shm\nnodes: 1\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run `tensorferry ARGS` in an empty folder. The exception of a bug is raised here."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> object:
        return CliRunner().invoke(main, args, catch_exceptions=False)

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(SOUND)
    return path


@pytest.fixture
def command_raising(monkeypatch):
    """Replace `up` by a command that raises this exception."""

    def place(problem: BaseException) -> None:
        @click.command()
        def command() -> None:
            raise problem

        monkeypatch.setattr("tensorferry.cli.up.command", command)

    return place


# --- the group ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_every_command(run, flag):
    result = run(flag)
    assert result.exit_code == 0
    for name, sentence in COMMANDS.items():
        assert f"{name} " in result.stdout
        assert sentence in result.stdout


def test_version(run):
    assert run("--version").stdout == f"tensorferry, version {__version__}\n"


@pytest.mark.processes
@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_and_version_import_no_command(args):
    program = (
        "import sys\n"
        "from tensorferry.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(*sys.modules, file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=60)
    loaded = set(ran.stderr.split())
    assert ran.returncode == 0
    assert "tensorferry.cli.main" in loaded
    assert not loaded & (
        {f"tensorferry.cli.{name}" for name in COMMANDS} | {"torch", "zmq", "asyncio", "msgspec", "yaml"}
    )


@pytest.mark.processes
def test_config_needs_no_torch(file):
    program = (
        "import sys\n"
        "from tensorferry.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules, 'yaml' in sys.modules)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "config", "check", str(file)], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.splitlines() == [f"{file}: ok", "False True"]


@pytest.mark.processes
def test_python_dash_m_is_the_command():
    ran = subprocess.run([sys.executable, "-m", "tensorferry", "--version"], capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"tensorferry, version {__version__}\n"


def test_an_unknown_command_is_wrong_usage(run):
    result = run("confg")
    assert result.exit_code == 2
    assert "No such command 'confg'" in result.stderr


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "exit_code", "lines"),
    [
        (PeerBusy("encoder 1"), 1, ["encoder 1 does not keep up: its queue is full"]),
        (DeploymentError("another `up` runs"), 1, ["another `up` runs"]),
        (ConfigError("a.yaml", 3, "pool", "wrong"), 2, ["a.yaml:3: pool: wrong"]),
        (
            ExceptionGroup("tasks", [DeploymentError("one"), DeploymentError("one"), PeerBusy("x")]),
            1,
            ["one", "x does"],
        ),
        (
            ExceptionGroup("tasks", [DeploymentError("one"), ExceptionGroup("inner", [ConfigError("f", 1, "k", "p")])]),
            2,
            ["one", "f:1: k: p"],
        ),
    ],
)
def test_what_a_user_can_be_told_is_told(run, command_raising, problem, exit_code, lines):
    command_raising(problem)
    result = run("up")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    told = result.stderr.removeprefix("Error: ").splitlines()
    assert len(told) == len(lines)
    for said, expected in zip(told, lines, strict=True):
        assert said.startswith(expected)


@pytest.mark.parametrize(
    "bug", [KeyError("x"), RuntimeError("x"), ExceptionGroup("tasks", [DeploymentError("one"), KeyError("x")])]
)
def test_a_bug_keeps_its_traceback(run, command_raising, bug):
    command_raising(bug)
    with pytest.raises(type(bug)) as caught:
        run("up")
    assert caught.value is bug


def test_friendly_errors_pass_what_is_no_error():
    with friendly_errors():
        done = True
    assert done


# --- config check, config show ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_check_accepts_every_shipped_file(run, path):
    result = run("config", "check", str(path))
    assert result.exit_code == 0
    first, *notes = result.stdout.splitlines()
    assert first == f"{path}: ok"
    assert bool(notes) == path.name.endswith("two-nodes.yaml")
    assert all(note.startswith("note: nodes: 2 nodes") and "later version" in note for note in notes)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_files_say_which_of_them_come_later(path):
    assert path.read_text().startswith("# NOT YET: ") == path.name.endswith("two-nodes.yaml")


def test_check_names_file_line_and_key(run, file):
    file.write_text(SOUND + "pool: {budget_mb: 0123}\n")
    result = run("config", "check", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"Error: {file}:4: pool.budget_mb: expected a whole number, got 0123 (text); write "
    )


def test_check_of_a_missing_file(run):
    result = run("config", "check", "none.yaml")
    assert (result.exit_code, result.stderr) == (2, "Error: none.yaml: cannot be read: No such file or directory\n")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("model: {adapter: patch_vit}", "model.adapter"),
        ("model: {options: {with: 4}}", "model.options.with"),
        ("scheduler: {engine: vllm}", "scheduler.engine"),
        ("scheduler: {options: {service_msec: 4}}", "scheduler.options.service_msec"),
        ("tokenizer: {processor: qwen3}", "tokenizer.processor"),
        ("tokenizer: {options: {max_pixel: 4}}", "tokenizer.options.max_pixel"),
    ],
)
def test_check_knows_the_adapters_engines_and_processors(run, file, line, key):
    file.write_text(f"{SOUND}{line}\n")
    result = run("config", "check", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {file}:4: {key}: ")


def test_check_knows_the_largest_item(run, file):
    file.write_text(SOUND + "limits:\n  item_mb: 1\n  request_mb: 1\n")
    result = run("config", "check", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {file}:6: limits.request_mb: the largest item has a pixel tensor of ")


def test_p3_cuda_vmm_wants_a_model_that_has_opted_in(run, file, tmp_path, monkeypatch):
    (tmp_path / "shy_adapter.py").write_text("class Shy:\n    def encode(self, items, load, out): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text("name: a\ntransport: cuda_vmm\nmodel: {adapter: 'shy_adapter:Shy'}\n")
    result = run("config", "check", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {file}:2: transport: cuda_vmm needs a model that has opted in")
    assert run("config", "check", str(file), "--set", "model.adapter=patch-vit").exit_code == 0


def test_show_prints_a_file_that_loads_to_the_same(run, file, tmp_path):
    shown = run("config", "show", str(file), "--set", "pool.budget_mb=512", "--set", "telemetry.log_level=debug")
    assert shown.exit_code == 0
    again = tmp_path / "again.yaml"
    again.write_text(shown.stdout)
    deployment = load(again)
    assert deployment == load_deployment(file, ["pool.budget_mb=512", "telemetry.log_level=debug"])
    assert (deployment.pool.budget_mb, deployment.telemetry.log_level) == (512, "debug")
    assert deployment != Deployment(name="a", transport="shm")


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_wrong_setting_is_named(run, file, command):
    result = run("config", command, str(file), "--set", "pool.bugdet_mb=512")
    assert result.exit_code == 2
    assert result.stderr == "Error: --set: pool.bugdet_mb: unknown key, given 512; did you mean `budget_mb`?\n"


# --- what cannot work together --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("tokenizer: {processor: kimi-k25}", "tokenizer.processor", "kimi-k25 makes patches row by row, and patch-vit"),
        ("model: {adapter: kimi-k25}", "tokenizer.processor", "qwen2-vl makes patches block by block, and kimi-k25"),
        (
            "model: {adapter: kimi-k25}\ntokenizer: {options: {temporal_patch_size: 1}}",
            "tokenizer.processor",
            "choose the one made for the model",
        ),
        (
            "model: {adapter: qwen2.5-vl}\ntokenizer: {options: {patch_size: 32}}",
            "tokenizer.options",
            "patches of 6144 numbers, and qwen2.5-vl takes them of 1176",
        ),
        ("model: {adapter: qwen3-vl}", "tokenizer.options", "of 1176 numbers, and qwen3-vl takes them of 1536"),
        ("model: {options: {patch_features: 100}}", "tokenizer.options", "patch-vit takes them of 100"),
        (
            "tokenizer: {options: {merge_size: 4}}",
            "tokenizer.options.merge_size",
            "merges 4 patches a side, and patch-vit merges 2",
        ),
        (
            "scheduler: {engine: hf-causal, options: {width: 128}}",
            "scheduler.options",
            "embeddings of width 128, and patch-vit makes float32 of width 256",
        ),
        (
            "model: {adapter: fingerprint}\nscheduler: {engine: hf-causal, options: {width: 32}}",
            "scheduler.options",
            "takes floating-point embeddings of width 32, and fingerprint makes uint8",
        ),
        (
            "scheduler: {engine: hf-causal, options: {path: /nosuch}}",
            "scheduler.options.path",
            "/nosuch is not a directory; name one",
        ),
    ],
)
def test_what_cannot_work_together_is_found_before_anything_starts(run, file, text, key, problem):
    file.write_text(f"{SOUND}{text}\n")
    result = run("config", "check", str(file))
    assert result.exit_code == 2
    assert f"{key}: " in result.stderr
    assert problem in result.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a tokenizer.json: "),
        ("{}", "is not a tokenizer.json: "),
        ('{"vocab": {"a": 1}}', "is not a tokenizer.json: "),
        ('{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', r"lacks <\|image_pad\|>, "),
    ],
)
def test_a_vocabulary_that_is_none_is_found(run, file, tmp_path, text, problem):
    vocabulary = tmp_path / "tokenizer.json"
    vocabulary.write_text(text)
    file.write_text(f"{SOUND}tokenizer: {{vocabulary: tokenizer.json}}\n")
    result = run("config", "check", str(file))
    assert result.exit_code == 2
    line = len(SOUND.splitlines()) + 1
    assert re.search(rf"{re.escape(str(file))}:{line}: tokenizer\.vocabulary: {vocabulary} {problem}", result.stderr)
    vocabulary.write_text(files("tensorferry.stages.tokenizer").joinpath("bytelevel.json").read_text())
    assert run("config", "check", str(file)).stdout == f"{file}: ok\n"


def test_a_checkpoint_decides_what_fits_it(run, file, tmp_path):
    model, language = tmp_path / "model", tmp_path / "language"
    model.mkdir()
    language.mkdir()
    vision = {"patch_size": 16, "out_hidden_size": 2048}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": vision}))
    (language / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 2048}))
    deployment = (
        f"{SOUND}model: {{adapter: qwen2.5-vl, path: {model}}}\n"
        f"scheduler: {{engine: hf-causal, options: {{path: {language}}}}}\n"
    )
    file.write_text(deployment)
    assert "takes them of 1536" in run("config", "check", str(file)).stderr
    file.write_text(f"{deployment}tokenizer: {{options: {{patch_size: 16}}}}\n")
    (model / "config.json").write_text(
        json.dumps({"model_type": "qwen2_5_vl", "vision_config": vision | {"depth": 31}})
    )
    assert "fullatt_block_indexes" in run("config", "check", str(file)).stderr
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": vision}))
    assert run("config", "check", str(file)).stdout == f"{file}: ok\n"
    (language / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 1024}))
    assert "of width 1024, and qwen2.5-vl makes bfloat16 of width 2048" in run("config", "check", str(file)).stderr
