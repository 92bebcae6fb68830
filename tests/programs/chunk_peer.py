"""peer.py with elastic pools over the stub driver: `chunk_peer.py DESCRIPTOR`, in the environment of a StubCuda."""

from __future__ import annotations

import runpy
from pathlib import Path

import stub_device  # type: ignore[import-not-found]  # beside the stub driver

stub_device.install()
runpy.run_path(str(Path(__file__).with_name("peer.py")), run_name="__main__")
