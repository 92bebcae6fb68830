"""Module paths that earlier documents named: importable with a warning until 0.2."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import tensorferry

MOVED = {
    "tensorferry.pipeline.config": (
        "tensorferry.pipeline.deployment",
        ("load", "Deployment", "LimitsSpec", "ModelSpec", "SchedulerSpec"),
    ),
    "tensorferry.pipeline.parts": ("tensorferry.pipeline.client.prompt_parts", ("Video",)),
}
KEPT = (
    "tensorferry.codecs.errors",
    "tensorferry.codecs.frames",
    "tensorferry.codecs.pool.export",
    "tensorferry.codecs.tensors",
    "tensorferry.stages.adapters.base",
    "tensorferry.stages.engines.base",
    "tensorferry.stages.processors.base",
)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_has_the_same_names_and_says_where_it_is_now(old: str) -> None:
    new, names = MOVED[old]
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        found = import_module(old)
    for name in names:
        assert getattr(found, name) is getattr(tensorferry, name)


@pytest.mark.parametrize("old", MOVED)
def test_the_warning_names_the_line_that_imports(old: str) -> None:
    program = f"from {old} import {MOVED[old][1][0]}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'File "<string>", line 1' in done.stderr
    assert "DeprecationWarning" in done.stderr


@pytest.mark.parametrize("path", KEPT)
def test_what_plug_ins_import_stands_where_it_stood(path: str) -> None:
    assert import_module(path)
