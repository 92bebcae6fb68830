"""What the documents show runs as it is written, and names nothing but `tensorferry` itself."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import tensorferry

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "tests" / "data" / "images" / "tiny_20x20.jpg"
NAMED = re.compile(r"^```(?:python|yaml) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^\s*from tensorferry import (.+)$", re.MULTILINE)
INNER = re.compile(r"tensorferry\.(?:codecs|connectors|pipeline|replay|stages|cli)\b")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
TREE = "benchmarks|cli|codecs|configs|connectors|docs|examples|pipeline|replay|src|stages|tests"
NAMED_PATH = re.compile(rf"`((?:{TREE})/[\w./-]*\w/?|[\w-]+\.py)[`:]|\]\(([\w./-]+)(?:#[^)]*)?\)")
DEADLINE_S = 60.0

pytestmark = pytest.mark.timeout(180)


def files_of(name: str) -> dict[str, str]:
    return dict(NAMED.findall((ROOT / "docs" / name).read_text(encoding="utf-8")))


@asynccontextmanager
async def running(file: Path, *settings: str) -> AsyncIterator[dict[str, str]]:
    """A deployment, and the environment in which its processes and clients find the modules beside its file."""
    environ = {**os.environ, "PYTHONPATH": str(file.parent)}
    more = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "tensorferry", "up", "--config", str(file), *more]
    up = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environ)
    try:
        assert up.stdout is not None
        assert b" is ready" in await asyncio.wait_for(up.stdout.readline(), DEADLINE_S)
        yield environ
        up.terminate()
        assert await asyncio.wait_for(up.wait(), DEADLINE_S) == 0
    finally:
        if up.returncode is None:
            up.kill()
        await up.communicate()


async def run(environ: dict[str, str], program: Path, *args: object) -> str:
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", str(program), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environ,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.processes
async def test_the_three_plug_ins_and_the_clients_work_together() -> None:
    with tempfile.TemporaryDirectory(prefix="tf-") as name:
        folder = Path(name)
        plugins, clients = files_of("adapters.md"), files_of("client.md")
        assert plugins.keys() == {"squares.py", "mean_patch.py", "parrot.py", "plugins.yaml"}
        assert clients.keys() == {"ask.py", "cancel.py", "crowd.py"}
        for file, text in {**plugins, **clients}.items():
            (folder / file).write_text(text, encoding="utf-8")
        file = folder / "plugins.yaml"
        checked = await run(
            {**os.environ, "PYTHONPATH": name}, ROOT / "src/tensorferry/__main__.py", "config", "check", file
        )
        assert checked == f"{file}: ok\n"
        file.write_text(f"{plugins['plugins.yaml']}runtime_dir: run\n", encoding="utf-8")  # where tests keep their own
        async with running(file, "limits.in_flight_requests=2") as environ:
            # `What is this? ` is 14 tokens of the byte-level vocabulary, and the image's span 4 and its two ends.
            assert await run(environ, folder / "ask.py", file, IMAGE) == "served: 20 tokens in, 16 out\n"
            said = await run(environ, folder / "ask.py", file, file)
            assert said.startswith("failed: BadItem: item 0: not an image that can be read")
            assert await run(environ, folder / "cancel.py", file) == "Cancelled\ngiven up\n"
            assert await run(environ, folder / "crowd.py", file) == "{'Result': 20}\n"


@pytest.mark.processes
async def test_the_readme_s_client_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory(prefix="tf-") as name:
        file = Path(name) / "local.yaml"
        file.write_text((ROOT / "configs/local.yaml").read_text() + f"runtime_dir: {name}/run\n")
        mine = program.replace("configs/local.yaml", str(file)).replace("examples/", f"{ROOT}/examples/")
        (Path(name) / "readme.py").write_text(mine)
        async with running(file) as environ:
            assert (await run(environ, Path(name) / "readme.py")).startswith("Result(")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_no_inner_module(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    if document.name != "CHANGELOG.md":
        assert INNER.findall(text) == []
    for names in IMPORT.findall(text):
        assert set(re.split(r",\s*", names.strip())) <= set(tensorferry.__all__)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_are_there(document: Path) -> None:
    """A path stands for a place in the tree, a bare name for a file beside the document or anywhere in the product."""
    if document.name == "CHANGELOG.md":  # it names files as they were called then
        return
    text = document.read_text(encoding="utf-8")
    own = {name for name, _ in NAMED.findall(text)}
    folders = ("benchmarks", "cli", "codecs", "connectors", "docs", "pipeline", "replay", "stages", "tests")
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*")} | own
    for path, link in NAMED_PATH.findall(text):
        named = path or link
        if "NAME" not in named:
            assert (ROOT / named).exists() or (document.parent / named).exists() or named in names, named


def test_every_code_in_the_name_of_a_test_is_explained() -> None:
    explained = re.findall(r"^\| ([PLESRABC]\d+) \|", (ROOT / "docs/promises.md").read_text("utf-8"), re.MULTILINE)
    assert len(set(explained)) == len(explained)
    tests = [file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    named = [codes for test in tests for codes in re.findall(r"def test_((?:[plesrabc]\d+_)+)", test)]
    assert len(named) > 100
    used = {code.upper() for codes in named for code in codes.strip("_").split("_")}
    assert used - set(explained) == set()


@pytest.mark.processes
def test_every_public_name_is_there_and_costs_nothing_before_it_is_asked_for() -> None:
    program = (
        "import sys, tensorferry\n"
        "assert not {'msgspec', 'numpy', 'zmq', 'torch'} & set(sys.modules), 'heavy'\n"
        "for name in ('Result', 'Failed', 'Busy', 'Failure', 'BadItem'): getattr(tensorferry, name)\n"
        "assert not {'zmq', 'torch'} & set(sys.modules), 'heavier'\n"
        "assert set(tensorferry.__all__) <= set(dir(tensorferry))\n"
        "for name in tensorferry.__all__: getattr(tensorferry, name)\n"
        "assert not {'torch', 'transformers', 'PIL'} & set(sys.modules), 'heaviest'\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    with pytest.raises(AttributeError, match="nosuch"):
        _ = tensorferry.nosuch


def test_nothing_that_can_be_asked_for_is_left_out_of_what_type_checkers_see() -> None:
    source = (ROOT / "src/tensorferry/__init__.py").read_text(encoding="utf-8")
    typed = set(re.findall(r"^    from \S+ import (\w+) as \1$", source, re.MULTILINE))
    assert typed | {"__version__"} == set(tensorferry.__all__)
