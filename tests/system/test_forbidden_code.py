"""What no line of ours may do, whatever a linter is told: make objects or code of somebody's bytes, or start a shell.

Beside ruff's rules, which a `noqa` switches off one by one; here the exceptions are whole files, by name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = (
    "codecs",
    "pipeline",
    "replay",
    "stages",
    "cli",
    "configs",
    "connectors",
    "src/tensorferry/__init__.py",
    "src/tensorferry/__main__.py",
    "src/tensorferry/vllm_ec.py",
)
#: Rivals that are measured send pickles, each to itself; nothing that is installed imports these.
PICKLING = {"benchmarks/rivals.py", "benchmarks/gpu_rival.py"}

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "joblib", "xmlrpc"}
NAMES = {"eval", "exec", "__import__"}
METHODS = {
    "recv_pyobj", "send_pyobj", "unsafe_load", "full_load", "load_all", "unsafe_load_all", "read_pickle", "to_pickle",
    "run_path", "run_module", "system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell",
    "urlopen", "urlretrieve",
}  # fmt: skip
#: (module, name) that are called by their module's name.
NAMED = {("yaml", "load"), ("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load"), ("np", "save")}
KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}  #: unless they are False
SECRET = re.compile(rb'secret-key\s*=\s*"[^"{]{40}"')  # of a CURVE certificate


def sources(*places: str) -> list[Path]:
    found = [
        path
        for place in places
        for path in ((ROOT / place).rglob("*.py") if (ROOT / place).is_dir() else [ROOT / place])
    ]
    assert found
    return sorted(path for path in found if path.relative_to(ROOT).as_posix() not in PICKLING)


def offences(code: str) -> Iterator[str]:
    """The forbidden things in a module's text, with their lines."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=names):
                found = {name.name.partition(".")[0] for name in names} & MODULES
            case ast.ImportFrom(module=str(module)):
                found = {module.partition(".")[0]} & MODULES
            case ast.Call(func=ast.Name(id="compile")):  # the built-in one; `re.compile` is a method
                found = {"compile"}
            case ast.Name(id=name):
                found = {name} & NAMES
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in NAMED:
                found = {f"{module}.{name}"}
            case ast.Attribute(attr=name):
                found = {name} & METHODS
            case ast.keyword(value=ast.Constant(value=False)):
                continue
            case ast.keyword(arg=str(name)):
                found = {name} & KEYWORDS
            case _:
                continue
        yield from (f"line {getattr(node, 'lineno', '?')}: {what}" for what in sorted(found))


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import os, marshal", "from dill.session import x", "eval(x)",
        "x = [exec]", "compile(x, '', 'exec')", "__import__(x)", "socket.recv_pyobj()", "yaml.load(x)", "f = yaml.load",
        "yaml.unsafe_load(x)", "torch.load(x)", "np.load(x)", "f(allow_pickle=True)", "m(trust_remote_code=t)",
        "subprocess.run(x, shell=True)", "os.system(x)", "asyncio.create_subprocess_shell(x)", "request.urlopen(x)",
    ],
)  # fmt: skip
def test_what_is_forbidden_is_found(code: str) -> None:
    assert list(offences(f"def f():\n    {code}"))


@pytest.mark.parametrize(
    "code", ["re.compile(x)", "json.load(x)", "self.load(x)", "run(x, shell=False)", "model.eval()"]
)
def test_what_is_not_is_left_alone(code: str) -> None:
    assert not list(offences(code))


@pytest.mark.slow
def test_b28_nothing_makes_objects_or_code_of_bytes() -> None:
    found = [
        f"{path.relative_to(ROOT)} {offence}"
        for path in sources(*PRODUCT, "benchmarks", "examples")
        for offence in offences(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.slow
def test_the_exceptions_are_none_of_the_product() -> None:
    assert all((ROOT / name).is_file() for name in PICKLING)
    imported = {
        name
        for path in sources(*PRODUCT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    assert not [name for name in imported if name.partition(".")[0] in ("benchmarks", "tests")]


def test_no_secret_key_lies_in_the_repository() -> None:
    folders = (
        "benchmarks",
        "cli",
        "codecs",
        "configs",
        "connectors",
        "docs",
        "examples",
        "pipeline",
        "replay",
        "stages",
        "tests",
        ".ci",
    )
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    assert SECRET.search(b'secret-key = "' + b"x" * 40 + b'"')
    assert not [path for path in files if SECRET.search(path.read_bytes())]


def test_every_test_that_the_threat_model_names_is_there() -> None:
    named = set(re.findall(r"\btest_\w+", (ROOT / "SECURITY.md").read_text(encoding="utf-8")))
    tests = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    found = set(tests).union(*(re.findall(r"def (test_\w+)", text) for text in tests.values()))
    assert len(named) > 20
    assert not named - found
