"""Commands import plug-ins only where needed, report what they raise, and name all mistakes of a file at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorferry.cli.config import load_deployment
from tensorferry.codecs.errors import ConfigError, ConfigErrors
from tensorferry.codecs.machine.transport import TRANSPORTS, TRANSPORTS_MEANT
from tensorferry.pipeline.deployment.document import MOST_MISTAKES
from tensorferry.pipeline.deployment.load import load

METHODS = {"processor": "write", "adapter": "encode", "engine": "run"}
SECTIONS = {"processor": "tokenizer", "adapter": "model", "engine": "scheduler"}
#: What a module or a constructor may raise, and how it is told of.
RAISED = {
    "raise KeyError('x')": "KeyError: 'x'",
    "raise SystemExit(3)": "SystemExit: 3",
    "raise SystemExit": "SystemExit",
    "raise StopIteration": "StopIteration",
    "raise BaseException('two\\nlines')": "BaseException: two lines",
    "raise GeneratorExit": "GeneratorExit",
    "import nosuchmodule": "ModuleNotFoundError: No module named 'nosuchmodule'",
    "raise type('two\\nlines', (Exception,), {})('x')": "two lines: x",
    # As from `tensorferry.load("other.yaml")` in the plug-in: of another file, so not to be taken for this one's.
    "import tensorferry; raise tensorferry.ConfigError('other.yaml', 7, 'name', 'bad')": (
        "ConfigError: other.yaml:7: name: bad"
    ),
}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(may_start_processes: None, tmp_path: Path) -> Run:
    """Run `tensorferry ARGS` as a process with tmp_path on its PYTHONPATH."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "tensorferry", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, cwd=tmp_path)

    return run


def plugin(folder: Path, kind: str, *, top: str = "", built: str = "pass") -> str:
    """A module with a plug-in of this kind, which leaves a mark when it is imported; the line that names it."""
    text = f"open({str(folder / ('imported-' + kind))!r}, 'w').close()\n{top}\nclass Mine:\n"
    text += f"    def __init__(self, *given):\n        {built}\n"
    text += f"    def {METHODS[kind]}(self, *given): ...\n    def largest_item_nbytes(self): return 1\n"
    text += "    supports_cuda_vmm_feature_transport = True\n"
    (folder / f"my_{kind}.py").write_text(text)
    return f"{SECTIONS[kind]}: {{{kind}: 'my_{kind}:Mine'}}\n"


