"""A stub of NVML: knows of each GPU whether the plan of the stub driver says that it is in an NVLink domain."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

PLAN = json.loads((Path(os.environ["STUB_CUDA"]) / "plan.json").read_text())


def init_v2():
    if PLAN.get("nvml") == "missing":
        raise RuntimeError("no libnvidia-ml")


def shutdown():
    pass


def device_get_handle_by_uuid(uuid):
    return int(uuid[4:6], 16) - 1


def device_get_gpu_fabric_info_v(handle):
    gpus = PLAN.get("gpus", [{}])
    cluster = bytes(15) + bytes([bool(gpus[handle].get("mnnvl"))])
    return SimpleNamespace(state=3, cluster_uuid=cluster)
