"""A processor that fails once as torch does where the operating system refuses what CUDA needs.

`tokenizer.options.once` is a path: while a file is there, whoever processes an item removes it and fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorferry.codecs.tensors import View
from tensorferry.pipeline.deployment.spec import LimitsSpec
from tensorferry.stages.processors.base import Plan
from tensorferry.stages.processors.qwen2_vl import Qwen2VLProcessor

PROBLEM = """CUDA error: OS call failed or operation not supported on this OS
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


class LosesItsGpu(Qwen2VLProcessor):
    def __init__(self, options: Mapping[str, object], limits: LimitsSpec) -> None:
        super().__init__({}, limits)
        self._once = Path(str(options["once"]))

    def write(self, data: bytes | memoryview, plan: Plan, out: View) -> bytes:
        try:
            self._once.unlink()
        except FileNotFoundError:
            return super().write(data, plan, out)
        raise RuntimeError(PROBLEM)