def imported(folder: Path) -> set[str]:
    return {path.name.removeprefix("imported-") for path in folder.glob("imported-*")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A deployment that names three plug-ins, and a transport for which the model is asked."""
    path = tmp_path / "a.yaml"
    path.write_text("name: a\ntransport: cuda_vmm\n" + "".join(plugin(tmp_path, kind) for kind in METHODS))
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["down", "--config"],
        ["status", "--config"],
        ["top", "--once", "--config"],
        ["submit", "--text", "x", "--config"],
        ["config", "show"],
        ["config", "check", "--no-import"],
    ],
    ids=lambda command: command[0] + command[1],
)
def test_what_starts_nothing_imports_no_plug_in(run: Run, file: Path, command: list[str]) -> None:
    ran = run(*command, str(file))
    assert "Traceback" not in ran.stderr
    assert ran.returncode in (0, 1)
    assert imported(file.parent) == set()


def test_config_check_imports_all_three_kinds(run: Run, file: Path) -> None:
    ran = run("config", "check", str(file))
    assert (ran.returncode, ran.stdout.splitlines()[0]) == (0, f"{file}: ok")
    assert imported(file.parent) == set(METHODS)
    assert "--no-import" not in ran.stdout


def test_config_check_says_what_it_has_not_imported(run: Run, file: Path) -> None:
    said = run("config", "check", "--no-import", str(file)).stdout.splitlines()
    assert said == [
        f"{file}: ok",
        "note: --no-import: these plug-ins were not imported, so they were not checked: "
        "tokenizer.processor: my_processor:Mine, model.adapter: my_adapter:Mine, scheduler.engine: my_engine:Mine",
    ]


@pytest.mark.parametrize(("statement", "said"), RAISED.items(), ids=RAISED)
def test_what_an_import_raises_is_one_line(run: Run, tmp_path: Path, statement: str, said: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: a\n" + "".join(plugin(tmp_path, kind, top=statement) for kind in METHODS))
    ran = run("config", "check", str(file))
    assert ran.returncode == 2
    lines = ran.stderr.removeprefix("Error: ").splitlines()
    assert len(lines) == 3  # a line each
    for number, (kind, line) in enumerate(zip(METHODS, lines, strict=True), 2):
        module = f"my_{kind}"
        begin = f"{file}:{number}: {SECTIONS[kind]}.{kind}: cannot import {module} of '{module}:Mine': {said}"
        assert line == f"{begin} ({tmp_path / module}.py, line 2)"


def test_a_syntax_error_is_one_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: a\n" + plugin(tmp_path, "engine", top="def f(:"))
    said = run("config", "check", str(file)).stderr.splitlines()
    assert len(said) == 1
    assert f"{file}:2: scheduler.engine: cannot import my_engine of 'my_engine:Mine': SyntaxError: " in said[0]
    assert "(my_engine.py, line 2)" in said[0]


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("statement", ["raise KeyError('x')", "raise SystemExit(3)"])
@pytest.mark.parametrize("command", ["start", "up"])
def test_what_a_constructor_raises_is_one_line(
    run: Run, tmp_path: Path, kind: str, statement: str, command: str
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: a\ntransport: cpu\n" + plugin(tmp_path, kind, built=statement))
    stages = {"processor": "tokenizer", "adapter": "encoder", "engine": "scheduler"}
    ran = run("up", "--config", str(file)) if command == "up" else run("start", stages[kind], "--config", str(file))
    assert ran.returncode in (1, 2)
    assert "Traceback" not in ran.stderr
    key, name = f"{SECTIONS[kind]}.{kind}", f"my_{kind}"
    told = f"{file}:3: {key}: cannot make '{name}:Mine': {RAISED[statement]} ({tmp_path / name}.py, line 5)"
    lines = [line for line in ran.stderr.splitlines() if told in line]
    assert lines, ran.stderr
    if command == "start":
        assert len(lines) == 1


# --- all mistakes at once ---------------------------------------------------------------------------------------

MANY = """\
name: a
transport: gpu
nodes: many
pool: {budget_mb: 0123, slotz: 4}
tokenizer: {options: {max_pixel: 4, patch_size: x}, workers: 1, workers: 2}
model: {adapter: patch_vit}
timeouts: {quarantine_s: 0.5, heartbeat_s: 1}
limits: {item_mb: 4, request_mb: 2}
scheduler: {options: [1], devices: [0, a]}
runtime_dir: ~/x
telemetry: *alias
"""
#: (line, key, how the problem starts), in the order of lines.
FOUND = [
    (2, "transport", "expected one of auto, cpu, shm, cuda_ipc, cuda_vmm, got gpu (text); for tensors in GPU memory"),
    (3, "nodes", "expected a whole number, got many (text)"),
    (4, "pool.budget_mb", "expected a whole number, got 0123 (text)"),
    (4, "pool.slotz", "unknown key, given 4; did you mean `slots`?"),
    (5, "tokenizer.workers", "given twice; first on line 5"),
    (5, "tokenizer.options.max_pixel", "unknown option, given 4; qwen2-vl has: "),
    (5, "tokenizer.options.patch_size", "Expected `int`, got `str`, not 'x'"),
    (6, "model.adapter", "unknown: 'patch_vit'; give one of "),
    (7, "timeouts.quarantine_s", "0.5 s is no longer than timeouts.heartbeat_s"),
    (8, "limits.item_mb", "4 MiB is more than a whole request may have"),
    (9, "scheduler.options", "expected a section of keys, got a list"),
    (9, "scheduler.devices", "expected a whole number, got"),
    (10, "runtime_dir", "'~/x' is not a path"),
    (11, "telemetry", "the alias *alias is not supported"),
]


def test_all_mistakes_of_a_file_are_told_at_once(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(MANY)
    ran = run("config", "check", str(file), "--set", "encoder.ranks=0", "--set", "nonsense")
    said = ran.stderr.removeprefix("Error: ").splitlines()
    expected = [*FOUND, (None, "nonsense", "write it as KEY=VALUE"), (None, "encoder.ranks", "expected a whole number")]
    assert ran.returncode == 2
    for line, (number, key, problem) in zip(said, expected, strict=True):
        where = "--set" if number is None else f"{file}:{number}"
        assert line.startswith(f"{where}: {key}: {problem}")


def test_a_mistake_hides_none_of_another_key_in_its_section(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "name: a\n"
        "tokenizer: {workers: 0, processor: nope, vocabulary: none.json}\n"
        "model: {path: 5, adapter: 'a:'}\n"
        "scheduler: {groups: x, options: {service_ms: -1}}\n"
        "embeddings_pool: {budget_mb: x}\n"
        "telemetry: {log_level: loud, otlp_endpoint: nowhere}\n"
    )
    said = run("config", "check", str(file)).stderr.removeprefix("Error: ").splitlines()
    assert {line.split(": ")[1] for line in said} == {
        "tokenizer.workers",
        "tokenizer.processor",
        "tokenizer.vocabulary",
        "model.path",
        "model.adapter",
        "scheduler.groups",
        "scheduler.options.service_ms",
        "embeddings_pool.budget_mb",
        "telemetry.log_level",
        "telemetry.otlp_endpoint",
    }


def test_a_name_is_looked_at_whatever_its_options_are(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "name: a\ntokenizer: {processor: nope, options: 5}\nmodel: {adapter: no, options: []}\n"
        "scheduler: {engine: no, options: x}\n"
    )
    said = run("config", "check", str(file)).stderr.removeprefix("Error: ").splitlines()
    keys = [f"{SECTIONS[kind]}.{key}" for kind in METHODS for key in (kind, "options")]
    assert sorted(line.split(": ")[1] for line in said) == sorted(keys)


def test_a_choice_that_is_none_is_told_the_choices(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: a\ntokenizer: {options: {dtype: int8}}\n")
    with pytest.raises(ConfigError, match=r"options\.dtype: expected one of float32, bfloat16, not 'int8'$"):
        load_deployment(file)


def test_what_follows_from_a_mistake_is_not_told(tmp_path: Path) -> None:
    """The default that replaces an unknown value is not reported as a mistake."""
    file = tmp_path / "a.yaml"
    file.write_text(
        "name: 5\ntransport: cqu\npool: {budget_mb: 1}\ntokenizer: {workers: 2}\n"
        "limits: {item_mb: 600, request_mb: x}\n"
    )
    with pytest.raises(ConfigErrors) as caught:
        load(file)
    assert [one.key for one in caught.value.each] == ["name", "transport", "limits.request_mb"]


@pytest.mark.slow
def test_no_file_makes_more_lines_than_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: a\n" + "".join(f"k{number}: 1\n" for number in range(20_000)))
    with pytest.raises(ConfigErrors) as caught:
        load(file)
    assert len(caught.value.each) == MOST_MISTAKES + 1
    assert str(caught.value).endswith(f"only the first {MOST_MISTAKES} mistakes are named")


def test_errors_survive_a_trip_between_processes() -> None:
    several = ConfigErrors(ConfigError("a", 1, "b", "c"), ConfigError("a", 2, "d", "e"))
    again = type(several)(*several.args)
    assert (str(again), again.line, len(again.each)) == ("a:1: b: c\na:2: d: e", 1, 2)


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("gpu", {"cuda_ipc", "cuda_vmm", "auto"}),
        ("CUDA", {"cuda_ipc", "cuda_vmm", "auto"}),
        ("ipc", {"cuda_ipc", "shm"}),
        ("vmm", {"cuda_vmm"}),
        ("rdma", set(TRANSPORTS)),
        ("shared_memory", {"shm"}),
        ("shared-memory", {"shm"}),
        ("tcp", {"cpu"}),
    ],
)
def test_what_others_call_a_transport_suggests_ours(tmp_path: Path, given: str, suggested: set[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"name: a\ntransport: {given}\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    remedy = caught.value.problem.partition(";")[2]
    words = set(remedy.replace(",", " ").replace(";", " ").split())
    assert words & {*TRANSPORTS, "auto"} == suggested


def test_no_transport_of_ours_is_taken_for_another() -> None:
    assert not {name.replace("_", "") for name in (*TRANSPORTS, "auto")} & TRANSPORTS_MEANT.keys()
