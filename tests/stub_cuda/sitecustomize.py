"""Puts the stub driver in the place of the real one in every Python started with this folder on PYTHONPATH.

Nothing is imported for it: a process that never asks for `cuda.bindings.driver` never loads the stub, nor logs a call.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

STUBS = {"cuda.bindings.driver": "stub_driver.py", "cuda.bindings.nvml": "stub_nvml.py"}


class StubFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in STUBS:
            return None
        return importlib.util.spec_from_file_location(fullname, Path(__file__).parent / STUBS[fullname])


if "STUB_CUDA" in os.environ:
    sys.meta_path.insert(0, StubFinder())
